"""Each alarm fires on what is planted in the metrics of a recorded run, and none on the run as it is."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.lab.mismatch.statistics import measure
from dcmdp_jax.observe.alarms import alarms
from tests.lab.mismatch.sampled_columns import columns

_RECORDED = Path(__file__).parent / "clean_run_of_50_steps.jsonl"


def _clean():
    rows = [json.loads(line) for line in _RECORDED.read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step"}
    return {
        name: tuple(np.array(column) for column in zip(*((r["step"], r[name]) for r in rows if name in r), strict=True))
        for name in names
    }


CLEAN = _clean()
STEPS = np.arange(1, 51)


def _named(**planted):
    """Alarms of the clean run with some metrics replaced; `/` is written `__`."""
    changed = {name.replace("__", "/"): (STEPS, np.broadcast_to(values, 50)) for name, values in planted.items()}
    return [alarm.name for alarm in alarms(CLEAN | changed)]


def test_nothing_fires_over_a_clean_run_at_any_step():
    assert len(CLEAN["discrepancy/mean"][1]) == 50
    for end in range(1, 51):
        so_far = {name: (steps[steps <= end], values[steps <= end]) for name, (steps, values) in CLEAN.items()}
        assert alarms(so_far) == []


def test_a_run_without_metrics_raises_nothing():
    assert alarms({}) == []
    assert alarms({"discrepancy/mean": (STEPS, np.full(50, np.nan)), "dual/tolerance": (STEPS, np.full(50, 1.0))}) == []


DELTA, C = CLEAN["discrepancy/mean"][1], float(CLEAN["dual/tolerance"][1][-1])
ENTROPY = CLEAN["policy/entropy"][1]


def test_mismatch_well_above_the_budget():
    assert _named(discrepancy__mean=np.full(50, 1.6 * C)) == ["mismatch"]
    assert _named(discrepancy__mean=np.full(50, 1.4 * C)) == []


def test_a_budget_within_the_noise_is_noise_and_not_mismatch():
    floor = np.full(50, 1.6 * C / 2.9)
    assert _named(discrepancy__mean=np.full(50, 1.6 * C), mismatch__noise_floor=floor) == ["noise"]
    # Under the budget noise does no harm.
    assert _named(discrepancy__mean=np.full(50, 0.9 * C), mismatch__noise_floor=floor) == []


def test_old_weights_are_staleness_and_not_mismatch():
    lag = np.where(STEPS % 2, 3, 0)
    assert _named(discrepancy__mean=np.full(50, 1.6 * C), rollout__staleness_max=lag) == ["staleness"]
    assert _named(rollout__staleness_max=lag) == []  # a lag that changes nothing
    # Measured apart, each has its own alarm: a discrepancy under the same weights is mismatch, whatever the lag.
    apart = {"rollout__staleness_max": np.ones(50), "staleness__log_ratio_abs_mean": np.full(50, 0.19)}
    assert _named(**apart) == []
    assert _named(**apart, discrepancy__mean=np.full(50, 1.6 * C)) == ["mismatch"]
    assert _named(**apart | {"staleness__log_ratio_abs_mean": np.full(50, 0.21)}) == ["staleness"]


def test_an_engine_that_keeps_its_weights_is_a_failed_sync():
    # From step 41 on the engine's weights stay: the gap grows with every update.
    stuck = np.where(STEPS <= 40, DELTA, DELTA * np.maximum(STEPS - 39.0, 0) ** 1.5)
    assert _named(discrepancy__mean=stuck) in (["weight_sync"], ["weight_sync", "mismatch"])
    # A doubling is no jump.
    assert "weight_sync" not in _named(discrepancy__mean=np.where(STEPS <= 40, DELTA, 2 * DELTA))


@pytest.mark.parametrize("planted", [{"top_p": 0.9}, {"broken": 2}])
def test_cut_sampling_and_retokenization(planted):
    found = measure(columns(**planted, noise=0.01))
    rng = np.random.default_rng(0)
    series = {
        "mismatch__k1": found.k1 * rng.normal(1, 0.1, 50), "mismatch__k3": found.k3 * rng.normal(1, 0.1, 50),
        "mismatch__effective_sample_size": np.full(50, found.effective_sample_size),
    }  # fmt: skip
    if "top_p" in planted:
        assert _named(**series) == ["support"]
    missing = 1 - np.mean(np.exp(columns(**planted, noise=0.01).log_ratio))
    # The alarm's quantity is 1 - mean p / q, whatever was planted.
    assert found.k1 - found.k3 == pytest.approx(missing, abs=1e-9)


def test_other_weights_are_not_taken_for_cut_sampling():
    found = measure(columns(noise=0.3))
    assert abs(found.k1 - found.k3) < 0.02 < found.k1


def test_collapse_ahead_needs_both_trends():
    rising = np.where(STEPS <= 30, DELTA, DELTA[:30].mean() * (1 + (STEPS - 30) / 10)) * 0.5
    falling = np.where(STEPS <= 30, 1.0, 1.0 - (STEPS - 30) / 25)
    assert _named(discrepancy__mean=rising, policy__entropy=falling) == ["collapse"]
    assert _named(discrepancy__mean=rising, policy__entropy=np.ones(50)) == []
    assert _named(discrepancy__mean=0.5 * DELTA[:30].mean(), policy__entropy=falling) == []


def test_every_alarm_says_what_to_do():
    planted = {
        "noise": {"discrepancy/mean": 1.6 * C, "mismatch/noise_floor": C},
        "mismatch": {"discrepancy/mean": 1.6 * C},
    }
    for name, values in planted.items():
        changed = {metric: (STEPS, np.full(50, value)) for metric, value in values.items()}
        (alarm,) = alarms(CLEAN | changed)
        assert alarm.name == name and alarm.text.endswith(".") and "\n" not in alarm.text
        assert any(word in alarm.text for word in ("Raise", "Run ", "Push", "Check", "Sample"))
    assert dataclasses.is_dataclass(alarm)
