"""Conversion of the trainer's parameters to the engine's precision and mesh, with checksums of the result.

One layer at a time: parts of a leaf are cast or quantized where the trainer has them, travel in the engine's precision,
and arrive where the engine wants them. No device and no host holds more of the trainer's tree than its own part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.array_checksum import array_checksum
from dcmdp_jax.engines.local.layout import EXPERT, TENSOR, weight_specs
from dcmdp_jax.models import quantize
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import fuse_projections, output_kernel
from dcmdp_jax.models.params import param_shapes, quantized_leaves
from dcmdp_jax.parallel.sharding import to_local
from dcmdp_jax.types import Params

ENGINE_PRECISIONS = ("exact", "float32", "bfloat16", "float16", *quantize.PRECISIONS)


def _cast(tree: Params, precision: str) -> Params:
    return jax.tree.map(lambda leaf: leaf if precision == "exact" else leaf.astype(precision), tree)


def _layer_of(layers: Params, config: ModelConfig, precision: str) -> Params:
    """A layer, or all of them stacked, in the engine's precision. Scales are per output channel: fusing before or after
    quantization gives the same values."""
    if precision in quantize.PRECISIONS:
        return quantize.quantize_tree(layers, quantized_leaves(config)["layers"], precision)
    return _cast(layers, precision)


def _without_layers(params: Params, precision: str) -> Params:
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    if precision in quantize.PRECISIONS:
        return quantize.quantize_output(rest, precision)
    if "output" not in rest:
        rest["output"] = output_kernel(rest)
        del rest["embedding"]
    return _cast(rest, precision)


class _Converters(NamedTuple):
    """Compiled programs of a conversion.

    Attributes:
        layer: (stacked layers, index) -> the engine's layer.
        outside: parameters without layers -> the engine's leaves outside layers.
        layer_checksums: the engine's layer -> checksums of its leaves before fusing.
    """

    layer: Callable[[Params, int], Params]
    outside: Callable[[Params], Params]
    layer_checksums: Callable[[Params], jax.Array]


@functools.lru_cache(maxsize=32)
def _converters(config: ModelConfig, precision: str, mesh: Mesh) -> _Converters:
    split = mesh.shape[TENSOR] > 1
    spec = functools.partial(weight_specs, config=config, mesh=mesh)
    shapes = engine_shapes(config, precision)
    fused = spec({"layers": shapes["layers"]})["layers"]
    cast = jax.eval_shape(lambda layers: _layer_of(layers, config, precision), _one_layer(config))
    unfused = spec({"layers": cast})["layers"]

    def shardings(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))

    def on_parts(function: Callable[[Params], Params], before: Any, after: Any) -> Callable[[Params], Params]:
        """Devices fuse their own heads: the fused matrix of a tensor group is not the fused matrix of one device."""
        if not split:
            return function
        return jax.shard_map(function, mesh=mesh, in_specs=(before,), out_specs=after, check_vma=False)

    def layer(layers: Params, index: jax.Array) -> Params:
        own = _layer_of(jax.tree.map(lambda leaf: leaf[index], layers), config, precision)
        if split:
            own = jax.lax.with_sharding_constraint(own, shardings(unfused))
        return on_parts(functools.partial(fuse_projections, mlp=True), unfused, fused)(own)

    def outside(params: Params) -> Params:
        # A result that is an argument would be the trainer's own buffer.
        return jax.tree.map(jnp.copy, _without_layers(params, precision))

    def layer_checksums(engine_layer: Params) -> jax.Array:
        separate = functools.partial(_separated, config=config, ways=mesh.shape[TENSOR])
        return _checksums(on_parts(separate, fused, unfused)(engine_layer), flat=mesh.size == 1)

    return _Converters(
        layer=jax.jit(layer, out_shardings=shardings(fused)),
        outside=jax.jit(
            outside, out_shardings=shardings(spec({name: leaf for name, leaf in shapes.items() if name != "layers"}))
        ),
        layer_checksums=jax.jit(layer_checksums),
    )


def _one_layer(config: ModelConfig, dtype: str = "float32") -> Params:
    stacked = param_shapes(config, dtype)["layers"]
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)


def engine_shapes(config: ModelConfig, precision: str, param_dtype: str = "float32") -> Params:
    """Shapes of the engine's tree, as `convert` makes it, but with one layer in place of the list: all are alike."""

    def made(params: Params, layer: Params) -> Params:
        fused = fuse_projections(_layer_of(layer, config, precision), mlp=True)
        return {**_without_layers(params, precision), "layers": fused}

    return jax.eval_shape(made, param_shapes(config, param_dtype), _one_layer(config, param_dtype))


def _separated(layer: Params, config: ModelConfig, ways: int) -> Params:
    """The inverse of `fuse_projections` on one of `ways` devices."""
    query, shared = (count * config.head_dim // ways for count in (config.num_heads, config.num_kv_heads))

    def parts(tree: Params, *sizes: int) -> list[Params]:
        ends = np.cumsum(sizes).tolist()
        starts = [0, *ends[:-1]]
        return [jax.tree.map(lambda leaf, a=a, b=b: leaf[..., a:b], tree) for a, b in zip(starts, ends, strict=True)]

    attention, feed_forward = dict(layer["attention"]), dict(layer["mlp"])
    attention |= dict(zip("qkv", parts(attention.pop("qkv"), query, shared, shared), strict=True))
    gated = feed_forward
    if "experts" in feed_forward:
        gated = feed_forward["experts"] = dict(feed_forward["experts"])
    width = (config.moe_intermediate_size if config.num_experts else config.intermediate_size) // ways
    gated |= dict(zip(("gate", "up"), parts(gated.pop("gate_up"), width, width), strict=True))
    return {**layer, "attention": attention, "mlp": feed_forward}


def _devices(leaf: jax.Array) -> list[jax.Device]:
    """The devices of an array, in the order of its mesh."""
    sharding = leaf.sharding
    return list(sharding.mesh.devices.flat) if isinstance(sharding, NamedSharding) else list(sharding.device_set)


def conversion_mesh(params: Params, mesh: Mesh) -> Mesh:
    """The mesh to convert on: the engine's, or its first device where the devices of a CPU will share its copy."""
    first = mesh.devices.flat[0]
    whole = mesh.shape[TENSOR] == mesh.shape[EXPERT] == 1
    if first.platform == "cpu" and whole and all(leaf.is_fully_replicated for leaf in jax.tree.leaves(params)):
        return Mesh(mesh.devices.reshape(-1)[:1].reshape((1,) * mesh.devices.ndim), mesh.axis_names)
    return mesh


def convert(params: Params, config: ModelConfig, precision: str, mesh: Mesh) -> Params:
    """Convert the trainer's parameters to the engine's tree, with matrices in `precision`.

    `layers` is a list of one dict per layer with fused projections (see `decoder.fuse_projections`); of a tensor group
    each device has its own heads' parts fused. Tied embeddings become "output" [D, V] only, and tokens are looked up in
    its columns: a transposed second factor slows a product on XLA:CPU 1.2 to 5 times. If quantized, the output matrix
    is a copy and "embedding" stays.

    Uses two small compiled programs, one of them run for each layer, so compilation time does not depend on depth.
    Values are the same on every mesh.

    Args:
        params: parameters as of `params.init_params`, on any mesh.
        config: the model.
        precision: "exact" (the dtype of `params`), "float32", "bfloat16", "float16", or of
            `quantize.PRECISIONS`.
        mesh: see `conversion_mesh`.

    Returns:
        New arrays, sharded by `weight_specs`. None aliases `params`, whose buffers may be donated afterwards.
    """
    programs, count = _converters(config, precision, mesh), config.num_layers
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    if _devices(rest["norm"]["scale"]) == list(mesh.devices.flat):
        layers = [programs.layer(params["layers"], np.int32(index)) for index in range(count)]
        return {**programs.outside(rest), "layers": layers}
    # Other devices: each leaf of a layer goes there by itself, to the devices that will have a part of it.
    moved = {"layers": _one_layer(config)}
    specs = weight_specs({**rest, **moved}, config, mesh)

    def move(leaf: jax.Array, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.device_put(to_local(leaf, sharding), sharding)

    def layer(index: int) -> Params:
        own = jax.tree.map(
            lambda leaf, spec: move(leaf[index][None], P(None, *spec)), params["layers"], specs["layers"]
        )
        return programs.layer(own, np.int32(0))

    outside = {name: jax.tree.map(move, leaf, specs[name]) for name, leaf in rest.items()}
    return {**programs.outside(outside), "layers": [layer(index) for index in range(count)]}


def share_copies(weights: Params, mesh: Mesh) -> Params:
    """Replicate `weights` from the devices of `conversion_mesh` to all of `mesh`.

    CPU devices with the same part of an array share one copy in memory.
    """
    if mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
        return weights

    def shared(leaf: jax.Array) -> jax.Array:
        sharding = NamedSharding(mesh, leaf.sharding.spec)
        kept = {_place(shard.index): shard.data for shard in leaf.addressable_shards}
        # JAX does not copy a NumPy array with its own alignment.
        views = [
            data if data.devices() == {device} else jax.device_put(np.asarray(data), device)
            for device, index in sharding.addressable_devices_indices_map(leaf.shape).items()
            for data in [kept[_place(index)]]
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, views)

    return jax.tree.map(shared, weights)


def _place(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((part.start, part.stop) for part in index)


def _checksums(tree: Params, *, flat: bool, stacked: bool = False) -> jax.Array:
    """`array_checksum` of each leaf, [leaves]; of each layer of stacked ones, [layers, leaves]."""

    def checksum(x: jax.Array) -> jax.Array:
        # Flattened, which costs half as much on one device and would gather an array on several.
        return array_checksum(x.reshape(-1) if flat else x)

    return jnp.stack([(jax.vmap(checksum) if stacked else checksum)(x) for x in jax.tree.leaves(tree)], axis=-1)


_rest_checksums = jax.jit(_checksums, static_argnames=("flat",))


def fingerprint(weights: Params, config: ModelConfig, precision: str, mesh: Mesh) -> np.ndarray:
    """Compute the `array_checksum` of each leaf of the engine's tree, [leaves] uint32. Layers come first, in order.

    Fused matrices count as the parts that the trainer has. Each device reads its own part of the weights only.

    Args:
        weights: engine tree, see `convert`.
        config, precision, mesh: its arguments.
    """
    programs = _converters(config, precision, mesh)
    rest = {name: leaf for name, leaf in weights.items() if name != "layers"}
    sums = [*map(programs.layer_checksums, weights["layers"]), _rest_checksums(rest, flat=mesh.size == 1)]
    return np.concatenate(jax.device_get(sums))


@functools.partial(jax.jit, static_argnames=("config", "precision", "flat"))
def _source_checksums(params: Params, config: ModelConfig, precision: str, flat: bool) -> tuple[jax.Array, jax.Array]:
    layers = _checksums(_layer_of(params["layers"], config, precision), flat=flat, stacked=True)
    return layers.reshape(-1), _checksums(_without_layers(params, precision), flat=flat)


def source_fingerprint(params: Params, config: ModelConfig, precision: str) -> np.ndarray:
    """Compute the `fingerprint` that `convert` should produce, from the trainer's parameters where they are."""
    flat = len(_devices(params["norm"]["scale"])) == 1
    return np.concatenate(jax.device_get(_source_checksums(params, config, precision, flat)))
