"""The worker's side of `worker_pool`: a process that calls one function, with limits on each call's time and memory.

The process loads the function once and forks a child that makes the calls. A call over its time limit ends the child by
a signal's default action, which works inside C code that never returns to Python; the process then forks the next
child, with everything loaded. All that a child started ends with it.

Only this process holds the trainer's socket. The child, which runs the user's code, has a socket of its own, and what
it writes there is bounded in time and size and has to bear the number of the request. Both processes, and all they
started, end when the trainer closes its socket or dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from dcmdp_jax.errors import one_line
from dcmdp_jax.rewards.messages import BadMessage, MessageSocket
from dcmdp_jax.rewards.process_tree import adopt_orphans, die_with_parent, kill_descendants, reap_orphans

MEMORY_LIMIT_BYTES = 2 * 1024**3
TIME_LIMIT_SIGNALS = (signal.SIGPROF, signal.SIGALRM)
_MAX_REPLY_BYTES = 1 << 28
# A call ends itself by its alarm; after this, one that replaced its alarm is killed.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_IDLE_SECONDS = 1.0
# Away from the small numbers that code closes or writes to by mistake.
_FIRST_DESCRIPTOR = 200
_STRAY = "something wrote to the socket of the process that calls it, such as to an inherited file descriptor"


def serve(
    socket_fd: int, load: Callable[[], Callable[..., Any]], *, memory_limit_bytes: int | None = MEMORY_LIMIT_BYTES
) -> None:
    """Answer requests from a socket until it is closed.

    The first message sent is {"ready": true}, or {"fatal": "..."} when `load` raises. A request is {"args": [...],
    "cpu_s": seconds of processor time or null, "wall_s": seconds on the wall}. The reply has the request's number and
    is {"value": ...}, {"error": "..."} when the function raises, {"timeout": true}, or {"died": signal number} when the
    call ended the child.

    Args:
        socket_fd: file descriptor of a stream socket, owned by this call.
        load: imports what the calls need and returns the function. It must not start threads: the process forks after.
        memory_limit_bytes: address space of the child and of each process it starts, None for no limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    adopt_orphans()
    os.set_inheritable(socket_fd, False)
    # The trainer may be gone, with its end of the socket closed.
    with (
        MessageSocket(socket.socket(fileno=socket_fd)) as trainer,
        contextlib.suppress(EOFError, OSError, _TrainerGone),
    ):
        try:
            function = load()
        except Exception as error:
            trainer.send(0, _encode({"fatal": _describe(error)}))
            return
        trainer.send(0, _encode({"ready": True}))
        try:
            _relay(trainer, lambda: _fork(trainer, function, memory_limit_bytes))
        finally:
            kill_descendants(os.getpid())


@dataclasses.dataclass
class _Child:
    """The process that makes the calls, and the socket to it."""

    pid: int
    messages: MessageSocket

    def end(self) -> int:
        """Kill it with all that it started; its exit code, -N for one that signal N ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        kill_descendants(os.getpid())
        reap_orphans(None)
        self.messages.close()
        return code

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _relay(trainer: MessageSocket, fork: Callable[[], _Child]) -> None:
    """Hand requests to a child, and its replies to the trainer, until it is gone. A child that ends is replaced."""
    child = fork()
    while True:
        if _has_message(trainer, child):
            number, request = trainer.receive()
            reply, usable = _ask(trainer, child, number, request)
            if not usable:
                child.end()
                child = fork()
            trainer.send(number, _encode(reply))
        else:  # it ended, or wrote what nobody asked for
            child.end()
            time.sleep(_POLL_SECONDS)
            child = fork()
        reap_orphans(child.pid)


def _has_message(trainer: MessageSocket, child: _Child) -> bool:
    """Wait for the trainer; False if the child ends or writes something first."""
    while True:
        ready = _readable(trainer, child.messages, _IDLE_SECONDS)
        if child.messages.fileno() in ready or child.has_ended():
            return False
        if ready:
            return True


def _ask(trainer: MessageSocket, child: _Child, number: int, request: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Make one call; the reply, and whether the child can make the next.

    Raises:
        _TrainerGone: if the trainer closed its socket.
    """
    end = time.monotonic() + request["wall_s"] + _GRACE_SECONDS
    try:
        child.messages.send(number, _encode(request), request["wall_s"] + _GRACE_SECONDS)
        while time.monotonic() < end:
            ready = _readable(trainer, child.messages, _POLL_SECONDS)
            if trainer.fileno() in ready:  # it sends nothing during a call
                raise _TrainerGone
            if child.messages.fileno() not in ready:
                if child.has_ended():
                    raise EOFError
            elif (message := child.messages.read(_POLL_SECONDS, number=number)) is not None:
                if not isinstance(message[1], dict):
                    raise BadMessage
                return message[1], True
    except BadMessage:
        return {"error": _STRAY}, False
    except TimeoutError:
        pass
    except (EOFError, OSError):
        return {"died": max(0, -_exit_code(child))}, False
    return {"timeout": True}, False


class _TrainerGone(Exception):
    """The trainer closed its socket during a call."""


def _exit_code(child: _Child) -> int:
    """The exit code of a child that closed its socket; it stays to be waited for."""
    for _ in range(int(_GRACE_SECONDS / _POLL_SECONDS)):
        if child.has_ended():
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        time.sleep(_POLL_SECONDS)
    return 1


def _readable(trainer: MessageSocket, child: MessageSocket, timeout_s: float) -> set[int]:
    poll = select.poll()
    for end in (trainer, child):
        poll.register(end.fileno(), select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(timeout_s * 1000)}


def _fork(trainer: MessageSocket, function: Callable[..., Any], memory_limit_bytes: int | None) -> _Child:
    """Fork a child that answers requests on a socket of its own."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return _Child(pid, MessageSocket(ours, max_bytes=_MAX_REPLY_BYTES))
    code = 1
    try:
        die_with_parent()
        trainer.close()
        ours.close()
        if memory_limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
        _answer_requests(MessageSocket(_away(theirs)), function)
        code = 0
    finally:
        os._exit(code)  # the stack above belongs to the parent


def _away(end: socket.socket) -> socket.socket:
    """The same socket under a large descriptor, which programs that are started do not inherit."""
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR))


def _answer_requests(supervisor: MessageSocket, function: Callable[..., Any]) -> None:
    own = os.getpid()
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            number, request = supervisor.receive()
            reply = _call(function, **request)
            if os.getpid() != own:  # the function forked and returned here too
                os._exit(0)
            supervisor.send(number, reply)


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


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _describe(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}", 300)
