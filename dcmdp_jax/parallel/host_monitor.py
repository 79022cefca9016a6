"""Signs of life among the processes of a run, and what each has to say to the others.

JAX's coordination service, which process 0 runs, holds one key for each process: a counter that rises every second,
what the process is doing, and why it failed. A thread of each process writes its own key and reads all of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from dcmdp_jax.activity import give_back_terminal

_KEYS = "dcmdp/hosts/"
_PERIOD_S = 1.0
# After the failure of another process, the main thread has this long to leave by itself, with its own message.
_GRACE_S = 3.0
_EXIT_CODE = 1

RUNNING, STOPPING, FAILED = "running", "stopping", "failed"


class HostMonitor:
    """Ends this process when another one is dead, or has failed and waits for nobody.

    A process can't leave a collective operation that another one never enters, so the thread ends the process as a
    kill would; the run resumes from its newest checkpoint.

    Attributes:
        stopping: set once another process has asked all to meet early, or has failed.
    """

    def __init__(self, client: Any, index: int, names: Sequence[str], timeout_s: float, coordinator: str) -> None:
        """Start the thread.

        Args:
            client: client of JAX's coordination service.
            index: index of this process.
            names: names of all processes.
            timeout_s: a process without a sign of life for this long is dead.
            coordinator: address of the coordination service.
        """
        self._client, self._index, self._names, self._timeout_s = client, index, names, timeout_s
        self._beat, self._state, self._message = 0, RUNNING, ""
        self._lock = threading.Lock()
        self._end, self._leaving, self.stopping = threading.Event(), threading.Event(), threading.Event()
        self._write()
        if index:
            _explain_abort(coordinator, names[0])
        self._thread = threading.Thread(target=self._watch, name="host monitor", daemon=True)
        self._thread.start()

    def say(self, state: str, message: str = "") -> None:
        """Tell the others at once what this process is doing."""
        with self._lock:
            self._state, self._message = state, message
        self._write()

    def leave(self) -> None:
        """The main thread ends the process by itself: the monitor no longer does."""
        self._leaving.set()

    def close(self) -> None:
        """Stop the thread; a call of the service that does not return is waited for no longer than the others are."""
        self._end.set()
        self._thread.join(self._timeout_s)

    def wait_for_verdict(self) -> None:
        """Wait as long as it takes to find out that another process is dead; this one then ends here."""
        time.sleep(self._timeout_s + 2 * _PERIOD_S)

    def _write(self) -> None:
        with self._lock:
            self._beat += 1
            value = json.dumps([self._beat, self._state, self._message])
        self._client.key_value_set(f"{_KEYS}{self._index}", value, allow_overwrite=True)

    def _watch(self) -> None:
        began = time.monotonic()
        seen = {index: (0, began) for index in range(len(self._names)) if index != self._index}
        failed_at: dict[int, float] = {}
        while not self._end.wait(_PERIOD_S):
            try:
                self._write()
                entries = self._client.key_value_dir_get(_KEYS)
            except jax.errors.JaxRuntimeError:
                # JAX itself ends a process that has lost the service; `_explain_abort` says why.
                continue
            now = time.monotonic()
            for key, value in entries:
                index = int(key.rpartition("/")[2])
                if index == self._index:
                    continue
                beat, state, message = json.loads(value)
                if beat != seen[index][0]:
                    seen[index] = beat, now
                if state != RUNNING:
                    self.stopping.set()
                if state == FAILED and now - failed_at.setdefault(index, now) > _GRACE_S:
                    self._end_process(f"{_who(index, self._names)} failed: {message}", others_live=True)
            for index, (_, at) in seen.items():
                if now - at > self._timeout_s and index not in failed_at:
                    self._end_process(
                        f"{_who(index, self._names)} has given no sign of life for {self._timeout_s:g} s "
                        "(`timeout_s`) and is taken for dead; the same commands resume the run",
                        others_live=False,
                    )

    def _end_process(self, reason: str, *, others_live: bool) -> None:
        if self._leaving.is_set():
            return
        print_error(reason)
        if others_live:
            # All meet in JAX's shutdown: without it, the process that failed would wait for the others.
            ended = threading.Thread(target=jax.distributed.shutdown, daemon=True)
            ended.start()
            ended.join(self._timeout_s)
        elif not self._index:
            # The others lose the coordination service with this process, and would take that for the cause.
            time.sleep(2 * _GRACE_S)
        os._exit(_EXIT_CODE)


def print_error(reason: str) -> None:
    """Print one line on stderr, past Python's buffers: the process may end at once."""
    sys.stdout.flush()
    give_back_terminal()
    os.write(2, f"error: {reason}\n".encode())


def _who(index: int, names: Sequence[str]) -> str:
    return f"process {index} on {names[index]}"


def _explain_abort(coordinator: str, name: str) -> None:
    """Say which host is gone when JAX aborts this process because the coordination service is.

    JAX (0.10) ends a process with abort() as soon as its connection to process 0 breaks, and no Python code runs
    then: its callback for the case can't take the error that it is called with. So the C library calls this handler.
    """
    host, _, port = coordinator.rpartition(":")

    def explain(number: int) -> None:
        del number
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError:
            print_error(f"process 0 on {name} is gone, and the run's coordination with it; the same commands resume it")
            os._exit(_EXIT_CODE)

    global _ABORT_HANDLER
    _ABORT_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
    ctypes.CDLL(None).signal(signal.SIGABRT, _ABORT_HANDLER)


_ABORT_HANDLER: Any = None  # what C calls must not be garbage-collected
