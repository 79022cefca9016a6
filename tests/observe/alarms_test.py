"""Each alarm fires on what is planted in the metrics of a recorded run, and none on the run as it
is.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.observe.alarms import alarms
from dcmdp_jax.probe.columns.pairs import measure
from tests.support.sampled_columns import columns

_RECORDED = Path(__file__).parent / "clean_run_of_50_steps.jsonl"


def _clean():
    rows = [json.loads(line) for line in _RECORDED.read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step"}
    return {
        name: tuple(
            np.array(column)
            for column in zip(*((r["step"], r[name]) for r in rows if name in r), strict=True)
        )
        for name in names
    }


CLEAN = _clean()
STEPS = np.arange(1, 51)


def _named(**planted):
    """Alarms of the clean run with some metrics replaced; `/` is written `__`."""
    changed = {
        name.replace("__", "/"): (STEPS, np.broadcast_to(values, 50))
        for name, values in planted.items()
    }
    return [alarm.name for alarm in alarms(CLEAN | changed)]


def test_nothing_fires_over_a_clean_run_at_any_step():
    assert len(CLEAN["discrepancy/mean"][1]) == 50
    for end in range(1, 51):
        so_far = {
            name: (steps[steps <= end], values[steps <= end])
            for name, (steps, values) in CLEAN.items()
        }
        assert alarms(so_far) == []


def test_a_run_without_metrics_raises_nothing():
    assert alarms({}) == []
    assert (
        alarms(
            {
                "discrepancy/mean": (STEPS, np.full(50, np.nan)),
                "dual/tolerance": (STEPS, np.full(50, 1.0)),
            }
        )
        == []
    )


def test_updates_that_the_engine_does_not_hold_are_no_mismatch():
    rising = 0.002 * 1.15 ** np.arange(50)
    held = {"mismatch__sync_changed": 0.1, "discrepancy__mean": rising}
    assert _named(mismatch__sync_rounding=1.0, **held) == ["unseen_updates"]
    # An engine that gets the updates, or a discrepancy that does not grow, as that of rounding
    # alone.
    assert "unseen_updates" not in _named(mismatch__sync_rounding=0.1, **held)
    assert _named(mismatch__sync_rounding=1.0) == []


def test_completions_more_alike_than_chance_are_not_independent():
    assert _named(completion__identical_fraction=1.0, completion__identical_chance=0.01) == [
        "identical"
    ]
    # A policy that is sure of itself gives equal completions.
    assert _named(completion__identical_fraction=0.9, completion__identical_chance=0.9) == []


DELTA = CLEAN["discrepancy/mean"][1]
C = float(CLEAN["dual/tolerance"][1][-1])
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
    assert _named(discrepancy__mean=np.full(50, 1.6 * C), rollout__staleness_max=lag) == [
        "staleness"
    ]
    assert _named(rollout__staleness_max=lag) == []  # a lag that changes nothing
    # Measured apart, each has its own alarm: a discrepancy under the same weights is mismatch,
    # whatever the lag.
    apart = {
        "rollout__staleness_max": np.ones(50),
        "staleness__log_ratio_abs_mean": np.full(50, 0.19),
    }
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
        "mismatch__k1": found.k1 * rng.normal(1, 0.1, 50),
        "mismatch__k3": found.k3 * rng.normal(1, 0.1, 50),
        "mismatch__effective_sample_size": np.full(50, found.effective_sample_size),
    }
    if "top_p" in planted:
        assert _named(**series) == ["support"]
    missing = 1 - np.mean(np.exp(columns(**planted, noise=0.01).log_ratio))
    # The alarm's quantity is 1 - mean p / q, whatever was planted.
    assert found.k1 - found.k3 == pytest.approx(missing, abs=1e-9)


def test_other_weights_are_not_taken_for_cut_sampling():
    found = measure(columns(noise=0.3))
    assert abs(found.k1 - found.k3) < 0.02 < found.k1


def _kept(name, arm):
    """The five runs of an arm of a study, as alarms see them."""
    runs = {}
    packed = (Path(__file__).parents[2] / "research" / "kept" / name).read_bytes()
    for row in map(json.loads, gzip.decompress(packed).splitlines()):
        if row["arm"] == arm and "discrepancy/mean" in row:
            runs.setdefault(row["seed"], []).append(row)
    for rows in runs.values():
        names = {name for row in rows for name in row if "/" in name}
        columns = {
            name: [(row["step"], row[name]) for row in rows if name in row] for name in names
        }
        yield {
            name: tuple(np.array(x) for x in zip(*pairs, strict=True))
            for name, pairs in columns.items()
        }


def _spoken(series):
    """Alarm -> (first step at which a run raises it, text)."""
    found = {}
    for end in range(1, int(series["discrepancy/mean"][0][-1]) + 1):
        so_far = {
            name: (steps[steps <= end], values[steps <= end])
            for name, (steps, values) in series.items()
        }
        for alarm in alarms(so_far):
            found.setdefault(alarm.name, (end, alarm.text))
    return found


def test_five_runs_that_the_penalty_ended_speak_of_the_penalty_and_not_of_the_weights():
    """Completions of 200 tokens at lambda = 1: reward 0 from step 9 on, largest deltas of 0.9 to 1.

    The series have no share of the penalty, no k1, k3, effective sample size and no broken
    completions: `penalty` speaks by lambda times the largest delta alone, as soon as a rise can be
    told from the usual, and `support` and `retokenization` are silent.
    """
    runs = list(_kept("map_200tokens.jsonl.gz", "token_1"))
    assert len(runs) == 5 and not any("dual/penalty_share" in run for run in runs)
    for run in runs:
        spoken = _spoken(run)
        assert set(spoken) == {"mismatch", "penalty", "collapse"}
        assert spoken["penalty"][0] == 15 and "lambda = 1 " in spoken["penalty"][1]
        assert "method=grpo" in spoken["penalty"][1] and "higher" not in spoken["collapse"][1]
        # With the share, had it been kept, five steps are enough.
        share = {
            "dual/penalty_share": (
                run["discrepancy/mean"][0],
                np.full(len(run["discrepancy/mean"][0]), 0.2),
            )
        }
        assert _spoken(run | share)["penalty"][0] == 5
    # The same engine without a penalty.
    for run in _kept("map_200tokens.jsonl.gz", "grpo"):
        assert not {"penalty", "weight_sync"} & set(_spoken(run))


def test_penalty_by_its_share_and_by_a_lambda_that_moves_nothing():
    assert _named(dual__penalty_share=np.full(50, 0.11)) == ["penalty"]
    assert _named(dual__penalty_share=np.full(50, 0.09)) == []
    # Where no prompt has a signal, the penalty is the whole update: that is another problem.
    silent = np.where(STEPS % 3, 1.0, 0.5)
    assert _named(dual__penalty_share=np.ones(50), reward__all_equal_groups=silent) == []
    assert _named(dual__penalty_share=np.ones(50), reward__all_equal_groups=1.5 - silent) == [
        "penalty"
    ]
    # the last ten steps: 0.51 to 0.6
    flat = np.full(50, 1.1 * C)
    rising = 0.1 + 0.01 * STEPS
    steep = np.where(STEPS <= 40, 0.1, 0.1 + 0.01 * (STEPS - 40))  # 0.11 to 0.2
    assert _named(discrepancy__mean=flat, dual__multiplier=steep) == ["penalty"]
    assert _named(discrepancy__mean=flat * 0.8, dual__multiplier=steep) == []  # within the budget
    assert _named(discrepancy__mean=flat, dual__multiplier=rising) == []  # by less than half
    assert (
        _named(discrepancy__mean=np.where(STEPS <= 45, C, 0.9 * C), dual__multiplier=steep) == []
    )  # it follows
    small = {"discrepancy__mean": flat, "dual__multiplier": steep}
    assert _named(**small, dual__penalty_share=np.full(50, 0.009)) == []
    assert _named(**small, dual__penalty_share=np.full(50, 0.011)) == ["penalty"]


def test_a_jump_after_the_reward_fell_or_under_whole_penaltys_is_no_failed_sync():
    jump = {"discrepancy__mean": np.where(STEPS <= 44, DELTA, 10 * DELTA)}
    assert "weight_sync" in _named(**jump)
    # Delta rises at step 45; the reward fell at 42, or at 45 as it does where the engine has other
    # weights.
    for fell, spoken in ((42, False), (45, True)):
        found = _named(**jump, reward__mean=np.where(fell > STEPS, 0.6, 0.1))
        assert ("weight_sync" in found) is spoken, fell
    assert "weight_sync" in _named(**jump, reward__mean=np.full(50, -1.0))  # did not fall
    assert "weight_sync" not in _named(**jump, reward__mean=np.where(STEPS >= 42, -2.0, -1.0))
    for largest, spoken in ((0.4, True), (0.6, False)):
        found = _named(**jump, dual__multiplier=np.ones(50), discrepancy__max=np.full(50, largest))
        assert ("weight_sync" in found) is spoken and ("penalty" in found) is not spoken, largest


def test_collapse_ahead_needs_both_trends():
    rising = np.where(STEPS <= 30, DELTA, DELTA[:30].mean() * (1 + (STEPS - 30) / 10)) * 0.5
    falling = np.where(STEPS <= 30, 1.0, 1.0 - (STEPS - 30) / 25)
    assert _named(discrepancy__mean=rising, policy__entropy=falling) == ["collapse"]
    assert _named(discrepancy__mean=rising, policy__entropy=np.ones(50)) == []
    assert _named(discrepancy__mean=0.5 * DELTA[:30].mean(), policy__entropy=falling) == []


def test_displacement_that_confidence_hides():
    tail = np.where(
        STEPS <= 30, 0.1, 0.1 + 0.01 * (STEPS - 30)
    )  # 0.13 in the window's first five, 0.28 in its last
    still = {"discrepancy__mean": 0.5 * DELTA[:30].mean()}
    assert _named(displacement__abs_p95=tail, **still) == ["displacement"]
    assert _named(displacement__abs_p95=np.full(50, 0.3), **still) == []
    assert "displacement" not in _named(
        displacement__abs_p95=tail, discrepancy__mean=0.02 * C * STEPS
    )


def test_a_budget_on_a_quantile_is_compared_with_that_quantile():
    assert _named(discrepancy__mean=0.1 * C, discrepancy__spent=1.6 * C) == ["mismatch"]
    assert _named(discrepancy__mean=1.6 * C, discrepancy__spent=0.5 * C) == []


def _planted(length, **values):
    """Alarms of a run of `length` steps that has these metrics alone."""
    columns = {
        name.replace("__", "/"): np.broadcast_to(column, length) for name, column in values.items()
    }
    return [
        alarm.name
        for alarm in alarms({name: (np.arange(1, length + 1), x) for name, x in columns.items()})
    ]


def test_a_penalty_of_rounding_that_is_the_whole_update_is_said():
    # Case trl#3452 as it was recorded: float32 on both sides, every reward equal, lambda 0.1.
    found = {"reward__all_equal_groups": 1.0, "dual__penalty_share": 1.0, "dual__multiplier": 0.1}
    rounding = {"discrepancy__mean": [1.15e-8, 6.8e-9, 2.7e-9, 1.3e-9, 6.9e-10]}
    assert _planted(5, **found, **rounding) == ["rounding"]
    # One step may have no signal.
    assert _planted(1, **found, discrepancy__mean=1e-8) == []
    # bfloat16 against itself gives 1e-3: within three such floors it is rounding too, above them it
    # is mismatch.
    assert _planted(5, **found, discrepancy__mean=2e-3, mismatch__noise_floor=1e-3) == ["rounding"]
    assert _planted(5, **found, discrepancy__mean=4e-3, mismatch__noise_floor=1e-3) == []
    # GRPO and the exact engine penalty nothing; a prompt with a signal, a teacher or a KL term is a
    # gradient.
    assert _planted(5, **found | {"dual__penalty_share": 0.0}, **rounding) == []
    assert _planted(5, **found | {"reward__all_equal_groups": [1, 1, 1, 1, 0.9]}, **rounding) == []
    assert _planted(5, **found | {"dual__penalty_share": 1e-9}, **rounding) == []
    assert _planted(5, **found, **rounding, policy__kl=1e-4) == []


def test_completions_that_reach_the_limit_and_did_not_before_are_said():
    # Case ms-swift#9526 as it was recorded: a teacher that ends with another token.
    name = "completion__truncated_fraction"
    assert _planted(6, **{name: [0, 0.03, 0.19, 0.66, 0.97, 0.97]}) == ["truncation"]
    assert _planted(5, **{name: [0, 0.03, 0.19, 0.66, 0.97]}) == []
    # A policy that never ended, and one that ends again.
    assert _planted(6, **{name: 1.0}) == []
    assert _planted(6, **{name: [0, 0, 1, 1, 1, 0.2]}) == []


def test_every_alarm_says_what_to_do():
    planted = {
        "noise": {"discrepancy/mean": 1.6 * C, "mismatch/noise_floor": C},
        "mismatch": {"discrepancy/mean": 1.6 * C},
    }
    for name, values in planted.items():
        changed = {metric: (STEPS, np.full(50, value)) for metric, value in values.items()}
        (alarm,) = alarms(CLEAN | changed)
        assert alarm.name == name and alarm.text.endswith(".") and "\n" not in alarm.text
        assert any(word in alarm.text for word in ("Raise", "Repair", "Push", "Check", "Sample"))
