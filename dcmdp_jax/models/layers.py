"""Linear layer, RMS norm, rotary embedding and MLP of the Qwen decoders."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dcmdp_jax.models.config import ModelConfig, yarn_attention_factor
from dcmdp_jax.models.quantize import QuantizedKernel, quantized_matmul


class Linear(nnx.Module):
    """y = x W + b with W [in, out]; W may be a `QuantizedKernel` in an inference engine.

    Products run in the dtype of `x`, parameters are cast to it.
    """

    def __init__(self, size_in: int, size_out: int, *, bias: bool, dtype: jnp.dtype) -> None:
        self.kernel = nnx.Param(jnp.zeros((size_in, size_out), dtype))
        self.bias = nnx.Param(jnp.zeros((size_out,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel.get_value()
        # Tokens in one axis: XLA's CPU backend takes 2.5 times as long for a weight gradient that contracts two.
        tokens = x.reshape(-1, x.shape[-1])
        quantized = isinstance(kernel, QuantizedKernel)
        y = quantized_matmul(tokens, kernel) if quantized else tokens @ kernel.astype(x.dtype)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.get_value().astype(x.dtype)


class RMSNorm(nnx.Module):
    """y = w * x / sqrt(mean(x^2) + eps), the mean in float32 as in Hugging Face's Qwen code."""

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale.get_value(), self.eps)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`RMSNorm` with the weights `scale` [size] given."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale.astype(x.dtype)


class MLP(nnx.Module):
    """W_down (silu(W_gate x) * W_up x); `merged` has W_gate and W_up side by side in one matrix."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, merged: bool = False) -> None:
        self.width = config.intermediate_size
        if merged:
            self.gate_up = Linear(config.hidden_size, 2 * self.width, bias=False, dtype=dtype)
        else:
            self.gate = Linear(config.hidden_size, self.width, bias=False, dtype=dtype)
            self.up = Linear(config.hidden_size, self.width, bias=False, dtype=dtype)
        self.down = Linear(self.width, config.hidden_size, bias=False, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        if hasattr(self, "gate_up"):
            both = self.gate_up(x)
            gate, up = both[..., : self.width], both[..., self.width :]
        else:
            gate, up = self.gate(x), self.up(x)
        return self.down(swiglu(gate, up))


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

    The backward pass computes the sigmoid again: kept from the forward pass it is one more array of the MLP's width to
    write and to read, which costs XLA's CPU backend more than the exponential.
    """
    return jax.nn.silu(gate) * up


def _swiglu_forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return swiglu(gate, up), (gate, up)


def _swiglu_backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The barrier keeps the forward pass's sigmoid from being found equal and kept.
    gate, up = jax.lax.optimization_barrier(saved)
    gate32, cotangent32 = gate.astype(jnp.float32), cotangent.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate32)
    slope = sigmoid * (1 + gate32 * (1 - sigmoid))
    gate_bar = cotangent32 * up.astype(jnp.float32) * slope
    return gate_bar.astype(gate.dtype), (cotangent32 * gate32 * sigmoid).astype(up.dtype)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def row_maximum(x: jax.Array) -> jax.Array:
    """`jnp.max(x, axis=-1, keepdims=True)` for the exponent of a softmax. NaN may be passed over: a comparison that
    need not look out for it takes a third of the time on CPU, and what is not a number stays so in the exponentials.
    Not differentiable, and the last axis may not be split over devices."""

    def larger(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.select(a > b, a, b)

    return jax.lax.reduce(x, jnp.asarray(-jnp.inf, x.dtype), larger, (x.ndim - 1,))[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def split(x: jax.Array, at: int, axis: int) -> tuple[jax.Array, jax.Array]:
    """The first `at` entries along an axis, and the rest."""
    first, second = jnp.split(x, [at], axis=axis)
    return first, second


def _split_forward(x: jax.Array, at: int, axis: int) -> tuple[tuple[jax.Array, jax.Array], None]:
    return split(x, at, axis), None


def _split_backward(at: int, axis: int, saved: None, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    del at, saved
    # Behind the barrier the concatenation copies whole rows; fused it would compute one element at a time on CPU.
    return (jnp.concatenate(jax.lax.optimization_barrier(cotangents), axis=axis),)


split.defvjp(_split_forward, _split_backward)


def rotary_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies of the rotary embedding and the factor on cos and sin.

    The unscaled frequencies are theta^(-2i/h). "linear" divides all by `factor`; "yarn" (Peng et al. 2023,
    arXiv:2309.00071, eq. 20-23) divides the slow ones and ramps between; "llama3" likewise by wavelength. The
    formulas are those of transformers' `modeling_rope_utils`, each operation rounded to float32 where it rounds: at
    position 30,000 the last bit of a frequency turns a head by 1e-3 radians, so being more exact is being different.

    Returns:
        [head_dim / 2] float32, radians per position, and the attention factor.
    """
    scaling, dim, one = config.rope_scaling, config.head_dim, np.float32(1)
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    periods = (config.rope_theta ** exponents.astype(np.float64)).astype(np.float32)
    plain, factor = one / periods, np.float32(scaling.factor)
    if scaling.kind == "default":
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / factor, 1.0
    if scaling.kind == "llama3":
        length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
        # torch divides a number by a tensor as number * (1 / tensor).
        wavelength = np.float32(2 * math.pi) * (one / plain)
        smooth = (np.float32(length) * (one / wavelength) - np.float32(low)) / np.float32(high - low)
        middle = (one - smooth) * plain / factor + smooth * plain
        chosen = np.where(wavelength > length / low, plain / factor, middle)
        return np.where(wavelength < length / high, plain, chosen), 1.0

    def dimension(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    kept = one - np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(width), 0, 1)
    return one / (factor * periods) * (one - kept) + plain * kept, yarn_attention_factor(scaling)


def rotary_tables(config: ModelConfig, position_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, for `apply_rotary`.

    Returns:
        (cos, cos) and (-sin, sin) for the two halves of a head: float32 `[..., 2, head_dim / 2]` for position_ids
        `[...]`.
    """
    frequencies, factor = rotary_frequencies(config)
    angles = position_ids[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    return jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2)


def apply_rotary(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the halves of each head: `x` [B, T, heads, h], tables [B, T, 2, h / 2]. Computed in float32.

    The halves change places by a reversal, not by a concatenation: XLA's CPU backend computes what is concatenated one
    element at a time.
    """
    cos, sin = (table[:, :, None] for table in rotary)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    return (halves * cos + jnp.flip(halves, -2) * sin).reshape(x.shape).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def norm_and_rotate(x: jax.Array, scale: jax.Array, rotary: tuple[jax.Array, jax.Array], eps: float) -> jax.Array:
    """RMS norm of each head, then `apply_rotary`: what Qwen3 does to queries and keys.

    Args:
        x: [B, T, heads, h].
        scale: [heads, h], the norm's weights.
        rotary: from `rotary_tables`; no gradient.
        eps: of the norm.
    """
    return _norm_and_rotate_forward(x, scale, rotary, eps)[0]


def _norm_and_rotate_forward(
    x: jax.Array, scale: jax.Array, rotary: tuple[jax.Array, jax.Array], eps: float
) -> tuple[jax.Array, tuple[Any, ...]]:
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    normed = (x32 * inverse).astype(x.dtype) * scale.astype(x.dtype)
    return apply_rotary(normed, rotary), (x, inverse, scale, rotary)


def _norm_and_rotate_backward(eps: float, saved: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    del eps
    x, inverse, scale, rotary = saved
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
