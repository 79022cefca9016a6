"""The parent's side of a comparison: a contender's process, asked for one round at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.rounds import Job

_ROOT = Path(__file__).resolve().parents[2]
_CHUNK = 65536


class WorkerFailed(RuntimeError):
    """A worker failed, died or did not answer; the message is one line."""


class Worker:
    """A process that does rounds of a job and is idle, blocked on a read, between them.

    A context manager: at its end the process and its children are killed. Should this process be
    killed instead, the worker reads the end of its input and leaves by itself.
    """

    def __init__(
        self,
        python: Path,
        module: str,
        job: Job,
        *,
        environment: dict[str, str],
        log: Path,
        timeout: float,
    ) -> None:
        """Start it.

        Args:
            python: its interpreter.
            module: what it runs, from the checkout's top level.
            job: what to do.
            environment: variables, all of them.
            log: what it prints.
            timeout: seconds that an answer may take.
        """
        self._log = log
        self._timeout = timeout
        self._pending = b""
        self._answers, theirs = os.pipe()
        try:
            with open(log, "wb") as output:
                self._process = subprocess.Popen(
                    [str(python), "-m", module, json.dumps(dataclasses.asdict(job)), str(theirs)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs,),
                    cwd=_ROOT,
                    env=environment,
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._answers)
            raise
        finally:
            os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process and its children; a second call does nothing."""
        if self._process.stdin.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._answers)

    def hello(self) -> dict[str, str]:
        """Wait until the work is set up; the versions of what does it.

        Raises:
            WorkerFailed: if it fails, dies or takes too long.
        """
        return self._answer()["versions"]

    def round(self) -> dict[str, float]:
        """One round: `seconds`, `cpu_seconds` of all its threads, and `peak_mib`, the process's
        peak memory so far.

        Raises:
            WorkerFailed: if it fails, dies or takes too long.
        """
        with contextlib.suppress(BrokenPipeError):  # a dead one is reported below
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout
        while b"\n" not in self._pending:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise WorkerFailed(f"no answer for {self._timeout:g} s")
            if not (chunk := os.read(self._answers, _CHUNK)):
                raise WorkerFailed(self._death())
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def _death(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "closed its answers and went on"
        said = [
            line
            for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.strip()
        ]
        ended = (
            f"killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        return f"{ended}; it last printed: {' '.join(said[-1].split())}" if said else ended
