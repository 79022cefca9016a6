"""Metrics of a training step that are computed on the device, in the compiled step."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dcmdp_jax.algorithm import masked
from dcmdp_jax.algorithm.discrepancy import completions_over_tolerance, displacement_statistics, mismatch_statistics
from dcmdp_jax.algorithm.dual import QUANTILES
from dcmdp_jax.algorithm.stats import Mean, Statistic
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.models.moe import Aux, router_metrics
from dcmdp_jax.training.rescore import lags
from dcmdp_jax.training.state import updates_made
from dcmdp_jax.types import Array, Batch, Rows, TrainState

Metrics = dict[str, jax.Array]

RECORDED = ("tokens/train_logprobs", "tokens/start_logprobs", "completions/advantages", "tokens/top_logprobs")
"""Arrays that a step also returns, for a recording of its tokens; the second only for batches that lag, the last only
with the engine's likeliest tokens."""


class TokenValues(NamedTuple):
    """Values of the tokens of rows, float32.

    Attributes:
        old_logprobs: nats, training stack, weights that sampled.
        discrepancy: delta.
        start_logprobs: nats, training stack, weights at the start of the step; None unless the rows lag.
        top_logprobs: `old_logprobs` of the engine's likeliest tokens; None unless they are recorded.
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
    """Metrics of the batch, of the optimizer's counters, and of the multiplier as this step used it.

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
    found = {name: tuple(getattr(bucket, field) for bucket in updates.tokens) for name, field in fields.items()}
    return {name: x for name, x in found.items() if x[0] is not None} | {advantages: updates.advantages.reshape(-1)}


def batch_metrics(
    batch: Batch, rows: tuple[TokenValues, ...], settings: AlgorithmSettings, tolerance: float | jax.Array
) -> Metrics:
    """Rewards, discrepancy and mismatch of a batch.

    Args:
        batch: the batch that was trained on.
        rows: values of the tokens, [M, A, R, L] float32 for each bucket.
        settings: the statistic that c bounds.
        tolerance: c of this step.

    Returns:
        [] float32 metrics named as in observe/metric_names.py, and `completions/discrepancy` [M * N].
    """
    mini_batches, completions = batch.rewards.shape

    def flat(buckets: tuple[Any, ...], name: str) -> jax.Array:
        return jnp.concatenate([getattr(bucket, name).reshape(mini_batches, -1) for bucket in buckets], axis=1)

    mask, rollout = flat(batch.rows, "completion_mask"), flat(batch.rows, "rollout_logprobs")
    train, delta = flat(rows, "old_logprobs"), flat(rows, "discrepancy")
    offsets = jnp.arange(mini_batches)[:, None] * completions
    index = flat(batch.rows, "completion_index") + offsets
    where = masked.CompletionIndex(mask, index, mini_batches * completions)
    over = completions_over_tolerance(delta, where, tolerance=tolerance)
    displacement = displacement_statistics(train, rollout, mask)
    engine_share = Mean(jnp.sum(jnp.where(mask & (rollout > train), delta, 0.0)), jnp.sum(jnp.where(mask, delta, 0.0)))

    rewards, valid = batch.rewards.reshape(-1), batch.valid.reshape(-1)
    group_ids = (batch.group_ids + offsets).reshape(-1)
    groups = masked.group_statistics(rewards, group_ids, valid, ddof=1)
    least = -masked.masked_max(-rewards, valid)  # subtracted first: see `group_statistics`
    mean_above = masked.masked_mean(rewards - least, valid)
    share = QUANTILES.get(settings.budget)
    bounded = {} if share is None else {settings.bounded_metric: masked.masked_quantile(delta, mask, share)}
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

    token by token: p_now is the training stack at the start of the step, p_v the same under the weights v that
    sampled the token. lambda is moved by the mismatch alone.

    Args:
        rows: the batch's, [M, A, R, L] for each bucket.
        logprobs: values of its tokens, like `rows`.

    Returns:
        [] float32: mean, mean of the absolute value and largest absolute value of each, over sampled tokens.
    """

    def flat(values: Iterable[Array]) -> jax.Array:
        return jnp.concatenate([x.reshape(-1) for x in values])

    mask, sampled = flat(b.completion_mask for b in rows), flat(b.rollout_logprobs for b in rows)
    then, now = flat(b.old_logprobs for b in logprobs), flat(b.start_logprobs for b in logprobs)
    staleness, mismatch, gap = now - then, then - sampled, now - sampled
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
