"""Shapes and dtypes of a batch, without making one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dcmdp_jax.data.packing import PackingPlan
from dcmdp_jax.types import Batch, Rows, SharedPrompts

_INTEGERS = ("input_ids", "position_ids", "segment_ids", "completion_index", "policy_versions")
_DTYPES = dict.fromkeys(_INTEGERS, jnp.int32) | {"completion_mask": jnp.bool_, "rollout_logprobs": jnp.float32}


def abstract_batch(packing: PackingPlan, routed_shape: tuple[int, int] | None = None) -> Batch:
    """Shapes of the batch that `packing.pack` makes.

    Args:
        packing: its plan.
        routed_shape: layers and k of the experts that episodes name; None if they name none.
    """
    shapes = zip(packing.micro_batches, packing.rows_per_micro_batch, packing.row_lengths, strict=True)
    rows = tuple(_abstract_rows(packing, *shape, routed_shape) for shape in shapes)
    completions = packing.mini_batches, packing.completions
    per_completion = {
        "rewards": jnp.float32, "group_ids": jnp.int32, "completion_lengths": jnp.int32, "loss_mask": jnp.bool_,
        "valid": jnp.bool_,
    }  # fmt: skip
    counts = jax.ShapeDtypeStruct((packing.mini_batches, len(rows)), jnp.int32)
    rest = {name: jax.ShapeDtypeStruct(completions, dtype) for name, dtype in per_completion.items()}
    return Batch(rows=rows, micro_batches=counts, **rest)


def _abstract_rows(
    packing: PackingPlan, micro_batches: int, rows: int, length: int, routed_shape: tuple[int, int] | None
) -> Rows:
    def routed(*shape: int) -> jax.ShapeDtypeStruct | None:
        return None if routed_shape is None else jax.ShapeDtypeStruct((*shape, *routed_shape), jnp.int16)

    shape = (packing.mini_batches, micro_batches, rows, length)
    prompts = None
    if packing.group_size:
        groups = (packing.mini_batches, micro_batches, rows // packing.group_size)
        read = (*groups, packing.prompt_length)
        prompts = SharedPrompts(
            jax.ShapeDtypeStruct(read, jnp.int32), jax.ShapeDtypeStruct(groups, jnp.int32), routed(*read)
        )
    fields = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in _DTYPES.items()}
    return Rows(**fields, prompts=prompts, routed_experts=routed(*shape))
