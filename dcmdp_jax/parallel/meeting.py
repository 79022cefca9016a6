"""The processes of a run find each other before JAX joins them.

JAX waits for a missing process without a word and aborts after minutes. So all meet first, by one socket of the address
at which JAX's coordination service listens afterwards: process 0 knows who is missing, and tells everybody.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator

from dcmdp_jax.errors import ArgumentError, UserError

_SAY_EVERY_S = 10.0
_RETRY_S = 0.25
_LONGEST_LINE = 4096
_LISTED = 8
_ALL_INTERFACES = "[::]"


def meet(
    coordinator: str,
    processes: int,
    process: int,
    timeout_s: float,
    *,
    listen_at: str = "",
    say: Callable[[str], None] = print,
) -> str:
    """Wait until all processes of a run are here.

    Args:
        coordinator: host:port of process 0.
        processes, process: how many there are, and the number of this one.
        timeout_s: how long each waits for the others.
        listen_at: host:port at which process 0 listens; "" for the coordinator's own. For a host that is reached by an
            address which none of its interfaces has.
        say: is told every ten seconds who is missing.

    Returns:
        host:port at which process 0 is to listen from now on.

    Raises:
        UserError: in one line, if somebody did not come, or the address is wrong.
    """
    if process:
        _OtherProcess(coordinator, processes, process, timeout_s, say).wait()
        return coordinator
    return _Process0(coordinator, listen_at or coordinator, processes, timeout_s, say).wait()


def _split(address: str) -> tuple[str, int]:
    name, _, port = address.rpartition(":")
    return name.removeprefix("[").removesuffix("]"), int(port)


class _Process0:
    """Process 0: listens, and answers each who came when all have."""

    def __init__(
        self, coordinator: str, listen_at: str, processes: int, timeout_s: float, say: Callable[[str], None]
    ) -> None:
        self._coordinator, self._listen_at, self._processes = coordinator, listen_at, processes
        self._timeout_s, self._say = timeout_s, say
        self._here: dict[int, _Caller] = {}

    def wait(self) -> str:
        listener, address = self._listen()
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as ready:
            stack.enter_context(listener)
            ready.register(listener, selectors.EVENT_READ)
            started = last_said = time.monotonic()
            try:
                while len(self._here) < self._processes - 1:
                    now = time.monotonic()
                    if now - started > self._timeout_s:
                        raise ArgumentError(
                            "coordinator",
                            f"{self._missing()} of {self._processes} did not come to "
                            f"{self._coordinator} in {self._timeout_s:g} s; start the same command there with its own "
                            "`process`, check that this address is reached from there, or raise "
                            "`timeout_s`",
                        )
                    if now - last_said >= _SAY_EVERY_S:
                        last_said = now
                        self._tell(f"waiting for {self._missing()} of {self._processes} at {self._coordinator}")
                    left = min(started + self._timeout_s, last_said + _SAY_EVERY_S) - now
                    for key, _ in ready.select(max(0.01, left)):
                        if key.fileobj is listener:
                            with contextlib.suppress(OSError):
                                caller = _Caller(stack.enter_context(listener.accept()[0]))
                                ready.register(caller.connection, selectors.EVENT_READ, caller)
                        else:
                            self._hear(key.data, ready)
            except UserError as error:
                self._answer({"error": str(error)})
                raise
            self._answer({"go": True})
        return address

    def _listen(self) -> tuple[socket.socket, str]:
        """A socket at the named address alone, and that address."""
        host, port = _split(self._listen_at)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ArgumentError(
                "coordinator",
                f"got {self._listen_at!r}, whose name is not known on process 0's host "
                f"({error.strerror or error}); give host:port of process 0",
            ) from error
        if host != "localhost" and all(_is_loopback(place[0]) for *_, place in found) and not _is_number(host):
            # /etc/hosts of Debian gives a machine's own name an address that no other machine reaches.
            self._say(
                f"coordinator: {host} is {found[0][4][0]} on its own host, so process 0 listens on all "
                "its interfaces; give an address to listen on that one alone"
            )
            found, address = [(socket.AF_INET, None, None, None, ("", port))], f"{_ALL_INTERFACES}:{port}"
        else:
            address = self._listen_at
        problem: OSError | None = None
        for family, *_, place in found:
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(place)
                listener.listen(128)
            except OSError as error:
                problem = error
                listener.close()
            else:
                return listener, address
        raise ArgumentError(
            "coordinator",
            f"got {self._listen_at!r}, where process 0 can not listen ({problem.strerror}); "
            "give an address of the host that runs process 0 with a port that is free there; where the others reach it "
            "by an address that it does not have itself, JAX_COORDINATOR_BIND_ADDRESS is where it listens",
        ) from problem

    def _hear(self, caller: _Caller, ready: selectors.BaseSelector) -> None:
        """A caller says who it is, once; one that ends its connection is gone again."""
        for line in caller.lines():
            try:
                told = json.loads(line)
                number, processes, name = int(told["process"]), int(told["processes"]), str(told["host"])
            except (ValueError, TypeError, KeyError):
                # Whoever it is, it is no process of a run.
                caller.gone = True
                break
            problem = None
            if processes != self._processes or not 0 < number < processes:
                said = f"process {number} on {name} has {processes}, process 0 has {self._processes}"
                problem = ArgumentError("processes", f"{said}; start all hosts alike")
            elif number in self._here and self._here[number] is not caller:
                both = f"{self._here[number].name} and {name}"
                problem = ArgumentError("process", f"{number} on both {both}; each process has a number of its own")
            if problem:
                caller.send({"error": str(problem)})
                raise problem
            self._here[number] = caller
            caller.send({"heard": True})
            caller.name = name
        if caller.gone:
            ready.unregister(caller.connection)
            caller.connection.close()
            self._here = {number: other for number, other in self._here.items() if other is not caller}

    def _missing(self) -> str:
        numbers = [number for number in range(1, self._processes) if number not in self._here]
        more = f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else ""
        return ("process " if len(numbers) == 1 else "processes ") + ", ".join(map(str, numbers[:_LISTED])) + more

    def _tell(self, line: str) -> None:
        self._say(line)
        self._answer({"say": line})

    def _answer(self, message: dict[str, object]) -> None:
        for caller in self._here.values():
            caller.send(message)


class _OtherProcess:
    """Another process: comes to process 0, waits for its word, and tries again where there was nobody."""

    def __init__(
        self, coordinator: str, processes: int, process: int, timeout_s: float, say: Callable[[str], None]
    ) -> None:
        self._coordinator, self._place, self._say = coordinator, _split(coordinator), say
        self._process, self._timeout_s = process, timeout_s
        self._greeting = {"process": process, "processes": processes, "host": socket.gethostname()}
        self._started = self._last_said = time.monotonic()

    def wait(self) -> None:
        reason = "nobody answers"
        while (left := self._left()) > 0:
            try:
                with socket.create_connection(self._place, timeout=min(left, _SAY_EVERY_S)) as connection:
                    reason = "process 0 left before all were here, or another program has this address"
                    if self._talk(_Caller(connection)):
                        return
            except OSError as error:
                reason = error.strerror or str(error)
            self._remind(reason)
            time.sleep(_RETRY_S)
        raise ArgumentError(
            "coordinator",
            f"process {self._process} did not find process 0 at {self._coordinator} in "
            f"{self._timeout_s:g} s ({reason}); give host:port of process 0, start it, or raise `timeout_s`",
        )

    def _talk(self, host: _Caller) -> bool:
        """Whether all may go on; false where what answers is no process 0 that waits."""
        host.send(self._greeting)
        # Process 0 answers at once and every ten seconds, and knows better than this one how long to wait.
        heard, answered = time.monotonic(), False
        while time.monotonic() - heard < 1.5 * _SAY_EVERY_S and (answered or self._left() > 0):
            host.connection.settimeout(1.0)
            try:
                lines = list(host.lines())
            except TimeoutError:
                continue
            for line in lines:
                heard = time.monotonic()
                try:
                    told = json.loads(line)
                except ValueError:
                    return False
                if not isinstance(told, dict):
                    return False
                answered = True
                if "error" in told:
                    raise ArgumentError(*str(told["error"]).partition(": ")[::2])
                if told.get("go") is True:
                    return True
                if "say" in told:
                    self._last_said = heard
                    self._say(str(told["say"]))
            if host.gone:
                return False
        return False

    def _left(self) -> float:
        return self._started + self._timeout_s - time.monotonic()

    def _remind(self, reason: str) -> None:
        if time.monotonic() - self._last_said >= _SAY_EVERY_S:
            self._last_said = time.monotonic()
            self._say(f"process {self._process}: waiting for process 0 at {self._coordinator} ({reason})")


@dataclasses.dataclass(eq=False)
class _Caller:
    """One connection, read line by line without waiting for more than there is."""

    connection: socket.socket
    name: str = ""
    gone: bool = False
    rest: bytes = b""

    def send(self, message: dict[str, object]) -> None:
        """One line; where the connection has ended, the next read says so."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def lines(self) -> Iterator[bytes]:
        """The lines that one read completes. Sets `gone` at the end of the connection, or of patience with it."""
        try:
            read = self.connection.recv(_LONGEST_LINE)
        except TimeoutError:
            raise
        except OSError:
            read = b""
        *whole, self.rest = (self.rest + read).split(b"\n")
        self.gone = not read or len(self.rest) > _LONGEST_LINE
        yield from whole


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _is_number(host: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST))
    return False
