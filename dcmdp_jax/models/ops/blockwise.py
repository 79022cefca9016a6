"""Causal attention of packed rows, block by block of their segments, in XLA loops.

For platforms without such a kernel of their own. Measured on CPU: benchmarks/README.md.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dcmdp_jax.models.ops.cpu import softmax_maximum
from dcmdp_jax.types import Array

# Prefixes of the name scopes of both loops. Their number of blocks follows, where each row is one
# segment: of all queries, and of the keys of a row's last queries.
QUERY_BLOCKS = "attention_query_blocks"
KEY_BLOCKS = "attention_key_blocks"
_Carry = tuple[Array, ...]
_HIDDEN = -1e30
_LONG = 1024


def block_size(length: int) -> int:
    """Queries and keys of a block for rows of `length` tokens: the fastest on CPU."""
    return 64 if length <= _LONG else 128


def attention(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array,
    *,
    block: int | None = None,
    window: int | Array = 0,
) -> Array:
    """softmax(q k^T / sqrt(h)) v, each token seeing the tokens of its own segment up to itself.

    A block of queries begins at the first token of a segment, or where the block before it ends; it
    holds the segments that end within it, or a part of a longer one. Its keys are read block by
    block from the begin of its first segment, so the products grow with the sum of the squares of
    the segments' lengths. The softmax is computed online, in float32; the backward pass computes
    the weights again from their log-sum-exp. No array has two axes along the row.

    Args:
        query: [R, L, H, h].
        key, value: [R, L, K, h]; H is a multiple of K.
        segment_ids: [R, L] integers. Tokens of a segment are consecutive. 0 is padding: its outputs
            and gradients are zero, and no time is spent on it.
        block: queries and keys of a block; None: `block_size`.
        window: tokens that a token sees, itself included; 0: all before it. Blocks of keys outside
            are skipped.

    Returns:
        [R, L, H, h], the dtype of `query`.
    """
    rows, length, heads, width = query.shape
    kv_heads = key.shape[2]
    total = rows * length
    size = min(block or block_size(length), total)

    scale = 1.0 / math.sqrt(width)
    query = query * jnp.asarray(scale, query.dtype)
    attended = _attended(
        query.reshape(total, kv_heads, heads // kv_heads, width),
        key.reshape(total, kv_heads, width),
        value.reshape(total, kv_heads, width),
        _segments(segment_ids, size, window),
        size,
        length,
    )
    return attended.reshape(query.shape)


class _Segments(NamedTuple):
    """Where segments lie in the T tokens of all rows.

    Attributes:
        first: [T] int32, the first token that a token sees, of its segment; padding counts as a
            segment.
        after: [T] int32, the token after the block of queries that begins here.
        real: [T + 1] int32, the first token at or after this one that is not padding; T if there is
            none.
    """

    first: Array
    after: Array
    real: Array


def _segments(
    segment_ids: Array,
    size: int,
    window: int | Array,
) -> _Segments:
    total = segment_ids.size
    ids = segment_ids.reshape(-1)
    index = jnp.arange(total, dtype=jnp.int32)
    end = jnp.full((1,), total, jnp.int32)
    row_begins = index % segment_ids.shape[1] == 0
    begins = row_begins | (ids != jnp.roll(ids, 1))
    first = lax.cummax(jnp.where(begins, index, 0))

    # A block ends before the segment that it would cut, unless that is its first one.
    reach = jnp.minimum(index + size, total)
    cut_segment = jnp.concatenate([first, end])[reach]
    after = jnp.where(cut_segment > index, cut_segment, reach)

    real = lax.cummin(jnp.where(ids != 0, index, total), reverse=True)
    real = jnp.concatenate([real, end])
    has_window = not isinstance(window, int) or window != 0
    if has_window:
        first = jnp.maximum(first, index - window + 1)
    return _Segments(first=first, after=after, real=real)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Queries:
    """A block of B queries, with G heads side by side: n = G B columns.

    Attributes:
        at: [] int32, the first query.
        valid: [B] bool, false on queries of other blocks.
        first: [n] int32, the first key that a query sees; T where it is not valid.
        index: [n] int32, the query itself.
        begin: [] int32, the first key of the first block.
        count: [] int32, how many blocks of keys there are.
        following: [] int32, the first query of the next block.
    """

    at: Array
    valid: Array
    first: Array
    index: Array
    begin: Array
    count: Array
    following: Array

    @classmethod
    def of(
        cls,
        segments: _Segments,
        begin: Array,
        size: int,
        group: int,
    ) -> "_Queries":
        """The block that begins at a token; the last one holds earlier tokens too, not valid."""
        total = segments.first.shape[0]
        at = jnp.minimum(begin, total - size)
        index = at + jnp.arange(size, dtype=jnp.int32)
        after = segments.after[begin]
        in_block = (index >= begin) & (index < after)
        valid = in_block & (_rows(segments.real, at, size) == index)
        first = jnp.where(valid, _rows(segments.first, at, size), total)
        # Computed once and not in every fusion, whose loops over the columns of a group would not
        # be vectorized.
        first, index = lax.optimization_barrier((jnp.tile(first, group), jnp.tile(index, group)))

        first_key = segments.first[begin]
        return cls(
            at=at,
            valid=valid,
            first=first,
            index=index,
            begin=first_key,
            count=(begin - first_key + size - 1) // size + 1,
            following=segments.real[after],
        )

    def keys(self, block: Array) -> tuple[Array, Array]:
        """First key of a block, and [B, n] bool: which a query sees. The queries' own come last."""
        size = self.valid.shape[0]
        at = jnp.minimum(self.begin + block * size, self.at)
        last = jnp.where(block == self.count - 1, at + size, self.at - 1)
        key_index = at + jnp.arange(size, dtype=jnp.int32)[:, None]
        last_seen = jnp.minimum(self.index, last)
        return at, (key_index >= self.first) & (key_index <= last_seen)

    def write(self, target: Array, columns: Array) -> Array:
        """`target` [T, K, G, ...] with the block's [K, ..., n] at its valid queries."""
        size = self.valid.shape[0]
        block = columns.reshape(*columns.shape[:-1], -1, size)
        block = jnp.moveaxis(block, (-1, -2), (0, 2))
        block = block.reshape(size, *target.shape[1:])
        block = block.astype(target.dtype)
        inner_axes = (1,) * (target.ndim - 1)
        valid = self.valid.reshape(size, *inner_axes)
        block = jnp.where(valid, block, _rows(target, self.at, size))
        return lax.dynamic_update_slice_in_dim(target, block, self.at, 0)


def _rows(x: Array, at: Array | int, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, at, size)


def _as_rows(x: Array) -> Array:
    """[B, K, G, h] -> [K, n, h]."""
    return x.transpose(1, 2, 0, 3).reshape(x.shape[1], -1, x.shape[3])


def _as_columns(x: Array) -> Array:
    """[B, K, G, h] -> [K, h, n]."""
    return x.transpose(1, 3, 2, 0).reshape(x.shape[1], x.shape[3], -1)


def _product(x: Array, y: Array) -> Array:
    """[K, a, b] [K, b, c] in float32: the order of axes that XLA's CPU products are fastest in."""
    return lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _scopes(total: int, length: int, size: int) -> tuple[str, str]:
    rows = total // length
    in_row = -(-length // size)
    return f"{QUERY_BLOCKS}_{rows * in_row}", f"{KEY_BLOCKS}_{in_row}"


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attended(
    query: Array,
    key: Array,
    value: Array,
    segments: _Segments,
    size: int,
    length: int,
) -> Array:
    """Attended heads [T, K, G, h] for query [T, K, G, h], key and value [T, K, h].

    Scores are [K, keys, n]: queries are columns, so that reductions over keys are vectorized over
    queries.
    """
    return _attended_forward(query, key, value, segments, size, length)[0]


def _attended_forward(
    query: Array,
    key: Array,
    value: Array,
    segments: _Segments,
    size: int,
    length: int,
) -> tuple[Array, tuple[Any, ...]]:
    total, kv_heads, group, width = query.shape
    query_scope, key_scope = _scopes(total, length, size)

    def queries(carry: _Carry) -> _Carry:
        begin, attended, log_sum = carry
        block = _Queries.of(segments, begin, size, group)
        columns = _as_columns(_rows(query, block.at, size))

        def keys(index: Array, carry: _Carry) -> _Carry:
            maximum, weight, product = carry
            at, visible = block.keys(index)
            keys = _rows(key, at, size).transpose(1, 0, 2)
            scores = _product(keys, columns)
            scores = jnp.where(visible, scores, _HIDDEN)
            # A query that sees none of these keys gets weights of one, until its own key, the last,
            # makes them zero.
            larger = jnp.maximum(maximum, softmax_maximum(scores, 1))
            exponentials = jnp.exp(scores - larger)
            shrink = jnp.exp(maximum - larger)
            total_weight = jnp.sum(exponentials, axis=1, keepdims=True)
            weight = weight * shrink + total_weight
            values = _rows(value, at, size).transpose(1, 2, 0)
            product = product * shrink + _product(values, exponentials.astype(value.dtype))
            return larger, weight, product

        hidden = jnp.full((kv_heads, 1, group * size), _HIDDEN, jnp.float32)
        product = jnp.zeros((kv_heads, width, group * size), jnp.float32)
        with jax.named_scope(key_scope):
            maximum, weight, product = lax.fori_loop(
                0,
                block.count,
                keys,
                (hidden, jnp.zeros_like(hidden), product),
            )
        attended = block.write(attended, product / weight)
        block_log_sum = maximum + jnp.log(weight)
        return block.following, attended, block.write(log_sum, block_log_sum[:, 0])

    empty = (
        segments.real[0],
        jnp.zeros_like(query),
        jnp.zeros(query.shape[:3], jnp.float32),
    )
    with jax.named_scope(query_scope):
        _, attended, log_sum = lax.while_loop(lambda carry: carry[0] != total, queries, empty)
    # The arguments, the result, the log-sum-exp of each query.
    return attended, (query, key, value, segments, attended, log_sum)


def _attended_backward(
    size: int,
    length: int,
    saved: tuple[Any, ...],
    cotangent: Array,
) -> tuple[Array, Array, Array, None]:
    query, key, value, segments, attended, log_sum = saved
    total, kv_heads, group, width = query.shape
    query_scope, key_scope = _scopes(total, length, size)

    def queries(carry: _Carry) -> _Carry:
        begin, query_bar, key_bar, value_bar = carry
        block = _Queries.of(segments, begin, size, group)
        block_query = _rows(query, block.at, size)
        bar = jnp.where(block.valid[:, None, None, None], _rows(cotangent, block.at, size), 0)
        block_attended = _rows(attended, block.at, size)
        along = bar.astype(jnp.float32) * block_attended.astype(jnp.float32)
        along = jnp.sum(along, axis=-1)
        # Arrays of the inner loop, none of them computed in it.
        rows, columns, bar_rows, bar_columns, along, lse = lax.optimization_barrier(
            (
                _as_rows(block_query),
                _as_columns(block_query),
                _as_rows(bar),
                _as_columns(bar),
                _as_columns(along[..., None]),
                _as_columns(_rows(log_sum, block.at, size)[..., None]),
            )
        )

        def keys(index: Array, carry: _Carry) -> _Carry:
            block_bar, key_bar, value_bar = carry
            at, visible = block.keys(index)
            block_key = _rows(key, at, size)
            block_value = _rows(value, at, size)
            scores = _product(block_key.transpose(1, 0, 2), columns)
            weights = jnp.where(visible, jnp.exp(scores - lse), 0.0)
            weights_bar = _product(block_value.transpose(1, 0, 2), bar_columns)
            scores_bar = weights * (weights_bar - along)
            scores_bar = scores_bar.astype(query.dtype)
            block_bar += _product(block_key.transpose(1, 2, 0), scores_bar)

            def add(sums: Array, product: Array) -> Array:
                added = _rows(sums, at, size) + product.transpose(1, 0, 2)
                return lax.dynamic_update_slice_in_dim(sums, added, at, 0)

            key_bar = add(key_bar, _product(scores_bar, rows))
            value_bar = add(value_bar, _product(weights.astype(value.dtype), bar_rows))
            return block_bar, key_bar, value_bar

        block_bar = jnp.zeros((kv_heads, width, group * size), jnp.float32)
        with jax.named_scope(key_scope):
            block_bar, key_bar, value_bar = lax.fori_loop(
                0,
                block.count,
                keys,
                (block_bar, key_bar, value_bar),
            )
        return block.following, block.write(query_bar, block_bar), key_bar, value_bar

    empty = (
        segments.real[0],
        jnp.zeros_like(query),
        jnp.zeros(key.shape, jnp.float32),
        jnp.zeros(value.shape, jnp.float32),
    )
    with jax.named_scope(query_scope):
        _, query_bar, key_bar, value_bar = lax.while_loop(
            lambda carry: carry[0] != total, queries, empty
        )
    return query_bar, key_bar.astype(key.dtype), value_bar.astype(value.dtype), None


_attended.defvjp(_attended_forward, _attended_backward)
