"""The configured loss: surrogate, reference KL, load balancing; from rewards to its terms.

    loss = S / W + kl_coefficient K / V + router_aux_loss B

S is the surrogate summed over the tokens that corrections keep and W their weight; K is the sum of
the divergence over all tokens and V their weight; B is the load-balancing loss of the mini-batch.
Micro-batches add one sum that is divided by W at the end, so K / V and B enter it times W. W is
therefore known before the pass that takes the gradient: the terms weigh the same however many
tokens a correction drops.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dcmdp_jax.algorithm.advantages import has_signal, overlong_penalty
from dcmdp_jax.algorithm.discrepancy import (
    token_discrepancy,
)
from dcmdp_jax.algorithm.distribution import Head, centering_loss, distribution_statistics
from dcmdp_jax.algorithm.masked import (
    CompletionIndex,
    completion_means,
    gather_to_tokens,
    masked_sum,
)
from dcmdp_jax.algorithm.penalties import penalty_loss
from dcmdp_jax.algorithm.remedies import Corrected, Function, Statistics, Tokens, split
from dcmdp_jax.algorithm.signals import Signals, row_signals
from dcmdp_jax.algorithm.stats import Mean, clamped_log_ratio
from dcmdp_jax.config.algorithm import AlgorithmSettings, Remedies
from dcmdp_jax.data.episode import TEACHER_LOGPROBS
from dcmdp_jax.models.moe import Aux, load_balancing_loss
from dcmdp_jax.training.rescore import OLD_LOGPROBS, START_LOGPROBS
from dcmdp_jax.types import Array, Batch, DualState, Rows

SURROGATE = "policy/surrogate"
KL = "policy/kl"
ROUTER = "policy/router_loss"
"""Metrics: S / W, K / V and B, means of the updates that were made."""


def measure_of(settings: AlgorithmSettings) -> dict[str, Any]:
    """Return the keyword arguments of `token_discrepancy`."""
    return {"measure": settings.measure, "sided": settings.sided}


def signals_of(
    settings: AlgorithmSettings,
    remedies: Remedies,
    tokens: Tokens,
    weights: Array,
) -> Signals:
    """Compute the tokens' advantages, weights and the ratio's denominator by the settings."""
    completion_corrections = ()
    if remedies.centered:
        _, completion_corrections = remedies.centered
    signals = row_signals(
        tokens,
        weights,
        measure=measure_of(settings),
        level=settings.level,
        penalty=remedies.penalty,
        corrections=remedies.corrections,
        of_completions=completion_corrections,
        count_dropped=settings.correction_denominator == "all",
    )
    anchor = getattr(signals.tokens, _anchor(settings))
    return signals._replace(tokens=signals.tokens._replace(anchor_logprobs=anchor))


def _anchor(settings: AlgorithmSettings) -> str:
    """Field of the log-probs in the ratio's denominator."""
    fields = {"train": "old_logprobs", "proximal": "start_logprobs"}
    return fields.get(settings.ratio_denominator, "rollout_logprobs")


def loss_weights(settings: AlgorithmSettings, signals: Signals) -> Array:
    """Weight of each token in the loss, [R, L], `proximal_weights` included where they apply."""
    if settings.ratio_denominator == "proximal":
        return signals.weights * proximal_weights(signals.tokens)
    return signals.weights


def head_loss(
    settings: AlgorithmSettings,
    remedies: Remedies,
    tokens: Tokens,
    weights: Array,
    centered_weights: Array,
    head: Head,
) -> Array:
    """Sum the terms of the engine's top-k tokens: score centering and the penalty of a state.

    Args:
        settings, remedies: the method.
        tokens, weights: as `policy_loss` gets them.
        centered_weights: see `Signals`.
        head: the top-k tokens; the gradient reaches its `train_logprobs`.

    Returns:
        [] float32, a sum over tokens, to be added to that of `policy_loss`.
    """
    total = jnp.zeros(())
    if remedies.centered is not None:
        corrections, _ = remedies.centered
        if settings.ratio_denominator == "proximal":
            corrections += (_proximal,)
        total -= centering_loss(
            tokens,
            centered_weights,
            head,
            loss=remedies.loss,
            ratio_level=settings.ratio_level,
            anchor=_anchor(settings),
            corrections=corrections,
        )
    if settings.state_penalty is not None:
        total += penalty_loss(tokens, weights, head, settings.state_penalty)
    return total


def _proximal(tokens: Tokens) -> Corrected:
    """`proximal_weights` as a correction."""
    return Corrected(proximal_weights(tokens), jnp.ones_like(tokens.completion_mask))


def head_statistics(
    settings: AlgorithmSettings,
    head: Head | None,
    kept_mass: Array | None,
    mask: Array,
) -> Statistics:
    """Compute the statistics of the engine's top-k tokens; none without them."""
    statistics = {}
    if kept_mass is not None:
        statistics["distribution/kept_mass"] = masked_sum(lax.stop_gradient(kept_mass), mask)
    if head is not None:
        statistics |= distribution_statistics(head, mask, measure_of(settings))
    return statistics


def proximal_weights(tokens: Tokens) -> jax.Array:
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


class Terms(NamedTuple):
    """Constants of an update whose loss has terms besides the surrogate.

    Attributes:
        divisor: [] float32, W; 1 where it would be 0, so that the other terms remain.
        kl_weight: [] float32, V.
        router: `moe.router_sums` of the whole mini-batch; None without the load-balancing loss.
    """

    divisor: jax.Array
    kl_weight: jax.Array
    router: Aux | None


def scaled_terms(
    settings: AlgorithmSettings,
    terms: Terms,
    kl: jax.Array,
    router: Aux,
) -> jax.Array:
    """Scale the KL and router terms of a micro-batch by `divisor`, which divides the sum later.

    Args:
        settings: the coefficients.
        terms: constants of the update.
        kl: [] float32, K of the micro-batch.
        router: `moe.router_sums` of the micro-batch.
    """
    total = settings.kl_coefficient * terms.divisor * Mean(kl, terms.kl_weight).value()
    if terms.router is not None:
        sums = terms.router | {"router_probability": router["router_probability"]}
        total += settings.router_aux_loss * terms.divisor * load_balancing_loss(sums)
    return total


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

    so that a completion is compared with the others of its prompt in both. The group's deviation is
    that of the penalized rewards: in a group of equal rewards the discrepancy alone decides, and
    lambda, above 0, cancels.

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
            **measure_of(settings),
        )
        discrepancy.append(delta)

    def one_row(values: Iterable[Array]) -> Array:
        return jnp.concatenate([x.reshape(-1) for x in values])[None]

    mask = one_row(bucket.completion_mask for bucket in rows)
    index = one_row(bucket.completion_index for bucket in rows)
    completions = len(rewards)
    means = completion_means(one_row(discrepancy), CompletionIndex(mask, index, completions))

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
    return split(penalty(tokens))[0][0]


def token_advantages(
    completion_advantages: Array,
    rows: Rows,
    old_logprobs: Array,
    teacher_weight: float,
) -> Array:
    """The advantage of each token, with on-policy distillation in rows with a teacher's log-probs.

        A_t = A_i + w (log pi_T(y_t) - log pi_old(y_t))

    The mean of log pi_old - log pi_T over what the policy samples is the reverse KL, KL(pi_old ||
    pi_T), and the policy gradient of its second term the gradient of it: each token answers for
    itself alone, a discount of 0 (Lu et al. 2025, Thinking Machines, "On-Policy Distillation";
    slime's `opd_kl_coef` and NeMo-RL's `adv_estimator=opd` alike). pi_old is the training stack's,
    so that the engine's mismatch is not in it. Constants to the gradient.

    Args:
        completion_advantages: [N], A_i.
        rows: [R, L].
        old_logprobs: [R, L] nats, pi_old.
        teacher_weight: w, of the reward `teacher:MODEL`.

    Returns:
        [R, L] float32.
    """
    advantages = gather_to_tokens(completion_advantages, rows.completion_index)
    if TEACHER_LOGPROBS not in rows.columns:
        return advantages
    gain = lax.stop_gradient(rows.columns[TEACHER_LOGPROBS] - old_logprobs)
    return advantages + teacher_weight * gain


def loss_mask(settings: AlgorithmSettings, batch: Batch) -> Array:
    """The completions of a mini-batch that are in the loss."""
    if not settings.drop_equal_groups:
        return batch.loss_mask
    return batch.loss_mask & has_signal(batch.rewards, batch.group_ids, batch.valid)


Metrics = dict[str, jax.Array]
