"""Causal grouped-query attention over packed rows, by the best kernel of the platform."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dcmdp_jax.errors import UserError
from dcmdp_jax.models.ops import Ops
from dcmdp_jax.models.ops.tpu import splash_attention

KERNELS = ("xla", "cudnn", "splash")
_SPLASH_BLOCK = 128

AttendRows = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(query [R, L, H, h], key [R, L, K, h], value, segment_ids [R, L]) -> [R, L, H, h]."""


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
        mesh: the devices that rows and heads are split over, for cudnn and splash; None where the arguments are one
            device's own.

    Returns:
        [R, L, H, h], the dtype of `query`.
    """
    if kernel in ("cudnn", "splash"):
        attend = splash_attention if kernel == "splash" else functools.partial(_cudnn, one_segment=one_segment)
        return shard_map_over_rows_and_heads(attend, mesh)(query, key, value, segment_ids)
    visible = _causal(query.shape[1])
    if not one_segment:
        visible = visible & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return ops.attention(query, key, value, visible)


def shard_map_over_rows_and_heads(attend: AttendRows, mesh: Mesh | None) -> AttendRows:
    """Run a kernel on each device's own rows and heads; also inside a shard_map over data.

    The compiler can't split these kernels itself. It refuses Mosaic's (splash). cuDNN's call brings a partitioner of
    its own, which knows no mesh inside a shard_map and no key-value heads that tensor doesn't divide (jax 0.10.2).

    Args:
        attend: the kernel, of arguments alone.
        mesh: rows are split over data, fsdp and expert, heads over tensor; None for one device.

    Raises (the returned function, while tracing):
        UserError: if tensor does not divide the query heads.
    """
    if mesh is None or mesh.size == 1:
        return attend

    def mapped(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
        ways, heads, kv_heads = mesh.shape["tensor"], query.shape[2], key.shape[2]
        if heads % ways:
            raise UserError(f"mesh tensor: got {ways}, attention needs a divisor of the {heads} query heads")
        # Key-value heads that tensor doesn't divide: each goes to several devices, beside the query heads it serves.
        copies = ways // math.gcd(ways, kv_heads)
        key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
        # A shard_map over data may surround this one: then only the other axes are left to map over.
        around = jax.sharding.get_abstract_mesh()
        free = tuple(axis for axis in mesh.axis_names if axis not in around.manual_axes)
        rows = tuple(axis for axis in ("data", "fsdp", "expert") if axis in free)
        split = P(rows, None, "tensor", None)
        return jax.shard_map(
            attend, mesh=around if around.manual_axes else mesh, in_specs=(split, split, split, P(rows, None)),
            out_specs=split, axis_names=set(free), check_vma=False,
        )(query, key, value, segment_ids)  # fmt: skip

    return mapped


def _cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, *, one_segment: bool
) -> jax.Array:
    mask = None if one_segment else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    scale = 1.0 / math.sqrt(query.shape[-1])
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=True, scale=scale, implementation="cudnn"
    )


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
