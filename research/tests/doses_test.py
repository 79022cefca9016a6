"""The study of doses: every run starts from the same bits, and only whole seeds are kept."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from configs.studies import doses as study_file
from research import doses
from research.kept_studies import KEPT
from research.paper_regime import smoothed
from research.studies.results import Estimate, read_kept_metrics, write_kept_metrics
from research.studies.sweep import arm_values, load_study

_ROOT = Path(__file__).resolve().parents[2]
_WEIGHTS = "c17c0313becba9c405e66a263d5614eb70e49c0c4ca4b972336af05ea46bed51"


def test_every_run_starts_from_the_kept_policy_and_its_bits_are_these():
    weights = (_ROOT / study_file.START / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == _WEIGHTS
    for argument in ("", ":pilots", ":late", ":late_pilots"):
        arms = load_study(f"{doses.COARSE.study}{argument}").arms
        assert {arm_values(arm)["model.path"] for arm in arms.values()} == {study_file.START}


def test_c_is_a_quarter_above_the_pilots_median_discrepancy_of_four_steps():
    pilots = read_kept_metrics(KEPT / "doses_pilots.jsonl.gz", None)["grpo"]
    assert sorted(pilots) == [100, 101, 102]
    medians = [float(np.median(series["discrepancy/mean"][1])) for series in pilots.values()]
    assert all(len(series["discrepancy/mean"][1]) == 4 for series in pilots.values())
    assert float(f"{np.median(medians):.3g}") == study_file.HEALTHY
    arms = load_study(doses.COARSE.study).arms
    own_c = {
        name: arm_values(arms[name])["algorithm.tolerance"]
        for name in ("dc_own_c", "dc_from_0", "dc_small")
    }
    assert own_c == dict.fromkeys(own_c, pytest.approx(1.25 * study_file.HEALTHY))


def test_the_doses_in_a_real_models_range_are_those_of_the_pilots_gradients():
    rows_by_run = json.loads((KEPT / "doses_pilot_gradients.json").read_text(encoding="utf-8"))
    ratios = [
        row["penalty"] / row["advantage"]
        for rows in rows_by_run.values()
        for row in rows
        if row["step"] in (1, 2, 4, 8, 16)
    ]
    assert len(ratios) == 15
    page = " ".join((KEPT.parent / "doses.md").read_text(encoding="utf-8").split())
    for dose in (0.003, 0.01, 0.03, 0.1):
        # The penalty's gradient is proportional to lambda; the pilots had 0.01.
        scaled = [100 * ratio * dose / 0.01 for ratio in ratios]
        assert (
            f"| {dose:g} | {np.median(scaled):.2g}% | {min(scaled):.2g} to {max(scaled):.2g}% |"
            in page
        )
    # A real model's are 0.13 to 0.59% at lambda 0.1.
    assert f"`token_0.001` ({10 * np.median(ratios):.2g}%) was added" in page
    in_range = [
        dose
        for dose in (0.001, 0.003, 0.005, 0.01)
        if 0.0013 <= np.median(ratios) * dose / 0.01 <= 0.0059
    ]
    assert in_range == [0.001]


def _late_pilots():
    """(learning rate, engine) -> the mean rewards of four steps of each pilot, by seed."""
    pilots = read_kept_metrics(KEPT / "doses_late_pilots.jsonl.gz", None)
    means_by_setting = {}
    for arm, runs in pilots.items():
        engine, rate = arm.split("_")
        assert sorted(runs) == list(study_file.PILOT_SEEDS)
        means_by_setting[float(rate), engine] = [smoothed(runs[seed]) for seed in sorted(runs)]
    return pilots, means_by_setting


def test_the_pilots_rule_chooses_the_learning_rate_of_late_collapse():
    """The highest rate at which every run without mismatch learns and none collapses, and GRPO
    learns, has its best at step 16 or later, and collapses in one of three at least.
    """
    _, means_by_setting = _late_pilots()

    def learns(means):
        return means.max() >= means[0] + 0.05

    def collapses(means):
        return means[-1] < means.max() / 2

    qualifying_rates = [
        rate
        for rate in study_file.LATE_RATES
        if all(learns(one) and not collapses(one) for one in means_by_setting[rate, "exact"])
        # Means of four steps: the first stands at step 4.
        and any(
            learns(one) and collapses(one) and np.argmax(one) + 4 >= 16
            for one in means_by_setting[rate, "grpo"]
        )
    ]
    assert qualifying_rates[0] == study_file.LATE_RATE
    page = (KEPT.parent / "doses.md").read_text(encoding="utf-8")
    for (rate, engine), runs in means_by_setting.items():
        ends = (", ".join(f"{value:.2f}" for value in of_each) for of_each in _ends(runs))
        first, best, last = ends
        name = {"grpo": "int4", "exact": "zero-mismatch"}[engine]
        text = f"{rate:.0e}".replace("e-0", "e-")
        collapsed = sum(collapses(one) for one in runs)
        assert f"| {text} | {name} | {first} | {best} | {last} | {collapsed} of 3" in page


def _ends(runs):
    return ([one[0] for one in runs], [one.max() for one in runs], [one[-1] for one in runs])


def test_c_of_late_collapse_is_a_quarter_above_its_pilots_median_discrepancy():
    pilots, _ = _late_pilots()
    runs = pilots[f"grpo_{study_file.LATE_RATE:g}"].values()
    medians = [float(np.median(series["discrepancy/mean"][1][:4])) for series in runs]
    assert float(f"{np.median(medians):.3g}") == study_file.LATE_HEALTHY
    arms = load_study(doses.LATE.study).arms
    for name in ("dc_own_c", "dc_from_0"):
        c = arm_values(arms[name])["algorithm.tolerance"]
        assert c == pytest.approx(1.25 * study_file.LATE_HEALTHY)


def test_the_smaller_dose_of_late_collapse_alone_is_in_a_real_models_range():
    rows_by_run = json.loads((KEPT / "doses_late_pilot_gradients.json").read_text(encoding="utf-8"))
    rows = [row for rows in rows_by_run.values() for row in rows]
    assert [row["step"] for row in rows] == [1, 2, 4, 8, 16] * 3
    page = " ".join((KEPT.parent / "doses.md").read_text(encoding="utf-8").split())
    # The pilots had 0.01.
    ratios = [100 * row["penalty"] / row["advantage"] for row in rows]
    small = [0.3 * ratio for ratio in ratios]
    assert (
        f"at lambda 0.003 median {np.median(small):.2g}%, {min(small):.2g} to {max(small):.2g}% of "
        f"15; at 0.01 {np.median(ratios):.2g}%, {min(ratios):.2g} to {max(ratios):.2g}%" in page
    )
    assert 0.13 <= np.median(small) <= 0.59 < np.median(ratios)


def _runs(seeds_by_arm):
    last = np.array([1])
    return {
        arm: {seed: {"reward/mean": (last, np.array([seed / 8]))} for seed in seeds}
        for arm, seeds in seeds_by_arm.items()
    }


def test_a_seed_that_an_arm_lacks_is_no_whole_seed():
    runs = _runs({"grpo": [20, 21, 22], "tis": [20, 22]})
    assert doses.whole_seeds(runs, ["grpo", "tis"]) == [20, 22]
    assert doses.whole_seeds(runs, ["grpo", "tis", "exact"]) == []
    kept = doses.only_seeds(runs, [20, 22])
    assert {arm: sorted(seeds) for arm, seeds in kept.items()} == {
        "grpo": [20, 22],
        "tis": [20, 22],
    }


def test_whole_seeds_of_another_checkout_are_kept_beside_those_there_and_cut_ones_are_not(
    tmp_path, monkeypatch
):
    arms = list(load_study(doses.COARSE.study).arms)
    here = tmp_path / "here.jsonl.gz"
    there = tmp_path / "there.jsonl.gz"
    write_kept_metrics(here, _runs(dict.fromkeys(arms, [21])))
    more = _runs(dict.fromkeys(arms, [20, 22]))
    del more["centered"][22]
    write_kept_metrics(there, more)
    monkeypatch.setattr(doses, "COARSE", dataclasses.replace(doses.COARSE, metrics=here))
    # The multiplier's replay is another test's.
    monkeypatch.setattr(doses, "check_kept", lambda path, study: None)
    assert doses.main(["doses", f"--keep={there}"]) == 0
    assert {
        arm: sorted(seeds) for arm, seeds in read_kept_metrics(here, None).items()
    } == dict.fromkeys(arms, [20, 21])


def test_whole_seeds_alone_are_in_the_kept_metrics():
    if doses.COARSE.metrics.exists():
        runs = read_kept_metrics(doses.COARSE.metrics, None)
        seeds = doses.whole_seeds(runs, list(load_study(doses.COARSE.study).arms))
        assert {arm: sorted(of_arm) for arm, of_arm in runs.items()} == dict.fromkeys(runs, seeds)
        # Two processes work from both ends: what is missing lies in between.
        missing = sorted({*study_file.SEEDS} - {*seeds})
        assert set(seeds) <= {*study_file.SEEDS}
        if missing:
            assert missing == list(range(missing[0], missing[-1] + 1))


def _scored(own, exact):
    last = np.array([32])
    return {
        "eval/arithmetic/avg@4": (last, np.array([own])),
        "evaluation/arithmetic/avg@4": (last, np.array([exact])),
    }


def test_a_difference_is_to_the_mean_of_both_baselines_of_the_same_seed():
    runs = {
        "grpo": {20: _scored(0.2, 0.4), 21: _scored(0.6, 0.5)},
        "grpo_shaken": {20: _scored(0.4, 0.6), 21: _scored(0.4, 0.7)},
        "dc_small": {20: _scored(0.2, 0.6), 21: _scored(0.5, 0.9)},
    }
    # Exact: 60 - 50 and 90 - 60, mean 20, half width t(1) x 10; own: 20 - 30 and 50 - 50.
    found = doses.differences(runs, 12.0)
    exact, own = (found["dc_small", heading] for heading in doses.PRIMARY)
    assert exact.points.mean == pytest.approx(20) and exact.points.half_width == pytest.approx(
        127.06, abs=0.01
    )
    assert own.points.mean == pytest.approx(-5)
    # One degree of freedom: p = 1 - 2 / pi x atan(20 / 10).
    assert exact.p == pytest.approx(1 - 2 / np.pi * np.arctan(2)) and not exact.holds


def test_holm_counts_both_engines():
    """p is 0.034 by the exact engine: it would hold alone, and does not beside the own engine's
    0.92.
    """
    rng = np.random.default_rng(0)
    noise = rng.normal(size=40)
    noise -= noise.mean()

    def shifted(t):
        """40 differences whose t statistic is t."""
        return noise + t * noise.std(ddof=1) / np.sqrt(40)

    # p 0.92 and 0.034
    own = shifted(0.1)
    exact = shifted(2.2)
    base = {s: _scored(0.5, 0.5) for s in range(40)}
    arm = {s: _scored(0.5 + own[s] / 100, 0.5 + exact[s] / 100) for s in range(40)}
    found = doses.differences({"grpo": base, "grpo_shaken": base, "arm": arm}, 12.0)
    assert (
        0.025 < found["arm", doses.PRIMARY[0]].p < 0.05 and not found["arm", doses.PRIMARY[0]].holds
    )


@pytest.mark.parametrize(
    ("mean", "half_width", "holds", "verdict"),
    [
        (9, 4, True, "helps"),
        (-9, 4, True, "harms"),
        (4, 7, False, "neither"),
        (-4, 7, False, "neither"),
        (6, 7, False, "open"),
        (-6, 7, False, "open"),
        (0, 12.5, False, "open"),
    ],
)
def test_what_the_rule_says(mean, half_width, holds, verdict):
    points = Estimate(mean=mean, half_width=half_width, values={})
    assert doses.DoseDifference(points=points, p=0.5, holds=holds, margin=12).verdict == verdict


def _run(rewards, deltas, multipliers, *, own=0.5, exact=0.25):
    steps = np.arange(1, len(rewards) + 1)
    return _scored(own, exact) | {
        "reward/mean": (steps, np.array(rewards)),
        "discrepancy/mean": (steps, np.array(deltas)),
        "dual/multiplier": (steps, np.array(multipliers)),
    }


def test_the_secondary_table_by_hand():
    """The bar is 0.4, half of GRPO's best step; means of four steps stand at their last step."""
    learns = [0.1] * 4 + [0.8] * 8
    steady = _run(learns, [0.004] * 12, [0.0] * 12)
    # Means 0.1 0.275 0.45 0.625 0.8 0.625 0.45 0.275 0.1: below the bar at step 11, after it was
    # above. 0.25 below the peak at the seventh mean, so that nine deltas are before the fall.
    falls = _run([0.1] * 4 + [0.8] * 4 + [0.1] * 4, [0.002] * 9 + [1.0] * 3, [0.1] * 11 + [0.3])
    rewards = [0.8] * 4 + [0.1] * 4 + [0.8] * 4
    dips = _run(rewards, [0.002] * 12, [0.1] * 12, own=0.7, exact=0.45)
    base = {20: steady, 21: steady}
    runs = {"grpo": base, "grpo_shaken": base, "dc_small": {20: falls, 21: dips}}
    table = doses.text(runs, 12.0)
    assert "| `grpo` | 25.0 | 50.0 | 0 | - | 0 of 0 | 0.800 | 4.00 | 0 to 0 | 0 |" in table
    # The other's means: 0.8 0.625 0.45 0.275 0.1 0.275 ...: below at step 7, and back.
    assert "| `dc_small` | 35.0 | 60.0 | 1 | 9 | 1 of 2 | 0.800 | 2.00 | 0.1 to 0.3 | 1 |" in table
    assert "The bar: mean reward of four steps 0.400." in table
    # 0 and 20 points: t(1) is 1, and p 1 - 2 / pi x atan(1).
    assert "| `dc_small` | 2 | +10.0 ± 127.1 | 0.5 | +10.0 ± 127.1 | 0.5 | open |" in table


def test_no_table_before_every_seed_is_there(tmp_path):
    arms = list(load_study(doses.COARSE.study).arms)
    seeds = list(study_file.SEEDS)
    setting = dataclasses.replace(doses.COARSE, metrics=tmp_path / "doses.jsonl.gz")
    assert doses.read_complete(setting) is None
    runs = _runs(dict.fromkeys(arms, seeds))
    write_kept_metrics(setting.metrics, runs)
    assert len(doses.read_complete(setting)["grpo"]) == 40
    del runs["centered"][59]
    write_kept_metrics(setting.metrics, runs)
    assert doses.read_complete(setting) is None
