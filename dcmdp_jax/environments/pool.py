"""Environments in a process that can be killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dcmdp_jax.environments.protocol import Step
from dcmdp_jax.rewards.protocol import RewardError
from dcmdp_jax.rewards.worker_pool import Task, WorkerPool

_PROGRAM = ("-m", "dcmdp_jax.environments.worker")
_IMPORT_SECONDS = 300.0
_POLL_SECONDS = 0.1


class EnvironmentFailure(RewardError):
    """An environment raised, hung, died, or returned something that is no step. One line.

    Attributes:
        row: the completion that it is about, None if all.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


class EnvironmentPool:
    """One process with the environments of a batch of completions.

    A call that exceeds the time limit is killed, with every process that the environment has started. Not thread-safe.
    Close the pool, or use it as a context manager.

    Args:
        name: as for `protocol.load_environment`.
        columns: names of the columns that `reset` gets.
        timeout_s: wall-clock limit of one call for all completions, in seconds.
        memory_gib: address space of the process in GiB; 0 for no limit.
        output: file that gets what the environment prints, at its end; None discards it.
    """

    def __init__(
        self, name: str, columns: Sequence[str], *, timeout_s: float, memory_gib: float = 0.0,
        output: Path | None = None,
    ) -> None:  # fmt: skip
        self.name, self._columns, self._timeout_s = name, list(columns), timeout_s
        self._pool = WorkerPool((*_PROGRAM, str(int(memory_gib * 1024**3))), 1, output)

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def check(self) -> None:
        """Import the environment.

        Raises:
            EnvironmentFailure: in one line, if that can't be done.
        """
        self._call("load", _IMPORT_SECONDS, lambda: None, self._columns)

    def reset(
        self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]], on_wait: Callable[[], None]
    ) -> tuple[list[str], str]:
        """Begin a batch; the first observation of each completion, mostly empty, and the role of the later ones.

        Raises:
            EnvironmentFailure: in one line.
        """
        found = self._call("reset", self._timeout_s, on_wait, list(prompts), dict(columns))
        return found["observations"], found["role"]

    def step(self, rows: Sequence[int], texts: Sequence[str], on_wait: Callable[[], None]) -> list[Step]:
        """What the environments of some completions say to their turns.

        Raises:
            EnvironmentFailure: in one line.
        """
        found = self._call("step", self._timeout_s, on_wait, list(rows), list(texts))
        return [Step(*each) for each in found["steps"]]

    def close(self) -> None:
        """Kill the process. Harmless when called again."""
        self._pool.close()

    def _call(self, request: str, timeout_s: float, on_wait: Callable[[], None], *arguments: Any) -> dict[str, Any]:
        self._pool.submit(Task(request, (request, self.name, *arguments), cpu_s=None, wall_s=timeout_s))
        while (result := self._pool.next_result(_POLL_SECONDS)) is None:
            on_wait()
        outcome = result[1]
        if outcome.status == "timeout":
            raise EnvironmentFailure(f"environment {self.name}: {request} gave no result in {timeout_s:g} s")
        if outcome.status == "error":
            raise EnvironmentFailure(f"environment {self.name}: {request}: {outcome.message}")
        if "problem" in outcome.value:
            raise EnvironmentFailure(outcome.value["problem"], outcome.value.get("row"))
        return outcome.value
