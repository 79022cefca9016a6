"""The configured loss: a sum of terms, and what they are computed from.

    loss = S / W + kl_coefficient K / V + router_aux_loss B

S is the surrogate summed over the tokens that corrections keep and W their weight; K is the sum of
the divergence over all tokens and V their weight; B is the load-balancing loss of the mini-batch.
Micro-batches add one sum that is divided by W at the end, so K / V and B enter it times W. With
them W is therefore known before the pass that takes the gradient: the terms weigh the same however
many tokens a correction drops.

To add a term, write its function and name it in `TERMS`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from dcmdp_jax.algorithm.advantages import has_signal, overlong_penalty
from dcmdp_jax.algorithm.discrepancy import token_discrepancy
from dcmdp_jax.algorithm.distribution import Head, centering_loss, distribution_statistics
from dcmdp_jax.algorithm.losses import policy_loss, reference_kl
from dcmdp_jax.algorithm.masked import (
    CompletionIndex,
    completion_means,
    gather_to_tokens,
    masked_sum,
    weighted_sum,
)
from dcmdp_jax.algorithm.penalties import penalty_length, penalty_loss
from dcmdp_jax.algorithm.remedies import Corrected, Function, Statistics, Tokens, split
from dcmdp_jax.algorithm.signals import Signals, penalty_share, row_signals
from dcmdp_jax.algorithm.stats import Mean, Statistic, clamped_log_ratio
from dcmdp_jax.config.algorithm import AlgorithmSettings, Remedies
from dcmdp_jax.data.episode import TEACHER_LOGPROBS
from dcmdp_jax.models.moe import Aux, load_balancing_loss
from dcmdp_jax.models.row_logprobs import RowOutputs
from dcmdp_jax.training.rescore import OLD_LOGPROBS, START_LOGPROBS
from dcmdp_jax.types import Array, Batch, DualState, Rows

SURROGATE = "policy/surrogate"
KL = "policy/kl"
ROUTER = "policy/router_loss"
"""Metrics: S / W, K / V and B, means of the updates that were made."""

Metrics = dict[str, Array]


def discrepancy_arguments(settings: AlgorithmSettings) -> dict[str, Any]:
    """Return the keyword arguments of `token_discrepancy`."""
    return {"measure": settings.measure, "sided": settings.sided}


def signals_of(
    settings: AlgorithmSettings,
    remedies: Remedies,
    tokens: Tokens,
    weights: Array,
) -> Signals:
    """Compute the tokens' advantages, weights and the ratio's denominator by the settings."""
    signals = row_signals(
        tokens,
        weights,
        measure=discrepancy_arguments(settings),
        level=settings.level,
        penalty=remedies.penalty,
        corrections=remedies.corrections,
        of_completions=remedies.whole_completions,
        count_dropped=settings.correction_denominator == "all",
    )
    anchor = getattr(signals.tokens, _anchor_field(settings))
    return signals._replace(tokens=signals.tokens._replace(anchor_logprobs=anchor))


def _anchor_field(settings: AlgorithmSettings) -> str:
    """Field of the log-probs in the ratio's denominator; the engine's for "rollout", "bypass"."""
    fields = {"train": "old_logprobs", "proximal": "start_logprobs"}
    return fields.get(settings.ratio_denominator, "rollout_logprobs")


def loss_weights(settings: AlgorithmSettings, signals: Signals) -> Array:
    """Weight of each token in the loss, [R, L], `proximal_weights` included where they apply."""
    if settings.ratio_denominator == "proximal":
        return signals.weights * proximal_weights(signals.tokens)
    return signals.weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What the terms of the loss are computed from, on a micro-batch.

    Attributes:
        settings, remedies: the method.
        tokens: advantages penalized; the gradient flows through `train_logprobs`.
        weights: [R, L] float32, of each token in the loss.
        signals: constants of the rows.
        head: the engine's top-k tokens, whose `train_logprobs` have a gradient; None without.
        rows: the micro-batch.
        outputs: of the forward pass of the policy.
        reference: the forward pass of the reference policy.
    """

    settings: AlgorithmSettings
    remedies: Remedies
    tokens: Tokens
    weights: Array
    signals: Signals
    head: Head | None
    rows: Rows
    outputs: RowOutputs | None = None
    reference: Callable[[], RowOutputs] | None = None


class TermConstants(NamedTuple):
    """Constants of an update whose loss has terms besides the surrogate.

    Attributes:
        divisor: [] float32, W; 1 where it would be 0, so that the other terms remain.
        planned_weight: [] float32, V.
        mini_batch_sums: by metric, what `Term.mini_batch_sum` gave over the whole mini-batch.
    """

    divisor: Array
    planned_weight: Array
    mini_batch_sums: Mapping[str, Any]


def _surrogate(inputs: LossInputs) -> tuple[Array, Statistics]:
    """S without the terms of the top-k tokens (Eq. 9-10)."""
    loss, statistics = policy_loss(
        inputs.tokens,
        inputs.weights,
        loss=inputs.remedies.loss,
        ratio_level=inputs.settings.ratio_level,
    )
    return loss.total, statistics


def _centering(inputs: LossInputs) -> Array:
    """Score centering of the engine's top-k tokens, subtracted: see `centering_loss`."""
    settings = inputs.settings
    corrections = inputs.remedies.single_tokens
    if settings.ratio_denominator == "proximal":
        corrections += (_proximal,)
    return -centering_loss(
        inputs.tokens,
        inputs.signals.centered_weights,
        inputs.head,
        loss=inputs.remedies.loss,
        ratio_level=settings.ratio_level,
        anchor=_anchor_field(settings),
        corrections=corrections,
    )


def _state_penalty(inputs: LossInputs) -> Array:
    """The penalty of the top-k tokens' discrepancy in each state, see `penalty_loss`."""
    return penalty_loss(inputs.tokens, inputs.weights, inputs.head, inputs.settings.state_penalty)


def _reference_kl(inputs: LossInputs) -> Array:
    """K: divergence from the reference policy."""
    divergence = reference_kl(
        inputs.tokens.train_logprobs,
        lax.stop_gradient(inputs.reference().logprobs),
        completion_mask=inputs.rows.completion_mask,
        estimator=inputs.settings.kl_estimator,
    )
    return weighted_sum(divergence, inputs.signals.planned_weights).total


def _router_sums(inputs: LossInputs) -> Aux:
    """`moe.router_sums` of the micro-batch."""
    return inputs.outputs.router


def _router_probability(inputs: LossInputs) -> Array:
    """The factor of B that has a gradient: the experts' probabilities, summed."""
    return inputs.outputs.router["router_probability"]


def _balance(probability: Array, constants: TermConstants) -> Array:
    """B, a product of two means over the mini-batch.

    One is a constant, from `mini_batch_sums`; the other, of `probability`, has the gradient. Over a
    micro-batch B would balance single texts (Qiu et al. 2025, arXiv:2501.11873).
    """
    sums = constants.mini_batch_sums[ROUTER]
    return load_balancing_loss(sums | {"router_probability": probability})


def _mean_of_tokens(total: Array, constants: TermConstants) -> Array:
    """K / V."""
    return Mean(total, constants.planned_weight).value()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """A term of the loss.

    Attributes:
        metric: name of its mean, recorded where the loss has several. Each term has its own, except
            those of `SURROGATE`, which are one sum, S.
        total: its sum over a micro-batch, or (sum, statistics).
        coefficient: its factor in the loss, by the settings; 0: not in it.
        mean: of other terms than `SURROGATE`: (sum, constants) -> the term, linear in the sum.
        mini_batch_sum: what to sum over the mini-batch in a pass before that of the gradient;
            `mean` gets it as `constants.mini_batch_sums[metric]`. None: nothing.
    """

    metric: str
    total: Callable[[LossInputs], Any]
    coefficient: Callable[[AlgorithmSettings], float]
    mean: Callable[[Any, TermConstants], Array] = _mean_of_tokens
    mini_batch_sum: Callable[[LossInputs], Any] | None = None


TERMS = (
    Term(metric=SURROGATE, total=_surrogate, coefficient=lambda _: 1),
    Term(metric=SURROGATE, total=_centering, coefficient=lambda settings: settings.centers),
    Term(
        metric=SURROGATE,
        total=_state_penalty,
        coefficient=lambda settings: settings.state_penalty is not None,
    ),
    Term(metric=KL, total=_reference_kl, coefficient=lambda settings: settings.kl_coefficient),
    Term(
        metric=ROUTER,
        total=_router_probability,
        coefficient=lambda settings: settings.router_aux_loss,
        mean=_balance,
        mini_batch_sum=_router_sums,
    ),
)
"""Every term, in the order in which they are computed."""


def terms_of(settings: AlgorithmSettings) -> tuple[Term, ...]:
    """The terms that the settings ask for."""
    return tuple(term for term in TERMS if term.coefficient(settings))


def sum_of_terms(
    terms: Sequence[Term], inputs: LossInputs, constants: TermConstants | None
) -> tuple[Array, dict[str, Any], Statistics]:
    """The loss of a micro-batch times W, the sums by metric, and the terms' statistics."""
    totals = {}
    statistics = {}
    for term in terms:
        total, term_statistics = split(term.total(inputs))
        if term.metric in totals:
            total = totals[term.metric] + total
        totals[term.metric] = total
        statistics |= term_statistics

    loss = totals[SURROGATE]
    for term in terms:
        if term.metric != SURROGATE:
            mean = term.mean(totals[term.metric], constants)
            loss += term.coefficient(inputs.settings) * constants.divisor * mean
    return loss, totals, statistics


def term_metrics(
    terms: Sequence[Term], totals: dict[str, Any], constants: TermConstants
) -> dict[str, Array]:
    """The terms of an update: loss = surrogate + kl_coefficient kl + router_aux_loss router."""
    metrics = {SURROGATE: totals[SURROGATE] / constants.divisor}
    for term in terms:
        if term.metric != SURROGATE:
            metrics[term.metric] = term.mean(totals[term.metric], constants)
    return metrics


def _proximal(tokens: Tokens) -> Corrected:
    """`proximal_weights` as a correction."""
    return Corrected(proximal_weights(tokens), jnp.ones_like(tokens.completion_mask))


def head_statistics(inputs: LossInputs) -> Statistics:
    """Compute the statistics of the engine's top-k tokens; none without them."""
    mask = inputs.rows.completion_mask
    kept_mass = inputs.outputs.kept_mass
    statistics = {}
    if kept_mass is not None:
        statistics["distribution/kept_mass"] = masked_sum(lax.stop_gradient(kept_mass), mask)
    if inputs.head is not None:
        statistics |= distribution_statistics(
            inputs.head, mask, discrepancy_arguments(inputs.settings)
        )
    return statistics


def penalty_share_of(inputs: LossInputs, unpenalized: Array) -> Statistic:
    """Compute `penalty_share`, with the penalty of a state where the loss has one."""
    in_loss = None
    penalty = inputs.settings.state_penalty
    if penalty is not None:
        in_loss = penalty_length(inputs.head, inputs.rows.completion_mask, penalty)
    return penalty_share(inputs.signals.tokens, unpenalized, inputs.signals.weights, in_loss)


def proximal_weights(tokens: Tokens) -> Array:
    """pi_prox / pi_old, the weights of the decoupled objective: `ratio_denominator="proximal"`.

        l_t = -(pi_prox / pi_old) min(r_t A_t, clip(r_t) A_t),    r_t = pi_theta / pi_prox

    pi_prox is the policy at the start of the step and pi_old the one that sampled, both on the
    training stack: the clip bounds what this step changes, and the weight corrects for what changed
    since sampling (Hilton et al. 2022, arXiv:2110.00641; AReaL, Fu et al. 2025, arXiv:2505.24298,
    whose pi_old is the engine's). 1 without a lag.

    Returns:
        [R, L] float32, a constant; 1 outside the mask; e^20 at most.
    """
    log_ratio = clamped_log_ratio(tokens.start_logprobs, tokens.old_logprobs)
    return lax.stop_gradient(jnp.exp(jnp.where(tokens.completion_mask, log_ratio, 0.0)))


def punished_rewards(
    settings: AlgorithmSettings, batch: Batch, max_completion_tokens: int
) -> Array:
    """The rewards, less the soft punishment of long completions."""
    if not settings.overlong_buffer:
        return batch.rewards
    return batch.rewards - overlong_penalty(
        batch.completion_lengths,
        max_completion_tokens=max_completion_tokens,
        buffer=settings.overlong_buffer,
        penalty=settings.overlong_penalty,
    )


def penalized_rewards(
    settings: AlgorithmSettings,
    remedies: Remedies,
    dual: DualState,
    rewards: Array,
    rows: tuple[Rows, ...],
) -> Array | None:
    """Rewards with the penalty inside, before their group's mean is taken: `level="reward"`.

        r_i - lambda mean_t delta_{i,t},    or as `method` has it for an advantage,

    so that a completion is compared with the others of its prompt in reward and in discrepancy. The
    group's deviation is that of the penalized rewards: in a group of equal rewards only the
    discrepancy decides, and any lambda above 0 cancels.

    Args:
        settings: level, measure, sided.
        remedies: the penalty is used; it sees advantages, discrepancy, multiplier and tolerance
            alone.
        dual: lambda_k and c.
        rewards: [M, N] float32.
        rows: the buckets, [M, A, R, L] each, with p^Train of the weights that sampled them.

    Returns:
        [M, N] float32; completions without a token keep their reward. None where tokens are
        penalized.
    """
    if settings.level != "reward":
        return None

    def penalized(mini_batch: tuple[Array, tuple[Rows, ...]]) -> Array:
        return _penalized(settings, remedies.penalty, dual, *mini_batch)

    return lax.map(penalized, (rewards, rows))


def _penalized(
    settings: AlgorithmSettings,
    penalty: Function,
    dual: DualState,
    rewards: Array,
    rows: tuple[Rows, ...],
) -> Array:
    """`penalized_rewards` of a mini-batch."""
    discrepancy = []
    for bucket in rows:
        columns = bucket.columns
        delta = token_discrepancy(
            columns.get(OLD_LOGPROBS, columns.get(START_LOGPROBS)),
            bucket.rollout_logprobs,
            completion_mask=bucket.completion_mask,
            **discrepancy_arguments(settings),
        )
        discrepancy.append(delta)

    def as_one_row(values: Iterable[Array]) -> Array:
        return jnp.concatenate([x.reshape(-1) for x in values])[None]

    mask = as_one_row(bucket.completion_mask for bucket in rows)
    index = as_one_row(bucket.completion_index for bucket in rows)
    completions = len(rewards)
    means = completion_means(as_one_row(discrepancy), CompletionIndex(mask, index, completions))

    # Each completion is one token of the penalty.
    tokens = Tokens(
        advantages=rewards[None],
        discrepancy=means[None],
        completion_mask=jnp.ones((1, completions), bool),
        completion_index=jnp.arange(completions)[None],
        num_completions=completions,
        multiplier=dual.multiplier,
        tolerance=dual.tolerance,
    )
    penalized, _ = split(penalty(tokens))
    return penalized[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenReward:
    """A reward of each token: by how much another policy finds it likelier than p^Train.

    Attributes:
        column: column of its log-probs.
        weight: factor in the advantage.
        metric: name of the mean of log p^Train less the column.
    """

    column: str
    weight: float
    metric: str


def distillation(teacher: str, weight: float) -> tuple[TokenReward, ...]:
    """The token reward of a run whose reward `teacher:MODEL` has this weight; none without one.

    The mean of log pi_old - log pi_T over what the policy samples is the reverse KL, KL(pi_old ||
    pi_T). The policy gradient of this reward is its gradient, where each token answers only for
    itself, a discount of 0 (Lu et al. 2025, Thinking Machines, "On-Policy Distillation"; slime's
    `opd_kl_coef` and NeMo-RL's `adv_estimator=opd` alike). pi_old is the training stack's, so that
    the engine's mismatch is not in it.
    """
    if not teacher:
        return ()
    reward = TokenReward(column=TEACHER_LOGPROBS, weight=weight, metric="policy/teacher_kl")
    return (reward,)


def token_advantages(
    completion_advantages: Array,
    rows: Rows,
    old_logprobs: Array,
    token_rewards: Sequence[TokenReward],
) -> Array:
    """The advantage of each token: its completion's, and its own rewards.

        A_t = A_i + sum w (log pi_T(y_t) - log pi_old(y_t))

    Args:
        completion_advantages: [N], A_i.
        rows: [R, L], with the columns of the rewards.
        old_logprobs: [R, L] nats, pi_old.
        token_rewards: w and the column of pi_T; constants to the gradient.

    Returns:
        [R, L] float32.
    """
    advantages = gather_to_tokens(completion_advantages, rows.completion_index)
    for reward in token_rewards:
        gain = lax.stop_gradient(rows.columns[reward.column] - old_logprobs)
        advantages = advantages + reward.weight * gain
    return advantages


def token_reward_statistics(inputs: LossInputs, token_rewards: Sequence[TokenReward]) -> Statistics:
    """How far p^Train is from the policies of the token rewards."""
    old_logprobs = inputs.signals.tokens.old_logprobs
    statistics = {}
    for reward in token_rewards:
        gap = old_logprobs - inputs.rows.columns[reward.column]
        statistics[reward.metric] = masked_sum(gap, inputs.rows.completion_mask)
    return statistics


def loss_mask(settings: AlgorithmSettings, batch: Batch) -> Array:
    """The completions of a mini-batch that are in the loss."""
    if not settings.drop_equal_groups:
        return batch.loss_mask
    return batch.loss_mask & has_signal(batch.rewards, batch.group_ids, batch.valid)
