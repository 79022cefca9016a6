"""A linear layer's product, and cached keys and values, rounded as vLLM rounds them.

Gradients pass straight through.

y = Q(x) Q(W): both factors have the values that the engine multiplies by, sums are in float32. The
gradient is that of the plain product at the rounded factors, d y / d x = Q(W), d y / d W = Q(x)
(Bengio et al. 2013).

| `Scheme.products` | W | x |
|---|---|---|
| int8 | int8, a scale max / 127 for each column | int8, a scale max / 127 for each token |
| fp8 | e4m3, a scale max / 448 for a matrix; q, k and v are one, gate and up too | e4m3, max / 448 for each token |
| fp8_per_block | e4m3, max / 448 for each 128 x 128 of the same matrices | e4m3, max / 448 for 128 of a token |
| fp8_weights_per_block | that of fp8_per_block as vLLM's CPU kernel reads it: times the scale, in bfloat16 | as it is |

A maximum over an axis that a mesh splits is that of all devices: arrays here are global, the
compiler reduces.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from dcmdp_jax.models.products import PRECISE
from dcmdp_jax.models.quantize import FP8_MAX, quantize_kernel, with_rounded_inputs
from dcmdp_jax.models.scheme import Scheme
from dcmdp_jax.types import Array, Params

BLOCK = 128
_E5M2_MAX = 57344.0
# vLLM's least maxima: of a token in int8; of a token, of 128 of it and of a block of weights in
# fp8.
_LEAST_INT8 = 1e-7
_LEAST_TOKEN = 1.0 / 512
_LEAST_GROUP = 1e-10
_LEAST_BLOCK = 1e-4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SchemeKernel:
    """A matrix whose product is rounded.

    Attributes:
        weights: [in, out], the parameter itself; the gradient flows here.
        scale: [G, out] float32, constant: of each block of `in / G` inputs, rounded up to whole
            blocks.
        products: `Scheme.products`.
    """

    weights: Array
    scale: Array
    products: str = dataclasses.field(metadata={"static": True})


def with_scheme(layer_params: Params, scheme: Scheme) -> Params:
    """One layer's parameters, its matrices as `SchemeKernel`s.

    Args:
        layer_params: parameters of one layer, also after `layer_params.fuse_projections`; of a dense
            model.
        scheme: with `products`, or `weights` whose inputs are rounded; without, the parameters come
            back.
    """
    if not scheme.products:
        return with_rounded_inputs(layer_params, scheme.weights)
    attention = dict(layer_params["attention"])
    mlp = dict(layer_params["mlp"])
    together = [(attention, ("o",)), (mlp, ("gate", "up")), (mlp, ("down",))]
    if not scheme.skip_qkv:
        attention_names = ("q", "k", "v")
        if "qkv" in attention:
            attention_names = ("qkv",)
        elif "mixed" in attention:
            attention_names = ("mixed", "gate")
        together.append((attention, attention_names))
    for linears, names in together:
        kernels = [linears[name]["kernel"] for name in names]
        scales = _scales(kernels, scheme.products)
        for name, scale in zip(names, scales, strict=True):
            kernel = SchemeKernel(
                linears[name]["kernel"],
                scale,
                scheme.products,
            )
            linears[name] = {**linears[name], "kernel": kernel}
    return {**layer_params, "attention": attention, "mlp": mlp}


@jax.custom_vjp
def scheme_matmul(
    x: Array,
    kernel: SchemeKernel,
) -> Array:
    """Q(x) Q(W) of `x` [T, in], in its dtype; see the module."""
    return _forward(x, kernel)[0]


def _forward(
    x: Array,
    kernel: SchemeKernel,
) -> tuple[Array, tuple]:
    products = kernel.products
    values, x_scale = _round_tokens(x, products)
    columns = _round_weights(kernel)
    if products == "int8":
        sums = jnp.matmul(
            values.astype(jnp.int8), columns.astype(jnp.int8), preferred_element_type=jnp.int32
        )
        y = sums.astype(jnp.float32) * x_scale * kernel.scale
    elif products == "fp8":
        # Exact in bfloat16 and in float32.
        sums = jnp.matmul(
            values.astype(x.dtype), columns.astype(x.dtype), preferred_element_type=jnp.float32
        )
        y = sums * x_scale * kernel.scale
    else:
        rounded_x = _scaled_tokens(values, x_scale)
        rounded_weights = _scaled_weights(columns, kernel)
        precision = PRECISE
        if products == "fp8_weights_per_block" and x.dtype == jnp.bfloat16:
            rounded_x = rounded_x.astype(jnp.bfloat16)
            rounded_weights = rounded_weights.astype(jnp.bfloat16)
            precision = None
        y = jnp.matmul(
            rounded_x,
            rounded_weights,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
    # The backward pass rounds the weights again: kept, they would be a second copy.
    saved_dtype = x.dtype
    if products == "int8":
        saved_dtype = jnp.int8
    saved = (values.astype(saved_dtype), x_scale, kernel)
    return y.astype(x.dtype), saved


def _backward(
    saved: tuple,
    y_bar: Array,
) -> tuple[Array, SchemeKernel]:
    values, x_scale, kernel = saved
    rounded_x = _scaled_tokens(values.astype(jnp.float32), x_scale)
    rounded_weights = _scaled_weights(_round_weights(kernel), kernel)
    x_bar = jnp.matmul(y_bar, rounded_weights.astype(y_bar.dtype).T)
    weights_bar = jnp.matmul(rounded_x.astype(y_bar.dtype).T, y_bar)
    kernel_bar = SchemeKernel(
        weights_bar.astype(kernel.weights.dtype),
        jnp.zeros_like(kernel.scale),
        kernel.products,
    )
    return x_bar, kernel_bar


scheme_matmul.defvjp(_forward, _backward)


def round_cache(x: Array, cache: str) -> Array:
    """Keys or values as an engine with this cache reads them; the gradient passes straight through.

    e4m3 ("fp8") and e5m2, saturating, with scale 1. "_truncated": towards zero, as vLLM's CPU build
    (0.32) stores them; others round to nearest, ties to even.

    Args:
        x: any shape and float dtype.
        cache: one of `scheme.CACHES`, or "" for `x` itself.
    """
    if not cache:
        return x
    dtype = jnp.float8_e5m2
    limit = _E5M2_MAX
    if cache.removesuffix("_truncated") == "fp8":
        dtype = jnp.float8_e4m3fn
        limit = FP8_MAX
    exact = lax.stop_gradient(x)
    rounded = jnp.clip(exact.astype(jnp.float32), -limit, limit)
    if cache.endswith("_truncated"):
        rounded = _truncate(rounded, jnp.finfo(dtype))
    else:
        rounded = rounded.astype(dtype)
    return rounded.astype(x.dtype) + (x - exact)  # the difference is exactly 0


def _truncate(x: Array, info: jnp.finfo) -> Array:
    """Finite float32 towards zero, to the mantissa of a dtype or the steps of its subnormals."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    mask = (0xFFFFFFFF << (23 - info.nmant)) & 0xFFFFFFFF
    normal = lax.bitcast_convert_type(bits & jnp.uint32(mask), jnp.float32)
    steps = 2.0 ** (info.nmant - info.minexp)
    return jnp.where(jnp.abs(x) < 2.0**info.minexp, jnp.trunc(x * steps) / steps, normal)


def _scales(kernels: list[Array], products: str) -> list[Array]:
    """[G, out] float32 scales of matrices that the engine holds as one, side by side."""
    kernels = [lax.stop_gradient(kernel) for kernel in kernels]
    if products == "int8":
        # As the bridge quantizes the trainer's parameters: in float32, whatever the engine's dtype.
        return [quantize_kernel(kernel, "int8").scale[None] for kernel in kernels]
    widths = [kernel.shape[1] for kernel in kernels]
    kernels = [jnp.abs(_as_synced(kernel)) for kernel in kernels]
    if products == "fp8":
        maxima = [jnp.max(kernel) for kernel in kernels]
        largest = functools.reduce(jnp.maximum, maxima)
        scale = jnp.where(largest > 0, _over_448(largest), 1.0)
        return [jnp.broadcast_to(scale, (1, width)) for width in widths]
    if any(width % BLOCK for width in widths[:-1]):
        return _block_scales(jnp.concatenate(kernels, axis=1), widths)
    # No block has columns of two matrices.
    scales = []
    for kernel, width in zip(kernels, widths, strict=True):
        scales += _block_scales(kernel, [width])
    return scales


def _block_scales(magnitudes: Array, widths: list[int]) -> list[Array]:
    rows, columns = magnitudes.shape
    padded = jnp.pad(magnitudes, ((0, -rows % BLOCK), (0, -columns % BLOCK)))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = jnp.max(blocks, axis=(1, 3))
    scale = _over_448(jnp.maximum(largest, _LEAST_BLOCK))
    scale = jnp.repeat(scale, BLOCK, axis=1)
    scales = []
    start = 0
    for width in widths:
        scales.append(scale[:, start : start + width])
        start += width
    return scales


def _as_synced(kernel: Array) -> Array:
    """vLLM quantizes to fp8 what it was given, which is bfloat16."""
    return kernel.astype(jnp.bfloat16).astype(jnp.float32)


def rounded_in_blocks(weights: Array) -> Array:
    """A matrix in float8_e4m3fn, a scale for each 128 x 128, as vLLM rounds its bfloat16 form."""
    [scale] = _scales([weights], "fp8_per_block")
    kernel = SchemeKernel(weights, scale, "fp8_per_block")
    return _scaled_weights(_round_weights(kernel), kernel).astype(weights.dtype)


def _round_weights(kernel: SchemeKernel) -> Array:
    """[in, out] float32, whole numbers or e4m3 values, to be multiplied by the scale."""
    weights = kernel.weights
    if kernel.products == "int8":
        return jnp.round(jnp.clip(weights.astype(jnp.float32) / kernel.scale, -127.0, 127.0))
    synced = _as_synced(weights)
    inverse_scale = 1.0 / _by_input(kernel.scale, weights.shape[0])
    values = _to_e4m3(synced * inverse_scale)
    if kernel.products != "fp8_weights_per_block":
        return values
    # vLLM's CPU kernel reads a value below 2^-6, which has no leading 1, as if it had: m / 8 2^-6
    # as (1 + m / 8) 2^-7.
    small = jnp.abs(values) < 2.0**-6
    misread = jnp.copysign(2.0**-7 + jnp.abs(values) / 2, values)
    return jnp.where(small, misread, values)


def _scaled_weights(
    values: Array,
    kernel: SchemeKernel,
) -> Array:
    rounded = values * _by_input(kernel.scale, values.shape[0])
    if kernel.products == "fp8_weights_per_block":
        return _as_synced(rounded)
    return rounded


def _by_input(scale: Array, size: int) -> Array:
    """[in or 1, out] of [G, out]."""
    if len(scale) == 1:
        return scale
    return jnp.repeat(scale, BLOCK, axis=0)[:size]


def _round_tokens(x: Array, products: str) -> tuple[Array, Array]:
    """Values [T, in] float32, and their scales [T, groups]."""
    x = x.astype(jnp.float32)
    if products == "int8":
        largest = jnp.max(jnp.abs(x), axis=1, keepdims=True)
        largest = jnp.maximum(largest, _LEAST_INT8)
        return jnp.round(x * (127.0 / largest)), largest / 127.0
    if products == "fp8":
        largest = jnp.max(jnp.abs(x), axis=1, keepdims=True)
        scale = _over_448(jnp.maximum(largest, _LEAST_TOKEN))
        return _to_e4m3(x / scale), scale
    if products == "fp8_per_block":
        tokens, size = x.shape
        padded = jnp.pad(x, ((0, 0), (0, -size % BLOCK)))
        groups = padded.reshape(tokens, -1, BLOCK)
        largest = jnp.max(jnp.abs(groups), axis=2)
        scale = _over_448(jnp.maximum(largest, _LEAST_GROUP))
        values = _to_e4m3(groups / scale[:, :, None])
        return values.reshape(tokens, -1)[:, :size], scale
    return x, jnp.ones((len(x), 1), jnp.float32)


def _scaled_tokens(values: Array, scale: Array) -> Array:
    if scale.shape[1] > 1:
        scale = jnp.repeat(scale, BLOCK, axis=1)[:, : values.shape[1]]
    return values * scale


def _over_448(largest: Array) -> Array:
    """XLA multiplies by the inverse of a constant, and a last digit decides many ties."""
    return largest / lax.optimization_barrier(jnp.full_like(largest, FP8_MAX))


def _to_e4m3(x: Array) -> Array:
    return jnp.clip(x, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn).astype(jnp.float32)
