"""Metrics of a training batch, on the device and on the host: rewards, engine mismatch, lengths, time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.activity import activity
from dcmdp_jax.algorithm import masked
from dcmdp_jax.algorithm.discrepancy import completions_over_tolerance, displacement_statistics, mismatch_statistics
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.data.episode import Episode
from dcmdp_jax.data.lengths import QUANTILES
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.types import Batch, Rows

Metrics = dict[str, jax.Array]


def batch_metrics(
    batch: Batch,
    rows: tuple[tuple[jax.Array, ...], ...],
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
        jnp.concatenate([x.reshape(mini_batches, -1) for x in xs], axis=1)
        for xs in zip(*(row[:2] for row in rows), strict=True)
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
        **{f"displacement/{name}": value for name, value in displacement_statistics(train, rollout, mask).items()},
        "completions/discrepancy": masked.completion_means(delta, mask, index, total),
    }


def gap_metrics(rows: tuple[Rows, ...], logprobs: tuple[tuple[jax.Array, ...], ...]) -> Metrics:
    """The two parts of the gap between trainer and engine, of a batch that lags behind the policy.

        log p_now - log p^Inf = (log p_now - log p_v) + (log p_v - log p^Inf) = staleness + mismatch

    token by token: p_now is the training stack at the start of the step, p_v the same under the weights v that
    sampled the token. lambda is moved by the mismatch alone.

    Args:
        rows: of the batch, [M, A, R, L] for each bucket.
        logprobs: log p_v, delta and log p_now of its tokens, like `rows`.

    Returns:
        [] float32: mean, mean of the absolute value and largest absolute value of each, over sampled tokens.
    """
    staleness, mismatch, gap, mask = (
        jnp.concatenate([x.reshape(-1) for x in xs])
        for xs in zip(
            *(
                (now - then, then - bucket.rollout_logprobs, now - bucket.rollout_logprobs, bucket.completion_mask)
                for bucket, (then, _, now) in zip(rows, logprobs, strict=True)
            ),
            strict=True,
        )
    )
    metrics = {}
    for name, values in {"staleness": staleness, "mismatch": mismatch, "gap": gap}.items():
        metrics[f"{name}/log_ratio_mean"] = masked.masked_mean(values, mask)
        metrics[f"{name}/log_ratio_abs_mean"] = masked.masked_mean(jnp.abs(values), mask)
        metrics[f"{name}/log_ratio_max"] = masked.masked_max(jnp.abs(values), mask)
    return metrics


_SAID = {
    "push": "pushing the weights to the engine",
    "wait": "waiting for the sampler",
    "generate": "sampling",
    "verify": "scoring the completions",
    "noise_floor": "measuring the engine against itself",
    "pack": "packing tokens into rows",
    "step": "training",
}


class PhaseTimer:
    """Seconds of each phase of a step, and when it was; on the console, what the step does.

    Args:
        first: the first step of this process, whose programs are compiled.
    """

    def __init__(self, *, first: bool = False) -> None:
        self._more = " (the first time it compiles)" if first else ""
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        """(phase, start, end) by `time.monotonic`."""
        self._began = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; blocks of one name add up."""
        began = time.monotonic()
        with activity(_SAID[name] + self._more):
            yield
        ended = time.monotonic()
        self.spans.append((name, began, ended))
        self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + ended - began

    @property
    def starts(self) -> dict[str, float]:
        """Unix time at which each phase began first."""
        offset = time.time() - time.monotonic()
        return {name: began + offset for name, began, _ in reversed(self.spans)}

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """The phases, the total, and tokens per second."""
        total = time.monotonic() - self._began
        sampled = sum(episode.num_sampled for episode in episodes)
        tokens = sum(len(episode.token_ids) for episode in episodes)
        return self.seconds | {
            "time/total": total,
            "throughput/tokens_per_second": tokens / total,
            "throughput/sampled_tokens_per_second": sampled / self.seconds["time/generate"],
        }


def rollout_metrics(episodes: Sequence[Episode], grades: Grades | None) -> dict[str, float]:
    """Lengths, truncations, and what the verifier could not read if it was asked, by the names of metric_names.py."""
    lengths = [episode.num_sampled for episode in episodes]
    judged = {} if grades is None else {
        "reward/verifier_timeouts": grades.timeouts,
        "reward/verifier_errors": grades.errors,
        "reward/verifier_over_budget": grades.over_budget,
        "reward/no_answer_fraction": grades.unparsed / max(1, grades.rewards.size),
    }  # fmt: skip
    return judged | {
        "completion/length_mean": float(np.mean(lengths)),
        "completion/length_min": min(lengths),
        **{f"completion/length_p{p}": float(np.percentile(lengths, p)) for p in QUANTILES},
        "completion/length_max": max(lengths),
        "completion/truncated_fraction": float(np.mean([episode.finish_reason == "length" for episode in episodes])),
    }


def staleness_metrics(batch: Batch, policy_version: int) -> dict[str, float]:
    """Steps between the policy that is trained and those that sampled the batch's tokens; 0 in a synchronous run.

    Args:
        batch: packed, before it goes to the devices.
        policy_version: the training step of the parameters that the batch trains.
    """
    versions = [rows.columns["policy_versions"][rows.completion_mask] for rows in batch.rows]
    lag = policy_version - np.concatenate(versions)
    return {"rollout/staleness_mean": float(lag.mean()), "rollout/staleness_max": float(lag.max())}
