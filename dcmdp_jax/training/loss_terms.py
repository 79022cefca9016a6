"""Assemble the configured loss: surrogate, reference KL, load balancing; the metrics of a step on
the device.

    loss = S / W + kl_coefficient K / V + router_aux_loss B

S is the surrogate summed over the tokens that corrections keep and W their weight; K is the sum of
the divergence over all tokens and V their weight; B is the load-balancing loss of the mini-batch.
Micro-batches add one sum that is divided by W at the end, so K / V and B enter it times W. W is
therefore known before the pass that takes the gradient: the terms weigh the same however many
tokens a correction drops.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from dcmdp_jax.algorithm import masked
from dcmdp_jax.algorithm.advantages import has_signal, overlong_penalty
from dcmdp_jax.algorithm.discrepancy import (
    completions_over_tolerance,
    displacement_statistics,
    mismatch_statistics,
    token_discrepancy,
)
from dcmdp_jax.algorithm.distribution import Head, centering_loss, distribution_statistics
from dcmdp_jax.algorithm.dual import QUANTILES
from dcmdp_jax.algorithm.masked import CompletionIndex, completion_means, masked_sum
from dcmdp_jax.algorithm.penalties import charge_loss
from dcmdp_jax.algorithm.remedies import Corrected, Function, Statistics, Tokens, split
from dcmdp_jax.algorithm.signals import Signals, row_signals
from dcmdp_jax.algorithm.stats import Mean, Statistic, clamped_log_ratio
from dcmdp_jax.config.algorithm import AlgorithmSettings, Remedies
from dcmdp_jax.data.episode import TEACHER_LOGPROBS
from dcmdp_jax.models.moe import Aux, load_balancing_loss, router_metrics
from dcmdp_jax.training.rescore import OLD_LOGPROBS, START_LOGPROBS, lags
from dcmdp_jax.training.state import updates_made
from dcmdp_jax.types import Array, Batch, DualState, Rows, TrainState

SURROGATE = "policy/surrogate"
KL = "policy/kl"
ROUTER = "policy/router_loss"
"""Metrics: S / W, K / V and B, means of the updates that were made."""


def measure_of(settings: AlgorithmSettings) -> dict[str, Any]:
    """Return the keyword arguments of `token_discrepancy`."""
    return {"measure": settings.measure, "sided": settings.sided}


def signals_of(
    settings: AlgorithmSettings, remedies: Remedies, tokens: Tokens, weights: Array
) -> Signals:
    """Compute the per-token signals (advantages, weights, the ratio's denominator) of the
    configured method.
    """
    signals = row_signals(
        tokens,
        weights,
        measure=measure_of(settings),
        level=settings.level,
        penalty=remedies.penalty,
        corrections=remedies.corrections,
        of_completions=remedies.centered[1] if remedies.centered else (),
        count_dropped=settings.correction_denominator == "all",
    )
    anchor = getattr(signals.tokens, _anchor(settings))
    return signals._replace(tokens=signals.tokens._replace(anchor_logprobs=anchor))


def _anchor(settings: AlgorithmSettings) -> str:
    """Field of the log-probs in the ratio's denominator."""
    return {"train": "old_logprobs", "proximal": "start_logprobs"}.get(
        settings.ratio_denominator, "rollout_logprobs"
    )


def loss_weights(settings: AlgorithmSettings, signals: Signals) -> Array:
    """Weight of each token in the loss, [R, L]: `proximal_weights` in it with
    ratio_denominator="proximal".
    """
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
    """Sum the terms that need the engine's likeliest tokens: the baseline of score centering, the
    charge of a state.

    Args:
        settings, remedies: the method.
        tokens, weights: as `policy_loss` gets them.
        centered_weights: see `Signals`.
        head: the likeliest tokens; the gradient reaches its `train_logprobs`.

    Returns:
        [] float32, a sum over tokens, to be added to that of `policy_loss`.
    """
    total = jnp.zeros(())
    if remedies.centered is not None:
        single = remedies.centered[0] + (_proximal,) * (settings.ratio_denominator == "proximal")
        how = {"loss": remedies.loss, "ratio_level": settings.ratio_level, "corrections": single}
        total -= centering_loss(tokens, centered_weights, head, anchor=_anchor(settings), **how)
    if settings.state_charge is not None:
        total += charge_loss(tokens, weights, head, settings.state_charge)
    return total


def _proximal(tokens: Tokens) -> Corrected:
    """`proximal_weights` as a correction."""
    return Corrected(proximal_weights(tokens), jnp.ones_like(tokens.completion_mask))


def head_statistics(
    settings: AlgorithmSettings, head: Head | None, kept_mass: Array | None, mask: Array
) -> Statistics:
    """Compute the statistics of the engine's likeliest tokens; none without them."""
    kept = (
        {}
        if kept_mass is None
        else {"distribution/kept_mass": masked_sum(lax.stop_gradient(kept_mass), mask)}
    )
    return (
        kept if head is None else kept | distribution_statistics(head, mask, measure_of(settings))
    )


def proximal_weights(tokens: Tokens) -> jax.Array:
    """pi_prox / pi_old of the tokens, the weight of the decoupled objective
    (`ratio_denominator="proximal"`).

        l_t = -(pi_prox / pi_old) min(r_t A_t, clip(r_t) A_t),    r_t = pi_theta / pi_prox

    pi_prox is the policy at the start of the step and pi_old the one that sampled, both on the
    training stack: the clip bounds what this step changes, and the weight corrects for what changed
    since sampling (Hilton et al. 2022, arXiv:2110.00641; AReaL, Fu et al. 2025, arXiv:2505.24298,
    whose pi_old is the engine's). 1 without a lag.

    Returns:
        [R, L] float32, a constant; 1 outside the mask; e^20 at most.
    """
    moved = jnp.where(
        tokens.completion_mask, clamped_log_ratio(tokens.start_logprobs, tokens.old_logprobs), 0.0
    )
    return jax.lax.stop_gradient(jnp.exp(moved))


class Terms(NamedTuple):
    """Constants of an update whose loss has terms besides the surrogate.

    Attributes:
        divisor: [] float32, W; 1 where nothing is kept, so that the other terms remain.
        kl_weight: [] float32, V.
        router: `moe.router_sums` of the whole mini-batch; None without the load-balancing loss.
    """

    divisor: jax.Array
    kl_weight: jax.Array
    router: Aux | None


def scaled_terms(
    settings: AlgorithmSettings, terms: Terms, kl: jax.Array, router: Aux
) -> jax.Array:
    """Scale the KL and router terms of a micro-batch by `divisor`, by which the sum is divided in
    the end.

    Args:
        settings: the coefficients.
        terms: constants of the update.
        kl: [] float32, the micro-batch's part of K.
        router: `moe.router_sums` of the micro-batch.
    """
    total = settings.kl_coefficient * terms.divisor * Mean(kl, terms.kl_weight).value()
    if terms.router is not None:
        own = terms.router | {"router_probability": router["router_probability"]}
        total += settings.router_aux_loss * terms.divisor * load_balancing_loss(own)
    return total


def term_metrics(
    settings: AlgorithmSettings, terms: Terms, surrogate: jax.Array, kl: jax.Array
) -> dict[str, jax.Array]:
    """Return the terms of an update: loss = surrogate + kl_coefficient kl + router_aux_loss
    router.
    """
    metrics = {SURROGATE: surrogate / terms.divisor}
    if settings.kl_coefficient:
        metrics[KL] = Mean(kl, terms.kl_weight).value()
    if terms.router is not None:
        metrics[ROUTER] = load_balancing_loss(terms.router)
    return metrics


def punished_rewards(
    settings: AlgorithmSettings, batch: Batch, max_completion_tokens: int
) -> Array:
    """The rewards, less the soft punishment of long completions."""
    if not settings.overlong_buffer:
        return batch.rewards
    size = {"buffer": settings.overlong_buffer, "penalty": settings.overlong_penalty}
    return batch.rewards - overlong_penalty(
        batch.completion_lengths, max_completion_tokens=max_completion_tokens, **size
    )


def charged_rewards(
    settings: AlgorithmSettings,
    remedies: Remedies,
    dual: DualState,
    rewards: Array,
    rows: tuple[Rows, ...],
) -> Array | None:
    """Rewards with the charge inside, before their group's mean and deviation are taken
    (`level="reward"`).

        r_i - lambda mean_t delta_{i,t},    or as `method` has it for an advantage,

    so that a completion is compared with the others of its prompt in both. The group's deviation is
    that of the charged rewards: in a group of equal rewards the discrepancy alone decides, and
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
        charged.
    """
    if settings.level != "reward":
        return None
    return lax.map(
        lambda mini_batch: _charged(settings, remedies.penalty, dual, *mini_batch), (rewards, rows)
    )


def _charged(
    settings: AlgorithmSettings,
    penalty: Function,
    dual: DualState,
    rewards: Array,
    rows: tuple[Rows, ...],
) -> Array:
    """`charged_rewards` of a mini-batch."""

    def flat(values: Callable[[Rows], Array]) -> Array:
        return jnp.concatenate([values(bucket).reshape(-1) for bucket in rows])[None]

    def delta(bucket: Rows) -> Array:
        old = bucket.columns.get(OLD_LOGPROBS, bucket.columns.get(START_LOGPROBS))
        return token_discrepancy(
            old,
            bucket.rollout_logprobs,
            completion_mask=bucket.completion_mask,
            **measure_of(settings),
        )

    mask = flat(lambda bucket: bucket.completion_mask)
    index = flat(lambda bucket: bucket.completion_index)
    means = completion_means(flat(delta), CompletionIndex(mask, index, len(rewards)))
    tokens = Tokens(
        advantages=rewards[None],
        discrepancy=means[None],
        completion_mask=jnp.ones((1, len(rewards)), bool),
        completion_index=jnp.arange(len(rewards))[None],
        num_completions=len(rewards),
        **dual._asdict(),
    )
    return split(penalty(tokens))[0][0]


def token_advantages(
    of_completions: Array, rows: Rows, old_logprobs: Array, teacher_weight: float
) -> Array:
    """The advantage of each token, with a teacher's in rows that have its log-probs: on-policy
    distillation.

        A_t = A_i + w (log pi_T(y_t) - log pi_old(y_t))

    The mean of log pi_old - log pi_T over what the policy samples is the reverse KL, KL(pi_old ||
    pi_T), and the policy gradient of its second term the gradient of it: each token answers for
    itself alone, a discount of 0 (Lu et al. 2025, Thinking Machines, "On-Policy Distillation";
    slime's `opd_kl_coef` and NeMo-RL's `adv_estimator=opd` alike). pi_old is the training stack's,
    so that the engine's mismatch is no part of it. Constants to the gradient.

    Args:
        of_completions: [N], A_i.
        rows: [R, L].
        old_logprobs: [R, L] nats, pi_old.
        teacher_weight: w, of the reward `teacher:MODEL`.

    Returns:
        [R, L] float32.
    """
    plain = masked.gather_to_tokens(of_completions, rows.completion_index)
    if TEACHER_LOGPROBS not in rows.columns:
        return plain
    return plain + teacher_weight * lax.stop_gradient(rows.columns[TEACHER_LOGPROBS] - old_logprobs)


def loss_mask(settings: AlgorithmSettings, batch: Batch) -> Array:
    """The completions of a mini-batch that are in the loss."""
    if not settings.drop_equal_groups:
        return batch.loss_mask
    return batch.loss_mask & has_signal(batch.rewards, batch.group_ids, batch.valid)


Metrics = dict[str, jax.Array]

RECORDED = (
    "tokens/train_logprobs",
    "tokens/start_logprobs",
    "completions/advantages",
    "tokens/top_logprobs",
)
"""Arrays that a step also returns, for a recording of its tokens; the second only for batches that
lag, the last only with the engine's likeliest tokens.
"""


class TokenValues(NamedTuple):
    """Values of the tokens of rows, float32.

    Attributes:
        old_logprobs: nats, training stack, weights that sampled.
        discrepancy: delta.
        start_logprobs: nats, training stack, weights at the start of the step; None unless the rows
            lag.
        top_logprobs: `old_logprobs` of the engine's likeliest tokens; None unless they are
            recorded.
    """

    old_logprobs: Array
    discrepancy: Array
    start_logprobs: Array | None
    top_logprobs: Array | None = None


class Updates(NamedTuple):
    """Results of the updates, [M, ...], from which the metrics of a step are made."""

    statistics: dict[str, Statistic]
    router: Aux
    tokens: tuple[TokenValues, ...]
    advantages: Array


def step_metrics(
    settings: AlgorithmSettings,
    schedule: optax.Schedule,
    state: TrainState,
    after: TrainState,
    batch: Batch,
    updates: Updates,
) -> Metrics:
    """Metrics of the batch, of the optimizer's counters, and of the multiplier as this step used
    it.

    Args:
        settings: the statistics of groups.
        schedule: learning rate by update.
        state, after: at the start of the step, and after the updates.
        batch: the batch that was trained on.
        updates: results of the updates.
    """
    metrics = batch_metrics(batch, updates.tokens, settings, state.dual.tolerance)
    metrics |= router_metrics(jax.tree.map(lambda x: jnp.sum(x, axis=0), updates.router))
    rate = schedule(jnp.maximum(updates_made(after.opt_state) - 1, 0))
    metrics["optimizer/learning_rate"] = jnp.asarray(rate, jnp.float32)
    metrics["optimizer/skipped_in_row"] = after.skipped_in_row
    metrics |= {"dual/multiplier": state.dual.multiplier, "dual/tolerance": state.dual.tolerance}
    if state.loss_scale is not None:
        metrics["optimizer/loss_scale"] = state.loss_scale.scale
    return metrics | (gap_metrics(batch.rows, updates.tokens) if lags(batch.rows[0]) else {})


def recorded_tokens(updates: Updates) -> dict[str, tuple[jax.Array, ...] | jax.Array]:
    """The entries of `RECORDED`."""
    train, start, advantages, top = RECORDED
    fields = {train: "old_logprobs", start: "start_logprobs", top: "top_logprobs"}
    found = {
        name: tuple(getattr(bucket, field) for bucket in updates.tokens)
        for name, field in fields.items()
    }
    return {name: x for name, x in found.items() if x[0] is not None} | {
        advantages: updates.advantages.reshape(-1)
    }


def batch_metrics(
    batch: Batch,
    rows: tuple[TokenValues, ...],
    settings: AlgorithmSettings,
    tolerance: float | jax.Array,
) -> Metrics:
    """Rewards, discrepancy and mismatch of a batch.

    Args:
        batch: the batch that was trained on.
        rows: values of the tokens, [M, A, R, L] float32 for each bucket.
        settings: the statistic that c bounds.
        tolerance: c of this step.

    Returns:
        [] float32 metrics named as in observe/metric_names.py, and `completions/discrepancy` [M *
        N].
    """
    mini_batches, completions = batch.rewards.shape

    def flat(buckets: tuple[Any, ...], name: str) -> jax.Array:
        return jnp.concatenate(
            [getattr(bucket, name).reshape(mini_batches, -1) for bucket in buckets], axis=1
        )

    mask = flat(batch.rows, "completion_mask")
    rollout = flat(batch.rows, "rollout_logprobs")
    train = flat(rows, "old_logprobs")
    delta = flat(rows, "discrepancy")
    offsets = jnp.arange(mini_batches)[:, None] * completions
    index = flat(batch.rows, "completion_index") + offsets
    where = masked.CompletionIndex(mask, index, mini_batches * completions)
    over = completions_over_tolerance(delta, where, tolerance=tolerance)
    displacement = displacement_statistics(train, rollout, mask)
    engine_share = Mean(
        jnp.sum(jnp.where(mask & (rollout > train), delta, 0.0)),
        jnp.sum(jnp.where(mask, delta, 0.0)),
    )

    rewards = batch.rewards.reshape(-1)
    valid = batch.valid.reshape(-1)
    group_ids = (batch.group_ids + offsets).reshape(-1)
    groups = masked.group_statistics(rewards, group_ids, valid, ddof=1)
    least = -masked.masked_max(-rewards, valid)  # subtracted first: see `group_statistics`
    mean_above = masked.masked_mean(rewards - least, valid)
    share = QUANTILES.get(settings.budget)
    bounded = (
        {}
        if share is None
        else {settings.bounded_metric: masked.masked_quantile(delta, mask, share)}
    )
    bounded |= mismatch_statistics(train, rollout, mask)
    return bounded | {
        "reward/mean": least + mean_above,
        "reward/std": jnp.sqrt(masked.masked_mean((rewards - least - mean_above) ** 2, valid)),
        "reward/all_equal_groups": masked.masked_mean(groups.all_equal, groups.size > 0),
        "discrepancy/p50": masked.masked_quantile(delta, mask, 0.5),
        "discrepancy/p99": masked.masked_quantile(delta, mask, 0.99),
        "discrepancy/max": masked.masked_max(delta, mask),
        "discrepancy/engine_share": engine_share.value(),
        "discrepancy/completions_over_tolerance": over.value(),
        "displacement/mean": displacement["mean"],
        "displacement/abs_mean": displacement["abs_mean"],
        "displacement/abs_p50": displacement["abs_p50"],
        "displacement/abs_p95": displacement["abs_p95"],
        "displacement/abs_p99": displacement["abs_p99"],
        "completions/discrepancy": masked.completion_means(delta, where),
    }


def gap_metrics(rows: tuple[Rows, ...], logprobs: tuple[TokenValues, ...]) -> Metrics:
    """The two parts of the gap between trainer and engine, of a batch that lags behind the policy.

        log p_now - log p^Inf = (log p_now - log p_v) + (log p_v - log p^Inf) = staleness + mismatch

    token by token: p_now is the training stack at the start of the step, p_v the same under the
    weights v that sampled the token. lambda is moved by the mismatch alone.

    Args:
        rows: the batch's, [M, A, R, L] for each bucket.
        logprobs: values of its tokens, like `rows`.

    Returns:
        [] float32: mean, mean of the absolute value and largest absolute value of each, over
        sampled tokens.
    """

    def flat(values: Iterable[Array]) -> jax.Array:
        return jnp.concatenate([x.reshape(-1) for x in values])

    mask = flat(b.completion_mask for b in rows)
    sampled = flat(b.rollout_logprobs for b in rows)
    then = flat(b.old_logprobs for b in logprobs)
    now = flat(b.start_logprobs for b in logprobs)
    staleness = now - then
    mismatch = then - sampled
    gap = now - sampled
    return {
        "staleness/log_ratio_mean": masked.masked_mean(staleness, mask),
        "staleness/log_ratio_abs_mean": masked.masked_mean(jnp.abs(staleness), mask),
        "staleness/log_ratio_max": masked.masked_max(jnp.abs(staleness), mask),
        "mismatch/log_ratio_mean": masked.masked_mean(mismatch, mask),
        "mismatch/log_ratio_abs_mean": masked.masked_mean(jnp.abs(mismatch), mask),
        "mismatch/log_ratio_max": masked.masked_max(jnp.abs(mismatch), mask),
        "gap/log_ratio_mean": masked.masked_mean(gap, mask),
        "gap/log_ratio_abs_mean": masked.masked_mean(jnp.abs(gap), mask),
        "gap/log_ratio_max": masked.masked_max(jnp.abs(gap), mask),
    }
