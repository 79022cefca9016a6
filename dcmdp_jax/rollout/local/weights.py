"""From the trainer's parameters to the engine's own copy, in the engine's precision, and proof of what arrived."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.models import quantize
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import merge_projections, output_kernel
from dcmdp_jax.types import Params

PRECISIONS = ("exact", "float32", "bfloat16", *quantize.PRECISIONS)


def _cast(tree: Params, precision: str) -> Params:
    if precision in quantize.PRECISIONS:
        return quantize.quantize_matrices(tree, precision)
    return jax.tree.map(lambda leaf: leaf if precision == "exact" else leaf.astype(precision), tree)


def _merged_layer(layer: Params, precision: str) -> Params:
    # Scales belong to output channels: merged before or after, the values are the same.
    return _cast(merge_projections(layer, mlp=True), precision)


@functools.partial(jax.jit, static_argnames=("precision",))
def _layer(layers: Params, index: jax.Array, precision: str) -> Params:
    return _merged_layer(jax.tree.map(lambda leaf: leaf[index], layers), precision)


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
    """The engine's tree, made for many products with few rows: matrices in `precision`.

    `layers` is a list with one dict per layer, projections merged (see `decoder.merge_projections`). Tied embeddings
    are "output" [D, V] alone, whose columns are looked up: as the second factor of a product a transposed matrix costs
    XLA's CPU backend 1.2 to 5 times the time. Quantised, the output matrix is a copy and "embedding" stays.

    Two small compiled programs, one of them run for each layer: compiling takes no longer for a deeper model.

    Args:
        params: as `decoder.init_params` makes.
        config: the model.
        precision: "exact" (the dtype they have), "float32", "bfloat16", "int8" or "fp8" (see `quantize.quantize`).

    Returns:
        New arrays: none aliases `params`, whose buffers may be donated afterwards.
    """
    layers = [_layer(params["layers"], np.int32(index), precision) for index in range(config.num_layers)]
    return {**_outside(params, precision), "layers": layers}


def replicate(weights: Params, mesh: Mesh) -> Params:
    """`weights`, which are on the first device of `mesh`, whole on each.

    Devices that the CPU was made into read the same memory.
    """
    everywhere = NamedSharding(mesh, P())
    if mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
        return jax.device_put(weights, everywhere)

    def shared(leaf: jax.Array) -> jax.Array:
        # JAX takes over memory of NumPy's that is aligned as its own is.
        views = [jax.device_put(np.asarray(leaf), device) for device in mesh.devices.flat[1:]]
        return jax.make_array_from_single_device_arrays(leaf.shape, everywhere, [leaf, *views])

    return jax.tree.map(shared, weights)


def _checksums(tree: Params) -> jax.Array:
    def leaf(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32).reshape(-1)
        return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)

    return jnp.stack([leaf(x) for x in jax.tree.leaves(tree)])


_tree_checksums = jax.jit(_checksums)


def fingerprint(weights: Params) -> np.ndarray:
    """A checksum of each leaf of the engine's tree, [leaves] uint32: sum_i bits_i (2 i + 1) mod 2^32.

    The weight 2 i + 1 makes it see values that changed places. Layers come first, in order.
    """
    rest = {name: leaf for name, leaf in weights.items() if name != "layers"}
    sums = [_tree_checksums(tree) for tree in (*weights["layers"], rest)]
    return np.concatenate(jax.device_get(sums))


@functools.partial(jax.jit, static_argnames=("precision",))
def _source_checksums(params: Params, precision: str) -> tuple[jax.Array, jax.Array]:
    # One layer after another: merged, it is a copy.
    layers = jax.lax.map(lambda layer: _checksums(_merged_layer(layer, precision)), params["layers"])
    return layers.reshape(-1), _checksums(_without_layers(params, precision))


def source_fingerprint(params: Params, precision: str) -> np.ndarray:
    """`fingerprint` of what `convert` should make, computed from the stacked parameters of the trainer alone."""
    return np.concatenate(jax.device_get(_source_checksums(params, precision)))
