"""Causal grouped-query attention over packed rows, by the best kernel of the platform."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from dcmdp_jax.errors import ArgumentError, UserError
from dcmdp_jax.models.ops import Ops, blockwise, gpu, tpu
from dcmdp_jax.parallel.sharding import free_axes, shard_map_over
from dcmdp_jax.types import Array

KERNELS = ("xla", "blockwise", "cudnn", "splash")
SKIP_SEGMENTS = {"blockwise": 0, "cudnn": 16, "splash": 0}
"""Kernels whose time does not grow with the other segments of a row, so that long rows with many
segments serve all -> how many a row has at most by default, 0 for any number. cuDNN's memory grows
with it: 2.2 of 69 GiB for Qwen3-1.7B at 16, where rows leave 6% empty if the median sequence is a
tenth of the longest (25% with 8, 3% with 32).
"""
_SPLASH_BLOCK = 128
_SHORT = 192
# Of cuDNN's packed layout: with more, what it keeps is more than a mask.
_MOST_SEGMENTS = 32

AttendRows = Callable[..., Array]
"""(query [R, L, H, h], key [R, L, K, h], value, segment_ids [R, L]) -> [R, L, H, h]; scalars may
follow.
"""


def choose_kernel(
    setting: str,
    dtype: jnp.dtype,
    platform: str,
    length: int = _SPLASH_BLOCK,
) -> str:
    """The kernel for the setting.

    "auto" is splash on TPU, cudnn on GPU in half precision, blockwise on CPU, else xla. Short rows
    are xla's.

    Args:
        setting: "auto" or one of `KERNELS`.
        dtype: dtype of the activations.
        platform: the devices' platform.
        length: length of the longest rows. "auto" uses xla where splash takes no such rows, and on
            CPU for rows of fewer than 192 tokens.

    Raises:
        ValueError: for a setting that is neither "auto" nor one of `KERNELS`.
    """
    if setting in KERNELS:
        return setting
    if setting != "auto":
        raise ArgumentError("attention", f"got {setting!r}, allowed are auto, {', '.join(KERNELS)}")
    if platform == "tpu" and length % _SPLASH_BLOCK == 0:
        return "splash"
    if platform in ("gpu", "cuda") and dtype in (jnp.bfloat16, jnp.float16):
        return "cudnn"
    if platform == "cpu" and length >= _SHORT:
        return "blockwise"
    return "xla"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowKernel:
    """The kernel of `row_attention`, and what it may assume of the rows.

    Attributes:
        name: one of `KERNELS`. "blockwise" computes some rows as "xla" does, see `has_scores`.
        ops: the platform's operations; its attention is the kernel "xla".
        one_segment: rows hold one segment and padding after it, so the causal mask is all that real
            tokens need and cudnn runs without a mask in memory. Padding then sees the segment; its
            outputs are not used.
        segments: segments of a row at most; 0 for any number. See `statistics_kept` for cudnn.
        mesh: the devices that rows and heads are split over, for all but xla; None where the
            arguments are one device's own.
    """

    name: str
    ops: Ops
    one_segment: bool = False
    segments: int = 0
    mesh: Mesh | None = None


def row_attention(
    query: Float[Array, "R L H h"],
    key: Float[Array, "R L K h"],
    value: Float[Array, "R L K h"],
    segment_ids: Int[Array, "R L"],
    kernel: RowKernel,
    *,
    window: int = 0,
    slides: Bool[Array, ""] | None = None,
) -> Float[Array, "R L H h"]:
    """softmax(q k^T / sqrt(h)) v, each token seeing the tokens of its own segment up to itself.

    With a window w, at most w - 1 tokens before it.

    Args:
        query, key, value: H is a multiple of K.
        segment_ids: equal ids adjacent; 0 is padding, whose outputs are not used.
        kernel: how it is computed.
        window: w, at least 1; 0 for none.
        slides: whether the window holds, for layers of a scan that differ in it; None: it does.

    Returns:
        In the dtype of `query`.
    """
    if not has_scores(kernel.name, *query.shape[:3], kernel.mesh):
        attend = {
            "blockwise": blockwise.attention,
            "cudnn": functools.partial(_cudnn, kernel=kernel),
            "splash": tpu.splash_attention,
        }[kernel.name]
        if window:
            attend = _windowed(attend, window, traced=kernel.name == "blockwise")
        sharded_attend = shard_map_over_rows_and_heads(attend, kernel.mesh)
        if slides is None:
            return sharded_attend(query, key, value, segment_ids)
        return sharded_attend(query, key, value, segment_ids, slides)

    length = query.shape[1]
    visible = jnp.tril(jnp.ones((length, length), bool))[None]
    if window:
        near = jnp.triu(visible, 1 - window)
        if slides is not None:
            near = jnp.where(slides, near, visible)
        visible = near
    if not kernel.one_segment:
        same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
        visible = visible & same_segment
    return kernel.ops.attention(query, key, value, visible)


def statistics_kept(kernel: str, segments: int) -> int:
    """Float32 values of a token and head that a kernel keeps for its backward pass, above one.

    With 2 to 32 segments a row cudnn runs without a mask, each segment a sequence of its own, and
    keeps as many values.

    Args:
        kernel: one of `KERNELS`.
        segments: segments of a row at most; 0 for any number.
    """
    if kernel == "cudnn" and 2 <= segments <= _MOST_SEGMENTS:
        return segments
    return 0


def _windowed(attend: Callable[..., Array], window: int, *, traced: bool) -> AttendRows:
    """A kernel whose window holds where `slides`; a static window becomes a choice of two."""
    windowed = functools.partial(attend, window=window)

    def attended(
        query: Array,
        key: Array,
        value: Array,
        segment_ids: Array,
        slides: Array | None = None,
    ) -> Array:
        if slides is None:
            return windowed(query, key, value, segment_ids)
        if traced:
            length = jnp.where(slides, window, query.shape[1])
            return attend(query, key, value, segment_ids, window=length)
        return jax.lax.cond(slides, windowed, attend, query, key, value, segment_ids)

    return attended


def has_scores(kernel: str, rows: int, length: int, heads: int, mesh: Mesh | None) -> bool:
    """Whether a kernel computes the scores [length, length] of whole rows in memory.

    "xla" does. "blockwise" does so for rows of fewer than 192 tokens, whose blocks save nothing on
    a CPU, and for rows or query heads that a mesh doesn't split evenly, which only the compiler can
    split.

    Args:
        kernel: one of `KERNELS`.
        rows, length, heads: shape of the queries, over all devices but for the axes of a shard_map
            around.
        mesh: see `RowKernel`.
    """
    if kernel != "blockwise" or length < _SHORT:
        return kernel in ("xla", "blockwise")
    if mesh is None:
        return False
    row_ways = math.prod(mesh.shape[axis] for axis in _free_rows(mesh))
    return rows % row_ways != 0 or heads % mesh.shape["tensor"] != 0


def _free_rows(mesh: Mesh) -> tuple[str, ...]:
    """Axes that rows are split over, without the axes of an enclosing shard_map."""
    return tuple(axis for axis in free_axes(mesh) if axis != "tensor")


def shard_map_over_rows_and_heads(attend: AttendRows, mesh: Mesh | None) -> AttendRows:
    """Run a kernel on each device's own rows and heads; also inside a shard_map over data.

    The compiler can't split these kernels itself. It refuses Mosaic's (splash). cuDNN's call brings
    a partitioner of its own, which knows no mesh inside a shard_map and no key-value heads that
    tensor doesn't divide (jax 0.10.2).

    Args:
        attend: the kernel, of arguments alone.
        mesh: rows are split over data, fsdp and expert, heads over tensor; None for one device.

    Raises (the returned function, while tracing):
        UserError: if tensor does not divide the query heads.
    """
    if mesh is None or mesh.size == 1:
        return attend

    def mapped(
        query: Array,
        key: Array,
        value: Array,
        segment_ids: Array,
        *flags: Array,
    ) -> Array:
        ways = mesh.shape["tensor"]
        heads = query.shape[2]
        if heads % ways:
            raise UserError(
                f"mesh tensor: got {ways}, attention needs a divisor of the {heads} query heads"
            )
        # Key-value heads that tensor doesn't divide: each goes to several devices, beside the query
        # heads it serves.
        copies = ways // math.gcd(ways, key.shape[2])
        key = jnp.repeat(key, copies, axis=2)
        value = jnp.repeat(value, copies, axis=2)

        rows = _free_rows(mesh)
        split = P(rows, None, "tensor", None)
        flag_specs = [P()] * len(flags)
        compute = shard_map_over(
            free_axes(mesh),
            attend,
            mesh,
            in_specs=(split, split, split, P(rows, None), *flag_specs),
            out_specs=split,
        )
        return compute(query, key, value, segment_ids, *flags)

    return mapped


def _cudnn(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array,
    *,
    kernel: RowKernel,
    window: int = 0,
) -> Array:
    if not kernel.one_segment and statistics_kept("cudnn", kernel.segments):
        return gpu.packed_attention(
            query,
            key,
            value,
            segment_ids,
            segments=kernel.segments,
            window=window,
        )
    mask = None
    if not kernel.one_segment:
        mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    local_window_size = None
    if window:
        # JAX counts the tokens before a query.
        local_window_size = (window - 1, 0)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=True,
        scale=1.0 / math.sqrt(query.shape[-1]),
        local_window_size=local_window_size,
        implementation="cudnn",
    )
