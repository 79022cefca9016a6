"""The operations of a decoder in plain `jax.numpy`, which tests compare others with."""

import jax
import jax.numpy as jnp

from dcmdp_jax.types import Array

Rotary = tuple[Array, Array]
"""(cos, cos) and (-sin, sin), each [B, T, 2, h / 2], from `layers.rotary_tables`; no gradient."""


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """y = w * x / sqrt(mean(x^2) + eps), the mean in float32 as in Hugging Face's Qwen code.

    Args:
        x: [..., size].
        scale: w, [size] or of a shape that broadcasts to `x`.
        eps: added to the mean square.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale.astype(x.dtype)


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up, with silu(x) = x / (1 + exp(-x))."""
    return jax.nn.silu(gate) * up


def rotate(x: Array, rotary: Rotary) -> Array:
    """Rotate the halves (a, b) of each head to (a cos - b sin, b cos + a sin), computed in float32.

    Args:
        x: [B, T, heads, h].
        rotary: see `Rotary`.
    """
    cos, sin = (table[:, :, None] for table in rotary)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    swapped = jnp.concatenate([halves[..., 1:, :], halves[..., :1, :]], axis=-2)
    return (halves * cos + swapped * sin).reshape(x.shape).astype(x.dtype)


def norm_and_rotate(
    x: Array,
    scale: Array,
    rotary: Rotary,
    eps: float,
) -> Array:
    """RMS norm of each head, then `rotate`, applied by Qwen3 to queries and keys.

    Args:
        x: [B, T, heads, h].
        scale: [heads, h], the norm's weights.
        rotary: see `Rotary`.
        eps: added to the mean square.
    """
    return rotate(rms_norm(x, scale, eps), rotary)


def attention(
    query: Array,
    key: Array,
    value: Array,
    visible: Array,
) -> Array:
    """softmax(q k^T / sqrt(h)) v over the visible keys, softmax in float32.

    Args:
        query: [R, L, H, h].
        key, value: [R, S, K, h]; query head i reads key head i // (H / K).
        visible: [R or 1, L, S] bool; every query sees at least one key.

    Returns:
        [R, L, H, h], the dtype of `query`.
    """
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=visible[:, None],
        implementation="xla",
    )


def split(x: Array, at: int) -> tuple[Array, Array]:
    """The first `at` entries along the third axis, and the rest."""
    return tuple(jnp.split(x, [at], axis=2))


def softmax_maximum(x: Array) -> Array:
    """max(x) over the last axis, kept as an axis of size 1; a softmax needs no gradient of it."""
    return jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))


def grouped_matmul(
    x: Array,
    kernels: Array,
    group_sizes: Array,
) -> Array:
    """x_r W_g(r) for rows that lie group by group.

    Args:
        x: [T, in]; the rows of group 0, then of group 1, and so on.
        kernels: [groups, in, out], the dtype of `x`.
        group_sizes: [groups] int32, rows of each group, at most T together. Rows beyond them have
            an undefined result and, where they have a cotangent, an undefined gradient. No
            gradient.

    Returns:
        [T, out], the dtype of `x`.
    """
    return jax.lax.ragged_dot(x, kernels, group_sizes)


@jax.custom_vjp
def permute(x: Array, order: Array, inverse: Array) -> Array:
    """x[order]; its transpose gathers by `inverse`, where autodiff would scatter row by row."""
    return x[order]


def _permute_forward(
    x: Array,
    order: Array,
    inverse: Array,
) -> tuple[Array, Array]:
    return x[order], inverse


def _permute_backward(
    inverse: Array,
    cotangent: Array,
) -> tuple[Array, None, None]:
    return cotangent[inverse], None, None


permute.defvjp(_permute_forward, _permute_backward)
