"""Metrics of a step, from its tokens and updates; and the tokens that are recorded."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dcmdp_jax.algorithm import stats
from dcmdp_jax.algorithm.discrepancy import (
    completions_over_tolerance,
    displacement_statistics,
    mismatch_statistics,
)
from dcmdp_jax.algorithm.dual import QUANTILES
from dcmdp_jax.algorithm.masked import (
    CompletionIndex,
    completion_means,
    group_statistics,
    masked_max,
    masked_mean,
    masked_quantile,
)
from dcmdp_jax.algorithm.stats import Mean, Statistic
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.models.moe import Aux, router_metrics
from dcmdp_jax.training.objective import LossInputs, Metrics
from dcmdp_jax.training.optimizer import updates_made
from dcmdp_jax.training.rescore import lags
from dcmdp_jax.types import Array, Batch, Rows, TrainState


class TokenValues(NamedTuple):
    """Values of the tokens of rows, float32.

    Attributes:
        old_logprobs: nats, training stack, weights that sampled.
        discrepancy: delta.
        start_logprobs: nats, training stack, weights at the start of the step; None unless the rows
            lag.
        top_logprobs: `old_logprobs` of the engine's top-k tokens; None unless they are
            recorded.
    """

    old_logprobs: Array
    discrepancy: Array
    start_logprobs: Array | None
    top_logprobs: Array | None = None


def token_values(inputs: LossInputs, *, every_token: bool) -> TokenValues:
    """The values of a micro-batch; log-probs of the top-k tokens if asked."""
    tokens = inputs.signals.tokens
    start_logprobs = None
    if lags(inputs.rows):
        start_logprobs = tokens.start_logprobs
    top_logprobs = None
    if inputs.head is not None and every_token:
        top_logprobs = inputs.head.old_logprobs
    return TokenValues(
        old_logprobs=tokens.old_logprobs,
        discrepancy=inputs.signals.discrepancy,
        start_logprobs=start_logprobs,
        top_logprobs=top_logprobs,
    )


class Updates(NamedTuple):
    """Results of the updates, [M, ...], from which the metrics of a step are made."""

    statistics: dict[str, Statistic]
    router: Aux
    tokens: tuple[TokenValues, ...]
    advantages: Array


class RecordedTokens(NamedTuple):
    """What a step returns beside its metrics; log-probs are [M, A, R, L] for each bucket.

    Attributes:
        discrepancy: [M * N] float32, each completion's own mean of delta.
        train_logprobs: `TokenValues.old_logprobs`; None, as all below, where tokens are not
            recorded.
        start_logprobs: that of `TokenValues`; None unless the batch lags.
        top_logprobs: [M, A, R, L, k], that of `TokenValues`; None without the top-k tokens.
        advantages: [M * N] float32.
    """

    discrepancy: Array
    train_logprobs: tuple[Array, ...] | None = None
    start_logprobs: tuple[Array, ...] | None = None
    top_logprobs: tuple[Array, ...] | None = None
    advantages: Array | None = None


def step_metrics(
    settings: AlgorithmSettings,
    schedule: optax.Schedule,
    state: TrainState,
    after: TrainState,
    batch: Batch,
    updates: Updates,
) -> Metrics:
    """Metrics of the updates and the batch, the optimizer's counters, the multiplier as used.

    Args:
        settings: the statistics of groups.
        schedule: learning rate by update.
        state, after: at the start of the step, and after the updates.
        batch: the batch that was trained on.
        updates: results of the updates.
    """
    metrics = statistics_metrics(stats.merge_stacked(updates.statistics))
    metrics |= batch_metrics(batch, updates.tokens, settings, state.dual.tolerance)
    metrics |= router_metrics(jax.tree.map(lambda x: jnp.sum(x, axis=0), updates.router))

    rate = schedule(jnp.maximum(updates_made(after.opt_state) - 1, 0))
    metrics["optimizer/learning_rate"] = jnp.asarray(rate, jnp.float32)
    metrics["optimizer/skipped_in_row"] = after.skipped_in_row
    metrics |= {"dual/multiplier": state.dual.multiplier, "dual/tolerance": state.dual.tolerance}
    if state.loss_scale is not None:
        metrics["optimizer/loss_scale"] = state.loss_scale.scale
    if lags(batch.rows[0]):
        metrics |= gap_metrics(batch.rows, updates.tokens)
    return metrics


def statistics_metrics(totals: dict[str, Statistic]) -> Metrics:
    """The values of a step's statistics; of two the squares become what they are measured for."""
    metrics = stats.values(totals)
    if "correction/weight_mean" in metrics:
        mean = metrics["correction/weight_mean"]
        square = metrics.pop("correction/weight_square_mean")
        metrics["correction/effective_sample_size"] = jnp.where(square > 0, mean**2 / square, 0.0)
    if "distribution/discrepancy_variance" in metrics:
        tokens = totals["distribution/discrepancy_variance"].weight
        variance = metrics.pop("distribution/discrepancy_variance")
        metrics["distribution/sampling_noise"] = jnp.sqrt(variance / jnp.maximum(tokens, 1.0))
    return metrics


def recorded_tokens(batch: Batch, updates: Updates, *, every_token: bool) -> RecordedTokens:
    """What is recorded of a step: each completion's discrepancy, and the tokens if asked."""

    def buckets(field: str) -> tuple[Array, ...] | None:
        arrays = tuple(getattr(bucket, field) for bucket in updates.tokens)
        return None if arrays[0] is None else arrays

    delta = _by_mini_batch(updates.tokens, "discrepancy")
    recorded = RecordedTokens(completion_means(delta, _completions(batch)))
    if not every_token:
        return recorded
    return recorded._replace(
        train_logprobs=buckets("old_logprobs"),
        start_logprobs=buckets("start_logprobs"),
        top_logprobs=buckets("top_logprobs"),
        advantages=updates.advantages.reshape(-1),
    )


def _by_mini_batch(buckets: tuple[Any, ...], field: str) -> Array:
    """A field of the tokens of all buckets, [M, tokens]."""
    arrays = [getattr(bucket, field) for bucket in buckets]
    return jnp.concatenate([x.reshape(len(x), -1) for x in arrays], axis=1)


def _completions(batch: Batch) -> CompletionIndex:
    """The completion of the step, in 0 .. M * N - 1, of each token, [M, tokens]."""
    mini_batches, completions = batch.rewards.shape
    offsets = jnp.arange(mini_batches)[:, None] * completions
    return CompletionIndex(
        _by_mini_batch(batch.rows, "completion_mask"),
        _by_mini_batch(batch.rows, "completion_index") + offsets,
        mini_batches * completions,
    )


def batch_metrics(
    batch: Batch,
    token_values: tuple[TokenValues, ...],
    settings: AlgorithmSettings,
    tolerance: float | Array,
) -> Metrics:
    """Rewards, discrepancy and mismatch of a batch.

    Args:
        batch: the batch that was trained on.
        token_values: values of the tokens, [M, A, R, L] float32 for each bucket.
        settings: the statistic that c bounds.
        tolerance: c of this step.

    Returns:
        [] float32 metrics named as in observe/metric_names.py.
    """
    where = _completions(batch)
    mask = where.mask
    rollout = _by_mini_batch(batch.rows, "rollout_logprobs")
    train = _by_mini_batch(token_values, "old_logprobs")
    delta = _by_mini_batch(token_values, "discrepancy")

    over = completions_over_tolerance(delta, where, tolerance=tolerance)
    # Share of the discrepancy in tokens that the engine finds likelier.
    engine_share = Mean(
        jnp.sum(jnp.where(mask & (rollout > train), delta, 0.0)),
        jnp.sum(jnp.where(mask, delta, 0.0)),
    )

    rewards = batch.rewards.reshape(-1)
    valid = batch.valid.reshape(-1)
    mini_batches, completions = batch.rewards.shape
    offsets = jnp.arange(mini_batches)[:, None] * completions
    group_ids = (batch.group_ids + offsets).reshape(-1)
    groups = group_statistics(rewards, group_ids, valid, ddof=1)
    least = -masked_max(-rewards, valid)  # subtracted first: see `group_statistics`
    mean_above = masked_mean(rewards - least, valid)

    metrics = mismatch_statistics(train, rollout, mask)
    metrics |= displacement_statistics(train, rollout, mask)
    if settings.budget in QUANTILES:
        quantile = masked_quantile(delta, mask, QUANTILES[settings.budget])
        metrics[settings.bounded_metric] = quantile
    return metrics | {
        "reward/mean": least + mean_above,
        "reward/std": jnp.sqrt(masked_mean((rewards - least - mean_above) ** 2, valid)),
        "reward/all_equal_groups": masked_mean(groups.all_equal, groups.size > 0),
        "discrepancy/p50": masked_quantile(delta, mask, 0.5),
        "discrepancy/p99": masked_quantile(delta, mask, 0.99),
        "discrepancy/max": masked_max(delta, mask),
        "discrepancy/engine_share": engine_share.value(),
        "discrepancy/completions_over_tolerance": over.value(),
    }


def gap_metrics(rows: tuple[Rows, ...], logprobs: tuple[TokenValues, ...]) -> Metrics:
    """Staleness and mismatch of a lagging batch, which add up to the gap to the engine.

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

    def flat(values: Iterable[Array]) -> Array:
        return jnp.concatenate([x.reshape(-1) for x in values])

    mask = flat(bucket.completion_mask for bucket in rows)
    rollout = flat(bucket.rollout_logprobs for bucket in rows)
    old = flat(bucket.old_logprobs for bucket in logprobs)
    start = flat(bucket.start_logprobs for bucket in logprobs)
    staleness = start - old
    mismatch = old - rollout
    gap = start - rollout
    return {
        "staleness/log_ratio_mean": masked_mean(staleness, mask),
        "staleness/log_ratio_abs_mean": masked_mean(jnp.abs(staleness), mask),
        "staleness/log_ratio_max": masked_max(jnp.abs(staleness), mask),
        "mismatch/log_ratio_mean": masked_mean(mismatch, mask),
        "mismatch/log_ratio_abs_mean": masked_mean(jnp.abs(mismatch), mask),
        "mismatch/log_ratio_max": masked_max(jnp.abs(mismatch), mask),
        "gap/log_ratio_mean": masked_mean(gap, mask),
        "gap/log_ratio_abs_mean": masked_mean(jnp.abs(gap), mask),
        "gap/log_ratio_max": masked_max(jnp.abs(gap), mask),
    }
