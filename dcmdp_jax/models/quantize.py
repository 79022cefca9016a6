"""Weights of an engine in 8, 4, 3 or 2 bits, a scale per output or group of its inputs."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dcmdp_jax.models.scheme import GROUPED, Grouped
from dcmdp_jax.types import Array, Params

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn; beyond it a cast gives NaN, not infinity."""
_LIMITS = {"int8": 127.0, "int4": 7.0, "int3": 3.0, "int2": 1.0, "fp8": FP8_MAX}
PRECISIONS = (*_LIMITS, *GROUPED)
_NVFP4_MAX = 6.0 * FP8_MAX


class QuantizedKernel(NamedTuple):
    """A matrix stored as W ~ values * scale.

    Attributes:
        values: [in, out] int8 or float8_e4m3fn (fewer bits too, a byte each), or uint8, places in
            the table of nf4.
        scale: [out] float32, positive; [G, out] of `GROUPED`, of G groups of inputs.
    """

    values: Array
    scale: Array

    @property
    def grouped(self) -> bool:
        """Whether groups of inputs have scales of their own."""
        return self.scale.ndim == self.values.ndim


Kernel = Array | QuantizedKernel
"""A matrix of a linear layer, or of many stacked."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("kernel",), meta_fields=("precision", "axis")
)
@dataclasses.dataclass(frozen=True)
class RoundsInputs:
    """A matrix whose inputs are rounded first, see `round_inputs`.

    Attributes:
        kernel: [in, out], an array or a `QuantizedKernel`.
        precision: one of `GROUPED`.
        axis: the axis of a `shard_map` that the inputs may be split over; "" for none.
    """

    kernel: Kernel
    precision: str
    axis: str = ""


def quantized_product(x: Array, kernel: QuantizedKernel) -> Array:
    """x (values * scale) in float32.

    A scale for each output is applied after the product, scales of groups before.
    """
    factor = kernel.values
    if kernel.grouped:
        factor = in_float32(kernel)
    product = jnp.matmul(x, factor.astype(x.dtype), preferred_element_type=jnp.float32)
    if kernel.grouped:
        return product
    return product * kernel.scale


def dequantize(weights: Params, dtype: jnp.dtype, *, keep_quantized: bool = False) -> Params:
    """The same numbers in `dtype`, to be multiplied many times without a conversion.

    With `keep_quantized` quantized matrices stay so, and each product converts its own: for
    platforms that do it while they read the matrix, where a second copy of the weights would cost
    what quantization saves.

    Exact for int8 and float8 values, in float32 and in bfloat16 (at most 7 significant bits);
    scales stay float32. XLA on CPU dequantizes a matrix in memory before each product with it,
    which doubled the time of a [64, 1024] x [1024, 3072] product; a loop that uses a matrix again
    and again wants it dequantized once, before the loop. The converter's own speed then matters
    little: 4M float8 values take 1.6 ms by `astype`, 0.9-1.8 ms by bit operations or a table of
    256. Matrices with groups become arrays, rounded to `dtype` with their scales.
    """

    def leaf(x: Kernel) -> Kernel:
        if not is_quantized(x):
            return x.astype(dtype)
        if keep_quantized:
            return x
        if x.grouped:
            return in_float32(x).astype(dtype)
        return QuantizedKernel(x.values.astype(dtype), x.scale)

    return jax.tree.map(leaf, weights, is_leaf=is_quantized)


def quantize_kernel(kernel: Array, precision: str) -> QuantizedKernel:
    """Symmetric quantization of the columns of [..., in, out], weights only.

        scale = max_in |W| / M,    values = round(W / scale),

    M = 127, 7, 3, 1 for "int8", "int4", "int3", "int2", rounded to integers; M = 448 for "fp8", to
    the nearest float8_e4m3fn; ties to even. So |W - values * scale| <= scale / 2 in integers; in
    fp8 at most 2^-4 |W|, or 2^-10 scale where W / scale is below 2^-6.
    A column of zeros, or one too small for its scale to be a normal float32, gets scale 1 and
    values 0.

    Those of `GROUPED` are the library qwix's: in each group of inputs scale = max |W| / M, with M =
    448 (mxfp8), 6 (mxfp4, nvfp4), 7.5 (int4) or 1 (nf4). A scale of mxfp8 and mxfp4 is rounded up
    to a power of two; one of nvfp4 to e4m3 after the matrix is divided by max |W| / (6 x 448), its
    float32 scale.

    Args:
        kernel: [..., in, out], any float dtype; computed in float32.
        precision: one of `PRECISIONS`.

    Returns:
        values [..., in, out] and scale [..., out] or [..., G, out], see `QuantizedKernel`. A column
        or group with a NaN has a NaN scale, but on a CPU, where XLA's reduction of large matrices
        loses it.

    Raises:
        ValueError: for another precision, or groups that do not divide the inputs.
    """
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision: got {precision!r}, quantized ones are {', '.join(PRECISIONS)}"
        )
    kernel = kernel.astype(jnp.float32)
    if precision in GROUPED:
        return _in_groups(kernel, GROUPED[precision])
    limit = _LIMITS[precision]
    scale = jnp.max(jnp.abs(kernel), axis=-2) / limit
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    # The quotient of a column's largest entry may round to just above the limit.
    scaled = jnp.clip(kernel / scale[..., None, :], -limit, limit)
    if precision == "fp8":
        return QuantizedKernel(scaled.astype(jnp.float8_e4m3fn), scale)
    return QuantizedKernel(jnp.round(scaled).astype(jnp.int8), scale)


def _in_groups(kernel: Array, form: Grouped, axis: str = "") -> QuantizedKernel:
    import qwix  # an optional extra

    matrix_scale = inverse = 1.0
    if form.qtype == "nvfp4":
        # Products: where XLA divides by one number for all, and where it multiplies by its inverse,
        # depends on shapes.
        largest = jnp.max(jnp.abs(kernel), axis=(-2, -1), keepdims=True)
        if axis:
            largest = lax.pmax(largest, axis)
        matrix_scale = largest * (1 / _NVFP4_MAX)
        small = matrix_scale < jnp.finfo(jnp.float32).tiny
        matrix_scale = jnp.where(small, 1.0, matrix_scale)
        inverse = jnp.where(small, 1.0, _NVFP4_MAX / largest)

    inputs = kernel.ndim - 2
    others = [axis for axis in range(kernel.ndim) if axis != inputs]
    array = qwix.quantize(
        kernel * inverse,
        form.qtype,
        channelwise_axes=others,
        tiled_axes={inputs: form.size},
    )
    dtype = {"int4": jnp.int8, "nf4": jnp.uint8}.get(form.qtype, jnp.float8_e4m3fn)
    return QuantizedKernel(array.qvalue.astype(dtype), array.scale * matrix_scale)


def round_inputs(x: Array, precision: str, axis: str = "") -> Array:
    """Inputs [T, in] of a product, each token rounded like a column; gradients pass through.

    Args:
        x: in any float dtype, which the result has too.
        precision: one of `GROUPED`.
        axis: see `RoundsInputs`: nvfp4's scale of a token is that of all its inputs, on whichever
            device.
    """
    exact = lax.stop_gradient(x)
    columns = exact[..., None].astype(jnp.float32)
    quantized = _in_groups(columns, GROUPED[precision], axis)
    rounded = in_float32(quantized)[..., 0].astype(x.dtype)
    return rounded + (x - exact)  # the difference is exactly 0


def with_rounded_inputs(layer_params: Params, precision: str, axis: str = "") -> Params:
    """Parameters of dense layers, kernels as `RoundsInputs` if the precision rounds inputs."""
    if precision not in GROUPED or not GROUPED[precision].rounds_inputs:
        return layer_params

    def leaf(path: tuple, x: Kernel) -> Kernel | RoundsInputs:
        if path[-1].key == "kernel":
            return RoundsInputs(x, precision, axis)
        return x

    return jax.tree_util.tree_map_with_path(leaf, layer_params, is_leaf=is_quantized)


def stored(w: Array, precision: str) -> Kernel:
    """A float32 matrix [..., in, out] with the values that an engine of a precision holds.

    Args:
        w: the matrix.
        precision: a dtype, "exact", or one of `PRECISIONS`, for each column; of another name
            (blocks of fp8, a server's own) the first of these that it begins with, else bfloat16.
    """
    if precision in GROUPED:
        return quantize_kernel(w, precision)
    for name in _LIMITS:
        if precision.startswith(name):
            return quantize_kernel(w, name)
    dtype = "bfloat16"
    if precision == "exact":
        dtype = "float32"
    for name in ("float16", "float32"):
        if precision.startswith(name):
            dtype = name
    # XLA removes a cast there and back.
    info = jnp.finfo(dtype)
    return lax.reduce_precision(w, info.nexp, info.nmant)


def in_float32(x: Kernel) -> Array:
    """The numbers that a matrix stands for."""
    if not is_quantized(x):
        return x.astype(jnp.float32)
    if not x.grouped:
        return x.values.astype(jnp.float32) * x.scale[..., None, :]

    import qwix  # an optional extra

    qtype = None
    if x.values.dtype == jnp.uint8:
        qtype = "nf4"
    return qwix.dequantize(qwix.QArray(x.values, x.scale, qtype=qtype))


def quantize_tree(tree: Params, quantized: Params, precision: str) -> Params:
    """`quantize_kernel` of the leaves that the tree `params.quantized_leaves` marks."""

    def leaf(x: Array, marked: bool) -> Kernel:
        if marked:
            return quantize_kernel(x, precision)
        return x

    return jax.tree.map(leaf, tree, quantized)


def straight_through(tree: Params, quantized: Params, precision: str) -> Params:
    """Marked leaves with the values of a quantized engine and the gradient of the leaves.

        value  values * scale of `quantize_kernel`,      d value / d leaf = 1

    the straight-through estimator of quantization-aware training (Bengio et al. 2013).

    Args:
        tree: parameters, or a part of them.
        quantized: the same tree of bools; see `params.quantized_leaves`.
        precision: one of `PRECISIONS`.
    """

    def leaf(x: Array, marked: bool) -> Array:
        if not marked:
            return x
        exact = lax.stop_gradient(x)
        rounded = in_float32(quantize_kernel(exact, precision)).astype(x.dtype)
        return rounded + (x - exact)  # the difference is exactly 0

    return jax.tree.map(leaf, tree, quantized)


def is_quantized(x: object) -> bool:
    """Whether a leaf is a `QuantizedKernel`."""
    return isinstance(x, QuantizedKernel)


_NUMBERS = 1 << 18
"""Numbers that are looked at of each parameter; the mean of so many has an error below 0.1%."""


def watched_columns(params: Params, quantized: Params) -> list[Array]:
    """Columns [..., in, some of out] of each matrix that `params.quantized_leaves` marks.

    Whole columns, since these share a scale; evenly chosen, 2^18 numbers of each matrix or one
    column at least.
    """
    watched = []
    for leaf, marked in zip(jax.tree.leaves(params), jax.tree.leaves(quantized), strict=True):
        if marked:
            columns = leaf.shape[-1]
            count = max(1, _NUMBERS * columns // leaf.size)
            watched.append(leaf[..., :: -(-columns // count)])
    return watched


def arrival(
    before: list[Array],
    params: Params,
    quantized: Params,
    precision: str,
) -> dict[str, Array]:
    """Share of the engine's weights that an update changes, and what rounding does to it.

    Of an update D = W' - W and a rounding Q:

        mismatch/sync_changed  = mean [Q(W') != Q(W)]
        mismatch/sync_rounding = ||Q(W') - Q(W) - D|| / ||D||

    0 for an engine that gets D as it is, 1 where none of it arrives, more where the few weights
    that change jump by more than all of D; 0 where D is 0. Without D's errors of rounding adding
    up: Q(W') is always nearest to W'.

    Args:
        before: `watched_columns` of the parameters W before the step.
        params: those after it.
        quantized: see `watched_columns`.
        precision: the engine's, see `stored`.
    """

    def values(x: Kernel) -> Array:
        if is_quantized(x):
            return x.values
        return x

    changed = error = update = 0.0
    for old, new in zip(before, watched_columns(params, quantized), strict=True):
        old = old.astype(jnp.float32)
        new = new.astype(jnp.float32)
        old_stored = stored(old, precision)
        new_stored = stored(new, precision)
        changed += jnp.sum(values(old_stored) != values(new_stored), dtype=jnp.float32)
        arrived = in_float32(new_stored) - in_float32(old_stored)
        error += jnp.sum((arrived - (new - old)) ** 2)
        update += jnp.sum((new - old) ** 2)
    return {
        "mismatch/sync_changed": changed / sum(x.size for x in before),
        "mismatch/sync_rounding": relative_error(error, update),
    }


def relative_error(error: Array, size: Array) -> Array:
    """sqrt(error / size) of two sums of squares; 0 where `size` is 0."""
    return jnp.where(size > 0, jnp.sqrt(error / jnp.where(size > 0, size, 1.0)), 0.0)
