"""Kernels of TPUs: splash attention, which skips blocks of other segments, and the grouped product of megablox."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dcmdp_jax.errors import UserError


def splash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, mesh: Mesh | None
) -> jax.Array:
    """Causal attention of packed rows within their segments; see `attention.row_attention` for the arguments.

    Raises:
        UserError: if the row length is not a multiple of 128, or the tensor axis does not divide the heads.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length = query.shape[1]
    if length % 128:
        raise UserError(f"row length: got {length}, splash attention needs a multiple of 128")
    block = 512 if length % 512 == 0 else 128
    sizes = splash.BlockSizes(**{name: block for name in ("block_q", "block_kv", "block_kv_compute", "block_q_dkv",
                                                          "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq",
                                                          "block_kv_dq")})  # fmt: skip
    query = query * jnp.asarray(1.0 / math.sqrt(query.shape[-1]), query.dtype)

    def local(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
        heads = query.shape[2]
        mask = masks.MultiHeadMask([masks.CausalMask((length, length)) for _ in range(heads)])
        kernel = splash.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
        # The multi-head kernel serves grouped queries too: query head i reads key head i // (H / K).
        swapped = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        return jnp.swapaxes(jax.vmap(kernel)(*swapped, splash.SegmentIds(segment_ids, segment_ids)), 1, 2)

    if mesh is None or mesh.size == 1:
        return local(query, key, value, segment_ids)
    ways, kv_heads = mesh.shape["tensor"], key.shape[2]
    if query.shape[2] % ways:
        raise UserError(f"mesh tensor: got {ways}, splash attention needs a divisor of the {query.shape[2]} heads")
    # Fewer key-value heads than devices to split them over: each goes to several, beside the query heads it serves.
    copies = ways // math.gcd(ways, kv_heads)
    key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
    # A shard_map over data may surround this one: then only the other axes are left to map over.
    around = jax.sharding.get_abstract_mesh()
    free = tuple(axis for axis in mesh.axis_names if axis not in around.manual_axes)
    split = tuple(axis for axis in ("data", "fsdp", "expert") if axis in free)
    rows, heads = P(split, None), P(split, None, "tensor", None)
    return jax.shard_map(
        local, mesh=around if around.manual_axes else mesh, in_specs=(heads, heads, heads, rows), out_specs=heads,
        axis_names=set(free), check_vma=False,
    )(query, key, value, segment_ids)  # fmt: skip


# Rows, in and out of a tile of the grouped product; those of MaxText for models of this width.
_TILE = (512, 1024, 1024)


def grouped_matmul(x: jax.Array, kernels: jax.Array, group_sizes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`reference.grouped_matmul` by megablox, which computes each row for its own group alone. Not run on a TPU yet.

    Args:
        x, kernels, group_sizes: as there.
        interpret: run the kernel's Python on any platform, to test it.
    """
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    rows = x.shape[0]
    tile = tuple(min(size, -(-dim // 128) * 128) for size, dim in zip(_TILE, (rows, *kernels.shape[1:]), strict=True))
    padded = jnp.pad(x, ((0, -rows % tile[0]), (0, 0)))
    return gmm(padded, kernels, group_sizes, x.dtype, tile, None, None, False, interpret)[:rows]
