"""The program of the process that calls a reward function.

    python -m dcmdp_jax.rewards.reward_worker MEMORY_BYTES SOCKET_FD

The function is imported by the process that calls it, not by its parent: a user's import may start threads, after
which a process can't be forked.
"""

from __future__ import annotations

import functools
import json
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dcmdp_jax.errors import one_line
from dcmdp_jax.rewards.protocol import (
    BUILT_IN_REWARDS,
    BadValue,
    Logged,
    RewardError,
    RewardFunction,
    TrainerState,
    call_reward,
    load_reward,
    plain_value,
)
from dcmdp_jax.rewards.worker_process import serve
from dcmdp_jax.user_code import describe_error


@functools.cache
def _load(function: str, columns: tuple[str, ...]) -> RewardFunction:
    return load_reward(function, columns)


def load(function: str, columns: Sequence[str]) -> dict[str, Any]:
    """Import the function. {}, or {"problem": "..."} with one line that names it."""
    try:
        _load(function, tuple(columns))
    except RewardError as error:
        return {"problem": one_line(error) + _memory_limit(error.__cause__ or error)}
    return {}


def call(
    function: str,
    columns: Mapping[str, Sequence[Any]],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """{"rewards": [...], "metrics": {...}, "extra": {...}} with what the function logged, or {"problem": "...", "row":
    place or None} with one line that names the function."""
    row, place = None, BUILT_IN_REWARDS.get(function, function).rpartition(":")[0]
    logged = Logged(len(completions))
    try:
        loaded = _load(function, tuple(columns))
        rewards = call_reward(loaded, prompts, completions, completion_ids, columns, TrainerState(**state), logged)
        extra = json.loads(json.dumps(logged.extra, default=_json_value))
        return {"rewards": rewards, "metrics": logged.metrics, "extra": extra}
    except RewardError as error:
        problem = str(error).removeprefix(f"reward {function}: ")
    except BadValue as error:
        problem, row = str(error), error.row
    except Exception as error:
        problem = f"raised {describe_error(error, place)}{_memory_limit(error)}"
    return {"problem": f"reward {function}: {one_line(problem)}", "row": row}


def _json_value(value: Any) -> Any:
    """A NumPy or torch scalar as a number, anything else that JSON lacks as text."""
    plain = plain_value(value)
    return plain if isinstance(plain, bool | int | float) else str(value)


def _memory_limit(error: BaseException) -> str:
    """The limit that a lack of memory may come from, as the end of a line."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    known = isinstance(error, MemoryError) and limit != resource.RLIM_INFINITY
    return f"; `memory_gib` is {limit / 1024**3:g} GiB, 0 is no limit" if known else ""


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):  # a file's, of which a killed call would lose what it printed last
        stream.reconfigure(line_buffering=True)
    requests = {"load": load, "call": call}
    memory, socket_fd = map(int, sys.argv[1:])
    serve(socket_fd, lambda: lambda name, *args: requests[name](*args), memory_limit_bytes=memory or None)
