"""The pool of processes that can be killed: limits, deaths, order, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcmdp_jax.rewards.worker_pool import Outcome, Task, WorkerPool
from dcmdp_jax.rewards.worker_process import MEMORY_LIMIT_BYTES
from tests.rewards.planted_worker import PROGRAM, descendants, is_alive
from tests.support.waiting import HANGS_S, wait_until

_ROOT = Path(__file__).resolve().parents[2]


def _task(kind: str, value: Any = None, *, cpu_s: float = 100.0, wall_s: float = 1000.0) -> Task:
    return Task(key=(kind, value), args=(kind, value), cpu_s=cpu_s, wall_s=wall_s)


def _result(pool: WorkerPool) -> tuple[Task, Outcome]:
    result = pool.next_result(HANGS_S)
    assert result is not None, "no call ended"
    return result


def _run(pool: WorkerPool, *args: Any, **limits: float) -> Outcome:
    pool.submit(_task(*args, **limits))
    return _result(pool)[1]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with_one_worker = WorkerPool(PROGRAM, num_workers=1)
    yield with_one_worker
    with_one_worker.close()


def test_each_result_comes_with_its_task() -> None:
    pool = WorkerPool(PROGRAM, num_workers=2)
    tasks = [_task("echo", k) for k in range(50)]
    for task in tasks:
        pool.submit(task)
    results = [_result(pool) for _ in tasks]
    pool.close()
    assert sorted(outcome.value for _, outcome in results) == list(range(50))
    assert all(outcome == Outcome("value", task.args[1]) for task, outcome in results)


@pytest.mark.parametrize(
    ("computes", "limit", "status"), [(0.2, 0.4, "value"), (0.6, 0.4, "timeout"), (0.8, 1.2, "value")]
)
def test_the_time_limit_is_the_calls_own_processor_time(pool, computes, limit, status) -> None:
    assert _run(pool, "compute", computes, cpu_s=limit).status == status


def test_a_waiting_call_has_a_wall_clock_limit(pool) -> None:
    assert _run(pool, "sleep", 0.5, cpu_s=0.1).status == "value"
    assert _run(pool, "sleep", 10 * HANGS_S, cpu_s=0.1, wall_s=0.5).status == "timeout"


def test_a_call_that_ended_just_over_its_limit_is_a_timeout(pool) -> None:
    # A hundredth of a second is near the kernel's own tick: most of these calls return before the timer ends them.
    assert {_run(pool, "compute", 0.0105, cpu_s=0.01).status for _ in range(10)} == {"timeout"}


@pytest.mark.parametrize(("limit", "calls"), [(0.3, 1), (0.8, 2)])
def test_a_hang_inside_c_is_a_timeout_and_no_crash_to_retry(pool, tmp_path, limit, calls) -> None:
    file = tmp_path / "calls"
    assert _run(pool, "hang", str(file), cpu_s=limit) == Outcome("timeout")
    # Above half a second the call has a short first try and then its whole limit.
    assert len(file.read_text().splitlines()) == calls
    assert _run(pool, "echo", 3) == Outcome("value", 3)


def test_slow_calls_wait_until_all_others_had_their_first_try(pool, tmp_path) -> None:
    slow = [_task("hang", str(tmp_path / str(k)), cpu_s=0.6) for k in range(3)]
    for task in (*slow, quick := _task("echo", "quick")):
        pool.submit(task)
    results = [_result(pool) for _ in range(4)]
    assert [task for task, _ in results] == [quick, *slow]


def test_a_call_that_kills_its_worker_is_made_once_more(pool, tmp_path) -> None:
    assert _run(pool, "die once", str(tmp_path / "one")) == Outcome("value", True)
    assert _run(pool, "die", str(tmp_path / "two")).status == "error"
    assert (tmp_path / "two").read_text().splitlines() == ["call", "call"]
    assert _run(pool, "echo", 3) == Outcome("value", 3)


def test_an_exception_is_the_outcome_of_its_call(pool) -> None:
    assert _run(pool, "raise", "two\nlines") == Outcome("error", message="ValueError: two lines")
    assert _run(pool, "exit", 0) == Outcome("error", message="SystemExit: 0")


def test_memory_is_limited(pool) -> None:
    assert _run(pool, "allocate", MEMORY_LIMIT_BYTES).message.startswith("MemoryError")
    assert _run(pool, "allocate", MEMORY_LIMIT_BYTES // 32) == Outcome("value", MEMORY_LIMIT_BYTES // 32)


def test_a_cancelled_task_is_not_begun(pool, tmp_path) -> None:
    file = tmp_path / "calls"
    pool.submit(_task("compute", 0.2))
    pool.submit(cancelled := _task("die", str(file)))
    cancelled.cancelled = True
    assert _result(pool)[1].status == "value"
    assert _run(pool, "echo", 3) == Outcome("value", 3)
    assert not file.exists()


def test_an_idle_worker_that_is_killed_is_replaced(pool) -> None:
    before = _run(pool, "pid").value
    os.kill(before, signal.SIGKILL)
    after = _run(pool, "pid").value
    assert after != before
    wait_until(lambda: not is_alive(before), "the end of the old worker")


def test_workers_ignore_ctrl_c(pool) -> None:
    before = _run(pool, "pid").value
    os.kill(before, signal.SIGINT)
    assert _run(pool, "pid").value == before


def test_submit_does_not_wait_for_a_worker(monkeypatch) -> None:
    begun, may_start = threading.Event(), threading.Event()

    def slow_start(self: WorkerPool) -> None:
        begun.set()
        may_start.wait(HANGS_S)
        raise RuntimeError("started late")

    monkeypatch.setattr(WorkerPool, "_start", slow_start)
    pool = WorkerPool(PROGRAM, num_workers=1)
    pool.submit(_task("echo", 1))
    assert begun.wait(HANGS_S)
    assert pool.next_result(0.0) is None
    may_start.set()
    with pytest.raises(RuntimeError, match="started late"):
        _result(pool)
    pool.close()


_CAN_NOT_LOAD = """
import sys
from dcmdp_jax.rewards.worker_process import serve

def load():
    raise ImportError("no module\\nof that name")

serve(int(sys.argv[1]), load)
"""


@pytest.mark.parametrize(
    ("program", "reason"), [("", "it ended at once"), (_CAN_NOT_LOAD, "ImportError: no module of that name")]
)
def test_workers_that_can_not_start_are_one_error(tmp_path, program, reason) -> None:
    path = tmp_path / "program.py"
    path.write_text(program)
    pool = WorkerPool((str(path),), num_workers=2)
    pool.submit(_task("echo", 1))
    with pytest.raises(RuntimeError) as raised:
        _result(pool)
    shown = f"{sys.executable} {path}"
    assert str(raised.value) == f"no worker process could be started: {reason}; `{shown}` shows the error"
    pool.close()


def test_close_leaves_nothing_behind() -> None:
    others, threads = set(descendants(os.getpid())), threading.active_count()
    pool = WorkerPool(PROGRAM, num_workers=2)
    pids = {_run(pool, "pid").value for _ in range(10)}
    for _ in range(4):
        pool.submit(_task("sleep", 10 * HANGS_S))
    pool.close()
    pool.close()
    # Killed; the kernel takes a moment to end them.
    wait_until(lambda: not any(map(is_alive, pids)), "the end of the workers")
    wait_until(lambda: set(descendants(os.getpid())) <= others, "the end of their children")
    assert threading.active_count() == threads


def test_workers_end_with_a_killed_trainer_even_while_they_hang(tmp_path) -> None:
    file = tmp_path / "calls"
    program = f"""
import os, signal, time
from dcmdp_jax.rewards.worker_pool import Task, WorkerPool
from tests.rewards.planted_worker import PROGRAM, descendants
from tests.support.waiting import HANGS_S, wait_until
pool = WorkerPool(PROGRAM, num_workers=2)
pool.submit(Task(key=0, args=("hang", {str(file)!r}), cpu_s=0.5, wall_s=1000.0))
pool.submit(Task(key=1, args=("echo", 1), cpu_s=0.5, wall_s=1000.0))
wait_until(lambda: os.path.exists({str(file)!r}) and len(descendants(os.getpid())) == 4, 'four workers')
print(*descendants(os.getpid()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=_ROOT, stdout=subprocess.PIPE, text=True, timeout=HANGS_S
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 4  # two workers and the child of each
    wait_until(lambda: not any(map(is_alive, pids)), "the end of all workers")
