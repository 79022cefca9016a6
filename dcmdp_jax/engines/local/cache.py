"""The key-value cache of a batch: layout, dtypes, and moving rows between caches.

Keys are stored transposed, [R, K, h, S]; values are [R, K, S, h]. With these layouts both products of attention read
memory sequentially on XLA:CPU (keys stored like values cost 2 to 7 times as much). `decode.decode` describes the slots.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.quantize import FP8_MAX

FLOAT8 = "float8_e4m3fn"

# For each layer keys [R, K, h, S] and values [R, K, S, h], float8 as uint8 bits.
Cache = tuple[tuple[jax.Array, jax.Array], ...]


def abstract(config: ModelConfig, rows: int, slots: int, *, dtype: str, sharding: NamedSharding) -> Cache:
    """Shapes of a cache of `rows` rows with `slots` slots, stored as `dtype`."""
    stored = jnp.uint8 if dtype == FLOAT8 else jnp.dtype(dtype)

    def held(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, config.num_kv_heads, *dims), stored, sharding=sharding)

    return ((held(config.head_dim, slots), held(slots, config.head_dim)),) * config.num_layers


def slots_of(cache: Cache) -> int:
    """Return the number of token slots per row."""
    return cache[0][1].shape[2]


def store(x: jax.Array, cache_dtype: str) -> jax.Array:
    """Cast to the cache's dtype; float8 saturates where a plain cast gives NaN (scale 1, vLLM's default).

    float8 is stored as uint8 bits: XLA:CPU has no float8 copy and would convert the whole cache to write one slot,
    which takes ten times as long as a decode step.
    """
    if cache_dtype != FLOAT8:
        return x.astype(cache_dtype)
    return jax.lax.bitcast_convert_type(jnp.clip(x, -FP8_MAX, FP8_MAX).astype(cache_dtype), jnp.uint8)


def load(stored: jax.Array, dtype: jnp.dtype) -> jax.Array:
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
    """Make a new cache from the rows `rows` [R'] int32, in that order, with `extra` more slots; None takes all rows.

    On several devices all selected rows are exchanged, which takes five times as long as keeping them in place. With
    `local`, nothing is exchanged: each device takes its own rows, and `rows` are indices local to it.

    With `release`, each layer of the old cache is freed before the next layer is copied, so that memory never holds
    both caches whole.
    """
    taken = []
    for layer in cache:
        # Wait for each layer: see `parallel.backend.MAX_IN_FLIGHT_PROGRAMS`.
        taken.append(jax.block_until_ready(_take_of_layer(layer, rows, extra=extra, sharding=sharding, local=local)))
        if release:
            for old in layer:
                old.delete()
    return tuple(taken)


@functools.partial(jax.jit, static_argnames=("extra", "sharding", "local"))
def _take_of_layer(
    layer: tuple[jax.Array, jax.Array], rows: jax.Array | None, *, extra: int, sharding: NamedSharding, local: bool
) -> tuple[jax.Array, jax.Array]:
    def longer(layer: tuple[jax.Array, jax.Array], rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        (key, value), none = layer, (0, 0)
        if rows is not None:
            key, value = key[rows], value[rows]
        return jnp.pad(key, (none, none, none, (0, extra))), jnp.pad(value, (none, none, (0, extra), none))

    if local:
        specs = sharding.spec, P(sharding.spec[0])
        longer = jax.shard_map(longer, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False)
    return jax.lax.with_sharding_constraint(longer(layer, rows), sharding)


@functools.partial(jax.jit, static_argnames=("sharding",), donate_argnames=("cache",))
def insert(cache: Cache, source: Cache, rows: jax.Array, places: jax.Array, *, sharding: NamedSharding) -> Cache:
    """Copy rows of another cache, which may have fewer slots, into rows of this one.

    Args:
        cache: destination; donated.
        source: the other cache.
        rows: [U] int32, rows of `source`.
        places: [U] int32, rows of `cache`; entries out of range are skipped.
        sharding: sharding of both caches.
    """
    held = slots_of(source)

    def copied(layer: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (key, value), (other_key, other_value) = layer, other
        key = key.at[places, :, :, :held].set(other_key[rows], mode="drop")
        return key, value.at[places, :, :held].set(other_value[rows], mode="drop")

    moved = tuple(copied(*pair) for pair in zip(cache, source, strict=True))
    return jax.lax.with_sharding_constraint(moved, sharding)
