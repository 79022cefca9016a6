"""The program of the process in which a user's environments play.

    python -m dcmdp_jax.environments.worker MEMORY_BYTES SOCKET_FD

It holds the environments of one batch of completions until the next is begun. If a call is killed, they are gone.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcmdp_jax.environments.protocol import (
    BUILT_IN_ENVIRONMENTS,
    BadStep,
    checked_observation,
    checked_step,
    load_environment,
)
from dcmdp_jax.errors import one_line
from dcmdp_jax.rewards.protocol import RewardError
from dcmdp_jax.rewards.worker_process import serve
from dcmdp_jax.user_code import describe_error

_playing: list[Any] = []
_load = functools.cache(load_environment)


def load(name: str, columns: Sequence[str]) -> dict[str, Any]:
    """Import the environment. {}, or {"problem": "..."} with one line that names it."""
    try:
        _load(name, tuple(columns))
    except RewardError as error:
        return {"problem": one_line(error)}
    return {}


def reset(name: str, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Make an environment for each completion. {"observations": [...], "role": "..."}, or {"problem": ..., "row": ...}.

    Args:
        name: of the environment.
        prompts: one per completion.
        columns: of each, one value per completion.
    """

    def begin() -> list[Any]:
        made = _load(name, tuple(columns))
        _playing[:] = [made() for _ in prompts]
        return [
            one.reset(prompt=prompt, **{key: values[row] for key, values in columns.items()})
            for row, (one, prompt) in enumerate(zip(_playing, prompts, strict=True))
        ]

    found = _checked(name, begin, checked_observation, range(len(prompts)))
    if "problem" in found:
        return found
    role = getattr(_playing[0], "observation_role", "user") if _playing else "user"
    if not isinstance(role, str):
        return {"problem": f"environment {name}: observation_role is {role!r:.80}, needs text", "row": None}
    return {"observations": found["values"], "role": role}


def step(name: str, rows: Sequence[int], texts: Sequence[str]) -> dict[str, Any]:
    """Give each environment the text of its turn. {"steps": [[observation, reward, done], ...]}, or a problem.

    Args:
        name: of the environment.
        rows: the completions, as `reset` got them.
        texts: of each.
    """
    if rows and max(rows) >= len(_playing):
        return {"problem": f"environment {name}: its process died in step", "row": None}
    found = _checked(
        name, lambda: [_playing[row].step(text) for row, text in zip(rows, texts, strict=True)], checked_step, rows
    )
    if "problem" in found:
        return found
    return {"steps": [[each.observation, each.reward, each.done] for each in found["values"]]}


def _checked(
    name: str, call: Callable[[], list[Any]], check: Callable[[Any], Any], rows: Sequence[int]
) -> dict[str, Any]:
    """{"values": what the calls gave, checked}, or a problem of one line and its completion."""
    place = BUILT_IN_ENVIRONMENTS.get(name, name).rpartition(":")[0]
    try:
        given = call()
        if any(map(inspect.isawaitable, given)):
            given = _loop().run_until_complete(_all(given))
    except RewardError as error:
        return {"problem": one_line(error), "row": None}
    except Exception as error:
        return {"problem": f"environment {name}: raised {one_line(describe_error(error, place))}", "row": None}
    values = []
    for row, value in zip(rows, given, strict=True):
        try:
            values.append(check(value))
        except BadStep as error:
            return {"problem": f"environment {name}: {one_line(error)}", "row": row}
    return {"values": values}


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls: what an environment opens belongs to it."""
    return asyncio.new_event_loop()


async def _all(given: Sequence[Any]) -> list[Any]:
    async def value_of(one: Any) -> Any:
        return await one if inspect.isawaitable(one) else one

    return list(await asyncio.gather(*map(value_of, given)))


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    requests = {"load": load, "reset": reset, "step": step}
    memory, socket_fd = map(int, sys.argv[1:])
    serve(socket_fd, lambda: lambda name, *args: requests[name](*args), memory_limit_bytes=memory or None)
