"""A study's numbers by hand."""

import math

import numpy as np
import pytest

from research.studies.results import (
    MEASURES,
    curves,
    estimate,
    held_out,
    measure_arms,
    paired_differences,
    recorded,
    tables,
)


def _series(**metrics):
    return {
        name.replace("__", "/").replace("AT", "@"): (
            np.array(list(values)),
            np.array(list(values.values()), float),
        )
        for name, values in metrics.items()
    }


def _run(score, discrepancy=0.002, tolerance=0.001):
    return _series(
        eval__t__avgAT8={0: 0.1, 4: score},
        discrepancy__mean={step: discrepancy * step for step in (1, 2, 3, 4)},
        dual__tolerance=dict.fromkeys((1, 2, 3, 4), tolerance),
        reward__mean={step: 0.1 * step for step in range(1, 21)},
    )


def test_one_number_of_a_run():
    run = _run(0.4, tolerance=0.005)
    values = {name: measure.value(run) for name, measure in MEASURES.items()}
    assert values["held_out"] == pytest.approx(40)
    assert values["reward"] == pytest.approx((1.9 + 2.0) / 2)  # the last 2 of 20 steps
    assert values["discrepancy"] == pytest.approx(0.008)  # of 4 steps the last
    assert values["growth"] == pytest.approx(4)  # .008 over .002
    assert values["over_tolerance"] == pytest.approx(50)  # .002 .004 | .006 .008 over .005
    assert math.isnan(values["multiplier"])


def test_held_out_is_the_mean_of_the_tasks_where_all_were_evaluated():
    steps, values = held_out(
        _series(eval__a__avgAT8={0: 0.2, 8: 0.4, 16: 0.5}, eval__b__avgAT4={0: 0.4, 16: 0.7})
    )
    assert steps.tolist() == [0, 16] and values == pytest.approx([0.3, 0.6])


def test_estimate_leaves_out_what_is_not_finite():
    found = estimate({0: 1.0, 1: math.nan, 2: 3.0})
    # Two values: mean 2, sd sqrt(2), t(1) = 12.706, over sqrt(2).
    assert (
        found.mean == 2
        and found.half_width == pytest.approx(12.7062, abs=1e-3)
        and set(found.values) == {0, 2}
    )
    assert math.isnan(estimate({}).mean)


def test_differences_are_paired_by_seed():
    # The arms spread by 20 points between seeds, their difference by 2: 1, 2 and 3.
    runs = {
        "grpo": {0: _run(0.30), 1: _run(0.40), 2: _run(0.50), 3: _run(0.9)},
        "dc": {0: _run(0.31), 1: _run(0.42), 2: _run(0.53)},
    }
    arms = measure_arms(runs, MEASURES["held_out"])
    difference = paired_differences(arms, "grpo")["dc"]
    assert difference.mean == pytest.approx(2) and difference.half_width == pytest.approx(
        4.30265 / 3**0.5, abs=1e-4
    )
    assert difference.values == pytest.approx({0: 1, 1: 2, 2: 3})
    # Unpaired, the baseline's fourth seed would turn the sign.
    assert arms["dc"].mean < arms["grpo"].mean


def test_curves_have_the_steps_that_all_seeds_have():
    runs = {
        "a": {0: _series(m={1: 1.0, 2: 2.0, 3: 5.0}), 1: _series(m={1: 3.0, 2: 2.0})},
        "b": {},
        "c": {0: {}},
    }
    found = curves(runs, lambda series: recorded(series, "m"))
    assert list(found) == ["a"]
    np.testing.assert_allclose(found["a"], [[1, 2, 12.7062], [2, 2, 0]], atol=1e-3)


def test_tables_and_their_numbers():
    runs = {"grpo": {0: _run(0.3), 1: _run(0.5)}, "dc": {0: _run(0.4), 1: _run(0.8)}, "late": {}}
    text = tables("Methods", runs, "grpo", ["Not finished: 2 of 6 runs."])
    lines = text.splitlines()
    assert lines[0] == "# Methods" and lines[-1] == "Not finished: 2 of 6 runs."
    # 30, 50: 40 +- 12.706 * 14.142 / 1.4142; differences 10 and 30: 20 +- 127.
    assert any(line.startswith("| grpo | 2 | 40 ± 1.3e+02 |") for line in lines)
    assert any(line.startswith("| dc | +20 ± 1.3e+02 |") for line in lines)
    assert any(line.startswith("| late | 0 | - |") for line in lines)
    assert "lambda" not in text  # no run recorded it
    held = measure_arms(runs, MEASURES["held_out"])
    assert held["dc"].values == pytest.approx({0: 40, 1: 80})
    differences = paired_differences(held, "grpo")
    assert differences["dc"].mean == pytest.approx(20) and math.isnan(differences["late"].mean)
