"""Causal grouped-query attention over packed rows, by the best kernel of the platform."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dcmdp_jax.models.layers import row_maximum, split

KERNELS = ("xla", "cudnn", "splash")
HIDDEN = -1e30
"""What is added to the score of a key that a query does not see."""

# XLA's CPU backend computes a concatenation inside a fusion one element at a time, one that stands alone by whole rows.
_apart = jax.lax.optimization_barrier


def choose_kernel(setting: str, dtype: jnp.dtype, platform: str) -> str:
    """The kernel for the setting: "auto" is splash on TPU, cudnn on GPU in half precision, else xla.

    Raises:
        ValueError: for a setting that is neither "auto" nor one of `KERNELS`.
    """
    if setting in KERNELS:
        return setting
    if setting != "auto":
        raise ValueError(f"attention: got {setting!r}, allowed are auto, {', '.join(KERNELS)}")
    if platform == "tpu":
        return "splash"
    if platform in ("gpu", "cuda") and dtype in (jnp.bfloat16, jnp.float16):
        return "cudnn"
    return "xla"


def row_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    *,
    kernel: str,
    one_segment: bool,
    mesh: Mesh | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(h)) v, each token seeing the tokens of its own segment up to itself.

    Args:
        query: [R, L, H, h].
        key, value: [R, L, K, h]; H is a multiple of K.
        segment_ids: [R, L] int32; 0 is padding, which only sees padding.
        kernel: "xla", "cudnn" or "splash".
        one_segment: rows hold one segment and padding after it, so the causal mask is all that real tokens need and
            cudnn runs without a mask in memory. Padding then sees the segment; its outputs are not used.
        mesh: needed by splash on more than one device: rows are split over (data, fsdp), heads over tensor.

    Returns:
        [R, L, H, h], the dtype of `query`.
    """
    scale = 1.0 / math.sqrt(query.shape[-1])
    if kernel == "splash":
        return _splash(query * jnp.asarray(scale, query.dtype), key, value, segment_ids, mesh)
    if kernel == "cudnn":
        mask = None if one_segment else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, is_causal=True, scale=scale, implementation="cudnn"
        )
    visible = _causal(query.shape[1])
    if not one_segment:
        visible = visible & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return _xla(query, key, value, visible)


def shared_prompt_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, shape: tuple[int, int, int, int]
) -> jax.Array:
    """`row_attention` where the R / P rows of a group share the S tokens of their prompt.

    Args:
        query: [1, P S + R L, H, h], the tokens of all prompts and then those of all rows.
        key, value: [1, P S + R L, K, h].
        visible: from `visible_of_shared`.
        shape: P, S, R, L.

    Returns:
        [1, P S + R L, H, h].
    """
    prompts, prompt_length, rows, length = shape
    in_prompts, in_rows = [], []
    for x in (query, key, value):
        shared, own = split(x[0], prompts * prompt_length, axis=0)
        in_prompts.append(shared.reshape(prompts, prompt_length, *x.shape[2:]))
        in_rows.append(own.reshape(rows, length, *x.shape[2:]))
    for i in (1, 2):
        repeated = jnp.repeat(in_prompts[i], rows // prompts, axis=0)
        in_rows[i] = _apart(jnp.concatenate(_apart((repeated, in_rows[i])), axis=1))
    attended = _xla(*in_prompts, _causal(prompt_length)), _xla(*in_rows, visible)
    return jnp.concatenate(_apart(tuple(x.reshape(-1, *query.shape[2:]) for x in attended)))[None]


def visible_of_shared(prompt_lengths: jax.Array, shape: tuple[int, int, int, int]) -> jax.Array:
    """The keys that each query of `shared_prompt_attention`'s rows sees, [R, L, S + L] bool: the real tokens of its
    prompt, of which there are `prompt_lengths` [P], and its own row up to itself."""
    prompts, prompt_length, rows, length = shape
    real = jnp.repeat(jnp.arange(prompt_length) < prompt_lengths[:, None], rows // prompts, axis=0)
    parts = jnp.broadcast_to(real[:, None], (rows, length, prompt_length)), _causal(length)
    return jnp.concatenate([parts[0], jnp.broadcast_to(parts[1], (rows, length, length))], axis=-1)


def _causal(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))[None]


def _xla(query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array) -> jax.Array:
    """`visible` [R or 1, L, S]. The heads of a group stand in the query axis, [R, K, (H / K) L, h]: both products are
    plain batched matrix products, and forward and backward take half the time of `jax.nn.dot_product_attention` on
    CPU."""
    rows, length, heads, width = query.shape
    group = heads // key.shape[2]
    # A factor on the query costs less than one on the scores.
    query = (query * jnp.asarray(1.0 / math.sqrt(width), query.dtype)).reshape(rows, length, -1, group, width)
    query = query.transpose(0, 2, 3, 1, 4).reshape(rows, -1, group * length, width)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    bias = jnp.tile(jnp.where(visible, 0.0, HIDDEN), (1, group, 1))[:, None]
    attended = _attended(query, key, value, bias)
    return attended.reshape(rows, -1, group, length, width).transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, width)


@jax.custom_vjp
def _attended(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
    """softmax(q k^T + bias) v for query [R, K, Q, h], key and value [R, K, S, h], bias [R or 1, 1, Q, S].

    The sum of the exponentials divides the result, not the [Q, S] weights, and the backward pass takes
    sum_s w_s dw_s as sum_h o_h do_h: four passes over [Q, S] fewer than autodiff. No gradient to `bias`.
    """
    return _attended_forward(query, key, value, bias)[0]


def _attended_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    scores = jnp.einsum("rkqh,rksh->rkqs", query, key, preferred_element_type=jnp.float32) + bias
    exponentials = jnp.exp(scores - row_maximum(scores))
    inverse = 1.0 / jnp.sum(exponentials, axis=-1, keepdims=True)
    exponentials = exponentials.astype(value.dtype)
    product = jnp.einsum("rkqs,rksh->rkqh", exponentials, value, preferred_element_type=jnp.float32)
    attended = (product * inverse).astype(value.dtype)
    return attended, (query, key, value, bias, exponentials, inverse, attended)


def _attended_backward(
    saved: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    query, key, value, bias, exponentials, inverse, attended = saved
    cotangent32 = cotangent.astype(jnp.float32)
    along = jnp.sum(cotangent32 * attended.astype(jnp.float32), axis=-1, keepdims=True) * inverse
    divided = (cotangent32 * inverse).astype(value.dtype)
    value_bar = jnp.einsum("rkqs,rkqh->rksh", exponentials, divided)
    pulled = jnp.einsum("rkqh,rksh->rkqs", divided, value, preferred_element_type=jnp.float32)
    scores_bar = (exponentials.astype(jnp.float32) * (pulled - along)).astype(query.dtype)
    query_bar = jnp.einsum("rkqs,rksh->rkqh", scores_bar, key)
    key_bar = jnp.einsum("rkqs,rkqh->rksh", scores_bar, query)
    return query_bar, key_bar, value_bar, jnp.zeros_like(bias)


_attended.defvjp(_attended_forward, _attended_backward)


def _splash(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, mesh: Mesh | None) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length = query.shape[1]
    if length % 128:
        raise ValueError(f"row length: got {length}, splash attention needs a multiple of 128")
    block = 512 if length % 512 == 0 else 128
    sizes = splash.BlockSizes(**{name: block for name in ("block_q", "block_kv", "block_kv_compute", "block_q_dkv",
                                                          "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq",
                                                          "block_kv_dq")})  # fmt: skip

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
        raise ValueError(f"mesh tensor: got {ways}, splash attention needs a divisor of the {query.shape[2]} heads")
    # Fewer key-value heads than devices to split them over: each goes to several, beside the query heads it serves.
    copies = ways // math.gcd(ways, kv_heads)
    key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
    rows, heads = P(("data", "fsdp"), None), P(("data", "fsdp"), None, "tensor", None)
    return jax.shard_map(local, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False)(
        query, key, value, segment_ids
    )
