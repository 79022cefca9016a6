"""The parameters of one layer, and their projections fused."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.types import Params


def fuse_projections(layer_params: Params, *, mlp: bool) -> Params:
    """Concatenate W_q, W_k, W_v of a layer to "qkv", and with `mlp` W_gate and W_up to "gate_up".

    One larger product runs faster than three small ones. In training only q, k and v are fused: the
    backward pass of a fused MLP would concatenate both gradients, which costs more than the product
    saves.

    Args:
        layer_params: parameters of one layer; kernels may be `QuantizedKernel`s.
        mlp: fuse the MLP too.
    """

    def fused(*linears: Params) -> Params:
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), *linears)

    attention = dict(layer_params["attention"])
    feed_forward = layer_params["mlp"]
    if not is_recurrent(layer_params):
        query = attention.pop("q")
        key = attention.pop("k")
        value = attention.pop("v")
        attention["qkv"] = fused(query, key, value)
    if mlp:

        def fuse_mlp(mlp: Params) -> Params:
            return {"gate_up": fused(mlp["gate"], mlp["up"]), "down": mlp["down"]}

        feed_forward = map_mlps(fuse_mlp, feed_forward)
    return {**layer_params, "attention": attention, "mlp": feed_forward}


def map_mlps(function: Callable[[Params], Params], feed_forward: Params) -> Params:
    """Apply a function to the parameters of a layer's MLP, or of its experts and the shared one."""
    if "experts" not in feed_forward:
        return function(feed_forward)
    mapped = dict(feed_forward)
    for name, linears in feed_forward.items():
        if "down" in linears:
            mapped[name] = function(linears)
    return mapped


def is_recurrent(layer_params: Params) -> bool:
    """Whether a layer with these parameters is a `GatedDeltaNet` in place of attention."""
    return "a_log" in layer_params["attention"]


def layer_of(layers: Params, config: ModelConfig, index: int) -> Params:
    """Parameters of one layer.

    Args:
        layers: "layers" of a tree as `params.init_params` makes it, or of a whole number of periods
            of it.
        config: the model.
        index: the layer.
    """
    kind, position = config.layer_kinds[index]
    return jax.tree.map(lambda leaf: leaf[position], config.by_kind(layers)[kind])
