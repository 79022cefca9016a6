"""Everything about rows that is constant to the gradient, computed once from p^Train and p^Inf."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Float, Int

from dcmdp_jax.algorithm import masked, stats
from dcmdp_jax.algorithm.corrections import Correction, chain
from dcmdp_jax.algorithm.discrepancy import PenaltyLevel, sequence_discrepancy, token_discrepancy
from dcmdp_jax.algorithm.remedies import Function, Statistics, Tokens, require_tokens, split
from dcmdp_jax.algorithm.require import require_option, require_same_shape
from dcmdp_jax.types import Array


class Signals(NamedTuple):
    """Constants of the rows of a micro-batch.

    Attributes:
        tokens: with the old log-probs as float32, the discrepancy as penalized, and penalized
            advantages.
        discrepancy: delta of each token, 0 outside the mask.
        weights: what multiplies a token's loss; 0 outside the mask and on dropped tokens.
        planned_weights: the same before corrections: w_i on each sampled token.
        centered_weights: the same with the corrections of whole completions alone.
        dropped_tokens: tokens of each completion that corrections leave out of the loss and of its
            denominator.
        mean_discrepancy: delta's sum over the tokens of these rows, and their number. Merged over
            the whole batch its value is dbar, what moves the multiplier (Eq. 11).
        statistics: statistics of the penalty and the corrections, by metric name.
    """

    tokens: Tokens
    discrepancy: Float[jax.Array, "R L"]
    weights: Float[jax.Array, "R L"]
    planned_weights: Float[jax.Array, "R L"]
    centered_weights: Float[jax.Array, "R L"]
    dropped_tokens: Int[jax.Array, " N"]
    mean_discrepancy: stats.Mean
    statistics: Statistics


def penalty_share(
    tokens: Tokens,
    unpenalized: Float[Array, "R L"],
    token_weights: Float[Array, "R L"],
    in_loss: Float[Array, "R L"] | None = None,
) -> stats.Mean:
    """Share of an update that is penalty for the discrepancy, unreduced. Ours, not in the paper.

        C / (C + S),    C = sum w |A' - A| (1 - p),    S = sum w |A| (1 - p)

    with A' - A what the method adds to the advantage, -lambda delta for DC-GRPO, and w the weight
    of the token in the loss. 1 - p stands for the length of the score, the gradient of log p in the
    logits, which is between 1 - p and sqrt(2) (1 - p): a penalty on a token that the policy is sure
    of moves nothing. C / S = share / (1 - share). How single terms cancel is not in it.

    Args:
        tokens: `advantages` penalized; p is of `train_logprobs`.
        unpenalized: A, the advantage without discrepancy.
        token_weights: >= 0, w.
        in_loss: >= 0, length of the gradient of a penalty in the loss before lambda
            (`penalties.penalty_length`); sum w lambda of it is added to C.

    Returns:
        C over C + S; 1 where all advantages are 0 and something is penalized, 0 where nothing is.

    Raises:
        ValueError: if the shapes differ.
    """
    require_tokens(tokens)
    require_same_shape(
        advantages=tokens.advantages,
        unpenalized=unpenalized,
        token_weights=token_weights,
    )
    score = -jnp.expm1(jnp.minimum(jnp.asarray(tokens.train_logprobs, jnp.float32), 0.0))
    penalized = jnp.abs(tokens.advantages - unpenalized) * score
    penalty = masked.weighted_sum(penalized, token_weights).total
    plain = masked.weighted_sum(jnp.abs(unpenalized) * score, token_weights).total
    if in_loss is not None:
        require_same_shape(in_loss=in_loss, token_weights=token_weights)
        penalty += tokens.multiplier * masked.weighted_sum(in_loss, token_weights).total
    return stop_gradient(stats.Mean(penalty, penalty + plain))


def row_signals(
    tokens: Tokens,
    weights: Float[Array, " N"],
    *,
    measure: Mapping[str, Any],
    level: PenaltyLevel,
    penalty: Function,
    corrections: Sequence[Correction] = (),
    of_completions: Sequence[Correction] = (),
    count_dropped: bool = False,
) -> Signals:
    """The constants of rows (Algorithm 1 from "Discrepancy" to the penalized advantage).

        delta_{i,t}   = discrepancy of p^Train and p^Inf                      (Eq. 3)
        A^DC_{i,t}    = A_i - lambda_k delta_{i,t}, or as `penalty` has it    (Eq. 8)
        w_{i,t}       = w_i, times the weights of `corrections`, 0 where one drops the token

    Rows add: a batch may be split into calls at will, as long as all tokens of a completion are in
    one call.

    Args:
        tokens: log-probs, advantages without penalty, mask, completions, multiplier (lambda_k from
            before this step's dual update) and tolerance.
        weights: from `losses.aggregation_weights`.
        measure: keyword arguments of `token_discrepancy`: measure, sided.
        level: the unit that is penalized. "token": delta_{i,t}. "sequence": its mean over the
            completion. "reward": no penalty per token, the advantages hold it already. The mean
            discrepancy is that of tokens in any case.
        penalty: function of `penalties` that penalizes the discrepancy.
        corrections: functions of `corrections`, in order.
        of_completions: corrections among them that give all tokens of a completion one weight, for
            score centering.
        count_dropped: dropped tokens count in the denominator of the loss.

    Returns:
        `Signals`. No gradient flows through any of them.

    Raises:
        ValueError: if the shapes differ or an option is unknown.
    """
    require_tokens(tokens)
    # A weight for each completion.
    require_same_shape(weights=weights, completions=np.empty(tokens.num_completions))
    require_option("level", level, get_args(PenaltyLevel))
    mask = tokens.completion_mask
    num_completions = tokens.num_completions
    tokens = tokens._replace(old_logprobs=jnp.asarray(tokens.old_logprobs, jnp.float32))
    # The number of completions stays a Python number.
    tokens = stop_gradient(tokens)._replace(num_completions=num_completions)

    delta = token_discrepancy(
        tokens.old_logprobs,
        tokens.rollout_logprobs,
        completion_mask=mask,
        **measure,
    )
    penalized_discrepancy = delta
    if level == "reward":
        penalized_discrepancy = jnp.zeros_like(delta)
    elif level == "sequence":
        penalized_discrepancy = sequence_discrepancy(delta, tokens.where)
    tokens = tokens._replace(discrepancy=penalized_discrepancy)
    penalized_advantages, statistics = split(penalty(tokens))

    # `tokens` are constants, so that all that follows from them is.
    completion_weights = masked.gather_to_tokens(weights, tokens.completion_index)
    planned_weights = stop_gradient(masked.masked_values(completion_weights, mask))
    dropped_tokens = jnp.zeros(num_completions, jnp.int32)
    token_weights = planned_weights
    centered_weights = planned_weights
    if of_completions:
        corrected, _ = chain(tokens, of_completions)
        kept_tokens = mask & corrected.keep
        centered_weights = jnp.where(kept_tokens, planned_weights * corrected.weights, 0.0)
    if corrections:
        corrected, correction_statistics = chain(tokens, corrections)
        statistics = statistics | correction_statistics
        kept_tokens = mask & corrected.keep
        token_weights = jnp.where(kept_tokens, planned_weights * corrected.weights, 0.0)
        if not count_dropped:
            dropped = tokens.where._replace(mask=mask & ~corrected.keep)
            dropped_tokens = masked.completion_counts(dropped)
    return Signals(
        tokens=tokens._replace(advantages=penalized_advantages),
        discrepancy=delta,
        weights=token_weights,
        planned_weights=planned_weights,
        centered_weights=centered_weights,
        dropped_tokens=dropped_tokens,
        mean_discrepancy=masked.masked_sum(delta, mask),
        statistics=statistics,
    )
