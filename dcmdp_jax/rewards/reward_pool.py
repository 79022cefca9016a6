"""Reward functions called in processes that can be killed: one process for each function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dcmdp_jax.rewards.protocol import BEGINNING, Message, RewardError, TrainerState
from dcmdp_jax.rewards.worker_pool import Outcome, Task, WorkerPool

_PROGRAM = ("-m", "dcmdp_jax.rewards.reward_worker")
# Some libraries take minutes to import on a busy machine.
_IMPORT_SECONDS = 300.0
_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Returned:
    """What a call gave.

    Attributes:
        rewards: one value or None per completion.
        metrics: name -> the numbers that the function logged under it.
        extra: name -> one value per completion, JSON values.
    """

    rewards: list[float | None]
    metrics: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    extra: dict[str, list[Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A call that gave no rewards.

    Attributes:
        problem: one line that names the function.
        row: place of the completion with a bad value, None if it is not about one.
    """

    problem: str
    row: int | None = None


class RewardPool:
    """Calls each reward function on batches of completions.

    Each function has its own process, which imports it at once and runs until the pool is closed. Functions run in
    parallel, each on one batch at a time. The process kills a call that exceeds the time limit, with every process that
    the function has started.

    Not thread-safe. Close the pool, or use it as a context manager.

    Args:
        functions: names as for `protocol.load_reward`, each once.
        columns: names of the columns that every call gets.
        timeout_s: wall-clock limit of one call in seconds; the import has its own limit of 5 minutes.
        memory_gib: address space of a function's process, and of each process it starts, in GiB; 0 for no limit.
        output: file that gets what the functions print, at its end; None discards it.
    """

    def __init__(
        self, functions: Sequence[str], columns: Sequence[str], *, timeout_s: float, memory_gib: float = 0.0,
        output: Path | None = None,
    ) -> None:  # fmt: skip
        self._columns = list(columns)
        self._timeout_s = timeout_s
        program = (*_PROGRAM, str(int(memory_gib * 1024**3)))
        self._pools = {function: WorkerPool(program, 1, output) for function in functions}
        for function in functions:
            self._load(function)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def wait_until_loaded(self) -> None:
        """Wait until every function is imported.

        Raises:
            RewardError: in one line, for the first that can't be loaded.
        """
        for function in self._pools:
            outcome = self._outcome(function, "load", lambda: None)
            if isinstance(failure := _load_failure(function, outcome), Failure):
                raise RewardError(failure.problem)

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
            columns: the other columns, one element per completion. Types that JSON lacks, such as dates, arrive as
                text.
            state: of the run.
        """
        ids = [np.asarray(each).tolist() for each in completion_ids]
        batch = (dict(columns), list(prompts), list(completions), ids, dataclasses.asdict(state))
        for function, pool in self._pools.items():
            # Free in a process that has the function; a process that replaces a killed one must import it.
            self._load(function)
            pool.submit(Task(key="call", args=("call", function, *batch), cpu_s=None, wall_s=self._timeout_s))

    def collect(self, on_wait: Callable[[], None] = lambda: None) -> dict[str, Returned | Failure]:
        """Wait for the started calls; return what each function gave, or its failure.

        Args:
            on_wait: called ten times a second; an exception from it ends the wait.
        """
        return {function: self._result(function, self._outcome(function, "call", on_wait)) for function in self._pools}

    def close(self) -> None:
        """Kill the processes. Harmless when called again."""
        for pool in self._pools.values():
            pool.close()

    def _load(self, function: str) -> None:
        args = ("load", function, self._columns)
        self._pools[function].submit(Task(key="load", args=args, cpu_s=None, wall_s=_IMPORT_SECONDS))

    def _outcome(self, function: str, key: str, on_wait: Callable[[], None]) -> Outcome:
        """The outcome of the next task with this key; earlier ones are dropped."""
        while True:
            result = self._pools[function].next_result(_POLL_SECONDS)
            if result is None:
                on_wait()
            elif result[0].key == key:
                return result[1]

    def _result(self, function: str, outcome: Outcome) -> Returned | Failure:
        if outcome.status == "timeout":
            return Failure(f"reward {function}: no result in {self._timeout_s:g} s")
        if outcome.status == "error":
            return Failure(f"reward {function}: {outcome.message}")
        if "problem" in outcome.value:
            return Failure(outcome.value["problem"], outcome.value["row"])
        return Returned(**outcome.value)


def _load_failure(function: str, outcome: Outcome) -> Failure | None:
    if outcome.status == "timeout":
        return Failure(f"reward {function}: its import takes more than {_IMPORT_SECONDS:g} s")
    if outcome.status == "error":
        return Failure(f"reward {function}: can't be imported: {outcome.message}")
    return Failure(outcome.value["problem"]) if "problem" in outcome.value else None
