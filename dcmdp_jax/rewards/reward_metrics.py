"""Means and spreads of rewards, by reward and by data source."""

from __future__ import annotations

import numpy as np

from dcmdp_jax.rewards.scoring import Scores


def reward_metrics(scores: Scores) -> dict[str, float]:
    """Metrics of a batch, by the names of observe/metric_names.py.

    `reward/NAME/mean` and `/std` of each reward, over the completions that it gave a value; a reward that gave no value
    at all has neither. `reward/NAME/failed` of each function. `reward/source/SOURCE/mean` and `/std` of the totals,
    where the scores tell sources apart.
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
