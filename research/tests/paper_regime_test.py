"""The rules of the paper's own regime, on values by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from research import ascents
from research.paper_regime import (
    EXACTLY,
    Difference,
    claims,
    differences,
    ended,
    fall,
    outcome,
    table,
    yardstick,
)


def _run(rewards, exact, own=0.5, multiplier=0.0):
    steps = np.arange(1, len(rewards) + 1)
    last = np.array([len(rewards)])
    return {
        "reward/mean": (steps, np.array(rewards, float)),
        "discrepancy/mean": (steps, np.full(len(rewards), 2e-3)),
        "dual/multiplier": (steps, np.full(len(rewards), multiplier)),
        "eval/arithmetic/avg@4": (last, np.array([own])),
        "evaluation/arithmetic/avg@4": (last, np.array([exact])),
    }


_RISES = [0.2] * 4 + [0.6] * 4
_FALLS = [0.8] * 4 + [0.1] * 4


def test_one_yardstick_ends_runs_of_every_arm_and_grpos_own():
    runs = {
        "grpo": {0: _run(_RISES, 0.6), 1: _run(_FALLS, 0.1)},
        "dc_grpo": {0: _run(_FALLS, 0.1), 1: _run(_RISES, 0.5)},
    }
    # GRPO's means of four steps over two seeds: (0.2 + 0.8) / 2 = 0.5 at first, (0.6 + 0.1) / 2 =
    # 0.35 at the end; half of its best is 0.25. Relative to the same seed, seed 1 of dc_grpo would
    # not be told from its GRPO.
    assert yardstick(runs) == pytest.approx(0.25)
    assert ended(runs) == {"grpo": [1], "dc_grpo": [0]}
    # From a mean of 0.8 to one of 0.1; what rises alone falls by nothing.
    assert fall(_run(_FALLS, 0)) == pytest.approx(0.7) and fall(_run(_RISES, 0)) == 0


def test_welch_by_hand():
    runs = {"grpo": {0: _run(_RISES, 0.01)}, "grpo_shaken": {0: _run(_RISES, 0.05)}}
    runs["tis"] = {seed: _run(_RISES, score) for seed, score in enumerate((0.01, 0.02, 0.03))}
    found = differences(runs, EXACTLY)["tis"]
    # In %: means 2 and 3; variances 1 / 3 and 8 / 2: standard error sqrt(13 / 3), (13/3)^2 /
    # ((1/3)^2 / 2 + 4^2 / 1) = 1.17 degrees of freedom. Pooled variances would have three.
    error = math.sqrt(13 / 3)
    freedom = (13 / 3) ** 2 / ((1 / 3) ** 2 / 2 + 16)
    assert freedom == pytest.approx(1.17, abs=0.01)
    assert found.mean == pytest.approx(-1) and found.p == pytest.approx(
        2 * stats.t.sf(1 / error, freedom)
    )
    assert found.high == pytest.approx(-1 + stats.t.ppf(0.975, freedom) * error)


def test_baselines_are_pooled_and_holm_counts_the_arms():
    spread = (0.0, 0.01, 0.02)
    runs = {
        "grpo": {s: _run(_RISES, 0.5 + x) for s, x in enumerate(spread)},
        "grpo_shaken": {s: _run(_RISES, 0.7 + x) for s, x in enumerate(spread)},
        "exact": {s: _run(_RISES, 0.9 + x) for s, x in enumerate(spread)},
        "tis": {s: _run(_RISES, 0.6 + x) for s, x in enumerate(spread)},
    }
    found = differences(runs, EXACTLY)
    # GRPO alone would be 50 + 1, pooled it is 61; exact is at 91, TIS at 61.
    assert set(found) == {"exact", "tis"}
    assert found["exact"].mean == pytest.approx(30) and found["tis"].mean == pytest.approx(0)
    assert found["exact"].held and not found["tis"].held
    assert table(runs).count("\n") == 2 + 4


@pytest.mark.parametrize(
    ("low", "mean", "high", "said"),
    [
        (3, 20, 37, "the claim is reproduced"),
        (3, 15, 27, "open"),
        (-27, -15, -3, "open"),
        (-3, 20, 43, "open"),
        (-16, 1, 16, "neither help nor harm"),
        (-18, 0, 16, "open"),
        (-30, -18, -6, "a negative result"),
        (-30, -15, 0, "open"),
    ],
)
def test_what_an_outcome_is_said_to_mean(low, mean, high, said):
    assert outcome(Difference(mean, low, high, 0.5)).startswith(said)


def test_an_arm_is_compared_with_runs_of_its_own_seeds():
    """The arm has seeds 0 and 1, where GRPO and its replicate have a mean of 50; with seeds 2 and 3
    it would be 30.
    """
    runs = {
        "grpo": {s: _run(_RISES, x) for s, x in enumerate((0.4, 0.6, 0.0, 0.1))},
        "grpo_shaken": {s: _run(_RISES, x) for s, x in enumerate((0.45, 0.55, 0.1, 0.2))},
        "tis": {s: _run(_RISES, x) for s, x in enumerate((0.6, 0.8))},
    }
    assert differences(runs, EXACTLY)["tis"].mean == pytest.approx(70 - 50)
    # Seeds that the baseline lacks add nothing to it.
    runs["tis"][9] = _run(_RISES, 0.7)
    assert differences(runs, EXACTLY)["tis"].mean == pytest.approx(70 - 50)
    assert "| `tis` | 3, 4 | +20 (" in claims(runs)


def test_the_first_tables_scores_of_grpo_are_of_the_arms_seeds(monkeypatch):
    runs = {
        "grpo": {s: _run(_RISES, x) for s, x in enumerate((0.4, 0.6, 0.0, 0.9))},
        "dc_grpo": {s: _run(_RISES, x, multiplier=0.1) for s, x in enumerate((0.1, 0.2))},
    }
    monkeypatch.setattr(ascents, "read", lambda path: runs)
    monkeypatch.setattr(
        ascents, "ASCENTS", [one for one in ascents.ASCENTS if one.arm == "dc_grpo"][-1:]
    )
    assert ascents.ascents().splitlines()[-1].endswith("| 10 to 20 | 40 to 60 |")


def test_delta_before_a_fall_leaves_out_what_the_fall_did():
    # Means of four: 0.8, 0.625, 0.45, 0.275, 0.1; the third, of steps 3 to 6, is 0.35 below the
    # first.
    series = _run(_FALLS, 0)
    series["discrepancy/mean"] = (np.arange(1, 9), np.arange(1.0, 9.0))
    assert ascents.before_a_fall(series).tolist() == [1, 2, 3, 4, 5]
    assert len(ascents.before_a_fall(_run(_RISES, 0))) == 8
