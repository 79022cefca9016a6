"""Reward functions in worker processes: values, and every way to fail."""

from __future__ import annotations

import datetime

import numpy as np
import pytest

from dcmdp_jax.rewards.protocol import RewardError
from dcmdp_jax.rewards.reward_pool import Failure, RewardPool
from tests.rewards import planted_rewards

_FILE = planted_rewards.__file__
_LONG_S = 1000.0  # no limit that a busy machine reaches


def _name(function: str) -> str:
    return f"{_FILE}:{function}"


def _begin(pool: RewardPool, lengths: tuple[int, ...] = (1, 2), source: str = "algebra", **columns) -> None:
    size = len(lengths)
    ids = [np.arange(length, dtype=np.int32) for length in lengths]
    pool.begin(["p"] * size, ["c"] * size, ids, {"source": [source] * size, **columns})


def test_functions_are_called_with_one_batch_after_the_other():
    length, algebra = _name("length"), _name("only_for_algebra")
    with RewardPool([length, algebra], ["source"], timeout_s=_LONG_S) as pool:
        pool.wait_until_loaded()
        _begin(pool, (1, 2), "algebra")
        assert pool.collect() == {length: [1.0, 2.0], algebra: [1.0, 1.0]}
        _begin(pool, (4, 3, 5), "code")
        assert pool.collect() == {length: [4.0, 3.0, 5.0], algebra: [None] * 3}


def test_types_that_json_lacks_arrive_as_text(tmp_path):
    (tmp_path / "own.py").write_text("def f(day, **columns):\n    return [float(d == '2026-11-22') for d in day]\n")
    name = f"{tmp_path}/own.py:f"
    with RewardPool([name], ["source", "day"], timeout_s=_LONG_S) as pool:
        _begin(pool, day=[datetime.date(2026, 11, 22), datetime.date(2026, 11, 23)])
        assert pool.collect() == {name: [1.0, 0.0]}


@pytest.mark.parametrize(
    ("function", "timeout_s", "reason", "row"),
    [
        ("raises", _LONG_S, r"raised KeyError: 'two\nlines' (planted_rewards.py, line 24)", None),
        ("one_too_few", _LONG_S, "returned 1 rewards for 2 completions, needs one for each", None),
        ("not_a_number", _LONG_S, "returned nan, needs a finite number or None", 1),
        ("text", _LONG_S, "returned 'good', needs a finite number or None", 0),
        ("nothing", _LONG_S, "returned None, needs a list with one reward per completion", None),
        ("never_returns", 0.5, "no result in 0.5 s", None),
        ("dies", _LONG_S, "the worker process died twice", None),
    ],
)
def test_a_function_that_fails_is_named_and_hurts_no_other(function, timeout_s, reason, row):
    bad, good = _name(function), _name("length")
    with (
        RewardPool([bad], ["source"], timeout_s=timeout_s) as pool,
        RewardPool([good], ["source"], timeout_s=9) as other,
    ):
        for _ in range(2):  # and is called again with the next batch
            _begin(pool)
            _begin(other)
            assert pool.collect() == {bad: Failure(f"reward {bad}: {reason}", row)}
            assert other.collect() == {good: [1.0, 2.0]}


def test_a_wait_can_be_ended_and_a_hanging_function_is_killed():
    def stop():
        raise KeyboardInterrupt

    with RewardPool([_name("never_returns")], ["source"], timeout_s=_LONG_S) as pool:
        _begin(pool)
        with pytest.raises(KeyboardInterrupt):
            pool.collect(stop)
        (worker,) = next(iter(pool._pools.values()))._workers
    assert worker._process.returncode == -9


def test_a_function_that_can_not_be_loaded_is_named():
    with (
        RewardPool([_name("length"), "no.such:f"], [], timeout_s=_LONG_S) as pool,
        pytest.raises(RewardError, match="^reward no.such:f: can't import no.such: ModuleNotFoundError"),
    ):
        pool.wait_until_loaded()
