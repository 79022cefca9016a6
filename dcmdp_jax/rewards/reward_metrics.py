"""Means and spreads of rewards, by reward and by data source."""

from __future__ import annotations

import numpy as np

from dcmdp_jax.rewards.scoring import BatchScores


def reward_metrics(scores: BatchScores) -> dict[str, float]:
    """Metrics of a batch, named as in observe/metric_names.py.

    `reward/NAME/mean` and `/std` of each reward, over the completions that have a value of it; absent if none has.
    `reward/NAME/failed` of each function. `reward/source/SOURCE/mean` and `/std` of the totals, if the scores name
    sources.
    """
    metrics: dict[str, float] = {f"reward/{name}/failed": count for name, count in scores.failed.items()}
    for name, values in scores.values.items():
        metrics |= _mean_and_std(f"reward/{name}", values[np.isfinite(values)])
    sources = scores.sources or ()
    for source in sorted(set(sources)):
        metrics |= _mean_and_std(f"reward/source/{source}", scores.totals[np.array(sources) == source])
    missing = np.all([np.isnan(values) for values in scores.values.values()], axis=0)
    metrics["reward/without_value"] = int(missing.sum())
    return metrics


def _mean_and_std(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    exact = values.astype(np.float64)
    return {f"{name}/mean": float(exact.mean()), f"{name}/std": float(exact.std())}
