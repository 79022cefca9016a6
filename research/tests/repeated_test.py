"""A run that stands in two kept studies is named on a page; a copy is found whatever it is
called.
"""

import numpy as np

from research import long_tables, paper_regime, repeated
from research.kept_studies import KEPT

_PAGES = KEPT.parent


def _run(first_reward):
    steps = np.arange(1, 17)
    rewards = np.full(16, 0.5)
    rewards[0] = first_reward
    return {
        "reward/mean": (steps, rewards),
        "discrepancy/mean": (steps, 1e-3 * np.ones(16)),
        "policy/entropy": (steps, np.ones(16)),
    }


def test_a_copy_is_found_in_another_study_and_under_another_seed_and_equal_arms_of_a_seed_are_none():
    original = _run(0.25)
    other = _run(0.5)
    studies = {
        "old": {"grpo": {0: original, 1: other}},
        # The same run, longer names and its seed changed; and an arm that differs from another
        # later on.
        "new": {"baseline": {7: original}, "grpo": {3: _run(0.75)}, "shaken": {3: _run(0.75)}},
    }
    pairs = repeated.repeated_runs(studies)
    assert pairs == [(("old", "grpo", 0), ("new", "baseline", 7))]
    renumbered = {"old": {"grpo": {0: original, 1: original}}}
    assert repeated.repeated_runs(renumbered) == [(("old", "grpo", 0), ("old", "grpo", 1))]


def test_a_run_that_differs_in_one_bit_of_its_first_steps_is_another():
    changed = _run(0.25)
    changed["discrepancy/mean"][1][7] = np.nextafter(1e-3, 1)
    assert (
        repeated.repeated_runs({"old": {"grpo": {0: _run(0.25)}}, "new": {"grpo": {0: changed}}})
        == []
    )


def test_every_run_of_two_kept_studies_is_in_the_table():
    assert (_PAGES / "tables" / "repeated.txt").read_text(encoding="utf-8") == repeated.text()


def test_late_collapse_says_how_many_of_its_runs_were_known_and_what_the_others_say():
    page = " ".join((_PAGES / "paper_regime.md").read_text(encoding="utf-8").split())
    runs = long_tables.read(KEPT / "paper_regime.jsonl.gz")
    known = paper_regime.known_runs()
    # Ten of GRPO and of the exact engine, five of the replicate, TIS and score centering.
    assert {arm: len(seeds) for arm, seeds in known.items()} == {
        "grpo": 10,
        "exact": 10,
        "grpo_shaken": 5,
        "tis": 5,
        "centered": 5,
    }
    total = sum(len(seeds) for seeds in runs.values())
    assert f"{sum(map(len, known.values()))} of its {total} runs" in page
    fresh = paper_regime.fresh(runs)
    assert (len(fresh["grpo"]), len(fresh["grpo_shaken"]), len(fresh["dc_grpo"])) == (10, 15, 20)
