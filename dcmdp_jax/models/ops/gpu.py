"""Kernels of NVIDIA GPUs: cuDNN's attention over packed rows, without a mask in memory.

Run on one H200 (cuDNN 9.19).

It binds primitives that are private to JAX, as 0.10.2, 0.11.2 and 0.12.0 have them. Where a release
moves them a run is refused with the way out, `training.segments_per_row=1`. Another, on Python
3.12: `tokamax.dot_product_attention` with `mask` = equal segments and `is_causal=True`, which has a
boolean mask in memory. Its two XLA implementations (0.0.17) gave the plain version's values and
gradients on a CPU to 1.5e-6; its GPU kernels were not tried.
"""

import functools
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dcmdp_jax.errors import UserError
from dcmdp_jax.types import Array


class _Sequences(NamedTuple):
    """The segments of R rows as cuDNN's packed layout has them, R M at most.

    Attributes:
        lengths: [R, M] int32, tokens of each segment of all rows in their order; 0 beyond the last
            segment.
        query_offsets, key_offsets: [R, M + 1] int32, the first element of each segment in the
            array; then its end.
        real: [R, L] bool, the tokens of segments. cuDNN writes no others.
        excess: [] bool, whether there are more than R M.
    """

    lengths: Array
    query_offsets: Array
    key_offsets: Array
    real: Array
    excess: Array


def packed_attention(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array,
    *,
    segments: int,
    window: int = 0,
) -> Array:
    """Causal attention of packed rows within their segments; see `attention.row_attention`.

    cuDNN takes each segment as a sequence of its own, so it computes no scores between two of them
    and needs no mask. For the backward pass it keeps R M H L float32 values.

    Args:
        query, key, value, segment_ids: see `attention.row_attention`; tokens of a segment are
            consecutive. Padding's outputs and gradients are zero.
        window: tokens that a token sees, itself included; 0: all before it.
        segments: M, segments of a row at most, at least 2. All outputs are NaN if the rows have
            more together.

    Raises:
        UserError: if the queries have 2^31 elements or more, which an int32 offset can't reach.
    """
    rows, length, heads, width = query.shape
    if query.size >= 2**31:
        raise UserError(
            f"micro-batch: got {rows * length} tokens on a device, cuDNN's packed attention takes "
            f"fewer than {2**31 // (heads * width)}"
        )
    sequences = _sequences(segment_ids, segments, heads * width, key.shape[2] * width)
    attended = _attended(query, key, value, sequences, window or None)
    attended = jnp.where(sequences.real[..., None, None], attended, 0)
    return jnp.where(sequences.excess, jnp.nan, attended)


def _sequences(
    segment_ids: Array,
    segments: int,
    query_stride: int,
    key_stride: int,
) -> _Sequences:
    rows, length = segment_ids.shape
    total = rows * length
    ids = segment_ids.reshape(-1)
    index = jnp.arange(total, dtype=jnp.int32)
    begins = (index % length == 0) | (ids != jnp.roll(ids, 1))

    # The begin of the next segment, or padding, after each token.
    following = lax.cummin(jnp.where(begins, index, total), reverse=True)
    following = jnp.concatenate([following[1:], jnp.full((1,), total, jnp.int32)])
    real = begins & (ids != 0)
    # One entry more in each row than there are segments; cuDNN reads the first R M + 1.
    [starts] = jnp.nonzero(real, size=rows * (segments + 1), fill_value=total)
    starts = starts.astype(jnp.int32)
    used = starts[: rows * segments]
    lengths = jnp.where(used < total, following[jnp.minimum(used, total - 1)] - used, 0)
    starts = jnp.where(jnp.arange(starts.size) < used.size, starts, total).reshape(rows, -1)

    # JAX's own scaling of offsets takes the queries' heads for the keys too, before jax 0.12 (its
    # PR 39521).
    return _Sequences(
        lengths=lengths.reshape(rows, -1),
        query_offsets=starts * query_stride,
        key_offsets=starts * key_stride,
        real=segment_ids != 0,
        excess=jnp.sum(real, dtype=jnp.int32) > used.size,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attended(
    query: Array,
    key: Array,
    value: Array,
    sequences: _Sequences,
    window: int | None,
) -> Array:
    return _attended_forward(query, key, value, sequences, window)[0]


def _attended_forward(
    query: Array,
    key: Array,
    value: Array,
    sequences: _Sequences,
    window: int | None,
) -> tuple[Array, tuple[Any, ...]]:
    attended, statistics = _bind(
        "fwd",
        query,
        key,
        value,
        sequences,
        window=window,
        is_training=True,
    )
    return attended, (query, key, value, sequences, statistics, attended)


def _attended_backward(
    window: int | None, saved: tuple[Any, ...], cotangent: Array
) -> tuple[Array | None, ...]:
    *inputs, statistics, attended = saved
    gradients = _bind("bwd", *inputs, statistics, attended, cotangent, window=window)
    real = inputs[3].real[..., None, None]
    return *(jnp.where(real, gradient, 0) for gradient in gradients[:3]), None


_attended.defvjp(_attended_forward, _attended_backward)


def _bind(
    direction: str,
    query: Array,
    key: Array,
    value: Array,
    sequences: _Sequences,
    *saved: Array,
    window: int | None,
    **options: bool,
) -> list[Array]:
    """Bind JAX's primitive: the public function scales the offsets, and needs a GPU to trace."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    name = f"_dot_product_attention_{direction}"
    parameters = inspect.signature(getattr(cudnn, f"{name}_cuda_lowering")).parameters
    for option in ("score_mod_name", "score_mod_jaxpr"):
        if option in parameters:  # of jax 0.12
            options[option] = None
    unused = jnp.zeros(0, query.dtype)
    return getattr(cudnn, f"{name}_p").bind(
        query,
        key,
        value,
        unused,
        sequences.lengths,
        sequences.lengths,
        sequences.query_offsets,
        sequences.key_offsets,
        unused,
        unused,
        *saved,
        scale=1.0 / math.sqrt(query.shape[-1]),
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        sliding_window_length=window,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        layout=cudnn.AttentionLayout.BTNH.value,
        **options,
    )
