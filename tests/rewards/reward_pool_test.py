"""Reward functions in worker processes: values, and every way to fail."""

import datetime
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.environments.pool import EnvironmentPool
from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.rewards.protocol import RewardError
from dcmdp_jax.rewards.reward_pool import Returned, RewardPool
from tests.rewards import planted_rewards
from tests.rewards.planted_worker import descendants, is_alive
from tests.support.waiting import HANGS_S, wait_until

_FILE = planted_rewards.__file__
_ROOT = Path(__file__).resolve().parents[2]
_LONG_S = 1000.0  # no limit that a busy machine reaches


def _name(function: str) -> str:
    return f"{_FILE}:{function}"


def _failure(pool: RewardPool) -> tuple[str, int | None]:
    """The only function's error and its completion."""
    [error] = pool.collect().values()
    assert isinstance(error, RewardError)
    return str(error), error.row


@pytest.mark.parametrize("kind", ["file", "module", "verifier", "environment"])
def test_files_where_the_user_stands_do_not_replace_the_standard_librarys(
    tmp_path, monkeypatch, kind
):
    """`random.py` of a user, who keeps a reward beside it and starts the run there."""
    for name in ("resource", "random", "json", "types", "socket"):
        (tmp_path / f"{name}.py").write_text(
            "raise RuntimeError('not the one of the standard library')"
        )
    (tmp_path / "mine.py").write_text(
        "import random, resource\n"
        "def reward(completions, **_): return [1.0 for _ in completions]\n"
        "class Game:\n"
        "    def reset(self, prompt, **_): pass\n"
        "    def step(self, text): return '', 1.0, True\n"
    )
    monkeypatch.chdir(tmp_path)
    if kind == "verifier":
        with Verifier(1, _LONG_S, 0.0) as verifier:
            assert verifier.grade(["\\boxed{x^2+2x+1}"], ["(x+1)^2"]).rewards.tolist() == [1.0]
    elif kind == "environment":
        with EnvironmentPool("mine:Game", [], timeout_s=_LONG_S) as pool:
            pool.check()
            pool.reset(["p"], {}, lambda: None)
            [(_, reward, _)] = pool.step([0], ["t"], lambda: None)
            assert reward == 1.0
    else:
        name = "mine.py:reward" if kind == "file" else "mine:reward"
        with RewardPool([name], ["source"], timeout_s=_LONG_S) as pool:
            pool.wait_until_loaded()
            _begin(pool)
            assert pool.collect()[name].rewards == [1.0, 1.0]


def _begin(
    pool: RewardPool, lengths: tuple[int, ...] = (1, 2), source: str = "algebra", **columns
) -> None:
    size = len(lengths)
    ids = [np.arange(length, dtype=np.int32) for length in lengths]
    pool.begin(["p"] * size, ["c"] * size, ids, {"source": [source] * size, **columns})


def test_functions_are_called_with_one_batch_after_the_other():
    length = _name("length")
    algebra = _name("only_for_algebra")
    with RewardPool([length, algebra], ["source"], timeout_s=_LONG_S) as pool:
        pool.wait_until_loaded()
        _begin(pool, (1, 2), "algebra")
        assert pool.collect() == {length: Returned([1.0, 2.0]), algebra: Returned([1.0, 1.0])}
        _begin(pool, (4, 3, 5), "code")
        assert pool.collect() == {length: Returned([4.0, 3.0, 5.0]), algebra: Returned([None] * 3)}


def test_types_that_json_lacks_arrive_as_text(tmp_path):
    (tmp_path / "own.py").write_text(
        "def f(day, **columns):\n    return [float(d == '2026-11-22') for d in day]\n"
    )
    name = f"{tmp_path}/own.py:f"
    with RewardPool([name], ["source", "day"], timeout_s=_LONG_S) as pool:
        _begin(pool, day=[datetime.date(2026, 11, 22), datetime.date(2026, 11, 23)])
        assert pool.collect() == {name: Returned([1.0, 0.0])}


@pytest.mark.parametrize(
    ("function", "timeout_s", "reason", "row"),
    [
        ("raises", _LONG_S, r"raised KeyError: 'two\nlines' (planted_rewards.py, line 33)", None),
        ("one_too_few", _LONG_S, "returned 1 rewards for 2 completions, needs one for each", None),
        ("not_a_number", _LONG_S, "returned nan, needs a finite number or None", 1),
        ("text", _LONG_S, "returned 'good', needs a finite number or None", 0),
        ("nothing", _LONG_S, "returned None, needs a list with one reward per completion", None),
        (
            "a_dict",
            _LONG_S,
            "returned the dict {0: 1.0, 1: 1.0}, needs a list with one reward per completion",
            None,
        ),
        (
            "a_set",
            _LONG_S,
            "returned the set {0.0, 1.0}, needs a list with one reward per completion",
            None,
        ),
        (
            "a_text",
            _LONG_S,
            "returned the str '11', needs a list with one reward per completion",
            None,
        ),
        ("never_ends", _LONG_S, "returned 3 rewards for 2 completions, needs one for each", None),
        ("never_returns", 3.0, "no result in 3 s", None),
        ("dies", _LONG_S, "the worker process died twice", None),
    ],
)
def test_a_function_that_fails_is_named_and_hurts_no_other(function, timeout_s, reason, row):
    bad = _name(function)
    good = _name("length")
    with (
        RewardPool([bad], ["source"], timeout_s=timeout_s) as pool,
        RewardPool([good], ["source"], timeout_s=_LONG_S) as other,
    ):
        for _ in range(2):  # and is called again with the next batch
            _begin(pool)
            _begin(other)
            assert _failure(pool) == (f"reward {bad}: {reason}", row)
            assert other.collect() == {good: Returned([1.0, 2.0])}


def test_a_wait_can_be_ended_and_a_hanging_function_is_killed():
    def stop():
        raise KeyboardInterrupt

    others = set(descendants(os.getpid()))
    with RewardPool([_name("never_returns")], ["source"], timeout_s=_LONG_S) as pool:
        pool.wait_until_loaded()
        _begin(pool)
        with pytest.raises(KeyboardInterrupt):
            pool.collect(stop)
        [worker] = set(descendants(os.getpid())) - others
    assert not is_alive(worker)


def test_a_function_that_can_not_be_loaded_is_named():
    with (
        RewardPool([_name("length"), "no.such:f"], [], timeout_s=_LONG_S) as pool,
        pytest.raises(
            RewardError, match="^reward no.such:f: can't import no.such: ModuleNotFoundError"
        ),
    ):
        pool.wait_until_loaded()


@pytest.mark.parametrize(
    ("function", "rewards"), [("an_array", [0.0, 1.0]), ("an_iterator", [0.0, 1.0])]
)
def test_arrays_and_iterators_are_lists(function, rewards):
    with RewardPool([_name(function)], ["source"], timeout_s=_LONG_S) as pool:
        _begin(pool)
        assert pool.collect() == {_name(function): Returned(rewards)}


@pytest.mark.parametrize("function", ["forks", "forks_and_fails_there"])
def test_a_function_that_returns_in_two_processes_answers_once(function):
    with RewardPool([_name(function)], ["source"], timeout_s=_LONG_S) as pool:
        pool.wait_until_loaded()
        for lengths in [
            (1, 2),
            (3, 4, 5),
            (6,),
            (7, 8),
        ]:  # a second answer would be that of the next batch
            _begin(pool, lengths)
            assert pool.collect() == {
                _name(function): Returned([float(length) for length in lengths])
            }


_STRAY = (
    "something wrote to the socket of the process that calls it, such as to an inherited "
    "file descriptor"
)


@pytest.mark.parametrize(
    ("stray", "reason"),
    [
        (b"hello, this is no message", _STRAY),
        (
            struct.pack(">i", 1 << 20),
            _STRAY,
        ),  # multiprocessing's header of a megabyte that never comes
        (
            struct.pack(">QQ", 0, 30) + b'{"value": {"rewards": [9, 9]}}',
            _STRAY,
        ),  # the answer to an earlier request
        (struct.pack(">QQ", 1, 1 << 40), _STRAY),  # longer than any answer
        (struct.pack(">QQ", 1, 4) + b"{{{{", _STRAY),
        (struct.pack(">QQ", 1, 1) + b"1", _STRAY),
        (struct.pack(">QQ", 1, 1 << 20), "no result in 3 s"),  # its number, but never all of it
    ],
    ids=["text", "foreign header", "earlier answer", "too long", "no JSON", "no answer", "cut off"],
)
def test_what_a_function_writes_to_its_socket_neither_hangs_nor_counts(stray, reason):
    name = _name("writes_to_descriptors")
    with RewardPool([name], ["source"], timeout_s=3.0) as pool:
        pool.wait_until_loaded()
        _begin(pool, source=stray.hex())  # the second request: load, call
        assert _failure(pool) == (f"reward {name}: {reason}", None)
        _begin(pool, (4, 5), source="")
        assert pool.collect() == {name: Returned([4.0, 5.0])}


def test_what_a_function_writes_between_two_calls_does_not_count():
    name = _name("writes_later")
    with RewardPool([name], ["source"], timeout_s=_LONG_S) as pool:
        _begin(pool, (1, 2))
        assert pool.collect() == {name: Returned([1.0, 2.0])}
        time.sleep(1.0)
        _begin(pool, (3, 4))
        assert pool.collect() == {name: Returned([3.0, 4.0])}


def test_the_process_of_a_function_holds_one_socket():
    others = set(descendants(os.getpid()))
    with RewardPool([_name("length")], ["source"], timeout_s=_LONG_S) as pool:
        pool.wait_until_loaded()
        [worker] = set(descendants(os.getpid())) - others
        links = [os.readlink(each) for each in Path(f"/proc/{worker}/fd").iterdir()]
        assert len([link for link in links if link.startswith("socket:")]) == 1


def test_memory_is_limited_by_a_setting():
    name = _name("allocates")
    with RewardPool([name], ["source"], timeout_s=_LONG_S, memory_gib=0.5) as pool:
        _begin(pool, source=str(2**29))
        problem, _ = _failure(pool)
        assert problem.startswith(f"reward {name}: raised MemoryError")
        assert problem.endswith("; `memory_gib` is 0.5 GiB, 0 is no limit")
        _begin(pool, source=str(2**20))
        assert pool.collect() == {name: Returned([2.0**20, 2.0**20])}
    with RewardPool([name], ["source"], timeout_s=_LONG_S) as pool:
        _begin(pool, source=str(2**29))
        assert pool.collect() == {name: Returned([2.0**29, 2.0**29])}


def _started(path):
    wait_until(path.is_file, "the processes of the function")
    wait_until(lambda: len(path.read_text().split()) == 2, "their ids")
    return [int(pid) for pid in path.read_text().split()]


def test_what_a_function_starts_lives_until_the_pool_is_closed(tmp_path):
    name = _name("starts_processes")
    path = tmp_path / "returns"
    with RewardPool([name], ["source"], timeout_s=_LONG_S) as pool:
        _begin(pool, source=str(path))
        assert pool.collect() == {name: Returned([1.0, 1.0])}
        started = _started(path)
        assert all(map(is_alive, started))
    wait_until(lambda: not any(map(is_alive, started)), "the end of the processes")


def test_what_a_function_starts_ends_with_a_call_that_is_killed(tmp_path):
    name = _name("starts_processes")
    path = tmp_path / "hangs"
    with RewardPool([name], ["source"], timeout_s=3.0) as pool:
        _begin(pool, source=str(path))
        assert _failure(pool) == (f"reward {name}: no result in 3 s", None)
        started = _started(path)
        wait_until(lambda: not any(map(is_alive, started)), "the end of the processes")


def test_what_a_function_starts_ends_with_a_killed_trainer(tmp_path):
    path = tmp_path / "hangs"
    program = f"""
import numpy as np, time
from dcmdp_jax.rewards.reward_pool import RewardPool
pool = RewardPool([{_name("starts_processes")!r}], ["source"], timeout_s=1000.0)
pool.begin(["p"], ["c"], [np.arange(1)], {{"source": [{str(path)!r}]}})
time.sleep({10 * HANGS_S})
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=_ROOT) as trainer:
        started = _started(path)
        below = descendants(trainer.pid)
        assert set(started) & set(below)
        os.kill(trainer.pid, signal.SIGKILL)
    wait_until(
        lambda: not any(map(is_alive, [*below, *started])),
        "the end of all that the trainer started",
    )
