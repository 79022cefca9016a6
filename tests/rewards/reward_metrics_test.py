"""Means and spreads of rewards."""

import numpy as np
import pytest

from dcmdp_jax.observe.metric_names import metric_of
from dcmdp_jax.rewards.scoring import BatchScores, reward_metrics

_NAN = float("nan")


def _scores(
    failed: dict[str, int],
    totals: list[float],
    sources: tuple[str, ...] | None,
    **values: list[float],
) -> BatchScores:
    named = {name: np.array(column, np.float32) for name, column in values.items()}
    return BatchScores(
        totals=np.array(totals, np.float32),
        values=named,
        failed=failed,
        grades=None,
        sources=sources,
    )


def test_rewards_are_measured_by_name_and_totals_by_source():
    values = {"length": [3.0, _NAN, _NAN, 5.0], "math": [0.0, _NAN, 1.0, 0.0]}
    scores = _scores({"length": 2}, [3.0, 0.0, 1.0, 5.0], ("a", "b", "b", "a"), **values)
    metrics = reward_metrics(scores)
    assert metrics == {
        "reward/length/failed": 2,
        "reward/length/mean": 4.0,  # (3 + 5) / 2, not / 4
        "reward/length/std": 1.0,
        "reward/math/mean": pytest.approx(1 / 3),
        "reward/math/std": pytest.approx((2 / 9) ** 0.5),  # ((1/3)^2 + (2/3)^2 + (1/3)^2) / 3
        "reward/source/a/mean": 4.0,  # (3 + 5) / 2
        "reward/source/a/std": 1.0,
        "reward/source/b/mean": 0.5,  # (0 + 1) / 2
        "reward/source/b/std": 0.5,
        "reward/without_value": 1,  # the second
    }
    assert all(metric_of(name).unit and metric_of(name).description for name in metrics)


def test_a_single_source_and_a_reward_without_values_have_no_means():
    metrics = reward_metrics(_scores({"f": 2}, [0.0, 0.0], None, f=[_NAN, _NAN]))
    assert metrics == {"reward/f/failed": 2, "reward/without_value": 2}


def test_a_completion_has_each_reward_or_none():
    scores = _scores({"f": 0}, [0.5, 0.0], None, f=[0.5, _NAN], math=[0.0, 1.0])
    assert [scores.of_completion(index) for index in (0, 1)] == [
        {"f": 0.5, "math": 0.0},
        {"f": None, "math": 1.0},
    ]
