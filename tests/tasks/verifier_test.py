"""The pool of verifier processes: order, counts, time limits, deaths, and what outlives what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.tasks.verifier import Verifier

_ROOT = Path(__file__).resolve().parents[2]
_HANGS = r"9^{9^{9^{9}}} x"
_RAISES = r"x \mod 0"


def _boxed(answer: str) -> str:
    return rf"so \boxed{{{answer}}}"


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(num_workers=2, timeout_s=1.5) as pool:
        yield pool


def test_literals_are_graded_without_a_worker() -> None:
    with Verifier(num_workers=1, timeout_s=1.0) as pool:
        grades = pool.grade(
            [_boxed("025"), _boxed("26"), "no answer", "Answer: 1,000", _boxed("105263157894736842")],
            ["25", "25", "25", "1000", "105263157894736848"],
        )
        np.testing.assert_array_equal(grades.rewards, np.array([1, 0, 0, 1, 0], np.float32))
        assert grades.rewards.dtype == np.float32
        assert (grades.errors, grades.timeouts, grades.unparsed) == (0, 0, 1)
        assert pool.worker_pids == ()


def test_rewards_keep_their_order_and_repeats(verifier: Verifier) -> None:
    completions = [_boxed(f"{k % 7}+x") for k in range(40)]
    answers = [f"x+{k % 5}" for k in range(40)]
    grades = verifier.grade(completions, answers)
    np.testing.assert_array_equal(grades.rewards, [float(k % 7 == k % 5) for k in range(40)])
    assert (grades.errors, grades.timeouts, grades.unparsed) == (0, 0, 0)


def test_a_hanging_answer_costs_its_time_limit_and_nothing_else(verifier: Verifier) -> None:
    verifier.grade([_boxed("x+1")], ["1+x"])
    start = time.monotonic()
    grades = verifier.grade(
        [_boxed("x+1"), _boxed(_HANGS), _boxed(_RAISES), _boxed(_HANGS), "none"], ["1+x", "5x", "x+1", "5x", "1"]
    )
    assert time.monotonic() - start < 10.0
    np.testing.assert_array_equal(grades.rewards, [1, 0, 0, 0, 0])
    assert (grades.errors, grades.timeouts, grades.unparsed) == (1, 2, 1)
    assert verifier.grade([_boxed("x+1")], ["1+x"]).rewards.tolist() == [1.0]


def test_what_was_begun_is_graded_without_its_worker() -> None:
    completions, answers = [_boxed("2x+1"), "none", _boxed("25")], ["1+2x", "1", "25"]
    with Verifier(num_workers=1, timeout_s=5.0) as pool:
        pool.begin(completions, answers)
        # Asking again gives the worker its pair once it is ready.
        assert _wait_until(lambda: pool.begin([], []) is None and pool._outcomes[("2x+1", "1+2x")] is not None, 20)
        (worker,) = pool.worker_pids
        os.kill(worker, signal.SIGKILL)
        grades = pool.grade(completions, answers)
        assert pool.worker_pids == (worker,)
        np.testing.assert_array_equal(grades.rewards, [1, 0, 1])
        assert (grades.errors, grades.timeouts, grades.unparsed) == (0, 0, 1)
        # The next batch begins with nothing known: its worker is a new one.
        assert pool.grade(completions[:1], answers[:1]).rewards == [1]
        assert pool.worker_pids != (worker,)


def test_what_hangs_is_begun_once_and_holds_up_nobody(verifier: Verifier) -> None:
    verifier.grade([_boxed(f"z+{k}x") for k in range(8)], [f"{k}x+z" for k in range(8)])
    verifier.begin([_boxed(_HANGS)], ["5x"])
    assert verifier._outcomes == {(_HANGS, "5x"): None}
    time.sleep(1.6)  # past its limit
    verifier.begin([], [])
    assert verifier._outcomes == {(_HANGS, "5x"): "timeout"}
    grades = verifier.grade([_boxed(_HANGS), _boxed("x+1"), _boxed(_HANGS)], ["5x", "1+x", "5x"])
    np.testing.assert_array_equal(grades.rewards, [0, 1, 0])
    assert (grades.errors, grades.timeouts, grades.unparsed) == (0, 2, 0)


def test_a_killed_worker_is_replaced_and_its_answer_graded(verifier: Verifier) -> None:
    verifier.grade([_boxed(f"y+{k}x") for k in range(8)], [f"{k}x+y" for k in range(8)])
    killed = verifier.worker_pids

    def kill() -> None:
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(0.2, kill)
    timer.start()
    grades = verifier.grade([_boxed(f"y^2+{k}x^3") for k in range(150)], [f"{k}x^3+y^2" for k in range(150)])
    timer.join()
    assert len(killed) == 2
    assert grades.rewards.sum() == 150.0
    assert grades.errors == 0
    assert not set(killed) & set(verifier.worker_pids)


def test_workers_import_neither_jax_nor_flax() -> None:
    program = (
        "import sys; import dcmdp_jax.tasks.verifier_worker, dcmdp_jax.tasks.equivalence as e;"
        "e.equivalent('x+1', '1+x');"
        "print(sorted({'jax', 'flax', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_close_ends_the_workers_and_the_pool_says_so() -> None:
    pool = Verifier(num_workers=1, timeout_s=2.0)
    pool.grade([_boxed("x+1")], ["1+x"])
    (pid,) = pool.worker_pids
    pool.close()
    pool.close()
    assert not _alive(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.grade([_boxed("1")], ["1"])


def test_workers_end_with_a_killed_parent_even_while_they_hang() -> None:
    program = f"""
import threading, time
from dcmdp_jax.tasks.verifier import Verifier
pool = Verifier(num_workers=2, timeout_s=2.0)
pool.grade([r"\\boxed{{x+%d}}" % k for k in range(20)], ["%d+x" % k for k in range(20)])
threading.Timer(0.3, lambda: print(*pool.worker_pids, flush=True)).start()
pool.grade([r"\\boxed{{{_HANGS}}}"], ["5x"])
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=_ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
        parent.wait()
    assert pids
    assert _wait_until(lambda: not any(map(_alive, pids)), 8.0)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="num_workers = 0"):
        Verifier(num_workers=0)
    with pytest.raises(ValueError, match="timeout_s = 0"):
        Verifier(timeout_s=0)
    with Verifier() as pool, pytest.raises(ValueError, match="2 completions and 1 answers"):
        pool.grade(["a", "b"], ["1"])
