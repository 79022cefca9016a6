"""Calls in processes that can be killed: limits, deaths, order, and what is left behind."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dcmdp_jax.rewards.isolated import CallError, IsolatedPool
from tests.rewards.planted_worker import descendants, is_alive
from tests.support.waiting import HANGS_S, wait_until

_ROOT = Path(__file__).resolve().parents[2]
_PLANTED = "tests.rewards.planted_worker"
_MEMORY_GIB = 2
_MEMORY_BYTES = _MEMORY_GIB * 1024**3


def _submit(pool, *args, cpu_s=100.0, wall_s=1000.0):
    return pool.submit(*args, cpu_s=cpu_s, wall_s=wall_s)


def _run(pool, *args, **limits):
    """The value of a call, or the kind and the text of its error."""
    try:
        return _submit(pool, *args, **limits).result(HANGS_S)
    except CallError as error:
        return error.kind, str(error)


@pytest.fixture(scope="module")
def pool():
    with IsolatedPool(_PLANTED, memory_gib=_MEMORY_GIB) as with_one_worker:
        yield with_one_worker


def test_each_call_has_its_own_value():
    with IsolatedPool(_PLANTED, workers=2) as pool:
        calls = [_submit(pool, "echo", k) for k in range(50)]
        assert [call.result(HANGS_S) for call in calls] == list(range(50))


@pytest.mark.parametrize(
    ("computes", "limit", "in_time"), [(0.2, 0.4, True), (0.6, 0.4, False), (0.8, 1.2, True)]
)
def test_the_time_limit_is_the_calls_own_processor_time(pool, computes, limit, in_time):
    assert _run(pool, "compute", computes, cpu_s=limit) == (True if in_time else ("timeout", ""))


def test_a_waiting_call_has_a_wall_clock_limit(pool):
    assert _run(pool, "sleep", 0.5, cpu_s=0.1) is True
    assert _run(pool, "sleep", 10 * HANGS_S, cpu_s=0.1, wall_s=0.5) == ("timeout", "")


def test_a_call_that_ended_just_over_its_limit_is_a_timeout(pool):
    # A hundredth of a second is near the kernel's own tick: most of these calls return before the
    # timer ends them.
    assert {_run(pool, "compute", 0.0105, cpu_s=0.01) for _ in range(10)} == {("timeout", "")}


@pytest.mark.parametrize(("limit", "calls"), [(0.3, 1), (0.8, 2)])
def test_a_hang_inside_c_is_a_timeout_and_no_crash_to_retry(pool, tmp_path, limit, calls):
    file = tmp_path / "calls"
    assert _run(pool, "hang", str(file), cpu_s=limit) == ("timeout", "")
    # Above half a second the call has a short first try and then its whole limit.
    assert len(file.read_text().splitlines()) == calls
    assert _run(pool, "echo", 3) == 3


def test_slow_calls_wait_until_all_others_had_their_first_try(pool, tmp_path):
    slow = [_submit(pool, "hang", str(tmp_path / str(k)), cpu_s=0.6) for k in range(3)]
    quick = _submit(pool, "echo", "quick")
    assert list(concurrent.futures.as_completed([*slow, quick], HANGS_S)) == [quick, *slow]


def test_a_call_that_kills_its_process_is_made_once_more(pool, tmp_path):
    assert _run(pool, "die once", str(tmp_path / "one")) is True
    assert _run(pool, "die", str(tmp_path / "two")) == ("error", "the worker process died twice")
    assert (tmp_path / "two").read_text().splitlines() == ["call", "call"]
    assert _run(pool, "echo", 3) == 3


def test_an_exception_is_the_error_of_its_call(pool):
    assert _run(pool, "raise", "two\nlines") == ("error", "ValueError: two lines")
    assert _run(pool, "exit", 0) == ("error", "SystemExit: 0")


def test_a_function_is_not_told_the_password_of_a_ray_cluster(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a secret")
    monkeypatch.setenv("HF_HOME", "another variable")
    with IsolatedPool(_PLANTED) as pool:
        assert [_run(pool, "variable", name) for name in ("RAY_AUTH_TOKEN", "HF_HOME")] == [
            "",
            "another variable",
        ]


def test_memory_is_limited(pool):
    assert _run(pool, "allocate", _MEMORY_BYTES)[1].startswith("MemoryError")
    assert _run(pool, "allocate", _MEMORY_BYTES // 32) == _MEMORY_BYTES // 32


def test_a_cancelled_call_is_not_begun(pool, tmp_path):
    file = tmp_path / "calls"
    first = _submit(pool, "compute", 0.2)
    cancelled = _submit(pool, "die", str(file))
    assert cancelled.cancel()
    assert first.result(HANGS_S) is True and _run(pool, "echo", 3) == 3
    assert not file.exists()


def test_an_idle_process_that_is_killed_is_replaced_and_ignores_ctrl_c(pool):
    before = _run(pool, "pid")
    os.kill(before, signal.SIGINT)
    assert _run(pool, "pid") == before
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not is_alive(before), "the end of the old process")
    assert _run(pool, "pid") != before


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os._exit(0)", "the worker process ended at once; `"),
        (
            "def load(): raise ImportError('no module\\nof that name')",
            "ImportError: no module of that name",
        ),
    ],
)
def test_a_process_that_can_not_start_is_one_error(tmp_path, monkeypatch, program, reason):
    (tmp_path / "no_function.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with IsolatedPool("no_function", workers=2) as pool:
        kind, problem = _run(pool, "echo", 1)
    assert kind == "load" and problem.startswith(reason)
    if program.startswith("import"):
        assert problem.endswith(
            f"{sys.executable} -P -m dcmdp_jax.rewards.isolated_worker no_function` shows the error"
        )


def test_close_leaves_nothing_behind():
    others = set(descendants(os.getpid()))
    threads = threading.active_count()
    files = set(os.listdir("/proc/self/fd"))
    pool = IsolatedPool(_PLANTED, workers=2)
    pids = {_run(pool, "pid") for _ in range(10)}
    for _ in range(4):
        _submit(pool, "sleep", 10 * HANGS_S)
    pool.close()
    pool.close()
    assert not any(map(is_alive, pids)) and set(descendants(os.getpid())) <= others
    assert threading.active_count() == threads and set(os.listdir("/proc/self/fd")) <= files


def test_processes_end_with_a_killed_trainer_even_while_they_hang(tmp_path):
    file = tmp_path / "calls"
    program = f"""
import os, signal
from dcmdp_jax.rewards.isolated import IsolatedPool
from tests.rewards.planted_worker import descendants
from tests.support.waiting import wait_until
pool = IsolatedPool({_PLANTED!r}, workers=2)
pool.submit("hang", {str(file)!r}, wall_s=1000.0)
pool.submit("echo", 1, wall_s=1000.0).result()
wait_until(lambda: os.path.exists({str(file)!r}), 'the call')
print(*descendants(os.getpid()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_alive, pids)), "the end of all processes")
