"""Rewards: completions graded against reference answers, in processes that can be killed.

Most of a batch never leaves the trainer's process: a completion without an answer, and every pair of literals
(integers, decimals, fractions, words), is decided by `answers`. What is left goes to workers that run math-verify; each
pair gets a time limit, and a worker over it is killed, wherever it hangs, and replaced.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from dcmdp_jax.tasks.answers import compare_literals, extract_answer

_LOG = logging.getLogger(__name__)
_STARTUP_SECONDS = 60.0
_STARTS_FORGIVEN = 2
_Pair = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Grades:
    """Rewards of a batch of completions and what went wrong on the way to them.

    Attributes:
        rewards: [N] float32, 1 where the completion's answer equals the reference, else 0.
        errors: completions whose comparison raised or killed its worker twice; reward 0.
        timeouts: completions whose comparison was over the time limit; reward 0.
        unparsed: completions that commit to no answer (no box, no "Answer:" line); reward 0.
    """

    rewards: np.ndarray
    errors: int
    timeouts: int
    unparsed: int


class Verifier:
    """Grades completions with a pool of worker processes, started when first needed.

    Not thread-safe. Close it, or use it as a context manager; workers also end by themselves when this process dies.

    Args:
        num_workers: worker processes, at least 1.
        timeout_s: seconds one comparison may take in a worker, above 0. Starting a worker (about two seconds) is not
            counted.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(self, num_workers: int = 2, timeout_s: float = 5.0) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers = {num_workers}: at least 1 verifier process is needed")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s = {timeout_s}: the time limit of an answer must be above 0 seconds")
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._closed = False
        # Of every pair that was asked about and not yet answered for: None while it is with a worker or waits for one.
        self._outcomes: dict[_Pair, bool | str | None] = {}
        self._waiting: collections.deque[_Pair] = collections.deque()
        self._crashed: set[_Pair] = set()
        self._failed_starts = 0

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers now running; empty until an answer needs algebra."""
        return tuple(worker.process.pid for worker in self._workers)

    def begin(self, completions: Sequence[str], answers: Sequence[str]) -> None:
        """Starts on completions that `grade` will be asked about, and waits for nothing.

        What needs algebra goes to workers that are idle, the rest when `begin` or `grade` is next called.

        Args:
            completions, answers: as of `grade`.

        Raises:
            ValueError, RuntimeError: as `grade`.
        """
        self._ask(completions, answers)
        self._advance(wait=False)

    def grade(self, completions: Sequence[str], answers: Sequence[str]) -> Grades:
        r"""Rewards of completions, in their order.

        A comparison that raises or runs over its time limit is reward 0 and counted, never an exception here. A worker
        that dies under a comparison (killed for memory, say) is replaced and the comparison tried once more.

        Args:
            completions: decoded text of N completions.
            answers: the N reference answers, in the notation of `answers` (`\tolerance{...}` understood).

        Raises:
            ValueError: if the lengths differ or a reference answer states an ill-written tolerance.
            RuntimeError: if the verifier is closed, or its workers can't start.
        """
        pairs = self._ask(completions, answers)
        undecided = {pair for pair in pairs if pair is not None and self._outcomes[pair] is None}
        while undecided:
            undecided.difference_update(self._advance(wait=True))
        results = [None if pair is None else self._outcomes[pair] for pair in pairs]
        self._outcomes = {pair: None for pair, outcome in self._outcomes.items() if outcome is None}
        self._crashed.clear()
        return Grades(
            rewards=np.array([result is True for result in results], dtype=np.float32),
            errors=results.count("error"),
            timeouts=results.count("timeout"),
            unparsed=pairs.count(None),
        )

    def close(self) -> None:
        """Ends the workers. Harmless when called again."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _ask(self, completions: Sequence[str], answers: Sequence[str]) -> list[_Pair | None]:
        """What each completion is compared with, None for one that commits to no answer; new pairs are put in line."""
        if len(completions) != len(answers):
            raise ValueError(f"{len(completions)} completions and {len(answers)} answers: one answer per completion")
        if self._closed:
            raise RuntimeError("the verifier is closed: make a new one")
        pairs: list[_Pair | None] = []
        for completion, answer in zip(completions, answers, strict=True):
            prediction = extract_answer(completion)
            pair = None if prediction is None else (prediction, answer)
            pairs.append(pair)
            if pair is not None and pair not in self._outcomes:
                outcome = compare_literals(*pair)
                self._outcomes[pair] = outcome
                if outcome is None:
                    self._waiting.append(pair)
        return pairs

    def _advance(self, *, wait: bool) -> list[_Pair]:
        """Gives idle workers what waits and takes what they say, or, with `wait`, the next that one says; the pairs
        that are decided now."""
        decided = []
        try:
            self._fill_pool(len(self._waiting))
            for worker in self._workers:
                if self._waiting and worker.is_idle:
                    worker.send(self._waiting.popleft(), self._timeout_s)
            for worker in self._next_events(wait):
                pair = worker.pair
                outcome = worker.receive()
                if outcome is None:
                    continue
                if outcome in ("timeout", "crash"):
                    self._workers.remove(worker)
                    worker.kill()
                if pair is None:
                    self._failed_starts += 1
                    if self._failed_starts > _STARTS_FORGIVEN:
                        raise RuntimeError(worker.startup_failure)
                    continue
                if outcome == "crash" and pair not in self._crashed:
                    self._crashed.add(pair)
                    self._waiting.append(pair)
                    continue
                self._failed_starts = 0
                self._outcomes[pair] = "error" if outcome == "crash" else outcome
                decided.append(pair)
                if outcome in ("error", "crash", "timeout"):
                    _LOG.debug("verifier %s on prediction %r, answer %r", outcome, *pair)
        except BaseException:
            self.close()  # a comparison still in flight would answer the next batch's question
            raise
        return decided

    def _fill_pool(self, waiting: int) -> None:
        idle = sum(worker.pair is None for worker in self._workers)
        for _ in range(min(waiting - idle, self._num_workers - len(self._workers))):
            self._workers.append(_Worker(self._timeout_s))

    def _next_events(self, wait: bool) -> list[_Worker]:
        """Workers that have something to say or are over their deadline; with `wait` there is at least one, if any is
        busy."""
        busy = [worker for worker in self._workers if worker.deadline is not None]
        if not busy:
            return []
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            soonest = min(worker.deadline for worker in busy) if wait else 0.0
            ready = [key.data for key, _ in selector.select(max(0.0, soonest - time.monotonic()))]
        now = time.monotonic()
        return ready + [worker for worker in busy if worker not in ready and worker.deadline <= now]


class _Worker:
    """One worker process and the pair it has in hand."""

    def __init__(self, timeout_s: float) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dcmdp_jax.tasks.verifier_worker", str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdout = self.process.stdout
        self.output = self._stdout.fileno()
        os.set_blocking(self.output, False)
        self._input = self.process.stdin
        self._buffer = b""
        self._ready = False
        self._reason = ""
        self.pair: _Pair | None = None
        self.deadline: float | None = time.monotonic() + _STARTUP_SECONDS

    @property
    def is_idle(self) -> bool:
        return self._ready and self.pair is None

    def send(self, pair: _Pair, timeout_s: float) -> None:
        self.pair = pair
        self.deadline = time.monotonic() + timeout_s
        line = json.dumps({"prediction": pair[0], "gold": pair[1]}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # it died idle; reading its output says so
            self._input.write(line.encode())
            self._input.flush()

    def receive(self) -> bool | str | None:
        """The comparison's result, "error", "timeout", "crash", or None while there is none."""
        try:
            chunk = os.read(self.output, 65536)
        except BlockingIOError:
            if self.deadline is None or self.deadline > time.monotonic():
                return None
            self._reason = self._reason or f"it was not ready in {_STARTUP_SECONDS:.0f} s"
            return "timeout"
        if not chunk:
            return "crash"
        self._buffer += chunk
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        reply = json.loads(line)
        self.deadline = None
        if not self._ready:
            self._reason = reply.get("fatal", "")
            self._ready = not self._reason
            return "crash" if self._reason else None
        self.pair = None
        return reply.get("equal", "error")

    @property
    def startup_failure(self) -> str:
        return (
            f"no verifier process could be started: {self._reason or 'it ended at once'}; "
            f"`{sys.executable} -m dcmdp_jax.tasks.verifier_worker 5` shows the error"
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
