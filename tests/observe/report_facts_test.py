"""Facts and warnings of a run by hand."""

import dataclasses
import math

import numpy as np
import pytest

from dcmdp_jax.observe.metrics_io import without_placeholder
from dcmdp_jax.observe.report import (
    RecordedRun,
    describe_discrepancy,
    facts,
    read_run,
    verdict,
    warnings,
)


def _series(values, first=1):
    values = np.array(values, np.float64)
    return np.arange(first, first + len(values)), values


def _texts(facts):
    return [dataclasses.astuple(fact) for fact in facts]


def _run(series, **config):
    return RecordedRun(label="run", series=series, config=config, held_out=[], starts=[], nodes={})


def _facts_named(name, series):
    return [fact for fact in facts(_run(series)) if fact.name == name]


def test_facts_by_hand():
    series = {
        "reward/mean": _series([0.25, 0.75, *[0.5] * 16, 0.5, 1.0]),
        "eval/math/pass@4": _series([0.5], 0),
        "eval/math/avg@4": (np.array([0, 10, 20]), np.array([0.25, 0.75, 0.5])),
        "discrepancy/mean": _series([0.005, 0.003, 0.0037, 0.004]),
        "dual/tolerance": _series([0.0037] * 4),
        "dual/multiplier": _series([0.1, 0.3, 0.2, 0.2, 0.4]),
        "mismatch/noise_floor": (np.array([1, 17]), np.array([0.001, 0.002])),
        "throughput/tokens_per_second": _series([10.0, 100.0, 120.0]),
        "time/total": _series([60.0, 2.0, 1.0]),
    }
    run = _run(series, **{"rollout.engine": "vllm", "rollout.precision": "fp8", "model.path": "m"})
    assert _texts(facts(run)) == [
        ("Training steps", "20", ""),
        # Two of twenty steps at either end, not the single noisy first and last.
        ("Training reward", "0.500 → 0.750", "mean of first and last 2 steps"),
        # Points are percentage points of last over first: neither the ratio (100%) nor best over
        # first (50).
        (
            "Validation math/avg@4",
            "25.0% → 50.0%",
            "+25.0 points from step 0 to 20; best 75.0% at step 10",
        ),
        (
            "Validation math/pass@4",
            "50.0% → 50.0%",
            "+0.0 points from step 0 to 0; best 50.0% at step 0",
        ),
        # (0.005 + 0.003 + 0.0037 + 0.004) / 4. A mean that equals c is within the budget: two of
        # four, not three.
        ("Mean discrepancy", "0.003925", "tolerance c = 0.0037, exceeded in 50.0% of steps"),
        ("Noise floor", "0.002", "the engine against itself, last measurement"),
        ("Lambda, lowest and highest", "0.1 to 0.4", "rose 2 times, fell 1 times; last 0.4"),
        ("Throughput", "100 tokens/s", "median step; 1:03 in training steps"),
        ("Engine", "vllm", "precision fp8"),
        ("Started from", "m", ""),
    ]
    # Up to step 10 the score was at its best, and the later noise floor was not measured.
    before = {fact.name: fact.value for fact in facts(_run(series).until(10))}
    assert (before["Training steps"], before["Validation math/avg@4"]) == ("10", "25.0% → 75.0%")
    assert before["Noise floor"] == "0.001"


def test_what_each_replica_did_and_where(tmp_path):
    """A replica that moved is counted over both of its nodes; one that a synced version did not ask
    has zeros.
    """
    series = {
        "replica/0/tokens": _series([100, 1900]),
        "replica/0/seconds": _series([1.0, 60.0]),
        "replica/0/restarts": _series([0, 0]),
        "replica/1/tokens": _series([50, 0]),
        "replica/1/seconds": _series([2.0, 0.0]),
        "replica/1/restarts": _series([0, 2]),
    }
    for replica, nodes in enumerate(
        (["10.0.0.2 (ab)"], ["10.0.0.3 (cd)", "10.0.0.3 (cd)", "10.0.0.4 (ef)"])
    ):
        (tmp_path / "vllm" / str(replica)).mkdir(parents=True)
        (tmp_path / "vllm" / str(replica) / "nodes.txt").write_text(
            "".join(f"{node}\n" for node in nodes)
        )
    run = dataclasses.replace(read_run(tmp_path, without_metrics=True), series=series)
    assert _texts(fact for fact in facts(run) if fact.name.startswith("Replica")) == [
        ("Replica 0", "2,000 tokens", "1:01 at work, 0 restarts; on 10.0.0.2 (ab)"),
        ("Replica 1", "50 tokens", "0:02 at work, 2 restarts; on 10.0.0.3 (cd), 10.0.0.4 (ef)"),
    ]
    (tmp_path / "one" / "vllm").mkdir(parents=True)
    (tmp_path / "one" / "vllm" / "nodes.txt").write_text("here (ab)\n")
    assert read_run(tmp_path / "one", without_metrics=True).nodes == {"0": ["here (ab)"]}


def test_share_over_tolerance_compares_the_same_steps():
    series = {
        "discrepancy/mean": (np.array([1, 2, 3]), np.array([9.0, 1.0, math.nan])),
        "dual/tolerance": (np.array([2, 3]), np.array([2.0, 2.0])),
    }
    assert _texts(facts(_run(series)))[1] == (
        "Mean discrepancy",
        "5",
        "tolerance c = 2, exceeded in 0.0% of steps",
    )


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (0, "above the tolerance c in 3 of 5 steps"),
        (2, "above the tolerance c in 1 of 3 steps"),
        (5, "from 3 to 4 (first and last step)"),
    ],
)
def test_steps_that_c_is_measured_on_are_not_held_against_the_setting_in_its_place(measured, said):
    """The setting is 1, for the first two steps; then c = 4, which the last step meets."""
    series = {
        "discrepancy/mean": _series([3, 3, 3, 5, 4]),
        "dual/tolerance": _series([1, 1, 4, 4, 4]),
    }
    assert describe_discrepancy(without_placeholder(series, measured)).endswith(said)


def test_what_overlap_won_is_of_a_median_step_and_says_who_waits():
    """Medians over three steps, of which the first compiles: 3 + 2 seconds of work in 3.2, so 1.8
    are won.
    """
    seconds = {
        "generate": 2.5,
        "verify": 0.4,
        "pack": 0.1,
        "weight_sync": 0.2,
        "step": 1.8,
        "total": 3.2,
    }
    seconds |= {"wait": 1.2, "engine_idle": 0.2, "overlap": 1.8}
    series = {
        f"time/{name}": (np.arange(1, 4), np.array([99.0, x, x])) for name, x in seconds.items()
    }
    [fact] = _facts_named("Overlap won", series)
    assert fact.value == "1.8 s a step"
    assert fact.details == (
        "a step with 3 s of sampling and 2 s of training takes 3.2 s; the trainer waits 1.2 s, "
        "the sampler 0.2 s"
    )
    assert _facts_named("Overlap won", {"time/total": series["time/total"]}) == []


def test_what_was_not_recorded_is_no_fact():
    steps, score = facts(_run({"eval/a/avg@8": _series([0.5], 0)}))
    assert (steps.name, steps.value) == ("Training steps", "0")
    assert score.name == "Validation a/avg@8"
    unmeasured = facts(
        _run({"discrepancy/mean": _series([0.5]), "throughput/tokens_per_second": _series([2.0])})
    )
    assert _texts(unmeasured[1:]) == [
        ("Mean discrepancy", "0.5", "no tolerance c yet"),
        ("Throughput", "2 tokens/s", "median step; - in training steps"),
    ]


_HEALTHY = {
    "reward/mean": _series([0.5] * 10),
    "completion/truncated_fraction": _series([0.9] * 9 + [0.5]),
    "reward/verifier_timeouts": _series([0.0] * 10),
    "optimizer/skipped_updates": _series([0.0] * 10),
    "discrepancy/mean": _series([0.004] * 10),
    "dual/tolerance": _series([0.0037] * 10),
    "mismatch/noise_floor": _series([0.001]),
    "dual/multiplier": _series([0.1 + 0.001 * step for step in range(10)]),
}


def test_a_healthy_run_has_no_warnings():
    assert warnings(_HEALTHY) == []


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        (
            "completion/truncated_fraction",
            [0.0] * 9 + [0.75],
            "75.0% of the last completions were cut",
        ),
        ("reward/verifier_timeouts", [0, 2, 1], "ran out of time on 3 answers"),
        ("reward/verifier_errors", [0, 2], "failed on 2 answers"),
        ("reward/verifier_over_budget", [0, 4, 1], "time for a batch ran out on 5 answers"),
        ("optimizer/skipped_updates", [1, 0, 1], "2 optimizer updates were skipped"),
        (
            "reward/all_equal_groups",
            [0.2] * 9 + [0.95],
            "In 95.0% of the last prompts all completions got one reward",
        ),
        ("mismatch/noise_floor", [0.005], "c = 0.0037 is below the noise floor 0.005"),
        ("dual/multiplier", [0.8] * 4 + [1.0] * 6, "Lambda stayed at 1 over the last 6 steps"),
        ("policy/loss", [0.1, math.nan], "not finite were recorded for policy/loss"),
    ],
)
def test_each_warning(name, values, text):
    (warning,) = warnings({**_HEALTHY, name: _series(values)})
    assert text in warning


def test_a_fixed_multiplier_or_a_met_budget_is_not_a_cap():
    assert warnings({**_HEALTHY, "dual/multiplier": _series([0.0] * 10)}) == []
    met = {
        **_HEALTHY,
        "discrepancy/mean": _series([0.003] * 10),
        "dual/multiplier": _series([0.5] * 4 + [1.0] * 6),
    }
    assert warnings(met) == []


def test_where_the_gap_lies_is_of_the_last_step_that_looked():
    names = {"decoding_share": [0.5, 0.25], "decoding": [1.0, 0.001], "one_pass": [1.0, 0.003]}
    series = {
        f"mismatch/leg_{name}": (np.array([1, 17]), np.array(values))
        for name, values in names.items()
    }
    [fact] = _facts_named("Mismatch from decoding", series)
    # A share of -0.0004 is no "-0%".
    none = series | {"mismatch/leg_decoding_share": (np.array([1]), np.array([-0.0004]))}
    [no_share] = _facts_named("Mismatch from decoding", none)
    assert no_share.value == "0.0%"
    assert fact.value == "25.0%"
    assert fact.details == (
        "step 17: mean |p - q| 0.001 from decode to prefill, 0.003 from prefill to the trainer"
    )
    assert _facts_named("Mismatch from decoding", {}) == []


def test_the_verdict_on_a_supervised_run_names_no_engine():
    series = {"policy/loss": ([1, 2], [1.5, 1.25]), "eval/rows/loss": ([0, 2], [0.75, 0.5])}
    series = {name: tuple(map(np.array, both)) for name, both in series.items()}
    config = {
        "algorithm.loss": "likelihood",
        "model.path": "m",
        "rollout.engine": "local",
        "rollout.precision": "exact",
    }
    said = verdict(_run(series, **config))
    # A loss is no share: not "from 75% to 50%".
    assert said == {
        "trained": "2 supervised steps of m",
        "score": "validation rows/loss from 0.75 to 0.5",
    }
