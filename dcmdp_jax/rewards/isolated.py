"""Calls in processes that can be killed: one that hangs or crashes leaves the run alone.

Each process (`isolated_worker`) loads one function and makes one call at a time. A limit on
processor time is enforced by the process itself, so it is independent of machine load; a limit on
wall-clock time by the thread that waits. A process that is killed ends with its process group, and
so does every one when the trainer dies. What left the group (a daemon, a program in a session of
its own) stays.

Why no library: with pebble 5.2.3 the death of one idle worker makes the whole pool unusable,
spawned workers import the trainer's main module and with it JAX, and a hung worker outlives a
killed trainer.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dcmdp_jax.errors import one_line
from dcmdp_jax.rewards.isolated_worker import BadMessage, receive, send

# Without -P the working directory would come first, and a `resource.py` in it in the standard
# library's place.
_PROGRAM = ("-P", "-m", "dcmdp_jax.rewards.isolated_worker")
LOAD_SECONDS = 300.0
"""Longest time to load a function. Some libraries take minutes to import on a busy machine."""
_MAX_REPLY_BYTES = 1 << 28
_POLL_MILLISECONDS = 50
_END_SECONDS = 1.0
_ON_WAIT_SECONDS = 0.1
# Processor time of a call's first try. It gets its whole limit once no other call waits for a first
# try, so slow calls don't delay the others.
_FIRST_TRY_CPU_SECONDS = 0.5


class CallError(Exception):
    """A call that gave no value. One line.

    Attributes:
        kind: "error" (it raised, or killed its process twice), "timeout", or "load" (the function
            could not be loaded).
        row: the completion that the error is about, None if all.
    """

    def __init__(self, kind: str, message: str = "", row: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.row = row


class _Died(Exception):
    """The process ended without a reply, but not by a time limit."""


@dataclasses.dataclass(eq=False)
class _Call:
    """A call in line. Without `args` it only loads the function."""

    args: Sequence[Any] | None
    cpu_s: float | None = None
    wall_s: float = LOAD_SECONDS
    future: Future[Any] = dataclasses.field(default_factory=Future)


class Closing(contextlib.AbstractContextManager["Closing"]):
    """Closes itself at the end of a `with` block."""

    def close(self) -> None:
        """End what it started. Harmless when called again."""
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        self.close()


class IsolatedPool(Closing):
    """Processes that each call one function. Not thread-safe; close it.

    Args:
        module: has `load`, which returns the function.
        load_args: arguments of `load`, JSON values.
        workers: maximum number of processes. A process is started when a call waits for one.
        memory_gib: address space of a process, and of each that it starts, in GiB; 0 for no limit.
        output: file that gets what the processes print, at its end; None discards it.
    """

    def __init__(
        self,
        module: str,
        load_args: Sequence[Any] = (),
        *,
        workers: int = 1,
        memory_gib: float = 0.0,
        output: Path | None = None,
    ) -> None:
        self._new_worker = functools.partial(_Worker, module, load_args, memory_gib, output)
        self._max_workers = workers
        # Tries, place in line, call.
        self._calls: queue.PriorityQueue[tuple[int, int, _Call | None]] = queue.PriorityQueue()
        self._places = itertools.count()
        self._workers: list[tuple[_Worker, threading.Thread]] = []

    def load(self) -> Future[None]:
        """Start a process that loads the function; return a future that is done once it has."""
        return self._submit(_Call(None))

    def submit(self, *args: Any, wall_s: float, cpu_s: float | None = None) -> Future[Any]:
        """Put a call in line, where it can be cancelled; return the future of its value.

        Args:
            args: the function's arguments, JSON values; others arrive as text.
            wall_s: wall-clock limit in seconds.
            cpu_s: limit of processor time in seconds, None for none. A call with a long one has a
                short first try, which has a third of `wall_s`.
        """
        return self._submit(_Call(args, cpu_s, wall_s))

    def _submit(self, call: _Call) -> Future[Any]:
        self._calls.put((0, next(self._places), call))
        if len(self._workers) < self._max_workers:
            worker = self._new_worker()
            thread = threading.Thread(
                target=self._serve,
                args=(worker,),
                name="isolated-calls",
                daemon=True,
            )
            self._workers.append((worker, thread))
            thread.start()
        return call.future

    def close(self) -> None:
        """Kill the processes. Harmless when called again. Calls that were not made never end."""
        for worker, _ in self._workers:
            worker.close()
            self._calls.put((-1, next(self._places), None))
        for _, thread in self._workers:
            thread.join()
        self._workers = []

    def _serve(self, worker: "_Worker") -> None:
        """Make calls with one worker until the pool is closed, in a thread of its own."""
        while True:
            tries, _, call = self._calls.get()
            if call is None:  # the pool is closed
                return worker.end()
            if call.future.cancelled():
                continue
            cpu_s = call.cpu_s
            wall_s = call.wall_s
            is_short_try = tries == 0 and cpu_s is not None and cpu_s > _FIRST_TRY_CPU_SECONDS
            if is_short_try:
                # A long call first gets less, so that it does not delay the others.
                cpu_s = _FIRST_TRY_CPU_SECONDS
                wall_s /= 3

            value = None
            error = None
            try:
                value = worker.call(call.args, cpu_s, wall_s)
            except CallError as failure:
                error = failure
            except Exception as failure:  # for example, the process cannot start
                error = CallError("load", one_line(f"{type(failure).__name__}: {failure}"))
            if is_short_try and error is not None and error.kind == "timeout":
                self._calls.put((1, next(self._places), call))
                continue

            with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled meanwhile
                if error is None:
                    call.future.set_result(value)
                else:
                    call.future.set_exception(error)


class _Worker:
    """A process that is replaced when it died, and the socket to it."""

    def __init__(
        self,
        module: str,
        load_args: Sequence[Any],
        memory_gib: float,
        output: Path | None,
    ) -> None:
        self._module = module
        self._load_args = load_args
        self._memory_bytes = int(memory_gib * 1024**3)
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._connection = contextlib.ExitStack()  # closes the socket and the lifeline
        self._closed = False
        self._lock = threading.Lock()  # guards `_process` and `_closed`

    def call(self, args: Sequence[Any] | None, cpu_s: float | None, wall_s: float) -> Any:
        """Make a call and return its value. One that kills its process is made twice.

        Raises:
            CallError: if there is none.
        """
        for _ in range(2):
            with contextlib.suppress(_Died):
                # It died, or wrote what nobody asked for.
                if self._process is None or self._readable.poll(0):
                    self._start()
                if args is None:  # it only loads
                    return None
                return self._ask(args, cpu_s, wall_s)
        if self._number == 0:
            command = " ".join((sys.executable, *_PROGRAM, self._module))
            raise CallError(
                "load", f"the worker process ended at once; `{command}` shows the error"
            )
        raise CallError("error", "the worker process died twice")

    def _start(self) -> None:
        """Start a process and let it load its function.

        Raises:
            CallError: if it can't load it, or the pool is closed.
        """
        self.end()
        search_path = [os.environ.get("PYTHONPATH")]
        # Python finds an installed package by itself, after the standard library.
        root = str(Path(__file__).resolve().parents[2])
        if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
            search_path.append(root)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
            "RAY_AUTH_TOKEN": "",  # a user's function joins no cluster
        }

        self._socket, worker_socket = socket.socketpair()
        # Never written: it closes with the trainer, and the kernel then kills the worker.
        lifeline_read, lifeline_write = os.pipe()
        self._connection.enter_context(self._socket)
        self._connection.callback(os.close, lifeline_write)
        log_path = self._output or os.devnull
        with self._lock, worker_socket, open(lifeline_read), open(log_path, "ab") as log_file:
            if self._closed:
                raise CallError("error", "the pool is closed")
            worker_fd = worker_socket.fileno()
            arguments = map(str, (self._memory_bytes, worker_fd, lifeline_read))
            self._process = subprocess.Popen(
                [sys.executable, *_PROGRAM, self._module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=environment,
                pass_fds=(worker_fd, lifeline_read),
                start_new_session=True,  # its process group is what is killed
            )
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._number = 0

        try:
            self._ask(self._load_args, None, LOAD_SECONDS)
        except CallError as error:
            self.end()
            problem = str(error)
            if error.kind == "timeout":
                problem = f"its import takes more than {LOAD_SECONDS:g} s"
            raise CallError("load", problem) from error

    def _ask(self, args: Sequence[Any], cpu_s: float | None, wall_s: float) -> Any:
        """Send a request to the process and wait for the value that it replies.

        Raises:
            CallError: if the call raised, or ran over a limit.
            _Died: if the process ended.
        """
        end = time.monotonic() + wall_s
        process = self._process
        assert process is not None

        def wait() -> None:
            while time.monotonic() < end:
                if self._readable.poll(_POLL_MILLISECONDS):
                    return
                # A child of the process may keep the socket open.
                if process.poll() is not None:
                    raise EOFError
            raise TimeoutError

        request = json.dumps({"args": args, "cpu_s": cpu_s}, default=str).encode()
        try:
            self._socket.settimeout(wall_s)
            send(self._socket, self._number, request)
            reply = receive(self._socket, self._number, max_bytes=_MAX_REPLY_BYTES, wait=wait)
        except TimeoutError:
            self.end()
            raise CallError("timeout") from None
        except BadMessage:
            self.end()
            raise CallError(
                "error",
                "something wrote to the socket of the process that calls it, such as to an "
                "inherited file descriptor",
            ) from None
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            self.end()
            if process.returncode == -signal.SIGPROF:  # the call's limit of processor time
                raise CallError("timeout") from None
            raise _Died from None

        self._number += 1
        if "value" in reply:
            return reply["value"]
        if "error" in reply:
            raise CallError("error", str(reply["error"]), reply.get("row"))
        # The call returned, but only after its limit of processor time.
        raise CallError("timeout")

    def close(self) -> None:
        """Kill the process, from another thread than the one that calls; no other is started."""
        with self._lock:
            self._closed = True
            self._kill_group()

    def end(self) -> None:
        """Kill the process and wait for its end."""
        with self._lock:
            self._kill_group()
            if self._process is not None:
                self._process.wait()
            self._process = None
        self._connection.close()

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def result_of(future: Future[Any], on_wait: Callable[[], None] = lambda: None) -> Any:
    """Wait for a call and return its value.

    Args:
        future: a call of `IsolatedPool`.
        on_wait: called ten times a second; an exception from it ends the wait.

    Raises:
        CallError: if it gave none.
    """
    while not future.done():
        concurrent.futures.wait([future], _ON_WAIT_SECONDS)
        on_wait()
    return future.result()
