"""A sidecar process that runs an inference engine: start it, ask it, watch it."""

import collections
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.engines.sidecar import wire

logger = logging.getLogger(__name__)

_LOG = "sidecar.log"
_TEMPORARY = "tmp"
# A socket's name has at most 107 bytes; an engine's begin with this directory and end with up to 37
# more.
_LONGEST_TEMPORARY = 64
_LAST_LINES = 20
# A sidecar without a sign of life for this long during a request is broken.
STALL_TIMEOUT_S = 300.0
_END_S = 5.0
_CANCEL_S = 30.0
# One thread that lives as long as the trainer: a sidecar asks the kernel to be killed with the
# thread that started it.
_STARTER = ThreadPoolExecutor(1, "sidecar-starter")
# So long a request is waited for before the next look whether the caller has given it up.
_POLL_S = 0.05


class SidecarBroken(RuntimeError):
    """The sidecar died, hung, or gave an invalid answer.

    Its state is lost; the request may be repeated.
    """


@dataclasses.dataclass(frozen=True)
class Launch:
    """Arguments that start a sidecar.

    Attributes:
        name: engine name in errors and logs.
        python: interpreter that has the engine.
        script: the program it runs, which answers the requests listed in
            `engines/sidecar/__init__.py`.
        directory: its working directory: log, and temporary files while it runs. Exists.
        environment: variables set for it, on top of the trainer's.
        temporary_variables: variables set to its directory of temporary files, as TMPDIR is.
        start_timeout_s: limit from the start of the process to an engine that is ready.
    """

    name: str
    python: str
    script: Path
    directory: Path
    environment: Mapping[str, str]
    temporary_variables: tuple[str, ...]
    start_timeout_s: float


class Stopped(Exception):  # noqa: N818 - nothing is wrong
    """The caller gave the request up."""


class EngineProcess:
    """A process with an engine, and the requests to it. Any failure ends it, by its `kill`.

    Calls block; one thread.

    Attributes:
        name: engine name in errors and logs.
        log: where its log is.
        connection: sends the requests and receives the answers.
        serial: serial number of the weights in use, as their sender counts them.
        last_lines: the end of its log, whole once it is killed.
        node: the node of a cluster that it runs on; "" for this machine.
        started: whether its engine is there.
        work: tokens that it sampled, and seconds that it was at work.
    """

    def __init__(self, name: str, log: str, connection: Any) -> None:
        """Take over a connection to a process that was started."""
        self.name = name
        self.log = log
        self.connection = connection
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self.serial: int | None = None
        self.node = ""
        self.started = False
        self.work = collections.Counter()

    def request(
        self,
        op: str,
        header: wire.Fields | None = None,
        arrays: wire.Arrays | None = None,
        *,
        answer: str,
        timeout_s: float | None = None,
        stopped: threading.Event | None = None,
        on_progress: Callable[[wire.Message], None] = lambda message: None,
    ) -> wire.Message:
        """Ask, and wait for the answer.

        Args:
            op, header, arrays: the request.
            answer: the operation of the answer.
            timeout_s: limit between two messages; None: `STALL_TIMEOUT_S`.
            stopped: once set, the request is cancelled; a sidecar that does not cancel in time is
                killed.
            on_progress: called with each sign of progress.

        Raises:
            ValueError: if the sidecar refuses the request; it is unharmed.
            SidecarBroken: if it dies, stalls, or answers something else. It is gone then.
            Stopped: if `stopped` was set.
        """
        limit = timeout_s or STALL_TIMEOUT_S
        began = time.monotonic()
        try:
            self.connection.send(op, header, arrays, timeout_s=limit)
            heard = time.monotonic()
            while True:
                if stopped is not None and stopped.is_set():
                    self._cancel()
                    raise Stopped
                # Something to receive, the end of the connection included; waited for a moment.
                if self.connection.wait(_POLL_S):
                    message = self.connection.receive(timeout_s=limit)
                    heard = time.monotonic()
                    if message.header["op"] != "progress":
                        return self._checked(message, op, answer)
                    on_progress(message)
                elif time.monotonic() - heard > limit:
                    raise TimeoutError(f"waiting for a frame: nothing for {limit:g} s")
        except (wire.WireError, TimeoutError) as error:
            broken = self._broken(f"{op}: {error}")
            if op == "start":
                last = "nothing"
                if self.last_lines:
                    last = self.last_lines[-1]
                broken = SidecarBroken(f"{broken}; its log, {self.log}, ends with: {last}")
            raise broken from error
        finally:
            self.work["seconds"] += time.monotonic() - began

    def _checked(self, message: wire.Message, op: str, answer: str) -> wire.Message:
        """The answer, if it is the one that was asked for."""
        received = message.header["op"]
        if received == "refused":
            raise ValueError(str(message.header.get("message")))
        if received == "failed":
            reason = str(message.header.get("message"))
            self.kill()
            if op == "start":
                raise EngineError(f"{self.name} does not start: {reason}; its log is {self.log}")
            raise SidecarBroken(f"{op}: {reason}")
        if received != answer:
            raise self._broken(f"{op}: answered {received!r}, not {answer!r}")
        return message

    def _cancel(self) -> None:
        """End the request in flight; its answer is dropped."""
        if not self.started:
            self.kill()  # an engine that is being built reads nothing
            return
        try:
            self.connection.send("cancel", timeout_s=_CANCEL_S)
            while self.connection.receive(timeout_s=_CANCEL_S).header["op"] != "cancelled":
                pass
        except (wire.WireError, TimeoutError):
            logger.warning("%s process: did not cancel a request; killed", self.name)
            self.kill()

    def _broken(self, reason: str) -> SidecarBroken:
        self.kill()
        return SidecarBroken(f"{reason} ({self.node or 'not placed yet'})")


class Sidecar(EngineProcess):
    """A running sidecar of this machine.

    Attributes:
        pid: its process id.
    """

    def __init__(
        self,
        launch: Launch,
        fields: wire.Fields,
        stopped: threading.Event,
    ) -> None:
        """Start the process and wait until its engine is ready. Any interruption ends the process.

        Args:
            launch: how to start it.
            fields: those of the request "start"; it inherits the descriptors in "segments".
            stopped: see `request`.

        Raises:
            EngineError: if the engine refuses what it is built from, with its reason.
            SidecarBroken: if the process dies or says nothing in time.
        """
        self._launch = launch
        self._temporary = launch.directory / _TEMPORARY
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(mode=0o700)
        ours, theirs = socket.socketpair()
        super().__init__(launch.name, str(launch.directory / _LOG), wire.Connection(ours))

        began = time.monotonic()
        with theirs:
            self._process = _STARTER.submit(
                subprocess.Popen,
                [launch.python, str(launch.script), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=launch.directory,
                env=process_environment(launch),
                pass_fds=[theirs.fileno(), *fields["segments"]],
                # A group of its own: Ctrl-C in a terminal is for the trainer, and its children can
                # be found.
                start_new_session=True,
            ).result()
        self.pid = self._process.pid
        self._log = threading.Thread(target=self._keep_log, name="sidecar-log", daemon=True)
        self._log.start()

        try:
            ready = self.request(
                "start",
                fields,
                answer="ready",
                timeout_s=launch.start_timeout_s,
                stopped=stopped,
            )
        except BaseException:
            self.kill()
            raise
        self.started = True
        version = ready.header.get("version")
        seconds = time.monotonic() - began
        logger.info("%s %s ready after %.1f s, process %d", launch.name, version, seconds, self.pid)

    def _broken(self, reason: str) -> SidecarBroken:
        # A process that just died has not been collected yet; one that hangs is not going to end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        code = self._process.returncode
        self.kill()
        return SidecarBroken(f"{reason} ({_ending(code)})")

    def close(self) -> None:
        """Ask the process to end, and kill it if it does not. Safe to call twice."""
        if self._process.poll() is None:
            with contextlib.suppress(SidecarBroken, ValueError):
                self.request("close", answer="closed", timeout_s=_END_S)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process and its children, and remove its temporary files. Safe to call twice."""
        self.connection.close()
        self._process.kill()
        self._process.wait()
        # Its children die with it, and the one that cleans up after them needs a moment to do so.
        deadline = time.monotonic() + _END_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)
                time.sleep(0.02)
            os.killpg(self.pid, signal.SIGKILL)
        self._log.join(1.0)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _keep_log(self) -> None:
        """Copy the process's output to the log; a full disk costs the log, not the run."""
        path: Path | None = self._launch.directory / _LOG
        for line in self._process.stdout:
            self.last_lines.append(line.decode("utf-8", "replace").rstrip()[:2000])
            try:
                if path is not None:
                    with open(path, "ab") as log:
                        log.write(line)
            except OSError as error:
                logger.warning(
                    "%s: %s; the process's output is no longer kept", path, error.strerror
                )
                path = None
        self._process.stdout.close()


def process_environment(launch: Launch) -> dict[str, str]:
    temporary = str(launch.directory.resolve() / _TEMPORARY)
    if len(temporary) > _LONGEST_TEMPORARY or set("#?%") & set(temporary):
        # Sockets need short names, and torch reads that of its rendezvous file as a URL. This one
        # is that of the sidecar's working directory: a child that changes directory has no such
        # directory then.
        temporary = f"/proc/self/cwd/{_TEMPORARY}"
    named = dict.fromkeys(("TMPDIR", *launch.temporary_variables), temporary)
    return {**os.environ, **launch.environment, **named}


def _ending(code: int | None) -> str:
    if code is None:
        return "still running, stopped or stuck; killed"
    if code < 0:
        return f"killed by signal {-code}, {signal.strsignal(-code)}"
    return f"exit status {code}"
