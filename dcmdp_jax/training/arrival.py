"""What an engine's rounding lets through of a step's update."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dcmdp_jax.models.quantize import in_float32, is_quantized, stored
from dcmdp_jax.training.step_metrics import Metrics
from dcmdp_jax.types import Params

_NUMBERS = 1 << 18
"""Numbers that are looked at of each parameter; the mean of so many has an error below 0.1%."""


def watched_columns(params: Params, quantized: Params) -> list[jax.Array]:
    """Columns [..., in, some of out] of each matrix that `quantized` (see `params.quantized_leaves`) marks.

    Whole columns, since these share a scale; evenly chosen, 2^18 numbers of each matrix or one column at least.
    """
    return [
        leaf[..., :: -(-leaf.shape[-1] // max(1, _NUMBERS * leaf.shape[-1] // leaf.size))]
        for leaf, chosen in zip(jax.tree.leaves(params), jax.tree.leaves(quantized), strict=True)
        if chosen
    ]


def arrival(before: list[jax.Array], params: Params, quantized: Params, precision: str) -> Metrics:
    """Share of the engine's weights that an update D = W' - W changes, and what rounding Q does to it.

        mismatch/push_changed = mean [Q(W') != Q(W)],    mismatch/push_rounding = ||Q(W') - Q(W) - D|| / ||D||

    0 for an engine that gets D as it is, 1 where none of it arrives, more where the few weights that change jump by
    more than all of D; 0 where D is 0. Without D's errors of rounding adding up: Q(W') is always nearest to W'.

    Args:
        before: `watched_columns` of the parameters W before the step.
        params: those after it.
        quantized: see `watched_columns`.
        precision: the engine's, see `quantize.stored`.
    """
    changed = bent = whole = 0.0
    for old, new in zip(before, watched_columns(params, quantized), strict=True):
        old, new = old.astype(jnp.float32), new.astype(jnp.float32)
        held = [stored(w, precision) for w in (old, new)]
        values = [x.values if is_quantized(x) else x for x in held]
        changed += jnp.sum(values[0] != values[1], dtype=jnp.float32)
        bent += jnp.sum((in_float32(held[1]) - in_float32(held[0]) - (new - old)) ** 2)
        whole += jnp.sum((new - old) ** 2)
    rounding = jnp.where(whole > 0, jnp.sqrt(bent / jnp.where(whole > 0, whole, 1.0)), 0.0)
    return {"mismatch/push_changed": changed / sum(x.size for x in before), "mismatch/push_rounding": rounding}
