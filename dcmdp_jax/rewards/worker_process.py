"""The worker's side of `worker_pool`: a process that calls one function, with limits on each call's time and memory.

The process loads the function once and forks a child that makes the calls. A call over its time limit ends the child by
a signal's default action, which works inside C code that never returns to Python; the process then forks the next
child, with everything loaded. Messages are JSON over one socket. Both processes end when the trainer closes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from dcmdp_jax.errors import one_line

MEMORY_LIMIT_BYTES = 2 * 1024**3
TIME_LIMIT_SIGNALS = (signal.SIGPROF, signal.SIGALRM)


def serve(
    socket_fd: int, load: Callable[[], Callable[..., Any]], *, memory_limit_bytes: int | None = MEMORY_LIMIT_BYTES
) -> None:
    """Answer requests from a socket until it is closed.

    The first message sent is {"ready": true}, or {"fatal": "..."} when `load` raises. A request is {"args": [...],
    "cpu_s": seconds of processor time or null, "wall_s": seconds on the wall}. The reply is {"value": ...},
    {"error": "..."} when the function raises, {"timeout": true}, or {"died": signal number} when the call ended the
    child.

    Args:
        socket_fd: file descriptor of a stream socket, owned by this call.
        load: imports what the calls need and returns the function. It must not start threads: the process forks after.
        memory_limit_bytes: address space of the process, None for no limit.
    """
    if memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    # The trainer may be gone, with its end of the socket closed.
    with Connection(socket_fd) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            function = load()
        except Exception as error:
            _send(connection, {"fatal": _describe(error)})
            return
        _send(connection, {"ready": True})
        while (code := _run_child(connection, function)) != 0:
            _send(connection, {"died": max(0, -code)})


def _run_child(connection: Connection, function: Callable[..., Any]) -> int:
    """Fork a child that answers requests; its exit code, 0 after the last request, -N after signal N."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _answer_requests(connection, function)
            code = 0
        finally:
            os._exit(code)  # the stack above belongs to the parent
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _answer_requests(connection: Connection, function: Callable[..., Any]) -> None:
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            request = json.loads(connection.recv_bytes())
            connection.send_bytes(_call(function, **request))


def _call(function: Callable[..., Any], args: list[Any], cpu_s: float | None, wall_s: float) -> bytes:
    """Make one call and encode the reply."""
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, cpu_s or 0.0)
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    try:
        reply = json.dumps({"value": function(*args)})
    except BaseException as error:  # SystemExit too: the child serves the next request
        reply = json.dumps({"error": _describe(error)})
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    # The kernel looks at the timer every few milliseconds; a call that ended in between was over its limit too.
    over = cpu_s is not None and time.process_time() - began > cpu_s
    return b'{"timeout": true}' if over else reply.encode()


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _describe(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}", 300)
