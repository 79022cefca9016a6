"""Conversion of the trainer's parameters to the engine's precision and mesh, with checksums.

One layer at a time: parts of a leaf are cast or quantized where the trainer has them, travel in the
engine's precision, and arrive where the engine wants them. No device and no host holds more of the
trainer's tree than its own part.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.engines.local.layout import EXPERT, TENSOR, weight_specs
from dcmdp_jax.models import decoder, layer_params, quantize
from dcmdp_jax.models.array_checksum import array_checksum
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import param_shapes, quantized_leaves
from dcmdp_jax.parallel.sharding import to_local
from dcmdp_jax.types import Array, Params


def in_precision(params: Params, config: ModelConfig, precision: str) -> Params:
    """The trainer's parameters, or a part of them, in the engine's precision.

    Layers may be stacked or one. Scales are per output channel: fusing before or after quantization
    gives the same values. Tied embeddings become an "output" [D, V] of its own, and tokens are
    looked up in its columns: a transposed second factor slows a product on XLA:CPU 1.2 to 5 times.
    If quantized, that matrix is a copy and "embedding" stays.
    """
    params = dict(params)
    if "embedding" in params and "output" not in params:
        params["output"] = decoder.output_kernel(params)
        if precision not in quantize.PRECISIONS:
            del params["embedding"]
    marks = quantized_leaves(config) | {"output": True}
    own_marks = {name: marks[name] for name in params}
    return _cast(params, own_marks, precision)


def _cast(tree: Params, quantized: Params, precision: str) -> Params:
    if precision in quantize.PRECISIONS:
        return quantize.quantize_tree(tree, quantized, precision)
    if precision == "exact":
        return tree
    return jax.tree.map(lambda leaf: leaf.astype(precision), tree)


def _one_layer(config: ModelConfig, dtype: str = "float32") -> Params:
    """Shapes of one layer of each kind."""
    stacked = param_shapes(config, dtype)["layers"]
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)


def engine_shapes(
    config: ModelConfig,
    precision: str,
    param_dtype: str = "float32",
) -> Params:
    """Shapes of the engine's tree, as `Conversion` makes it."""

    def converted(params: Params) -> Params:
        params = in_precision(params, config, precision)
        fused = {}
        for kind, layer in config.by_kind(params["layers"]).items():
            fused[kind] = layer_params.fuse_projections(layer, mlp=True)
        params["layers"] = [fused[kind] for kind, _ in config.layer_kinds]
        return params

    shapes = param_shapes(config, param_dtype)
    shapes["layers"] = _one_layer(config, param_dtype)
    return jax.eval_shape(converted, shapes)


class Conversion:
    """Conversion of a model's parameters to one precision and mesh.

    Values are the same on every mesh. Two small compiled programs make the weights, one of them run
    for each layer, so compilation time does not depend on depth. A model with two kinds of layers
    has one for each kind.

    Attributes:
        layer: kind -> (stacked layers of it, index) -> the engine's layer.
        outside: parameters without layers -> the engine's leaves outside layers.
        source_checksums: (parameters, whether one device has them) -> the checksums that the
            weights should have.
        layer_checksums: (layer of the engine, kind) -> its checksums before fusing.
    """

    def __init__(self, config: ModelConfig, precision: str, mesh: Mesh) -> None:
        """Declare the programs; each is compiled when it first runs.

        Args:
            config: the model.
            precision: "exact" (the dtype of the parameters), "float32", "bfloat16", "float16", or
                of `quantize.PRECISIONS`.
            mesh: see `conversion_mesh`.
        """
        self._config = config
        self._mesh = mesh
        ways = mesh.shape[TENSOR]

        # Kind of layers -> how its matrices lie on the mesh, fused as the engine has them.
        engine_tree = engine_shapes(config, precision)
        outside_specs = weight_specs(engine_tree, config, mesh)
        layer_specs = outside_specs.pop("layers")
        fused = {}
        for kind, indices in config.kinds.items():
            fused[kind] = layer_specs[indices[0]]

        # The same of the trainer's separate matrices, and which of them are quantized.
        convert = functools.partial(in_precision, config=config, precision=precision)
        unfused_shapes = jax.eval_shape(convert, {"layers": _one_layer(config)})
        unfused_specs = weight_specs(unfused_shapes, config, mesh)
        unfused = config.by_kind(unfused_specs["layers"])
        marks = config.by_kind(quantized_leaves(config)["layers"])

        def shardings(specs: Any) -> Any:
            return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

        def on_parts(
            function: Callable[[Params], Params],
            before: Any,
            after: Any,
        ) -> Callable[[Params], Params]:
            # The fused matrix of a tensor group is not that of one device: each fuses its own
            # heads.
            if ways == 1:
                return function
            return jax.shard_map(
                function,
                mesh=mesh,
                in_specs=(before,),
                out_specs=after,
                check_vma=False,
            )

        def layer(layers: Params, index: Array, kind: str) -> Params:
            source = jax.tree.map(lambda leaf: leaf[index], layers)
            separate = _cast(source, marks[kind], precision)
            if ways > 1:
                separate = jax.lax.with_sharding_constraint(separate, shardings(unfused[kind]))
            fuse = functools.partial(layer_params.fuse_projections, mlp=True)
            fuse_parts = on_parts(fuse, unfused[kind], fused[kind])
            return fuse_parts(separate)

        def outside(params: Params) -> Params:
            # A result that is an argument would be the trainer's own buffer.
            return jax.tree.map(jnp.copy, convert(params))

        def source_checksums(
            params: Params,
            one_device: bool,
        ) -> list[Array]:
            converted = convert(params)
            layers = config.by_kind(converted.pop("layers"))
            sums = []
            for kind in config.kinds:
                kind_sums = _checksums(layers[kind], flat=one_device, stacked=True)
                sums.append(kind_sums.reshape(-1))
            sums.append(_checksums(converted, flat=one_device))
            return sums

        def layer_checksums(engine_layer: Params, kind: str) -> Array:
            split = functools.partial(_separated, config=config, ways=ways)
            split_parts = on_parts(split, fused[kind], unfused[kind])
            separate = split_parts(engine_layer)
            return _checksums(separate, flat=mesh.size == 1)

        self.layer = {}
        for kind in config.kinds:
            make_layer = functools.partial(layer, kind=kind)
            self.layer[kind] = jax.jit(make_layer, out_shardings=shardings(fused[kind]))
        self.layer_checksums = jax.jit(layer_checksums, static_argnames="kind")
        self.outside = jax.jit(outside, out_shardings=shardings(outside_specs))
        self.source_checksums = jax.jit(source_checksums, static_argnames="one_device")

    def weights(self, params: Params) -> Params:
        """The engine's tree, new arrays, sharded by `layout.weight_specs`.

        `layers` is a list of one dict per layer with fused projections (see
        `layer_params.fuse_projections`); of a tensor group each device has its own heads' parts fused.
        None of the arrays aliases `params`, as of `params.init_params` and on any mesh, whose
        buffers may be donated afterwards.
        """
        outer = dict(params)
        layers = self._config.by_kind(outer.pop("layers"))
        in_place = _devices(outer["norm"]["scale"]) == list(self._mesh.devices.flat)
        shapes = outer | {"layers": _one_layer(self._config)}
        specs = weight_specs(
            shapes,
            self._config,
            self._mesh,
        )
        layer_specs = self._config.by_kind(specs.pop("layers"))

        # Other devices: each leaf of a layer goes there by itself, to the devices that will have a
        # part of it.
        def move(leaf: Array, spec: P) -> Array:
            sharding = NamedSharding(self._mesh, spec)
            own_part = to_local(leaf, sharding)
            return jax.device_put(own_part, sharding)

        def layer(kind: str, index: int) -> Params:
            if in_place:
                return self.layer[kind](layers[kind], np.int32(index))

            def move_one(leaf: Array, spec: P) -> Array:
                return move(leaf[index][None], P(None, *spec))

            moved = jax.tree.map(move_one, layers[kind], layer_specs[kind])
            return self.layer[kind](moved, np.int32(0))

        if not in_place:
            outer = jax.tree.map(move, outer, specs)
        weights = self.outside(outer)
        weights["layers"] = [layer(kind, index) for kind, index in self._config.layer_kinds]
        return weights

    def proof(
        self,
        params: Params,
        weights: Params,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The checksums that the engine's weights should have, and those they have.

        Both are [leaves] uint32, of `array_checksum`. Layers come first, by kind and in order.
        Fused matrices count as the parts that the trainer has. Each side is read where it is, each
        device its own part only.
        """
        devices = _devices(params["norm"]["scale"])
        expected = jax.device_get(self.source_checksums(params, len(devices) == 1))

        outer = dict(weights)
        layers = outer.pop("layers")
        actual = []
        for kind, indices in self._config.kinds.items():
            for index in indices:
                actual.append(self.layer_checksums(layers[index], kind))
        actual.append(_checksums(outer, flat=self._mesh.size == 1))
        actual = jax.device_get(actual)
        return np.concatenate(expected), np.concatenate(actual)


# The `Conversion` of these arguments, with programs that an earlier weight sync may have compiled.
conversion = functools.lru_cache(maxsize=32)(Conversion)


def _separated(layer: Params, config: ModelConfig, ways: int) -> Params:
    """The inverse of `fuse_projections` on one of `ways` devices."""
    query_width = config.num_heads * config.head_dim // ways
    if config.family.output_gate:
        query_width *= 2
    kv_width = config.num_kv_heads * config.head_dim // ways

    def columns(fused: Params, start: int, width: int) -> Params:
        return jax.tree.map(lambda leaf: leaf[..., start : start + width], fused)

    def halves(mlp: Params) -> Params:
        mlp = dict(mlp)
        fused = mlp.pop("gate_up")
        width = jax.tree.leaves(fused)[0].shape[-1] // 2
        mlp["gate"] = columns(fused, 0, width)
        mlp["up"] = columns(fused, width, width)
        return mlp

    attention = dict(layer["attention"])
    if not layer_params.is_recurrent(layer):
        fused = attention.pop("qkv")
        attention["q"] = columns(fused, 0, query_width)
        attention["k"] = columns(fused, query_width, kv_width)
        attention["v"] = columns(fused, query_width + kv_width, kv_width)
    return {**layer, "attention": attention, "mlp": layer_params.map_mlps(halves, layer["mlp"])}


def _devices(leaf: Array) -> list[jax.Device]:
    """The devices of an array, in the order of its mesh."""
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        return list(sharding.mesh.devices.flat)
    return list(sharding.device_set)


def conversion_mesh(params: Params, mesh: Mesh) -> Mesh:
    """The engine's mesh, or its first device where the devices of a CPU will share its copy."""
    first = mesh.devices.reshape(-1)[:1]
    if first[0].platform != "cpu" or mesh.shape[TENSOR] > 1 or mesh.shape[EXPERT] > 1:
        return mesh
    for leaf in jax.tree.leaves(params):
        if not leaf.is_fully_replicated:
            return mesh
    shape = (1,) * mesh.devices.ndim
    return Mesh(first.reshape(shape), mesh.axis_names)


def share_copies(weights: Params, mesh: Mesh) -> Params:
    """Replicate `weights` from the devices of `conversion_mesh` to all of `mesh`.

    CPU devices with the same part of an array share one copy in memory.
    """
    if mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
        return weights

    def shared(leaf: Array) -> Array:
        sharding = NamedSharding(mesh, leaf.sharding.spec)
        copies = {_bounds(shard.index): shard.data for shard in leaf.addressable_shards}
        arrays = []
        for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
            copy = copies[_bounds(index)]
            if copy.devices() != {device}:
                # JAX does not copy a NumPy array with its own alignment.
                copy = jax.device_put(np.asarray(copy), device)
            arrays.append(copy)
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)

    return jax.tree.map(shared, weights)


def _bounds(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((axis.start, axis.stop) for axis in index)


@functools.partial(jax.jit, static_argnames=("flat", "stacked"))
def _checksums(tree: Params, *, flat: bool, stacked: bool = False) -> Array:
    """`array_checksum` of each leaf, [leaves]; of each layer of stacked ones, [layers, leaves]."""

    def checksum(x: Array) -> Array:
        # Flattened, which costs half as much on one device and would gather an array on several.
        if flat:
            x = x.reshape(-1)
        return array_checksum(x)

    if stacked:
        checksum = jax.vmap(checksum)
    sums = [checksum(leaf) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(sums, axis=-1)
