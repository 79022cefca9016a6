"""Reward functions, each called in a process of its own."""

import dataclasses
import functools
import json
import resource
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.errors import describe_error, one_line
from dcmdp_jax.rewards.isolated import CallError, Closing, IsolatedPool, result_of
from dcmdp_jax.rewards.protocol import (
    BEGINNING,
    BUILT_IN_REWARDS,
    Logged,
    Message,
    RewardError,
    RewardFunction,
    TrainerState,
    call_reward,
    load_reward,
    plain_value,
)


@dataclasses.dataclass(frozen=True)
class Returned:
    """The result of a call.

    Attributes:
        rewards: one value or None per completion.
        metrics: name -> the numbers that the function logged under it.
        extra: name -> one value per completion, JSON values.
    """

    rewards: list[float | None]
    metrics: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    extra: dict[str, list[Any]] = dataclasses.field(default_factory=dict)


class RewardPool(Closing):
    """Calls each reward function on batches of completions. Not thread-safe; close it.

    Functions are imported at once, and run in parallel, each on one batch at a time.

    Args:
        functions: names as for `protocol.load_reward`, each once.
        columns: names of the columns that every call gets.
        timeout_s: wall-clock limit of one call in seconds; the import has its own limit of 5
            minutes.
        memory_gib: address space of a function's process, and of each process it starts, in GiB; 0
            for no limit.
        output: file that gets what the functions print, at its end; None discards it.
    """

    def __init__(
        self,
        functions: Sequence[str],
        columns: Sequence[str],
        *,
        timeout_s: float,
        memory_gib: float = 0.0,
        output: Path | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._pools: dict[str, IsolatedPool] = {}
        for name in functions:
            self._pools[name] = IsolatedPool(
                __name__,
                (name, list(columns)),
                memory_gib=memory_gib,
                output=output,
            )
        self._loads = {name: pool.load() for name, pool in self._pools.items()}
        self._calls: dict[str, Future[Any]] = {}

    def wait_until_loaded(self) -> None:
        """Wait until every function is imported.

        Raises:
            RewardError: in one line, for the first that can't be loaded.
        """
        for name, loaded in self._loads.items():
            try:
                result_of(loaded)
            except CallError as error:
                raise self._failure(name, error) from error

    def begin(
        self,
        prompts: Sequence[str | list[Message]],
        completions: Sequence[str | list[Message]],
        completion_ids: Sequence[np.ndarray],
        columns: Mapping[str, Sequence[Any]],
        state: TrainerState = BEGINNING,
    ) -> None:
        """Start to call every function on a batch. Does not wait.

        Args:
            prompts, completions, completion_ids: one per completion.
            columns: the other columns, one element per completion. Types that JSON lacks, such as
                dates, arrive as text.
            state: the run's progress.
        """
        id_lists = [np.asarray(ids).tolist() for ids in completion_ids]
        for name, pool in self._pools.items():
            self._calls[name] = pool.submit(
                dict(columns),
                list(prompts),
                list(completions),
                id_lists,
                dataclasses.asdict(state),
                wall_s=self._timeout_s,
            )

    def collect(
        self, on_wait: Callable[[], None] = lambda: None
    ) -> dict[str, Returned | RewardError]:
        """Wait for the started calls; return what each function gave, or its failure.

        Args:
            on_wait: called ten times a second; an exception from it ends the wait.
        """
        results = {}
        for name, call in self._calls.items():
            try:
                results[name] = Returned(**result_of(call, on_wait))
            except CallError as error:
                results[name] = self._failure(name, error)
        return results

    def close(self) -> None:
        """Kill the processes. Harmless when called again."""
        for pool in self._pools.values():
            pool.close()

    def _failure(self, name: str, error: CallError) -> RewardError:
        problem = str(error).removeprefix(f"reward {name}: ")
        if not problem:
            problem = f"no result in {self._timeout_s:g} s"
        return RewardError(f"reward {name}: {problem}", error.row)


def load(name: str, columns: Sequence[str]) -> Callable[..., dict[str, Any]]:
    """Import a reward function, in its process.

    Raises:
        RewardError: in one line that names it.
    """
    try:
        return functools.partial(_call, name, load_reward(name, columns))
    except RewardError as error:
        raise RewardError(f"{error}{_memory_limit(error.__cause__ or error)}") from error


def _call(
    name: str,
    function: RewardFunction,
    columns: Mapping[str, Sequence[Any]],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields of `Returned`."""
    logged = Logged(len(completions))
    try:
        rewards = call_reward(
            function,
            prompts,
            completions,
            completion_ids,
            columns,
            TrainerState(**state),
            logged,
        )
        extra = json.loads(json.dumps(logged.extra, default=_json_value))
    except RewardError:
        raise
    except Exception as error:
        module, _, _ = BUILT_IN_REWARDS.get(name, name).rpartition(":")
        problem = one_line(describe_error(error, module))
        raise RewardError(f"raised {problem}{_memory_limit(error)}") from error
    return {"rewards": rewards, "metrics": logged.metrics, "extra": extra}


def _json_value(value: Any) -> Any:
    """A NumPy or torch scalar as a number, anything else that JSON lacks as text."""
    plain = plain_value(value)
    if isinstance(plain, bool | int | float):
        return plain
    return str(value)


def _memory_limit(error: BaseException) -> str:
    """The limit that a lack of memory may come from, as the end of a line."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if not isinstance(error, MemoryError) or limit == resource.RLIM_INFINITY:
        return ""
    return f"; `memory_gib` is {limit / 1024**3:g} GiB, 0 is no limit"
