"""Dose and response on planted runs whose answers are known."""

import json

import numpy as np
import pytest

from dcmdp_jax.errors import UserError
from research.dose_tables import (
    ascending,
    ascent_table,
    dose_claims,
    dose_panels,
    dose_table,
    draw_answer,
    draw_doses,
    fit_relation,
    holm,
    measure_doses,
    oracle_order,
    p_values,
    rank_correlation,
)
from research.studies.results import color_of, estimate

_STEPS = np.arange(1, 21)


def _run(seed, *, entropy=1.0, above=1.0, reward=0.5, held_out=0.5):
    """delta = 0.01 H^2 times `above`; H falls from 0.2 to 0.1."""
    h = entropy * np.linspace(0.2, 0.1, 20) * (1 + 0.01 * seed)
    return {
        "discrepancy/mean": (_STEPS, above * 0.01 * h**2),
        "policy/entropy": (_STEPS, h),
        "reward/mean": (_STEPS, np.full(20, reward + 0.01 * seed)),
        "eval/arithmetic/avg@2": (np.array([0, 20]), np.array([0.4, held_out])),
    }


_RUNS = {
    "grpo": {seed: _run(seed) for seed in range(4)},
    "spread_10": {seed: _run(seed, entropy=1.3, reward=0.3) for seed in range(4)},
    "apart_10": {seed: _run(seed, above=0.8, held_out=0.7) for seed in range(3)},
}


def test_the_relation_of_the_baseline_is_found():
    relation = fit_relation(_RUNS["grpo"])
    assert relation.slope == pytest.approx(2) and np.exp(relation.intercept) == pytest.approx(0.01)
    assert (relation.lowest, relation.highest) == (pytest.approx(0.1), pytest.approx(0.206))


def test_entropy_is_told_apart_from_what_is_left():
    found = measure_doses(_RUNS, "grpo")
    # 1.3 times the entropy is 1.69 times delta, all of it explained; per nat, 1.3 times.
    spread = {name: found[name]["spread_10"][1].mean for name in found}
    assert spread["excess"] == pytest.approx(0, abs=1e-9) and spread["per_nat"] == pytest.approx(30)
    assert spread["reward"] == pytest.approx(-0.2)
    apart = {name: found[name]["apart_10"][1].mean for name in found}
    assert (apart["excess"], apart["per_nat"], apart["entropy"]) == (
        pytest.approx(-20),
        pytest.approx(-20),
        pytest.approx(0),
    )
    assert apart["held_out"] == pytest.approx(20)


def test_the_table_names_runs_intervals_and_what_is_extrapolated():
    table = dose_table({**_RUNS, "not_run": {}}, "grpo").splitlines()
    assert table[0].startswith("| arm | runs | delta, 1e-3 |")
    assert [line.split(" | ")[:2] for line in table[2:]] == [
        ["| grpo", "4"],
        ["| spread_10", "4"],
        ["| apart_10", "3"],
    ]
    assert "extrapolated" not in table[3] and "-20 ±" in table[4]
    wide = dose_table({"grpo": _RUNS["grpo"], "far_1": {0: _run(0, entropy=3.0)}}, "grpo")
    assert "(extrapolated)" in wide


def test_a_claim_is_more_than_twice_its_interval_and_three_times_chance():
    runs = {
        "grpo": {seed: _run(seed) for seed in range(5)},
        "same": {seed: _run(seed, above=1.02) for seed in range(5)},  # chance: 2%, each time
        "small_1": {
            seed: _run(seed, above=1.05) for seed in range(5)
        },  # 5% is less than three times that
        "large_1": {seed: _run(seed, above=1.07) for seed in range(5)},
        "wide_1": {seed: _run(seed, above=1.3 if seed % 2 else 0.9) for seed in range(5)},
        "few_1": {seed: _run(seed, above=2.0) for seed in range(4)},
    }
    small, large, wide, few = dose_claims(runs, "grpo", "same")
    assert small == "- `small_1` (5 runs): no difference that they carry."
    assert (
        large.startswith("- `large_1` (5 runs): delta, 1e-3 +0.0")
        and "at equal entropy, % +7 ±" in large
    )
    assert wide.endswith("no difference that they carry.") and few.endswith(
        "no difference that they carry."
    )


def test_holm_and_p_by_hand():
    # 0.01 <= 0.05 / 4, 0.015 <= 0.05 / 3, 0.03 > 0.05 / 2: what comes after the first miss does not
    # hold either.
    assert holm({"a": 0.03, "b": 0.01, "c": 0.015, "d": 0.04}) == {"b", "c"}
    # 1, 2 and 3: mean 2, standard error 1 / sqrt(3), t = 3.46 with two degrees: p = 1 - t / sqrt(2
    # + t^2) = 0.0742.
    three = estimate({0: 1.0, 1: 2.0, 2: 3.0})
    found = {"reward": {"grpo": (three, three), "one": (three, three)}}
    assert p_values(found, ("grpo",)) == {("reward", "one"): pytest.approx(0.0742, abs=1e-4)}


def test_the_figure_has_a_panel_for_each_response_and_a_color_for_each_name():
    panels = dose_panels(
        _RUNS, "grpo", {"spread_10": ("token", 10.0), "apart_10": ("reward", 10.0)}
    )
    figure = draw_doses("T", "grpo", panels)
    assert len(figure.axes) == 6
    assert [line.get_color() for line in figure.axes[0].get_lines()][0] == color_of("grpo")
    assert (
        color_of("token_10")
        == color_of("token")
        == color_of("token_one_0.1")
        != color_of("reward_10")
    )


def _ascent(seed):
    """delta 0.004 for five steps of 20, then 0.003; lambda 1, 2, ... 20 and 10 more for each seed,
    falling last.
    """
    delta = np.where(_STEPS <= 5, 0.004, 0.003)
    multiplier = _STEPS + 10.0 * seed
    multiplier[-1] = 4.0
    return {
        "discrepancy/mean": (_STEPS, delta),
        "dual/multiplier": (_STEPS, multiplier),
        "dual/tolerance": (_STEPS, np.full(20, 0.0035)),
    }


def test_dual_ascent_is_compared_with_the_baseline_at_the_same_budget():
    still = {
        "discrepancy/mean": (_STEPS, np.full(20, 0.005)),
        "dual/multiplier": (_STEPS, np.zeros(20)),
    }
    runs = {"grpo": {0: still, 1: still}, "ascent_token": {0: _ascent(0), 1: _ascent(1)}}
    assert ascending(runs) == ["ascent_token"]
    row = ascent_table(runs, "grpo").splitlines()[2].strip("| ").split(" | ")
    # Peaks 19 and 29: 24, half width 12.706 * 7.071 / sqrt(2) = 64. Late delta 3 against 5.
    assert row == ["ascent_token", "2", "3.5", "4 ± 0", "24 ± 64", "25 ± 0", "100 ± 0", "-2 ± 0"]


def test_the_answer_in_one_figure_has_doses_above_and_the_ascent_below():
    panels = dict(list(dose_panels(_RUNS, "grpo", {"spread_10": ("token", 10.0)}).items())[:2])
    curve = np.stack([_STEPS, 0.01 * _STEPS, np.full(20, 0.001)], axis=1)
    figure = draw_answer(
        "T", "grpo", panels, {"ascent_token": curve}, {"grpo": curve, "ascent_token": curve}, 0.0044
    )
    assert len(figure.axes) == 4
    last = figure.axes[3].get_lines()
    assert [line.get_color() for line in last[:2]] == [color_of("grpo"), color_of("token")]
    assert list(last[2].get_ydata()) == [0.0044, 0.0044]


def test_rank_correlation_by_hand():
    # Ranks 0 1 2 3 against 0 2 1 3: 1 - 6 (0 + 1 + 1 + 0) / (4 * 15) = 0.8. Names of one side alone
    # do not count.
    first = {"a": 1.0, "b": 10.0, "c": 100.0, "d": 1e6, "x": 0.0}
    second = {"d": 9.0, "c": 2.0, "b": 3.0, "a": -1.0}
    assert rank_correlation(first, second) == pytest.approx(0.8)
    # Equal values share a rank: 0.5 0.5 2 against 0 1 2 is 0.75 / (sqrt(1.5) ...) = sqrt(3) / 2.
    assert rank_correlation({"a": 1, "b": 1, "c": 2}, {"a": 0, "b": 1, "c": 2}) == pytest.approx(
        np.sqrt(3) / 2
    )
    with pytest.raises(ValueError, match="rank correlation of 2 names: needs three"):
        rank_correlation({"a": 1, "b": 2}, {"a": 1, "b": 2})


def _end(reward):
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
    remedies = [
        remedy("no remedy", 0.5, 0.2, 0.9),
        remedy("token_1", 0.6, -0.1, 3.0),
        remedy("token_9", 0.9, 0.9, 0.1),
    ]
    path.write_text(json.dumps([{"engine": "local:int4", "model": "m", "remedies": remedies}]))
    rewards = {"grpo": 0.5, "token_1": 0.4, "token_9": 0.1}
    runs = {arm: {0: _end(value), 1: _end(value + 0.01)} for arm, value in rewards.items()}
    *shown, empty, line = oracle_order(path, {**runs, "token_99": {}}, "grpo")
    assert shown[0] == "| penalty | local:int4: error | bias^2 |" and empty == ""
    assert shown[3] == "| `token_1` | 0.60 ± 0.50 | -0.10 ± 0.25 |"
    assert line.startswith(
        "- `local:int4` on m, 3 arms: rank correlation with reward -1.00, held-out score -1.00, "
        "delta +1.00."
    )
    with pytest.raises(UserError, match="has 2 of the study's arms, needs three"):
        oracle_order(path, {"grpo": runs["grpo"], "token_1": runs["token_1"]}, "grpo")
    path.write_text("{")
    with pytest.raises(UserError, match="can't be read as remedies.json of the oracle"):
        oracle_order(path, runs, "grpo")
