"""The program of an isolated process, which loads one function and calls it for the trainer.

    python -P -m dcmdp_jax.rewards.isolated_worker MODULE [MEMORY_BYTES SOCKET_FD LIFELINE_FD]

The first request calls `MODULE.load`, which returns the function that later requests call. Without
the descriptors the program only loads, without arguments, to show why it can't.

A message is 16 bytes, its number and its length, and then JSON. A request is {"args": [...],
"cpu_s": seconds or null}; its reply has the same number and is {"value": ...}, {"error": "...",
"row": number or null}, or {"timeout": true}.
"""

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from dcmdp_jax.errors import UserError, one_line

MAX_MESSAGE_BYTES = 1 << 32
_HEADER = struct.Struct(">QQ")
_CHUNK_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
# Away from the small numbers that code closes or writes to by mistake.
_FIRST_DESCRIPTOR = 200


class BadMessage(Exception):
    """The bytes on the socket are not the message that was expected."""


def send(connection: socket.socket, number: int, content: bytes) -> None:
    """Send JSON under a number."""
    connection.sendall(_HEADER.pack(number, len(content)))
    connection.sendall(content)


def receive(
    connection: socket.socket,
    number: int,
    *,
    max_bytes: int = MAX_MESSAGE_BYTES,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Receive the message with this number.

    Args:
        connection: a stream socket.
        number: the only number to accept.
        max_bytes: longest content to accept.
        wait: called before each read; what it raises ends the wait.

    Raises:
        EOFError: if the other end is closed.
        BadMessage: if the bytes are no message, or another one.
    """

    def read(count: int) -> bytearray:
        buffer = bytearray()
        while len(buffer) < count:
            wait()
            chunk = connection.recv(min(_CHUNK_BYTES, count - len(buffer)))
            if not chunk:
                raise EOFError
            buffer += chunk
        return buffer

    received_number, length = _HEADER.unpack(read(_HEADER.size))
    if received_number != number or length > max_bytes:
        raise BadMessage
    try:
        content = json.loads(read(length))
    except ValueError as error:
        raise BadMessage from error
    if not isinstance(content, dict):
        raise BadMessage
    return content


def serve(module: str, trainer: socket.socket) -> None:
    """Load the function of a module, then answer requests until the trainer closes its socket."""

    def load(*args: Any) -> None:
        nonlocal function
        function = importlib.import_module(module).load(*args)

    function = load
    process_id = os.getpid()
    number = 0
    with trainer, contextlib.suppress(EOFError, ConnectionError):
        while True:
            request = receive(trainer, number)
            reply = _call(function, **request)
            if os.getpid() != process_id:  # the function forked and returned here too
                os._exit(0)
            send(trainer, number, reply)
            number += 1


def _call(function: Callable[..., Any], args: list[Any], cpu_s: float | None) -> bytes:
    """Make a call and encode the reply.

    A call over its processor time ends this process by a signal, also inside C.
    """
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, cpu_s or 0.0)
    try:
        reply = json.dumps({"value": function(*args)})
    except BaseException as error:  # SystemExit too: the next request is served
        if isinstance(error, UserError):
            message = one_line(error)
        else:
            message = one_line(f"{type(error).__name__}: {error}", 300)
        reply = json.dumps({"error": message, "row": getattr(error, "row", None)})
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    # The kernel looks at the timer every few milliseconds; a call that ended in between was over
    # its limit too.
    if cpu_s is not None and time.process_time() - start > cpu_s:
        return b'{"timeout": true}'
    return reply.encode()


def _end_with_trainer(lifeline_fd: int) -> None:
    """Let the kernel kill this process and its group once the trainer's end is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.set_inheritable(lifeline_fd, False)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)


def main(
    module: str,
    memory_bytes: int = 0,
    socket_fd: int | None = None,
    lifeline_fd: int | None = None,
) -> None:
    """Run the program with its command line's arguments."""
    sys.path.append(os.getcwd())  # the user's own modules, after the standard library's
    if socket_fd is None or lifeline_fd is None:
        importlib.import_module(module).load()
        return
    _end_with_trainer(lifeline_fd)
    # A file's, of which a killed call would lose what it printed last.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    trainer = socket.socket(fileno=fcntl.fcntl(socket_fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR))
    os.close(socket_fd)
    serve(module, trainer)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
