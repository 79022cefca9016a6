"""Environments, which a policy talks to in turns.

    class Game:
        observation_role = "user"  # of the messages that observations become; may be left out

        def reset(self, prompt, **columns): ...  # -> None, or text that is added to the prompt
        def step(self, text): ...                # -> observation, reward, done

One object plays one completion. `reset` gets the prompt as reward functions do, and the data's
columns. `step` gets the text that the policy wrote in its turn, and returns the text that it is
answered, a number, and whether the completion ends here. Both may be `async def`. The reward
`environment` is the sum of a completion's rewards.
"""

import asyncio
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dcmdp_jax.environments.tools import Step, Tools, failed_step
from dcmdp_jax.errors import UserError, describe_error, one_line
from dcmdp_jax.rewards.isolated import CallError, Closing, IsolatedPool, result_of
from dcmdp_jax.rewards.protocol import RewardError, gathered, plain_value, shown
from dcmdp_jax.user_files import load_object

_LONGEST_OBSERVATION = 100_000
"""Characters."""
_LARGEST_REWARD = 1e9
"""Absolute value."""


class EnvironmentPool(Closing):
    """One process with the environments of a batch of completions. Not thread-safe; close it.

    Args:
        name: see `load_environment`.
        columns: names of the columns that `reset` gets.
        timeout_s: wall-clock limit of one call for all completions, in seconds.
        memory_gib: address space of the process in GiB; 0 for no limit.
        output: file that gets what the environment prints, at its end; None discards it.
        tools: the further arguments of `Tools` if the environment is functions. Each turn is then a
            call of its own.
        workers: processes; several for tools alone.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[str],
        *,
        timeout_s: float,
        memory_gib: float = 0.0,
        output: Path | None = None,
        tools: Sequence[Any] = (),
        workers: int = 1,
    ) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._tools = tools
        self._pool = IsolatedPool(
            __name__,
            (name, list(columns), *tools),
            memory_gib=memory_gib,
            output=output,
            workers=workers,
        )

    def check(self) -> list[dict[str, Any]]:
        """Import the environment and return the JSON schemas of its tools.

        Raises:
            RewardError: in one line, if that can't be done.
        """
        self._result("load", self._pool.load())
        if not self._tools:
            return []
        return self._result("tools", self._pool.submit("tools", wall_s=self._timeout_s))

    def reset(
        self,
        prompts: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        on_wait: Callable[[], None],
    ) -> tuple[list[str], str]:
        """Begin a batch; return the first observations, mostly empty, and the later ones' role.

        Raises:
            RewardError: in one line, with the completion that it is about.
        """
        call = self._pool.submit("reset", list(prompts), dict(columns), wall_s=self._timeout_s)
        return tuple(self._result("reset", call, on_wait))

    def step(
        self,
        rows: Sequence[int],
        texts: Sequence[str],
        on_wait: Callable[[], None],
    ) -> list[Step]:
        """The environments' responses to the turns of some completions. Raises as `reset`."""
        batches = [(rows, texts)]
        if self._tools:
            batches = [([row], [text]) for row, text in zip(rows, texts, strict=True)]
        calls = []
        for batch in batches:
            calls.append(self._pool.submit("step", *batch, wall_s=self._timeout_s))

        steps = []
        for call in calls:
            steps += self._steps(call, on_wait)
        return steps

    def _steps(self, call: Future[Any], on_wait: Callable[[], None]) -> list[Step]:
        """The steps of a call. A turn of tools that hangs or kills the process gets an error."""
        try:
            return self._result("step", call, on_wait)
        except RewardError as error:
            if not self._tools or error.__cause__.kind == "load":
                raise
            return [failed_step(str(error).removeprefix(f"environment {self.name}: "))]

    def close(self) -> None:
        """Kill the process. Harmless when called again."""
        self._pool.close()

    def _result(self, method: str, call: Future[Any], *on_wait: Callable[[], None]) -> Any:
        try:
            return result_of(call, *on_wait)
        except CallError as error:
            problem = str(error).removeprefix(f"environment {self.name}: ")
            problem = problem or f"{method} gave no result in {self._timeout_s:g} s"
            raise RewardError(f"environment {self.name}: {problem}", error.row) from error


def load(name: str, columns: Sequence[str], *tools: Any) -> Callable[..., list[Any]]:
    """Import the environment, in its process; return a function that calls its methods.

    `tools` are arguments of `Tools`.

    Raises:
        RewardError: in one line that names it.
    """
    if tools:
        return Tools(name, *tools).call
    return _BatchEnvironments(name, columns).call


class _BatchEnvironments:
    """The environments of one batch, until the next is begun. They are lost with their process."""

    def __init__(self, name: str, columns: Sequence[str]) -> None:
        self._make = load_environment(name, columns)
        self._module = name.rpartition(":")[0]
        # One loop for all calls: what an environment opens belongs to it.
        self._environments = []
        self._loop = asyncio.new_event_loop()

    def call(self, method: str, *args: Any) -> list[Any]:
        """`[observations, role]` of `reset(prompts, columns)`, the steps of `step(rows, texts)`.

        Raises:
            RewardError: in one line, with the completion that it is about.
        """
        if method == "reset":
            return self._reset(*args)
        return self._step(*args)

    def _reset(self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> list[Any]:
        self._environments = []

        def begin(row: int) -> Any:
            self._environments.append(self._make())
            cells = {name: column[row] for name, column in columns.items()}
            return self._environments[row].reset(prompt=prompts[row], **cells)

        observations = self._checked(begin, checked_observation, range(len(prompts)))
        role = "user"
        if prompts:
            role = getattr(self._environments[0], "observation_role", role)
        if not isinstance(role, str):
            raise RewardError(f"observation_role is {role!r:.80}, needs text")
        return [observations, role]

    def _step(self, rows: Sequence[int], texts: Sequence[str]) -> list[Any]:
        if rows and max(rows) >= len(self._environments):
            raise RewardError("its process died in step")
        text_of = dict(zip(rows, texts, strict=True))
        return self._checked(
            lambda row: self._environments[row].step(text_of[row]), checked_step, rows
        )

    def _checked(
        self,
        call: Callable[[int], Any],
        check: Callable[[Any], Any],
        rows: Sequence[int],
    ) -> list[Any]:
        """The results of the calls, checked."""
        try:
            results = [*map(call, rows)]
            if any(map(inspect.isawaitable, results)):
                results = self._loop.run_until_complete(gathered(results))
        except Exception as error:
            raise RewardError(f"raised {one_line(describe_error(error, self._module))}") from error

        checked_results = []
        for row, result in zip(rows, results, strict=True):
            try:
                checked_results.append(check(result))
            except RewardError as error:
                raise RewardError(one_line(error), row) from error
        return checked_results


def load_environment(name: str, columns: Sequence[str]) -> Callable[[], Any]:
    """Import an environment's class, or a function that makes one, and check its methods.

    Args:
        name: `module:Class`, or `path.py:Class` relative to the working directory.
        columns: names of the columns that `reset` will get.

    Raises:
        RewardError: in one line, if it can't be imported, or has no `reset` or `step` that can be
            called so.
    """
    try:
        factory = load_object(name, "class")
    except UserError as error:
        raise RewardError(f"environment {error}") from error
    if inspect.isclass(factory):
        for method, arguments in (("reset", ("prompt", *columns)), ("step", ("text",))):
            function = getattr(factory, method, None)
            if not callable(function):
                raise RewardError(f"environment {name}: the class has no method {method}")
            try:
                inspect.signature(function).bind(None, **dict.fromkeys(arguments))
            except TypeError as error:
                raise RewardError(
                    f"environment {name}: {method} can't be called as "
                    f"{method}({', '.join(arguments)}): {error}"
                ) from None
    return factory


def checked_observation(value: Any) -> str:
    """The first observation, empty for None.

    Raises:
        RewardError: if it is not text, or too long. It does not name the environment.
    """
    if value is not None and not isinstance(value, str):
        raise RewardError(f"reset returned {shown(value)}, needs text or None")
    return _bounded(value or "")


def checked_step(value: Any) -> Step:
    """The response from what `step` returned.

    Raises:
        RewardError: if it is not (observation, reward, done). It does not name the environment.
    """
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise RewardError(f"step returned {shown(value)}, needs (observation, reward, done)")
    observation, reward, done = value
    reward = plain_value(reward)
    done = plain_value(done)
    if not isinstance(done, bool):
        raise RewardError(
            f"step returned {shown(done)} as its third value, which must be True or False"
        )
    if not isinstance(observation, str) and not (observation is None and done):
        raise RewardError(f"step returned {shown(observation)} as observation, needs text")
    if not isinstance(reward, numbers.Real) or not abs(float(reward)) <= _LARGEST_REWARD:
        raise RewardError(
            f"step returned {shown(reward)} as reward, needs a number of at most "
            f"{_LARGEST_REWARD:g}"
        )
    return [{"content": _bounded(observation or "")}], float(reward), done


def _bounded(text: str) -> str:
    if len(text) > _LONGEST_OBSERVATION:
        raise RewardError(
            f"an observation has {len(text):,} characters, at most {_LONGEST_OBSERVATION:,} are "
            "read"
        )
    return text
