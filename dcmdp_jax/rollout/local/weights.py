"""Conversion of the trainer's parameters to the engine's precision, with checksums of the result."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.array_checksum import array_checksum
from dcmdp_jax.models import quantize
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import fuse_projections, output_kernel
from dcmdp_jax.models.params import quantized_leaves
from dcmdp_jax.types import Params

PRECISIONS = ("exact", "float32", "bfloat16", "float16", *quantize.PRECISIONS)


def _cast(tree: Params, precision: str) -> Params:
    return jax.tree.map(lambda leaf: leaf if precision == "exact" else leaf.astype(precision), tree)


def _fused_layer(layer: Params, config: ModelConfig, precision: str) -> Params:
    if precision in quantize.PRECISIONS:
        # Scales are per output channel: fusing before or after quantization gives the same values.
        layer = quantize.quantize_tree(layer, quantized_leaves(config)["layers"], precision)
        return fuse_projections(layer, mlp=True)
    return _cast(fuse_projections(layer, mlp=True), precision)


@functools.partial(jax.jit, static_argnames=("config", "precision"))
def _layer(layers: Params, index: jax.Array, config: ModelConfig, precision: str) -> Params:
    return _fused_layer(jax.tree.map(lambda leaf: leaf[index], layers), config, precision)


def _without_layers(params: Params, precision: str) -> Params:
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    if precision in quantize.PRECISIONS:
        return quantize.quantize_output(rest, precision)
    if "output" not in rest:
        rest["output"] = output_kernel(rest)
        del rest["embedding"]
    return _cast(rest, precision)


@functools.partial(jax.jit, static_argnames=("precision",))
def _outside(params: Params, precision: str) -> Params:
    return jax.tree.map(jnp.copy, _without_layers(params, precision))


def convert(params: Params, config: ModelConfig, precision: str) -> Params:
    """Convert the trainer's parameters to the engine's tree, with matrices in `precision`.

    `layers` is a list of one dict per layer with fused projections (see `decoder.fuse_projections`). Tied embeddings
    become "output" [D, V] only, and tokens are looked up in its columns: a transposed second factor slows a product on
    XLA:CPU 1.2 to 5 times. If quantized, the output matrix is a copy and "embedding" stays.

    Uses two small compiled programs, one of them run for each layer, so compilation time does not depend on depth.

    Args:
        params: as returned by `params.init_params`.
        config: the model.
        precision: "exact" (the dtype of `params`), "float32", "bfloat16", "float16", "int8" or "fp8"
            (`quantize.quantize_kernel`).

    Returns:
        New arrays. None aliases `params`, whose buffers may be donated afterwards.
    """
    layers = [_layer(params["layers"], np.int32(index), config, precision) for index in range(config.num_layers)]
    return {**_outside(params, precision), "layers": layers}


def replicate(weights: Params, mesh: Mesh) -> Params:
    """Replicate `weights` from the first device of `mesh` to all.

    CPU devices share one copy in memory.
    """
    everywhere = NamedSharding(mesh, P())
    if mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
        return jax.device_put(weights, everywhere)

    def shared(leaf: jax.Array) -> jax.Array:
        # JAX does not copy a NumPy array with its own alignment.
        views = [jax.device_put(np.asarray(leaf), device) for device in mesh.devices.flat[1:]]
        return jax.make_array_from_single_device_arrays(leaf.shape, everywhere, [leaf, *views])

    return jax.tree.map(shared, weights)


def _checksums(tree: Params) -> jax.Array:
    # Flattened, which costs half as much on one device.
    return jnp.stack([array_checksum(x.reshape(-1)) for x in jax.tree.leaves(tree)])


_tree_checksums = jax.jit(_checksums)


def fingerprint(weights: Params) -> np.ndarray:
    """Compute the `array_checksum` of each leaf of the engine's tree, [leaves] uint32. Layers come first, in order."""
    rest = {name: leaf for name, leaf in weights.items() if name != "layers"}
    sums = [_tree_checksums(tree) for tree in (*weights["layers"], rest)]
    return np.concatenate(jax.device_get(sums))


@functools.partial(jax.jit, static_argnames=("config", "precision"))
def _source_checksums(params: Params, config: ModelConfig, precision: str) -> tuple[jax.Array, jax.Array]:
    # One layer at a time: fusing makes a copy.
    layers = jax.lax.map(lambda layer: _checksums(_fused_layer(layer, config, precision)), params["layers"])
    return layers.reshape(-1), _checksums(_without_layers(params, precision))


def source_fingerprint(params: Params, config: ModelConfig, precision: str) -> np.ndarray:
    """Compute the `fingerprint` that `convert` should produce, from the trainer's stacked parameters only."""
    return np.concatenate(jax.device_get(_source_checksums(params, config, precision)))
