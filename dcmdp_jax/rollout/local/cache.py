"""The key-value cache of a batch: its layout, its dtypes, and how rows move from one to another.

Keys are stored transposed, [R, K, h, S], values [R, K, S, h]: the one pair of layouts in which both products of the
attention stream through memory on XLA's CPU backend (keys stored like values cost 2 to 7 times as much). Which slot
holds what: see `decode.decode`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dcmdp_jax.models.quantize import FP8_MAX

FLOAT8 = "float8_e4m3fn"

Cache = tuple[tuple[jax.Array, jax.Array], ...]
"""For each layer keys [R, K, h, S] and values [R, K, S, h], float8 as uint8 bits."""


def slots_of(cache: Cache) -> int:
    """Tokens that a row has room for."""
    return cache[0][1].shape[2]


def store(x: jax.Array, cache_dtype: str) -> jax.Array:
    """Casts to the cache's dtype; float8 saturates where a cast would give NaN (scale 1, as vLLM's default).

    float8 is kept as its bits: XLA's CPU backend has no float8 copy and would convert the whole cache to write one
    slot, at ten times the time of a decode step.
    """
    if cache_dtype != FLOAT8:
        return x.astype(cache_dtype)
    return jax.lax.bitcast_convert_type(jnp.clip(x, -FP8_MAX, FP8_MAX).astype(cache_dtype), jnp.uint8)


def load(stored: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `store` kept, in `dtype`."""
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
    """A new cache of the rows `rows` [R'] int32, in that order, with `extra` more slots; None is all rows as they are.

    Over several devices rows that are named travel, all of them: five times the time of keeping them where they are.
    With `local` none does: each device takes rows of its own, which `rows` counts from its first.

    With `release` the old cache is used up, each layer before the next is taken: both are never there whole.
    """
    taken = []
    for layer in cache:
        # Waited for, each: see `parallel.host.MOST_UNDER_WAY`.
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
        longer = jax.shard_map(
            longer, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False
        )
    return jax.lax.with_sharding_constraint(longer(layer, rows), sharding)


@functools.partial(jax.jit, static_argnames=("sharding",), donate_argnames=("cache",))
def insert(cache: Cache, source: Cache, rows: jax.Array, places: jax.Array, *, sharding: NamedSharding) -> Cache:
    """Copies rows of another cache, which may have fewer slots, over rows of this one.

    Args:
        cache: where they go; donated.
        source: where they are.
        rows: [U] int32, rows of `source`.
        places: [U] int32, rows of `cache`; one that is out of range is left out.
        sharding: of both.
    """
    held = slots_of(source)

    def copied(layer: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (key, value), (other_key, other_value) = layer, other
        key = key.at[places, :, :, :held].set(other_key[rows], mode="drop")
        return key, value.at[places, :, :held].set(other_value[rows], mode="drop")

    moved = tuple(copied(*pair) for pair in zip(cache, source, strict=True))
    return jax.lax.with_sharding_constraint(moved, sharding)
