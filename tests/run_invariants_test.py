"""The invariants of a run's record see each kind of lie."""

import json

import pytest

from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.config.settings import to_dict
from tests.support.run_invariants import contradictions

_C = 0.25
_ETA = 2.0


def _step(step, multiplier, discrepancy):
    """A sound record of 4 prompts with 2 completions each, half of them right."""
    return {
        "step": step,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/all_equal_groups": 0.25,
        "reward/verifier_timeouts": 1,
        "reward/verifier_errors": 0,
        "reward/no_answer_fraction": 0.125,
        "completion/length_mean": 5.0,
        "completion/length_min": 2,
        "completion/length_max": 16,
        "completion/truncated_fraction": 0.125,
        "rollout/dropped_completions": 0,
        "rollout/padding_fraction": 0.5,
        "rollout/staleness_mean": 0.0,
        "rollout/staleness_max": 0.0,
        "discrepancy/mean": discrepancy,
        "discrepancy/p50": 0.1,
        "discrepancy/p99": 0.9,
        "discrepancy/max": 0.95,
        "discrepancy/completions_over_tolerance": 0.5,
        "mismatch/k1": -0.1,
        "mismatch/pearson": 0.9,
        "policy/ratio_min": 0.5,
        "policy/ratio_mean": 1.0,
        "policy/ratio_max": 2.0,
        "policy/loss": -0.1,
        "optimizer/skipped_updates": 0,
        "dual/multiplier": multiplier,
        "dual/tolerance": _C,
        "dual/violation": discrepancy - _C,
        "time/weight_sync": 1.0,
        "time/generate": 2.0,
        "time/verify": 0.5,
        "time/noise_floor": 0.0,
        "time/pack": 0.5,
        "time/step": 3.0,
        "time/total": 8.0,
        "displacement/abs_p50": 0.1,
        "displacement/abs_p95": 0.2,
        "displacement/abs_p99": 0.3,
        "throughput/tokens_per_second": 10.0,
        "throughput/sampled_tokens_per_second": 20.0,
    }


def _write(run_dir, *changes):
    """Three steps: lambda 0.125 + 2 x (0.375 - 0.25) = 0.375, + 2 x (0 - 0.25) = -0.125, cut to
    0.
    """
    from configs.demo import get_config

    config = get_config("debug")
    config.algorithm.tolerance_steps = 0
    config.algorithm.tolerance, config.algorithm.dual_learning_rate, config.algorithm.multiplier = (
        _C,
        _ETA,
        0.125,
    )
    config.training.prompts_per_step, config.rollout.group_size = 4, 2
    config.training.steps, config.evaluation.every_steps = 3, 2
    lines = {
        "0": {"step": 0, "eval/arithmetic/avg@2": 0.25, "eval/arithmetic/pass@2": 0.5},
        "1": _step(1, 0.125, 0.375),
        "2": _step(2, 0.375, 0.0),
        "3": _step(3, 0.0, 0.5),
        "2e": {"step": 2, "eval/arithmetic/avg@2": 0.5, "eval/arithmetic/pass@2": 0.5},
        "3e": {"step": 3, "eval/arithmetic/avg@2": 0.5, "eval/arithmetic/pass@2": 0.75},
    }
    for line, change in changes:
        lines[line] = None if change is None else {**lines[line], **change}
    (run_dir / "config.json").write_text(json.dumps(to_dict(from_config_dict(config.to_dict()))))
    (run_dir / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines.values() if line)
    )


def test_a_sound_record_has_no_contradiction(tmp_path):
    _write(tmp_path)
    assert contradictions(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "change", "said"),
    [
        # Summed over two devices.
        ("2", {"policy/ratio_min": 1.4}, "policy/ratio_min: above policy/ratio_mean at step 2"),
        ("2", {"policy/ratio_max": 0.9}, "policy/ratio_mean: above policy/ratio_max at step 2"),
        (
            "1",
            {"completion/length_min": 6},
            "completion/length_min: above completion/length_mean at step 1",
        ),
        ("1", {"completion/length_max": 17}, "completion/length_max: above the limit at step 1"),
        (
            "1",
            {"completion/length_max": 15},
            "completion/truncated_fraction: above 0 at step 1 where no completion",
        ),
        ("1", {"discrepancy/p50": 0.92}, "discrepancy/p50: above discrepancy/p99 at step 1"),
        ("1", {"discrepancy/p99": 0.96}, "discrepancy/p99: above discrepancy/max at step 1"),
        (
            "3",
            {"rollout/padding_fraction": 1.1},
            "rollout/padding_fraction: 1.1 at step 3, outside 0.0 .. 1.0",
        ),
        ("3", {"mismatch/pearson": "NaN"}, "mismatch/pearson: not finite at step 3"),
        ("3", {"policy/clip": 0.5}, "policy/clip: recorded at steps [3], expected [1, 2, 3]"),
        (
            "3",
            {"reward/mean": 0.55},
            "reward/mean: no whole number of completions, groups or tokens at step 3",
        ),
        ("3", {"reward/verifier_errors": 3}, "right and unjudged completions: above all at step 3"),
        ("3", {"reward/std": 0.4}, "reward/std squared: 0.16"),
        (
            "3",
            {"throughput/sampled_tokens_per_second": 10.0},
            "sampled tokens: 20.0 at step 3, expected 40.0",
        ),
        ("3", {"time/step": 5.0}, "the phases' times: above time/total at step 3"),
        ("3", {"dual/tolerance": 0.5}, "dual/tolerance: 0.5 at step 3, expected 0.25"),
        ("3", {"dual/violation": 0.5}, "dual/violation: 0.5 at step 3, expected 0.25"),
        ("3", {"dual/multiplier": 0.375}, "dual/multiplier: 0.375 at step 3, expected 0.0"),
        ("1", {"dual/multiplier": 0.25}, "dual/multiplier: 0.25 at step 1, expected 0.125"),
        ("2", {"dual/multiplier": 1.5}, "dual/multiplier: outside 0.0 .. 1.0 at step 2"),
        ("2", None, "reward/mean: recorded at steps [1, 3], expected [1, 2, 3]"),
        ("3e", None, "eval/arithmetic/avg@2: recorded at steps [0, 2], expected [0, 2, 3]"),
        (
            "3e",
            {"eval/arithmetic/pass@2": 0.25},
            "eval/arithmetic/avg@2: above eval/arithmetic/pass@2 at step 3",
        ),
    ],
)
def test_each_contradiction_is_found(tmp_path, line, change, said):
    _write(tmp_path, (line, change))
    assert any(found.startswith(said) for found in contradictions(tmp_path)), contradictions(
        tmp_path
    )


_REWARDS = {
    "reward/own/mean": -3.0,
    "reward/own/std": 2.0,
    "reward/own/failed": 8,
    "reward/source/a/mean": -1.5,
}


def _with_own_reward(tmp_path, *changes):
    own = [(line, _REWARDS | {"reward/mean": -1.5, "reward/std": 0.75}) for line in "123"]
    _write(tmp_path, *own, *changes)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rewards"]["functions"] = "math,own.py:own"
    (tmp_path / "config.json").write_text(json.dumps(config))
    return contradictions(tmp_path)


def test_a_users_reward_may_be_any_number_and_missing_where_it_gave_none(tmp_path):
    assert _with_own_reward(tmp_path) == []
    lines = (tmp_path / "metrics.jsonl").read_text().replace('"reward/own/mean": -3.0, ', "", 1)
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert contradictions(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward/own/std": -1.0}, "reward/own/std: -1.0 at step 2, outside 0.0 .. inf"),
        ({"reward/own/failed": 9}, "reward/own/failed: above all completions at step 2"),
        ({"reward/own/median": 0.5}, "reward/own/median: observe/metric_names.py does not know it"),
    ],
)
def test_contradictions_of_a_users_reward_are_found(tmp_path, change, said):
    assert said in _with_own_reward(tmp_path, ("2", change))
