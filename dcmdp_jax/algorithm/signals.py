"""Everything about rows that is constant to the gradient, computed once from p^Train and p^Inf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcmdp_jax.algorithm import corrections
from dcmdp_jax.algorithm.advantages import penalized_advantages
from dcmdp_jax.algorithm.corrections import Correction, SampledTokens
from dcmdp_jax.algorithm.discrepancy import (
    RATIO_LIMIT,
    Level,
    Measure,
    Sided,
    discrepancy,
    sequence_discrepancy,
)
from dcmdp_jax.algorithm.masked import completion_counts, gather_to_tokens, masked_sum
from dcmdp_jax.algorithm.stats import Mean
from dcmdp_jax.types import Array


class Signals(NamedTuple):
    """Constants of the rows [R, L] of a micro-batch.

    Attributes:
        old_logprobs: [R, L] float32 nats, p^Train.
        discrepancy: [R, L] float32, delta of each token, 0 outside the mask.
        advantages: [R, L] float32, penalized.
        weights: [R, L] float32, what multiplies a token's loss; 0 outside the mask and on dropped tokens.
        planned_weights: [R, L] float32, the same before corrections: w_i on each sampled token.
        kept: [R, L] bool, false on tokens that the correction drops.
        dropped_tokens: [N] int32, tokens of each completion that the correction leaves out of the loss and of its
            denominator.
        mean_discrepancy: delta's sum over the tokens of these rows, and their number. Merged over the whole batch its
            value is dbar, what moves the multiplier (Eq. 11).
        correction: statistics of the correction, by name; empty without one.
    """

    old_logprobs: jax.Array
    discrepancy: jax.Array
    advantages: jax.Array
    weights: jax.Array
    planned_weights: jax.Array
    kept: jax.Array
    dropped_tokens: jax.Array
    mean_discrepancy: Mean
    correction: dict[str, Mean]


KL_WEIGHTS: Mapping[str, Callable[[Signals], jax.Array]] = MappingProxyType(
    {
        "none": lambda signals: signals.planned_weights,
        "drop": lambda signals: jnp.where(signals.kept, signals.planned_weights, 0.0),
        "weigh": lambda signals: signals.weights,
    }
)
"""What corrections do to the divergence from the reference policy: name -> weights of its tokens, [R, L]."""


def row_signals(
    old_logprobs: Array,
    rollout_logprobs: Array,
    completion_mask: Array,
    completion_index: Array,
    advantages: Array,
    weights: Array,
    multiplier: float | Array,
    *,
    method: str,
    measure: Measure,
    sided: Sided,
    level: Level,
    tolerance: float,
    ratio_limit: float = RATIO_LIMIT,
    correction: Correction | None = None,
    train_logprobs: Array | None = None,
    count_dropped: bool = False,
) -> Signals:
    """The constants of rows (Algorithm 1 from "Discrepancy" to the penalized advantage).

        delta_{i,t}   = discrepancy of p^Train and p^Inf                      (Eq. 3)
        A^DC_{i,t}    = A_i - lambda_k delta_{i,t}, or as `method` has it     (Eq. 8)
        w_{i,t}       = w_i, times the weight of `correction`, 0 where it drops the token

    Rows add: a batch may be split into calls at will, as long as all tokens of a completion are in one call.

    Args:
        old_logprobs: [R, L] nats, training stack, weights that made the batch.
        rollout_logprobs: [R, L] nats, inference engine.
        completion_mask: [R, L] bool, true on sampled tokens; what lies outside is ignored.
        completion_index: [R, L] int, the completion of a token.
        advantages: [N] float32, from `advantages.group_advantages`.
        weights: [N] float32, from `losses.aggregation_weights`.
        multiplier: lambda_k, [], from before this step's dual update.
        method: how the discrepancy is charged, of `penalties.PENALTIES`.
        measure, sided, level, ratio_limit: of `discrepancy.discrepancy`. The mean discrepancy is that of tokens at
            either level.
        tolerance: c, in the discrepancy's unit.
        correction: None, or as in `corrections`.
        train_logprobs: [R, L] nats, the policy now, for corrections that use it; None: as `old_logprobs`.
        count_dropped: dropped tokens count in the denominator of the loss.

    Returns:
        `Signals`. No gradient flows through any of them.

    Raises:
        ValueError: if the shapes differ or an option is unknown.
    """
    completions = len(advantages)
    old_logprobs = jax.lax.stop_gradient(jnp.asarray(old_logprobs, jnp.float32))
    where = (completion_mask, completion_index, completions)
    delta = discrepancy(
        old_logprobs, rollout_logprobs, *where, measure=measure, sided=sided, level="token", ratio_limit=ratio_limit
    )
    charged = delta if level == "token" else sequence_discrepancy(delta, *where)
    token_advantages = gather_to_tokens(advantages, completion_index)
    penalized = penalized_advantages(token_advantages, charged, multiplier, tolerance, method=method)
    token_weights = jnp.where(completion_mask, gather_to_tokens(weights, completion_index), 0.0)
    planned_weights, kept = jax.lax.stop_gradient(token_weights), jnp.ones(jnp.shape(completion_mask), bool)
    dropped_tokens, done = jnp.zeros(completions, jnp.int32), {}
    if correction is not None:
        now = old_logprobs if train_logprobs is None else jax.lax.stop_gradient(train_logprobs)
        corrected = correction(SampledTokens(now, old_logprobs, rollout_logprobs, token_advantages, *where))
        token_weights = jnp.where(completion_mask & corrected.keep, token_weights * corrected.weights, 0.0)
        if not count_dropped:
            dropped_tokens = completion_counts(completion_mask & ~corrected.keep, completion_index, completions)
        kept, done = corrected.keep, corrections.statistics(corrected, completion_mask)
    return Signals(
        old_logprobs=old_logprobs,
        discrepancy=delta,
        advantages=penalized,
        weights=jax.lax.stop_gradient(token_weights),
        planned_weights=planned_weights,
        kept=kept,
        dropped_tokens=dropped_tokens,
        mean_discrepancy=masked_sum(delta, completion_mask),
        correction=done,
    )
