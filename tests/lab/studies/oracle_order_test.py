"""The oracle's order against training results, by ranks."""

import json

import numpy as np
import pytest

from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.studies.oracle_order import oracle_order, rank_correlation


def test_rank_correlation_by_hand():
    # Ranks 0 1 2 3 against 0 2 1 3: 1 - 6 (0 + 1 + 1 + 0) / (4 * 15) = 0.8. Names of one side alone do not count.
    first, second = {"a": 1.0, "b": 10.0, "c": 100.0, "d": 1e6, "x": 0.0}, {"d": 9.0, "c": 2.0, "b": 3.0, "a": -1.0}
    assert rank_correlation(first, second) == pytest.approx(0.8)
    # Equal values share a rank: 0.5 0.5 2 against 0 1 2 is 0.75 / (sqrt(1.5) ...) = sqrt(3) / 2.
    assert rank_correlation({"a": 1, "b": 1, "c": 2}, {"a": 0, "b": 1, "c": 2}) == pytest.approx(np.sqrt(3) / 2)
    with pytest.raises(ValueError, match="rank correlation of 2 names: needs three"):
        rank_correlation({"a": 1, "b": 2}, {"a": 1, "b": 2})


def _run(reward):
    steps = np.arange(1, 5)
    names = {"reward/mean": reward, "discrepancy/mean": 0.02 - 0.01 * reward, "policy/entropy": 0.1}
    # The relation of delta to entropy is a regression: they may not be constant.
    series = {name: (steps, value * (1 + 0.01 * steps)) for name, value in names.items()}
    return series | {"eval/arithmetic/avg@2": (np.array([4]), np.array([reward]))}


def test_the_order_is_that_of_the_error_at_the_best_length(tmp_path):
    def remedy(name, error, bias, variance):
        found = {"error": error, "squared_bias": bias, "variance": variance}
        return {"name": name, "quality": found, "half_width": {"error": 0.5, "squared_bias": 0.25}}

    path = tmp_path / "remedies.json"
    # By bias^2 + variance token_9, the shortest, would be first.
    remedies = [remedy("no remedy", 0.5, 0.2, 0.9), remedy("token_1", 0.6, -0.1, 3.0), remedy("token_9", 0.9, 0.9, 0.1)]
    path.write_text(json.dumps([{"engine": "local:int4", "model": "m", "remedies": remedies}]))
    rewards = {"grpo": 0.5, "token_1": 0.4, "token_9": 0.1}
    runs = {arm: {0: _run(value), 1: _run(value + 0.01)} for arm, value in rewards.items()}
    *shown, empty, line = oracle_order(path, {**runs, "token_99": {}}, "grpo")
    assert shown[0] == "| charge | local:int4: error | bias^2 |" and empty == ""
    assert shown[3] == "| `token_1` | 0.60 ± 0.50 | -0.10 ± 0.25 |"
    assert line.startswith(
        "- `local:int4` on m, 3 arms: rank correlation with reward -1.00, held-out score -1.00, delta +1.00."
    )
    with pytest.raises(UserError, match="has 2 of the study's arms, needs three"):
        oracle_order(path, {"grpo": runs["grpo"], "token_1": runs["token_1"]}, "grpo")
    path.write_text("{")
    with pytest.raises(UserError, match="can't be read as remedies.json of dcmdp probe"):
        oracle_order(path, runs, "grpo")
