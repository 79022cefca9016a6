"""What a training batch says of engine mismatch and rewards."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dcmdp_jax.algorithm import masked
from dcmdp_jax.algorithm.discrepancy import completions_over_tolerance, discrepancy, mismatch_statistics
from dcmdp_jax.config import AlgorithmSettings
from dcmdp_jax.types import Batch, Rows

Metrics = dict[str, jax.Array]


def batch_metrics(
    batch: Batch, train_logprobs: tuple[jax.Array, ...], settings: AlgorithmSettings
) -> tuple[Metrics, jax.Array]:
    """Rewards, discrepancy and mismatch of a batch.

    Args:
        batch: what was trained on.
        train_logprobs: p^Train of each bucket, [M, A, R, L] float32.
        settings: how the discrepancy is measured, and what it may be.

    Returns:
        [] float32 metrics named as in observe/names.py, `completions/discrepancy` [M * N], and the mean discrepancy,
        [] float32, that moves the multiplier.
    """
    mini_batches, completions = batch.rewards.shape

    def flat(field: Callable[[Rows], jax.Array]) -> jax.Array:
        return jnp.concatenate([field(bucket).reshape(mini_batches, -1) for bucket in batch.rows], axis=1)

    mask, rollout = flat(lambda b: b.completion_mask), flat(lambda b: b.rollout_logprobs)
    train = jnp.concatenate([p.reshape(mini_batches, -1) for p in train_logprobs], axis=1)
    offsets = jnp.arange(mini_batches)[:, None] * completions
    index = flat(lambda b: b.completion_index) + offsets
    total = mini_batches * completions
    measured = {"measure": settings.measure, "sided": settings.sided, "level": "token"}
    delta = discrepancy(train, rollout, mask, index, total, **measured)
    mean_discrepancy = masked.masked_mean(delta, mask)
    over = completions_over_tolerance(delta, mask, index, total, tolerance=settings.tolerance)
    mismatch = mismatch_statistics(train, rollout, mask)

    rewards, valid = batch.rewards.reshape(-1), batch.valid.reshape(-1)
    group_ids = (batch.group_ids + offsets).reshape(-1)
    groups = masked.group_statistics(rewards, group_ids, valid, ddof=settings.std_ddof)
    mean_reward = masked.masked_mean(rewards, valid)
    metrics = {
        "reward/mean": mean_reward,
        "reward/std": jnp.sqrt(masked.masked_mean((rewards - mean_reward) ** 2, valid)),
        "reward/all_equal_groups": masked.mean(masked.all_equal_groups(groups)),
        "discrepancy/mean": mean_discrepancy,
        "discrepancy/p50": masked.masked_quantile(delta, mask, 0.5),
        "discrepancy/p99": masked.masked_quantile(delta, mask, 0.99),
        "discrepancy/max": masked.masked_max(delta, mask),
        "discrepancy/completions_over_tolerance": masked.mean(over),
        "mismatch/k1": mismatch["kl_k1"],
        "mismatch/k3": mismatch["kl_k3"],
        "mismatch/pearson": mismatch["pearson"],
        "mismatch/effective_sample_size": mismatch["effective_sample_size"],
        "completions/discrepancy": masked.completion_means(delta, mask, index, total),
    }
    return metrics, mean_discrepancy
