"""The cache of a batch: layout, dtypes, and moving rows between caches.

Keys are stored transposed, [R, K, h, S]; values are [R, K, S, h]. With these layouts both products
of attention read memory sequentially on XLA:CPU (keys stored like values cost 2 to 7 times as
much). On a GPU keys are stored like values: a slot of transposed ones is written number by number,
32 bytes each (13.3 us a layer on an H200, values 2.4). `decode.decode` describes the slots. A
recurrent layer has a `gated_delta.State` in their place, which has no slots: it holds a row's
tokens up to the last.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.models import gated_delta, quantize
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.types import Array

FLOAT8 = "float8_e4m3fn"

Layer = tuple[Array, Array]
"""Keys, see `key_axes`, and values [R, K, S, h], float8 as uint8 bits; or the arrays of a
`State`.
"""
Cache = tuple[Layer, ...]


def key_axes(platform: str) -> tuple[int, ...]:
    """Axes of keys [R, S, K, h] as the cache has them: [R, K, S, h] on a GPU, else [R, K, h, S]."""
    if platform == "gpu":
        return (0, 2, 1, 3)
    return (0, 2, 3, 1)


def _slot_axes(sharding: NamedSharding) -> tuple[int, int]:
    """The axes of slots of keys and of values."""
    return key_axes(sharding.mesh.devices.flat[0].platform).index(1), 2


def abstract(
    config: ModelConfig,
    rows: int,
    slots: int,
    *,
    dtype: str,
    platform: str,
    sharding: NamedSharding | None = None,
) -> Cache:
    """Shapes of a cache of `rows` rows with `slots` slots, keys and values stored as `dtype`."""

    def by_row(dtype: str, dims: Iterable[int]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *dims), dtype, sharding=sharding)

    stored = dtype
    if dtype == FLOAT8:
        stored = "uint8"
    values = (config.num_kv_heads, slots, config.head_dim)
    keys = values if platform == "gpu" else (config.num_kv_heads, config.head_dim, slots)
    layer = (by_row(stored, keys), by_row(stored, values))
    state = gated_delta.State(*(by_row("float32", dims) for dims in config.state_sizes))
    layers = []
    for kind, _ in config.layer_kinds:
        if kind == "recurrent":
            layers.append(state)
        else:
            layers.append(layer)
    return tuple(layers)


def slots_of(cache: Cache) -> int:
    """Return the number of token slots per row."""
    _, values = next(layer for layer in cache if not isinstance(layer, gated_delta.State))
    return values.shape[2]


def store(x: Array, cache_dtype: str) -> Array:
    """Cast to the cache's dtype; float8 saturates where a plain cast gives NaN.

    Its scale is 1, vLLM's default. It is stored as uint8 bits: XLA:CPU has no float8 copy and would
    convert the whole cache to write one slot, which takes ten times as long as a decode step.
    """
    if cache_dtype != FLOAT8:
        return x.astype(cache_dtype)
    saturated = jnp.clip(x, -quantize.FP8_MAX, quantize.FP8_MAX)
    return jax.lax.bitcast_convert_type(saturated.astype(cache_dtype), jnp.uint8)


def load(stored: Array, dtype: jnp.dtype) -> Array:
    """Convert stored values back to `dtype`."""
    if stored.dtype == jnp.uint8:
        stored = jax.lax.bitcast_convert_type(stored, FLOAT8)
    return stored.astype(dtype)


def take(
    cache: Cache,
    rows: np.ndarray | None,
    *,
    extra: int,
    sharding: NamedSharding,
    local: bool = False,
    release: bool = False,
) -> Cache:
    """Make a new cache from rows of another.

    Args:
        cache: the other cache.
        rows: [R'] int32, rows in the order of the new cache; None takes all.
        extra: slots of a row that the new cache has more.
        sharding: sharding of both caches.
        local: each device takes its own rows, and `rows` are indices local to it. Else the selected
            rows of several devices are exchanged, which takes five times as long.
        release: free each layer of the old cache before the next layer is copied, so that memory
            never holds both caches.
    """
    layers = []
    for layer in cache:
        # Wait for each layer: see `parallel.backend.MAX_IN_FLIGHT_PROGRAMS`.
        copy = _take_of_layer(layer, rows, extra=extra, sharding=sharding, local=local)
        layers.append(jax.block_until_ready(copy))
        if release:
            for array in layer:
                array.delete()
    return tuple(layers)


@functools.partial(jax.jit, static_argnames=("extra", "sharding", "local"))
def _take_of_layer(
    layer: Layer,
    rows: Array | None,
    *,
    extra: int,
    sharding: NamedSharding,
    local: bool,
) -> Layer:
    def longer(layer: Layer, rows: Array | None) -> Layer:
        if rows is not None:
            layer = jax.tree.map(lambda x: x[rows], layer)
        if isinstance(layer, gated_delta.State):
            # A copy: the old cache may be freed.
            return jax.tree.map(jnp.copy, layer)
        arrays = []
        for x, slot_axis in zip(layer, _slot_axes(sharding), strict=True):
            padding = [(0, 0)] * 4
            padding[slot_axis] = (0, extra)
            arrays.append(jnp.pad(x, padding))
        return tuple(arrays)

    if local:
        longer = jax.shard_map(
            longer,
            mesh=sharding.mesh,
            in_specs=(sharding.spec, P(sharding.spec[0])),
            out_specs=sharding.spec,
            check_vma=False,
        )
    return jax.lax.with_sharding_constraint(longer(layer, rows), sharding)


@functools.partial(jax.jit, static_argnames=("sharding",), donate_argnames=("cache",))
def insert(
    cache: Cache,
    source: Cache,
    rows: Array,
    places: Array,
    *,
    sharding: NamedSharding,
) -> Cache:
    """Copy rows of another cache, which may have fewer slots, into rows of this one.

    Args:
        cache: destination; donated.
        source: the other cache.
        rows: [U] int32, rows of `source`.
        places: [U] int32, rows of `cache`; entries out of range are skipped.
        sharding: sharding of both caches.
    """
    filled = slice(slots_of(source))

    def copied(layer: Layer, source_layer: Layer) -> Layer:
        if isinstance(layer, gated_delta.State):
            return jax.tree.map(
                lambda x, y: x.at[places].set(y[rows], mode="drop"), layer, source_layer
            )
        arrays = []
        for x, y, slot_axis in zip(layer, source_layer, _slot_axes(sharding), strict=True):
            axes_between = [slice(None)] * (slot_axis - 1)
            arrays.append(x.at[(places, *axes_between, filled)].set(y[rows], mode="drop"))
        return tuple(arrays)

    layers = tuple(map(copied, cache, source))
    return jax.lax.with_sharding_constraint(layers, sharding)
