"""What the processes of a run tell each other outside of collective operations: to stop early, and why one failed.

Whether they live is for JAX to see. Each sends signs of life to the coordination service of process 0 from a thread
without Python, which a loaded machine does not hold up for long; without one for `timeout_s` JAX aborts all others.
"""

import contextlib
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

_STOPPING, _FAILED = "dcmdp/stopping", "dcmdp/failed"
_WAIT_MS = 10**11  # years: the end of the connection ends it
# After the failure of another process, the main thread has this long to leave by itself, with its own message.
_GRACE_S = 3.0


class HostMonitor:
    """Ends this process when another one has failed and waits for nobody.

    A process can't leave a collective operation that another one never enters, so a thread ends the process as a kill
    would; the run resumes from its newest checkpoint.

    Attributes:
        stopping: set once another process has asked all to meet early, or has failed.
    """

    def __init__(self, client: Any, index: int, names: Sequence[str], timeout_s: float, coordinator: str) -> None:
        """Start the thread.

        Args:
            client: client of JAX's coordination service.
            index: index of this process.
            names: names of all processes.
            timeout_s: JAX's limit between two signs of life.
            coordinator: address of the coordination service.
        """
        self._client, self._index, self._names, self._timeout_s = client, index, names, timeout_s
        self._leaving, self.stopping = threading.Event(), threading.Event()
        _explain_abort(index, names, timeout_s, coordinator)
        self._thread = threading.Thread(target=self._listen, name="host monitor", daemon=True)
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Ask the others to meet early."""
        self._tell(_STOPPING, "")

    def leave(self, failure: str | None) -> None:
        """The main thread ends the process by itself: the thread no longer does. Tell the others of a failure."""
        self._leaving.set()
        if failure is not None:
            self._tell(_FAILED, failure)
            self._tell(_STOPPING, "")

    def close(self) -> None:
        """Wait for the thread, which the end of the connection has ended."""
        self._thread.join(self._timeout_s)

    def wait_for_verdict(self) -> None:
        """Wait as long as JAX takes to find out that another process is dead; this one then ends here."""
        print_line("waiting to learn which process is gone", "an operation with the other processes failed")
        self._leaving.wait(1.5 * self._timeout_s + _GRACE_S)

    def _tell(self, topic: str, message: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
            self._client.key_value_set(topic, json.dumps([self._index, message]))

    def _listen(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the connection has ended
            self._client.blocking_key_value_get(_STOPPING, _WAIT_MS)
            self.stopping.set()
            index, message = json.loads(self._client.blocking_key_value_get(_FAILED, _WAIT_MS))
            if index == self._index or self._leaving.wait(_GRACE_S):
                return
            print_line("error", f"process {index} on {self._names[index]} failed: {message}")
            # All meet in JAX's shutdown: without it, the process that failed would wait for the others.
            ended = threading.Thread(target=jax.distributed.shutdown, daemon=True)
            ended.start()
            ended.join(self._timeout_s)
            os._exit(1)


def print_line(kind: str, text: str) -> None:
    """Print one line on stderr, past Python's buffers: the process may end at once."""
    sys.stdout.flush()
    os.write(2, f"{kind}: {text}\n".encode())


def _explain_abort(index: int, names: Sequence[str], timeout_s: float, coordinator: str) -> None:
    """Say which host is gone when JAX aborts this process.

    JAX (0.10) ends a process with abort() when its connection to process 0 breaks, or another process gives no sign of
    life, and no Python code runs then: its callback for the case can't take the error that it is called with. So the C
    library calls this handler. Only the lines that JAX has printed have the dead process's number.
    """
    host, _, port = coordinator.rpartition(":")
    known = ", ".join(f"{number} is on {name}" for number, name in enumerate(names))

    def explain(_: int) -> None:
        said = (
            f"a process has given no sign of life for {timeout_s:g} s (the hosts' timeout_s raises it); JAX's lines "
            f"above have its number: {known}; rerun the same commands to resume"
        )
        try:
            if index:
                socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError:
            said = f"lost the coordinator, process 0 on {names[0]}; rerun the same commands to resume"
        print_line("error", said)
        if not index:
            time.sleep(2 * _GRACE_S)  # the others would take the end of the service for the cause
        os._exit(1)

    global _ABORT_HANDLER
    _ABORT_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
    ctypes.CDLL(None).signal(signal.SIGABRT, _ABORT_HANDLER)


_ABORT_HANDLER: Any = None  # what C calls must not be garbage-collected
