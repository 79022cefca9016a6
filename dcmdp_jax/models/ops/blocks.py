"""The product of rows with the matrices of their groups, block by block: for CPU and GPU."""

import dataclasses

import jax
import jax.numpy as jnp

from dcmdp_jax.types import Array

BLOCKS = "expert_blocks"
"""Prefix of the name scope of a loop over blocks of rows; their largest number follows."""
# Rows of one product: fewer read a matrix too often, more compute rows of other groups for nothing.
_MOST_BLOCK_ROWS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Blocks of consecutive rows, each within one group but for its end.

    Attributes:
        size: rows of a block.
        owner: [blocks] int32, the group.
        first: [blocks] int32, the first row.
        rows: [blocks] int32, rows of the group; those after them belong to the next groups.
        count: [] int32, how many blocks there are; the entries after them are undefined.
    """

    size: int
    owner: Array
    first: Array
    rows: Array
    count: Array

    @property
    def scope(self) -> str:
        """Name scope of a loop over the blocks: how many there are at most."""
        return f"{BLOCKS}_{self.owner.size}"


def _blocks(group_sizes: Array, rows: int) -> _Blocks:
    groups = group_sizes.shape[0]
    mean_rows = rows // groups
    power_of_two = 1 << mean_rows.bit_length()
    size = min(_MOST_BLOCK_ROWS, max(8, power_of_two))

    # Each group begins a block of its own; the groups' blocks are numbered in order.
    in_group = -(-group_sizes // size)
    ends = jnp.cumsum(in_group)
    begins = ends - in_group
    index = jnp.arange(rows // size + groups)
    ended_groups = jnp.sum(ends <= index[:, None], axis=1)
    owner = jnp.minimum(ended_groups, groups - 1)

    group_begins = jnp.cumsum(group_sizes) - group_sizes
    within = (index - begins[owner]) * size
    return _Blocks(
        size=size,
        owner=owner,
        first=group_begins[owner] + within,
        rows=group_sizes[owner] - within,
        count=ends[-1],
    )


@jax.custom_vjp
def grouped_matmul(
    x: Array,
    kernels: Array,
    group_sizes: Array,
) -> Array:
    """`reference.grouped_matmul` block by block.

    XLA computes `ragged_dot` on CPU as the product of every row with every matrix: 4 to 60 times as
    long at 8 to 128 groups. On GPU too: 128 times the operations at 128 groups, and 32 GiB for
    8,192 tokens of Qwen3-30B-A3B (compiled, not run).
    """
    return _by_blocks(x, kernels, group_sizes, 0)


def _by_blocks(
    x: Array,
    kernels: Array,
    group_sizes: Array,
    contracted: int,
) -> Array:
    """Each row times the matrix of its group; `contracted` is the matrix's axis, 1 transposes."""
    blocks = _blocks(group_sizes, x.shape[0])
    # Blocks are written in order: what one writes beyond its group the next ones overwrite.
    padded = jnp.pad(x, ((0, blocks.size), (0, 0)))

    def body(i: Array, y: Array) -> Array:
        block = jax.lax.dynamic_slice_in_dim(padded, blocks.first[i], blocks.size)
        kernel = jax.lax.dynamic_index_in_dim(kernels, blocks.owner[i], keepdims=False)
        product = jax.lax.dot_general(block, kernel, (((1,), (contracted,)), ((), ())))
        return jax.lax.dynamic_update_slice_in_dim(y, product, blocks.first[i], 0)

    width = kernels.shape[2 - contracted]
    empty = jnp.zeros((padded.shape[0], width), x.dtype)
    with jax.named_scope(blocks.scope):
        products = jax.lax.fori_loop(0, blocks.count, body, empty)
        return products[: x.shape[0]]


def _grouped_forward(
    x: Array,
    kernels: Array,
    group_sizes: Array,
) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul(x, kernels, group_sizes), (x, kernels, group_sizes)


def _grouped_backward(
    saved: tuple[Array, Array, Array],
    cotangent: Array,
) -> tuple[Array, Array, None]:
    x, kernels, group_sizes = saved
    blocks = _blocks(group_sizes, x.shape[0])
    padding = ((0, blocks.size), (0, 0))
    padded = jnp.pad(x, padding)
    padded_bar = jnp.pad(cotangent, padding)

    def body(i: Array, grads: Array) -> Array:
        block = jax.lax.dynamic_slice_in_dim(padded, blocks.first[i], blocks.size)
        bar = jax.lax.dynamic_slice_in_dim(padded_bar, blocks.first[i], blocks.size)
        in_group = jnp.arange(blocks.size) < blocks.rows[i]
        bar = jnp.where(in_group[:, None], bar, 0)
        product = jax.lax.dot_general(
            block,
            bar,
            (((0,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        owner = blocks.owner[i]
        total = jax.lax.dynamic_index_in_dim(grads, owner, keepdims=False) + product
        return jax.lax.dynamic_update_index_in_dim(grads, total, owner, 0)

    zeros = jnp.zeros(kernels.shape, jnp.float32)
    with jax.named_scope(blocks.scope):
        grads = jax.lax.fori_loop(0, blocks.count, body, zeros)
    x_bar = _by_blocks(cotangent, kernels, group_sizes, 1)
    return x_bar, grads.astype(kernels.dtype), None


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)
