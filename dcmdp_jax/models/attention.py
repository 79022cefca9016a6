"""Causal grouped-query attention over packed rows, by the best kernel of the platform."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dcmdp_jax.errors import UserError
from dcmdp_jax.models.ops import Ops
from dcmdp_jax.models.ops.tpu import splash_attention

KERNELS = ("xla", "cudnn", "splash")
_SPLASH_BLOCK = 128


def choose_kernel(setting: str, dtype: jnp.dtype, platform: str, length: int = _SPLASH_BLOCK) -> str:
    """The kernel for the setting: "auto" is splash on TPU, cudnn on GPU in half precision, else xla.

    Args:
        setting: "auto" or one of `KERNELS`.
        dtype: of the activations.
        platform: of the devices.
        length: of the rows; "auto" gives those that splash does not take to xla.

    Raises:
        ValueError: for a setting that is neither "auto" nor one of `KERNELS`.
    """
    if setting in KERNELS:
        return setting
    if setting != "auto":
        raise UserError(f"attention: got {setting!r}, allowed are auto, {', '.join(KERNELS)}")
    if platform == "tpu" and length % _SPLASH_BLOCK == 0:
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
    ops: Ops,
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
        ops: of the platform; its attention is the kernel "xla".
        mesh: needed by splash on more than one device: rows are split over (data, fsdp), heads over tensor.

    Returns:
        [R, L, H, h], the dtype of `query`.
    """
    if kernel == "splash":
        return splash_attention(query, key, value, segment_ids, mesh)
    if kernel == "cudnn":
        mask = None if one_segment else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
        scale = 1.0 / math.sqrt(query.shape[-1])
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, is_causal=True, scale=scale, implementation="cudnn"
        )
    visible = _causal(query.shape[1])
    if not one_segment:
        visible = visible & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return ops.attention(query, key, value, visible)


def shared_prompt_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    shape: tuple[int, int, int, int],
    *,
    ops: Ops,
) -> jax.Array:
    """`row_attention` where the R / P rows of a group share the S tokens of their prompt.

    Args:
        query: [1, P S + R L, H, h], the tokens of all prompts and then those of all rows.
        key, value: [1, P S + R L, K, h].
        visible: from `visible_of_shared`.
        shape: P, S, R, L.
        ops: of the platform.

    Returns:
        [1, P S + R L, H, h].
    """
    prompts, prompt_length, rows, length = shape
    in_prompts, in_rows = [], []
    for x in (query, key, value):
        shared, own = ops.split(x[0], prompts * prompt_length, 0)
        in_prompts.append(shared.reshape(prompts, prompt_length, *x.shape[2:]))
        in_rows.append(own.reshape(rows, length, *x.shape[2:]))
    for i in (1, 2):
        repeated = jnp.repeat(in_prompts[i], rows // prompts, axis=0)
        in_rows[i] = ops.concatenate((repeated, in_rows[i]), 1)
    attended = ops.attention(*in_prompts, _causal(prompt_length)), ops.attention(*in_rows, visible)
    return ops.concatenate(tuple(x.reshape(-1, *query.shape[2:]) for x in attended), 0)[None]


def visible_of_shared(prompt_lengths: jax.Array, shape: tuple[int, int, int, int]) -> jax.Array:
    """The keys that each query of `shared_prompt_attention`'s rows sees, [R, L, S + L] bool: the real tokens of its
    prompt, of which there are `prompt_lengths` [P], and its own row up to itself."""
    prompts, prompt_length, rows, length = shape
    real = jnp.repeat(jnp.arange(prompt_length) < prompt_lengths[:, None], rows // prompts, axis=0)
    parts = jnp.broadcast_to(real[:, None], (rows, length, prompt_length)), _causal(length)
    return jnp.concatenate([parts[0], jnp.broadcast_to(parts[1], (rows, length, length))], axis=-1)


def _causal(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))[None]
