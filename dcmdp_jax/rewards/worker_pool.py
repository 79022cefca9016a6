"""A pool of processes that can be killed, for calls that may hang, crash or take all memory.

One thread per process hands it a call at a time, so calls run while the trainer does something else. The worker itself
enforces the time limit of a call (`worker_process`), by the processor time of that call: the limit does not depend on
the load of the machine or on when results are read.

Why no library: with pebble 5.2.3 the death of one idle worker makes the whole pool unusable, spawned workers import the
trainer's main module and with it JAX, and a hung worker outlives a killed trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from dcmdp_jax.rewards.messages import BadMessage, MessageSocket
from dcmdp_jax.rewards.process_tree import kill_descendants
from dcmdp_jax.rewards.worker_process import TIME_LIMIT_SIGNALS

_START_ATTEMPTS = 3
_START_SECONDS = 120.0
# The worker ends a call by itself, unless it is stopped.
_GRACE_SECONDS = 60.0
# Processor time of a call's first try. It gets its whole limit once no other call waits for a first try, so slow calls
# don't delay the others.
_FIRST_TRY_CPU_SECONDS = 0.5
_STOP = -1


@dataclasses.dataclass(eq=False)
class Task:
    """One call.

    Attributes:
        key: the caller's name for it.
        args: positional arguments, JSON values; others arrive as text.
        cpu_s: seconds of processor time it may take, None for no limit.
        wall_s: wall-clock limit in seconds, for a call that waits instead of computing.
        cancelled: set by the caller to drop the call if it has not started.
    """

    key: Hashable
    args: Sequence[Any]
    cpu_s: float | None
    wall_s: float
    cancelled: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a call.

    Attributes:
        status: "value", "error" (it raised, or killed its worker twice) or "timeout".
        value: what the function returned, None without status "value".
        message: what was raised.
    """

    status: str
    value: Any = None
    message: str = ""


class WorkerPool:
    """Processes that each run one program and call its function.

    Call `submit` and `next_result` from one thread. Close the pool after use. If this process dies, each worker ends
    at once, with all that its calls started.

    Args:
        program: arguments of the Python interpreter for a program that calls `worker_process.serve`; the file
            descriptor of its socket is appended.
        num_workers: maximum number of processes. A process is started when a task waits for one.
        output: file that gets what the processes print, at its end; None discards it.
    """

    def __init__(self, program: Sequence[str], num_workers: int, output: Path | None = None) -> None:
        self._program, self._output = tuple(program), output
        self._num_workers = num_workers
        self._tasks: queue.PriorityQueue[tuple[int, int, Task | None]] = queue.PriorityQueue()
        self._results: queue.SimpleQueue[tuple[Task, Outcome] | Exception] = queue.SimpleQueue()
        self._order = itertools.count()
        self._threads: list[threading.Thread] = []
        self._workers: set[_Worker] = set()
        self._closed = False
        self._lock = threading.Lock()  # guards `_workers` and `_closed`

    def submit(self, task: Task) -> None:
        """Put a task in line. Returns at once."""
        self._tasks.put((0, next(self._order), task))
        if len(self._threads) < self._num_workers:
            thread = threading.Thread(target=self._serve, name="worker-pool", daemon=True)
            self._threads.append(thread)
            thread.start()

    def next_result(self, timeout_s: float | None) -> tuple[Task, Outcome] | None:
        """Wait for the next task to end.

        Args:
            timeout_s: longest wait; None waits without a limit.

        Returns:
            A task and its outcome, or None after `timeout_s` without one.

        Raises:
            RuntimeError: if no worker can be started.
        """
        try:
            result = self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Kill the workers. Harmless when called again."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        for _ in self._threads:
            self._tasks.put((_STOP, next(self._order), None))
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _serve(self) -> None:
        """Run tasks on one worker; the body of a thread."""
        worker: _Worker | None = None
        try:
            while True:
                tries, _, task = self._tasks.get()
                if task is None:
                    return
                if task.cancelled:
                    continue
                short = tries == 0 and task.cpu_s is not None and task.cpu_s > _FIRST_TRY_CPU_SECONDS
                cpu_s = _FIRST_TRY_CPU_SECONDS if short else task.cpu_s
                wall_s = task.wall_s / 3 if short else task.wall_s
                outcome = None
                for _ in range(2):  # a call that kills its worker gets a second one
                    worker = worker or self._start()
                    outcome = worker.call(task.args, cpu_s, wall_s)
                    if not worker.usable:
                        self._discard(worker)
                        worker = None
                    if outcome is not None or self._closed:
                        break
                outcome = outcome or Outcome("error", message="the worker process died twice")
                if outcome.status == "timeout" and short:
                    self._tasks.put((1, next(self._order), task))
                else:
                    self._results.put((task, outcome))
        except Exception as error:
            if not self._closed:
                self._results.put(error)
        finally:
            if worker is not None:
                self._discard(worker)

    def _start(self) -> _Worker:
        """Start a worker and wait until it is ready."""
        reason = ""
        for _ in range(_START_ATTEMPTS):
            with self._lock:
                if self._closed:
                    raise RuntimeError("the worker pool is closed")
                worker = _Worker(self._program, self._output)
                self._workers.add(worker)
            fatal = worker.wait_until_ready()
            if fatal is None:
                return worker
            reason = fatal
            self._discard(worker)
        command = " ".join((sys.executable, *self._program))
        raise RuntimeError(f"no worker process could be started: {reason}; `{command}` shows the error")

    def _discard(self, worker: _Worker) -> None:
        with self._lock:
            worker.kill()
            self._workers.discard(worker)
        worker.messages.close()


class _Worker:
    """One worker process, its children, and the socket to them."""

    def __init__(self, program: Sequence[str], output: Path | None) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        ours, theirs = socket.socketpair()
        with theirs, open(output or os.devnull, "ab") as printed:
            self._process = subprocess.Popen(
                [sys.executable, *program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                env=os.environ | {"PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the process group to kill is the worker and its child
            )
        self.messages = MessageSocket(ours)
        self.usable = True
        self._number = 0

    def wait_until_ready(self) -> str | None:
        """None when it is ready, otherwise why it is not."""
        try:
            return self.messages.receive(_START_SECONDS)[1].get("fatal")
        except TimeoutError:
            return f"it was not ready in {_START_SECONDS:.0f} s"
        except (EOFError, OSError, BadMessage):
            return "it ended at once"

    def call(self, args: Sequence[Any], cpu_s: float | None, wall_s: float) -> Outcome | None:
        """Make one call; None if the worker died during it, but not by the time limit."""
        self.usable = False
        self._number += 1
        limit_s = wall_s + _GRACE_SECONDS
        request = {"args": args, "cpu_s": cpu_s, "wall_s": wall_s}
        try:
            self.messages.send(self._number, json.dumps(request, default=str).encode(), limit_s)
            number, reply = self.messages.receive(limit_s)
        except TimeoutError:
            return Outcome("timeout")
        except (EOFError, OSError, BadMessage):
            return None
        if number != self._number:
            return None
        if "died" in reply and reply["died"] not in TIME_LIMIT_SIGNALS:
            return None
        self.usable = True
        if "value" in reply:
            return Outcome("value", reply["value"])
        return Outcome("error", message=reply["error"]) if "error" in reply else Outcome("timeout")

    def kill(self) -> None:
        """Kill the worker, its child and all that they started. Harmless when called again."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGSTOP)  # so that it starts no new child
                kill_descendants(self._process.pid)
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
