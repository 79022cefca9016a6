"""Metrics of a training batch: rewards and engine mismatch."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dcmdp_jax.algorithm import masked
from dcmdp_jax.algorithm.discrepancy import completions_over_tolerance, mismatch_statistics
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.types import Batch, Rows

Metrics = dict[str, jax.Array]


def batch_metrics(
    batch: Batch,
    rows: tuple[tuple[jax.Array, jax.Array], ...],
    settings: AlgorithmSettings,
    tolerance: float | jax.Array,
) -> Metrics:
    """Rewards, discrepancy and mismatch of a batch.

    Args:
        batch: what was trained on.
        rows: p^Train and the discrepancy of each token, [M, A, R, L] float32 for each bucket.
        settings: the statistics of groups.
        tolerance: c of this step.

    Returns:
        [] float32 metrics named as in observe/metric_names.py, and `completions/discrepancy` [M * N].
    """
    mini_batches, completions = batch.rewards.shape

    def flat(field: Callable[[Rows], jax.Array]) -> jax.Array:
        return jnp.concatenate([field(bucket).reshape(mini_batches, -1) for bucket in batch.rows], axis=1)

    mask, rollout = flat(lambda b: b.completion_mask), flat(lambda b: b.rollout_logprobs)
    train, delta = (
        jnp.concatenate([x.reshape(mini_batches, -1) for x in xs], axis=1) for xs in zip(*rows, strict=True)
    )
    offsets = jnp.arange(mini_batches)[:, None] * completions
    index = flat(lambda b: b.completion_index) + offsets
    total = mini_batches * completions
    over = completions_over_tolerance(delta, mask, index, total, tolerance=tolerance)
    mismatch = mismatch_statistics(train, rollout, mask)

    rewards, valid = batch.rewards.reshape(-1), batch.valid.reshape(-1)
    group_ids = (batch.group_ids + offsets).reshape(-1)
    groups = masked.group_statistics(rewards, group_ids, valid, ddof=settings.std_ddof)
    mean_reward = masked.masked_mean(rewards, valid)
    return {
        "reward/mean": mean_reward,
        "reward/std": jnp.sqrt(masked.masked_mean((rewards - mean_reward) ** 2, valid)),
        "reward/all_equal_groups": masked.all_equal_groups(groups).value(),
        "discrepancy/p50": masked.masked_quantile(delta, mask, 0.5),
        "discrepancy/p99": masked.masked_quantile(delta, mask, 0.99),
        "discrepancy/max": masked.masked_max(delta, mask),
        "discrepancy/completions_over_tolerance": over.value(),
        "mismatch/k1": mismatch["kl_k1"],
        "mismatch/k3": mismatch["kl_k3"],
        "mismatch/pearson": mismatch["pearson"],
        "mismatch/effective_sample_size": mismatch["effective_sample_size"],
        "completions/discrepancy": masked.completion_means(delta, mask, index, total),
    }
