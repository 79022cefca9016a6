"""Rewards of a batch: order, counts, time limit and budget."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.rewards.math.verifier import Verifier
from tests.rewards.planted_worker import descendants
from tests.support.waiting import HANGS_S, wait_until

_ROOT = Path(__file__).resolve().parents[3]
_HANGS = r"9^{9^{9^{9}}} x"
_RAISES = r"x \mod 0"


def _plant(monkeypatch, call):
    """Let verifiers make a call of the planted worker in place of each comparison."""
    monkeypatch.setattr(
        "dcmdp_jax.rewards.math.verifier.COMPARISON", "tests.rewards.planted_worker"
    )
    monkeypatch.setenv("PLANTED_CALL", call)


def _boxed(answer):
    return rf"so \boxed{{{answer}}}"


@pytest.fixture(scope="module")
def verifier():
    with Verifier(num_workers=2, timeout_s=0.8) as pool:
        yield pool


def test_literals_are_graded_without_a_worker():
    before = descendants(os.getpid())
    with Verifier(num_workers=1, timeout_s=1.0) as pool:
        grades = pool.grade(
            [
                _boxed("025"),
                _boxed("26"),
                "no answer",
                "Answer: 1,000",
                _boxed("105263157894736842"),
            ],
            ["25", "25", "25", "1000", "105263157894736848"],
        )
        np.testing.assert_array_equal(grades.rewards, np.array([1, 0, 0, 1, 0], np.float32))
        assert grades.rewards.dtype == np.float32
        assert (grades.errors, grades.timeouts, grades.unparsed) == (0, 0, 1)
        assert descendants(os.getpid()) == before


def test_rewards_keep_their_order_and_repeats(verifier):
    completions = [_boxed(f"{k % 7}+x") for k in range(40)]
    answers = [f"x+{k % 5}" for k in range(40)]
    grades = verifier.grade(completions, answers)
    np.testing.assert_array_equal(grades.rewards, [float(k % 7 == k % 5) for k in range(40)])
    assert (grades.errors, grades.timeouts, grades.unparsed) == (0, 0, 0)


def test_a_hanging_answer_costs_its_time_limit_and_nothing_else(verifier):
    grades = verifier.grade(
        [_boxed("x+1"), _boxed(_HANGS), _boxed(_RAISES), _boxed(_HANGS), "none"],
        ["1+x", "5x", "x+1", "5x", "1"],
    )
    np.testing.assert_array_equal(grades.rewards, [1, 0, 0, 0, 0])
    assert (grades.errors, grades.timeouts, grades.over_budget, grades.unparsed) == (1, 2, 0, 1)
    assert verifier.grade([_boxed("x+1")], ["1+x"]).rewards.tolist() == [1.0]


@pytest.mark.parametrize("asks", ["at once", "meanwhile", "late"])
def test_an_answer_over_its_limit_gets_one_reward_whenever_results_are_asked_for(asks):
    # About 0.15 s of processor time, eight times the limit. It ends by itself, long before any hang
    # would be noticed.
    completions = [_boxed(r"\sin(x)^2+\cos(x)^2+y")]
    answers = ["1+y"]
    with Verifier(num_workers=1, timeout_s=0.02) as pool:
        if asks != "at once":
            pool.begin(completions, answers)
            for _ in range(120 if asks == "meanwhile" else 3):
                pool.begin([], [])
                time.sleep(0.05 if asks == "meanwhile" else 2.0)  # the worker starts, then compares
        grades = pool.grade(completions, answers)
    assert (grades.rewards.tolist(), grades.timeouts) == ([0.0], 1)


@pytest.mark.parametrize("asks", ["at once", "meanwhile", "late"])
def test_an_answer_within_its_limit_is_rewarded_whenever_results_are_asked_for(monkeypatch, asks):
    # The planted worker sleeps for longer than the limit, which is processor time.
    _plant(monkeypatch, "sleep 0.6")
    completions = [_boxed("x+1")]
    answers = ["1+x"]
    with Verifier(num_workers=1, timeout_s=0.3) as pool:
        if asks != "at once":
            pool.begin(completions, answers)
            for _ in range(20):
                time.sleep(0.05 if asks == "meanwhile" else 0.1)
                pool.begin([], [])
        grades = pool.grade(completions, answers)
    assert (grades.rewards.tolist(), grades.timeouts) == ([1.0], 0)


def test_an_answer_that_waits_ends_by_the_clock(monkeypatch):
    _plant(monkeypatch, "sleep 20")
    monkeypatch.setattr("dcmdp_jax.rewards.math.verifier.WALL_SECONDS", 0.1)
    with Verifier(num_workers=1, timeout_s=0.3) as pool:
        grades = pool.grade([_boxed("x+1")], ["1+x"])  # rewarded, were it to wait
    assert (grades.rewards.tolist(), grades.timeouts) == ([0.0], 1)


def test_a_first_batch_without_answers_is_said_once_with_the_setting_that_reads_them(caplog):
    texts = ["#### 7", "the answer is 7.", "no idea"]
    answers = ["7", "7", "7"]
    with Verifier() as pool:
        assert pool.grade(texts, answers).unparsed == 3 and pool.found_answer("#### 7") is None
        pool.grade(texts, answers)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("none of the first 3 completions has an answer") and "2 have one" in said
    assert "answer_extraction=flexible" in said
    caplog.clear()
    with Verifier(extraction="flexible") as pool:
        assert pool.grade(texts, answers).rewards.tolist() == [1.0, 1.0, 0.0]
        assert pool.found_answer("#### 7") == "7"
        pool.grade(["none"], ["7"])
    assert caplog.records == []


def test_comparisons_run_before_results_are_read(monkeypatch, tmp_path):
    """All that was begun is compared before `grade` is called.

    Not only what the first idle worker was given.
    """
    log = tmp_path / "log"
    _plant(monkeypatch, f"log {log}")
    completions = [_boxed(f"{k}x+1") for k in range(2, 22)]
    answers = ["1+x"] * 20
    with Verifier(num_workers=1) as pool:
        pool.begin(completions, answers)
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 20, "20 calls")
        assert pool.grade(completions, answers).rewards.sum() == 20
    assert len(log.read_text().splitlines()) == 20


def test_a_batch_ends_with_its_budget_and_counts_what_was_undecided(caplog):
    # 40 answers of 600 s each on two workers would take over three hours.
    bombs = [_boxed(rf"{k}^{{9^{{9^{{9}}}}}} x") for k in range(2, 42)]
    completions = [*bombs, _boxed("7"), "none", bombs[0]]
    answers = [*["5x"] * 40, "7", "1", "5x"]
    with Verifier(num_workers=2, timeout_s=600.0, budget_s=1.0) as pool:
        for _ in range(2):
            grades = pool.grade(completions, answers)
            np.testing.assert_array_equal(grades.rewards, [*[0] * 40, 1, 0, 0])
            assert (grades.errors, grades.timeouts, grades.over_budget, grades.unparsed) == (
                0,
                0,
                41,
                1,
            )
    (warning,) = [
        record.getMessage() for record in caplog.records if "budget" in record.getMessage()
    ]
    assert warning.startswith(
        "41 of 43 answers were undecided after 1 s, the verifier's budget for a batch"
    )


def test_a_batch_without_budget_waits_for_every_answer():
    with Verifier(num_workers=2, timeout_s=0.3, budget_s=0) as pool:
        grades = pool.grade([_boxed(rf"{k}^{{9^{{9^{{9}}}}}} x") for k in range(2, 8)], ["5x"] * 6)
    assert (grades.timeouts, grades.over_budget) == (6, 0)


def test_workers_import_neither_jax_nor_flax():
    program = (
        "import sys; import dcmdp_jax.rewards.isolated_worker, dcmdp_jax.rewards.math.equivalence "
        "as e;e.equivalent('x+1', '1+x');print(sorted({'jax', 'flax', 'torch', 'transformers'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=_ROOT, capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_closed_verifier_says_so():
    pool = Verifier(num_workers=1, timeout_s=2.0)
    pool.grade([_boxed("x+1")], ["1+x"])
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.grade([_boxed("1")], ["1"])


def test_workers_that_can_not_start_close_the_verifier(monkeypatch):
    monkeypatch.setattr("dcmdp_jax.rewards.math.verifier.COMPARISON", "no_such_module")
    with Verifier(num_workers=2) as pool:
        with pytest.raises(
            RuntimeError, match="no verifier process could be started: ModuleNotFoundError"
        ):
            pool.grade([_boxed(f"x+{k}") for k in range(5)], ["1+x"] * 5)
        with pytest.raises(RuntimeError, match="closed"):
            pool.grade([_boxed("x+1")], ["1+x"])


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="num_workers = 0"):
        Verifier(num_workers=0)
    with pytest.raises(ValueError, match="timeout_s = 0"):
        Verifier(timeout_s=0)
    with pytest.raises(ValueError, match="budget_s = -1"):
        Verifier(budget_s=-1)
    with Verifier() as pool, pytest.raises(ValueError, match="2 completions and 1 answers"):
        pool.grade(["a", "b"], ["1"])
