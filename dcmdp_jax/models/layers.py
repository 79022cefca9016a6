"""Linear layer, RMS norm, rotary embedding and MLP of the Qwen decoders."""

from __future__ import annotations

import math

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
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.scale.get_value().astype(x.dtype)


class MLP(nnx.Module):
    """W_down (silu(W_gate x) * W_up x)."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        self.gate = Linear(config.hidden_size, config.intermediate_size, bias=False, dtype=dtype)
        self.up = Linear(config.hidden_size, config.intermediate_size, bias=False, dtype=dtype)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=False, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


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
    """cos and sin of the rotary angles, float32 `[..., head_dim / 2]` for position_ids `[...]`."""
    frequencies, factor = rotary_frequencies(config)
    angles = position_ids[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rotary(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the halves of each head: `x` [B, T, heads, h], tables [B, T, h / 2]. Computed in float32."""
    cos, sin = (table[:, :, None, :] for table in rotary)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
