"""Shapes and dtypes of a batch, without making one."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dcmdp_jax.data.columns import COLUMNS, ROW_LAYOUT, Shape
from dcmdp_jax.data.row_layout import RowShapes
from dcmdp_jax.types import Batch, Rows


def abstract_batch(packing: RowShapes, columns: Mapping[str, Shape]) -> Batch:
    """Shapes of the batch that `packing.pack` makes.

    Args:
        packing: its shapes.
        columns: name -> shape of an entry, of the columns that the completions have; see `columns.columns_of_run`.
    """
    shapes = zip(packing.micro_batches, packing.rows_per_micro_batch, packing.row_lengths, strict=True)
    rows = tuple(_abstract_rows((packing.mini_batches, *shape), columns) for shape in shapes)
    completions = packing.mini_batches, packing.completions
    per_completion = {
        "rewards": jnp.float32, "group_ids": jnp.int32, "completion_lengths": jnp.int32, "loss_mask": jnp.bool_,
        "valid": jnp.bool_,
    }  # fmt: skip
    counts = jax.ShapeDtypeStruct((packing.mini_batches, len(rows)), jnp.int32)
    rest = {name: jax.ShapeDtypeStruct(completions, dtype) for name, dtype in per_completion.items()}
    return Batch(rows=rows, micro_batches=counts, **rest)


def _abstract_rows(shape: Shape, columns: Mapping[str, Shape]) -> Rows:
    layout = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in ROW_LAYOUT.items()}
    return Rows(
        **layout,
        columns={name: jax.ShapeDtypeStruct((*shape, *entry), COLUMNS[name].dtype) for name, entry in columns.items()},
    )
