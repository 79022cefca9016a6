"""The operations of a decoder for XLA's CPU backend, each with the cost of the plain version there.

benchmarks/README.md has the figures. None of them was measured on another platform.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from dcmdp_jax.models.ops import reference
from dcmdp_jax.models.ops.blocks import grouped_matmul as grouped_matmul
from dcmdp_jax.models.ops.reference import Rotary
from dcmdp_jax.types import Array

HIDDEN = -1e30
"""Added to the score of a key that a query does not see."""


@jax.custom_vjp
def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

    The backward pass computes the sigmoid again: kept from the forward pass it is one more array of
    the MLP's width to write and to read, which costs more than the exponential.
    """
    return reference.swiglu(gate, up)


def _swiglu_forward(
    gate: Array,
    up: Array,
) -> tuple[Array, tuple[Array, Array]]:
    return swiglu(gate, up), (gate, up)


def _swiglu_backward(
    saved: tuple[Array, Array],
    cotangent: Array,
) -> tuple[Array, Array]:
    # The barrier keeps XLA from finding the forward pass's sigmoid equal and keeping it.
    gate, up = jax.lax.optimization_barrier(saved)
    gate32 = gate.astype(jnp.float32)
    cotangent32 = cotangent.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate32)
    slope = sigmoid * (1 + gate32 * (1 - sigmoid))
    gate_bar = cotangent32 * up.astype(jnp.float32) * slope
    up_bar = cotangent32 * gate32 * sigmoid
    return gate_bar.astype(gate.dtype), up_bar.astype(up.dtype)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def softmax_maximum(x: Array, axis: int = -1) -> Array:
    """max(x) over an axis, kept as an axis of size 1.

    Not differentiable; the axis may not be split over devices.

    A comparison that ignores NaN takes a third of the time of `jnp.max`. NaN stays NaN in the
    exponentials.
    """

    def larger(a: Array, b: Array) -> Array:
        return jax.lax.select(a > b, a, b)

    least = jnp.asarray(-jnp.inf, x.dtype)
    return jnp.expand_dims(jax.lax.reduce(x, least, larger, (axis % x.ndim,)), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def split(x: Array, at: int) -> tuple[Array, Array]:
    """`reference.split`. The backward pass copies whole rows.

    Inside a fusion XLA would compute its concatenation one element at a time.
    """
    return reference.split(x, at)


def _split_forward(
    x: Array,
    at: int,
) -> tuple[tuple[Array, Array], None]:
    return split(x, at), None


def _split_backward(
    at: int,
    saved: None,
    cotangents: tuple[Array, Array],
) -> tuple[Array]:
    return (jnp.concatenate(jax.lax.optimization_barrier(cotangents), axis=2),)


split.defvjp(_split_forward, _split_backward)


def rotate(x: Array, rotary: Rotary) -> Array:
    """`reference.rotate` by a reversal: XLA computes a concatenation one element at a time."""
    cos, sin = (table[:, :, None] for table in rotary)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    return (halves * cos + jnp.flip(halves, -2) * sin).reshape(x.shape).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def norm_and_rotate(
    x: Array,
    scale: Array,
    rotary: Rotary,
    eps: float,
) -> Array:
    """`reference.norm_and_rotate` with a backward pass that reads its inputs once."""
    return _norm_and_rotate_forward(x, scale, rotary, eps)[0]


def _norm_and_rotate_forward(
    x: Array,
    scale: Array,
    rotary: Rotary,
    eps: float,
) -> tuple[Array, tuple[Any, ...]]:
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    normed = (x32 * inverse).astype(x.dtype) * scale.astype(x.dtype)
    return rotate(normed, rotary), (x, inverse, scale, rotary)


def _norm_and_rotate_backward(
    eps: float,
    saved: tuple[Any, ...],
    cotangent: Array,
) -> tuple[Any, ...]:
    x, inverse, scale, rotary = saved

    # Turned back.
    cos, sin = (table[:, :, None] for table in rotary)
    halves = cotangent.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    turned = (halves * cos + jnp.flip(halves * sin, -2)).reshape(x.shape)

    normed = x.astype(jnp.float32) * inverse
    pulled = turned * scale.astype(jnp.float32)
    along = jnp.mean(pulled * normed, axis=-1, keepdims=True)
    x_bar = (inverse * (pulled - normed * along)).astype(x.dtype)
    scale_bar = jnp.sum(turned * normed, axis=(0, 1)).astype(scale.dtype)
    return x_bar, scale_bar, jax.tree.map(jnp.zeros_like, rotary)


norm_and_rotate.defvjp(_norm_and_rotate_forward, _norm_and_rotate_backward)


def attention(
    query: Array,
    key: Array,
    value: Array,
    visible: Array,
) -> Array:
    """`reference.attention` in half its time, forward and backward.

    The query heads that share a key head are laid along the query axis, [R, K, (H / K) L, h], so
    that both products are plain batched matrix products.
    """
    rows, length, heads, width = query.shape
    group = heads // key.shape[2]

    # A factor on the query costs less than one on the scores.
    query = query * jnp.asarray(1.0 / math.sqrt(width), query.dtype)
    query = query.reshape(rows, length, -1, group, width).transpose(
        0,
        2,
        3,
        1,
        4,
    )
    query = query.reshape(rows, -1, group * length, width)
    key = key.transpose(0, 2, 1, 3)
    value = value.transpose(0, 2, 1, 3)
    bias = jnp.tile(jnp.where(visible, 0.0, HIDDEN), (1, group, 1))[:, None]

    attended = _attended(query, key, value, bias).reshape(
        rows,
        -1,
        group,
        length,
        width,
    )
    return attended.transpose(0, 3, 1, 2, 4).reshape(
        rows,
        length,
        heads,
        width,
    )


@jax.custom_vjp
def _attended(
    query: Array,
    key: Array,
    value: Array,
    bias: Array,
) -> Array:
    """softmax(q k^T + bias) v.

    For query [R, K, Q, h], key and value [R, K, S, h], bias [R or 1, 1, Q, S].

    The sum of the exponentials divides the result, not the [Q, S] weights, and the backward pass
    takes sum_s w_s dw_s as sum_h o_h do_h: four passes over [Q, S] fewer than autodiff. No gradient
    to `bias`.
    """
    return _attended_forward(query, key, value, bias)[0]


def _attended_forward(
    query: Array,
    key: Array,
    value: Array,
    bias: Array,
) -> tuple[Array, tuple[Array, ...]]:
    scores = jnp.einsum("rkqh,rksh->rkqs", query, key, preferred_element_type=jnp.float32) + bias
    exponentials = jnp.exp(scores - softmax_maximum(scores))
    inverse = 1.0 / jnp.sum(exponentials, axis=-1, keepdims=True)
    exponentials = exponentials.astype(value.dtype)
    product = jnp.einsum(
        "rkqs,rksh->rkqh",
        exponentials,
        value,
        preferred_element_type=jnp.float32,
    )
    attended = (product * inverse).astype(value.dtype)
    # The arguments, the weights before division, the result.
    return attended, (query, key, value, bias, exponentials, inverse, attended)


def _attended_backward(
    saved: tuple[Array, ...],
    cotangent: Array,
) -> tuple[Array, Array, Array, Array]:
    query, key, value, bias, exponentials, inverse, attended = saved
    cotangent32 = cotangent.astype(jnp.float32)
    along = jnp.sum(cotangent32 * attended.astype(jnp.float32), axis=-1, keepdims=True) * inverse
    divided = (cotangent32 * inverse).astype(value.dtype)

    value_bar = jnp.einsum("rkqs,rkqh->rksh", exponentials, divided)
    pulled = jnp.einsum(
        "rkqh,rksh->rkqs",
        divided,
        value,
        preferred_element_type=jnp.float32,
    )
    scores_bar = (exponentials.astype(jnp.float32) * (pulled - along)).astype(query.dtype)
    query_bar = jnp.einsum("rkqs,rksh->rkqh", scores_bar, key)
    key_bar = jnp.einsum("rkqs,rkqh->rksh", scores_bar, query)
    return query_bar, key_bar, value_bar, jnp.zeros_like(bias)


_attended.defvjp(_attended_forward, _attended_backward)
