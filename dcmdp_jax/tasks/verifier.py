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
        if len(completions) != len(answers):
            raise ValueError(f"{len(completions)} completions and {len(answers)} answers: one answer per completion")
        if self._closed:
            raise RuntimeError("the verifier is closed: make a new one")
        outcomes: dict[_Pair, bool | str | None] = {}
        pairs: list[_Pair | None] = []
        for completion, answer in zip(completions, answers, strict=True):
            prediction = extract_answer(completion)
            pair = None if prediction is None else (prediction, answer)
            pairs.append(pair)
            if pair is not None and pair not in outcomes:
                outcomes[pair] = compare_literals(*pair)
        undecided = [pair for pair, outcome in outcomes.items() if outcome is None]
        if undecided:
            outcomes.update(self._compare(undecided))
        results = [None if pair is None else outcomes[pair] for pair in pairs]
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

    def _compare(self, pairs: list[_Pair]) -> dict[_Pair, bool | str]:
        waiting = collections.deque(pairs)
        outcomes: dict[_Pair, bool | str] = {}
        crashed: set[_Pair] = set()
        failed_starts = 0
        try:
            while len(outcomes) < len(pairs):
                self._fill_pool(len(waiting))
                for worker in self._workers:
                    if waiting and worker.is_idle:
                        worker.send(waiting.popleft(), self._timeout_s)
                for worker in self._next_events():
                    pair = worker.pair
                    outcome = worker.receive()
                    if outcome is None:
                        continue
                    if outcome in ("timeout", "crash"):
                        self._workers.remove(worker)
                        worker.kill()
                    if pair is None:
                        failed_starts += 1
                        if failed_starts > _STARTS_FORGIVEN:
                            raise RuntimeError(worker.startup_failure)
                        continue
                    if outcome == "crash" and pair not in crashed:
                        crashed.add(pair)
                        waiting.append(pair)
                        continue
                    outcomes[pair] = "error" if outcome == "crash" else outcome
                    if outcome in ("error", "crash", "timeout"):
                        _LOG.debug("verifier %s on prediction %r, answer %r", outcome, *pair)
        except BaseException:
            self.close()  # a comparison still in flight would answer the next batch's question
            raise
        return outcomes

    def _fill_pool(self, waiting: int) -> None:
        idle = sum(worker.pair is None for worker in self._workers)
        for _ in range(min(waiting - idle, self._num_workers - len(self._workers))):
            self._workers.append(_Worker(self._timeout_s))

    def _next_events(self) -> list[_Worker]:
        """Waits until a worker has something to say or is over its deadline."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                if worker.deadline is not None:
                    selector.register(worker.output, selectors.EVENT_READ, worker)
            soonest = min(worker.deadline for worker in self._workers if worker.deadline is not None)
            ready = [key.data for key, _ in selector.select(max(0.0, soonest - time.monotonic()))]
        now = time.monotonic()
        late = [w for w in self._workers if w not in ready and w.deadline is not None and w.deadline <= now]
        return ready + late


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
