"""Kernels of TPUs: splash attention, and the grouped product of megablox."""

import math

import jax
import jax.numpy as jnp

from dcmdp_jax.errors import UserError
from dcmdp_jax.types import Array


def splash_attention(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array,
    *,
    window: int = 0,
) -> Array:
    """Causal attention of packed rows within their segments; see `attention.row_attention`.

    Raises:
        UserError: if the row length is not a multiple of 128.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = query.shape[1:3]
    if length % 128:
        raise UserError(f"row length: got {length}, splash attention needs a multiple of 128")
    block = 512 if length % 512 == 0 else 128
    sides = "q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq"
    sizes = splash.BlockSizes(**{f"block_{side}": block for side in sides})
    query = query * jnp.asarray(1.0 / math.sqrt(query.shape[-1]), query.dtype)
    square = length, length
    if window:
        head_mask = masks.LocalMask(square, (window - 1, 0), 0)
    else:
        head_mask = masks.CausalMask(square)
    mask = masks.MultiHeadMask([head_mask] * heads)
    kernel = splash.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    # The multi-head kernel serves grouped queries too: query head i reads key head i // (H / K).
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    ids = splash.SegmentIds(segment_ids, segment_ids)
    return jnp.swapaxes(jax.vmap(kernel)(query, key, value, ids), 1, 2)


# Rows, in and out of a tile of the grouped product; as in MaxText for models of this width.
_TILE = (512, 1024, 1024)


def grouped_matmul(
    x: Array,
    kernels: Array,
    group_sizes: Array,
    *,
    interpret: bool = False,
) -> Array:
    """`reference.grouped_matmul` by megablox. Not run on a TPU yet.

    Args:
        x, kernels, group_sizes: see `reference.grouped_matmul`.
        interpret: run the kernel's Python on any platform, to test it.
    """
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    rows = x.shape[0]
    tile = tuple(
        min(size, -(-dim // 128) * 128)
        for size, dim in zip(_TILE, (rows, *kernels.shape[1:]), strict=True)
    )
    padded = jnp.pad(x, ((0, -rows % tile[0]), (0, 0)))
    return gmm(padded, kernels, group_sizes, x.dtype, tile, None, None, False, interpret)[:rows]
