"""The processes of a run find each other before JAX joins them.

JAX waits for a missing process without a word and aborts after minutes. So all meet first, by one
socket of the address at which JAX's coordination service listens afterwards: process 0 knows who is
missing, and tells everybody.
"""

import contextlib
import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

from dcmdp_jax.errors import ArgumentError, UserError

logger = logging.getLogger(__name__)

_SAY_EVERY_S = 10.0
_RETRY_S = 0.25
_GREETING_S = 1.0
_LONGEST_LINE = 4096


def meet(
    coordinator: str,
    processes: int,
    process: int,
    timeout_s: float,
    *,
    listen_at: str = "",
) -> None:
    """Wait until all processes of a run are here; every ten seconds a warning says who is missing.

    Args:
        coordinator: host:port of process 0.
        processes, process: how many there are, and the number of this one.
        timeout_s: how long each waits for the others.
        listen_at: host:port at which process 0 listens; "" for the coordinator's own. For a host
            that is reached by an address which none of its interfaces has.

    Raises:
        UserError: in one line, if somebody did not come, or the address is wrong.
    """
    if process:
        _come(coordinator, processes, process, timeout_s)
        return
    with _listen(listen_at or coordinator) as listener:
        _wait_for_all(listener, coordinator, processes, timeout_s)


def split_address(address: str) -> tuple[str, int]:
    """Host, without the brackets of an IPv6 address, and port of HOST:PORT."""
    name, _, port = address.rpartition(":")
    return name.removeprefix("[").removesuffix("]"), int(port)


def _wait_for_all(
    listener: socket.socket,
    coordinator: str,
    processes: int,
    timeout_s: float,
) -> None:
    """Process 0: wait until all processes have come; tell each to go, or why not."""
    callers: dict[int, socket.socket] = {}
    names: dict[int, str] = {}  # of the callers' hosts
    began = time.monotonic()
    end = began + timeout_s
    next_line = began + _SAY_EVERY_S

    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(callers) < processes - 1:
                numbers = sorted(set(range(1, processes)) - set(callers))
                noun = "process"
                if len(numbers) > 1:
                    noun = "processes"
                missing = f"{noun} {', '.join(map(str, numbers))}"
                now = time.monotonic()
                if now >= end:
                    raise ArgumentError(
                        "coordinator",
                        f"{missing} of {processes} did not come to {coordinator} in {timeout_s:g} "
                        "s; start the same command there with its own `process`, check that this "
                        "address is reached from there, or raise `timeout_s`",
                    )
                if now >= next_line:
                    next_line = now + _SAY_EVERY_S
                    line = f"waiting for {missing} of {processes} at {coordinator}"
                    logger.warning(line)
                    _send(callers.values(), say=line)
                for key, _ in selector.select(min(end, next_line) - now):
                    if key.fileobj is not listener:
                        # A process that has greeted sends nothing more: its connection has ended,
                        # and it is missing again.
                        selector.unregister(key.fileobj)
                        callers.pop(key.data).close()
                        continue
                    number = _greet(listener, callers, names, processes)
                    if number:
                        selector.register(callers[number], selectors.EVENT_READ, number)
            _send(callers.values(), go=True)
        except UserError as error:
            _send(callers.values(), error=str(error))
            raise
        finally:
            for caller in callers.values():
                caller.close()


def _greet(
    listener: socket.socket,
    callers: dict[int, socket.socket],
    names: dict[int, str],
    processes: int,
) -> int:
    """Accept a caller and add it to `callers`, and its host to `names`.

    Returns:
        Its number; 0 if it is no process of a run.

    Raises:
        ArgumentError: sent to the caller too, if it was started differently.
    """
    listener.settimeout(_GREETING_S)
    try:
        caller, _ = listener.accept()
    except OSError:  # gone again, or no file descriptor is free
        return 0
    caller.settimeout(_GREETING_S)
    try:
        greeting = json.loads(caller.makefile("rb").readline(_LONGEST_LINE))
        number = int(greeting["process"])
        count = int(greeting["processes"])
        name = str(greeting["host"])
    except (ValueError, TypeError, KeyError, OSError):
        caller.close()
        return 0

    if number in callers:
        problem = ArgumentError(
            "process",
            f"{number} on both {names[number]} and {name}; each process has a number of its own",
        )
    elif count != processes or not 0 < number < processes:
        problem = ArgumentError(
            "processes",
            f"process {number} on {name} has {count}, process 0 has {processes}; start all hosts "
            "with the same command",
        )
    else:
        callers[number] = caller
        names[number] = name
        _send([caller], heard=True)
        return number
    _send([caller], error=str(problem))
    caller.close()
    raise problem


def _send(callers: Iterable[socket.socket], **message: object) -> None:
    for caller in callers:
        with contextlib.suppress(OSError):
            caller.sendall(json.dumps(message).encode() + b"\n")


def _listen(listen_at: str) -> socket.socket:
    """A socket at the named address alone."""
    host, port = split_address(listen_at)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ArgumentError(
            "coordinator",
            f"got {listen_at!r}, whose name is not known on process 0's host "
            f"({error.strerror or error}); give host:port of process 0",
        ) from error

    first_ip = addresses[0][4][0]
    # Debian's /etc/hosts gives a host's own name a loopback address.
    if first_ip.startswith("127.") and not host.startswith(("127.", "localhost")):
        logger.warning(
            "coordinator: %s is %s here, which no other host reaches; give its address",
            host,
            first_ip,
        )

    problem = None
    for family, *_, address in addresses:
        try:
            return socket.create_server(address, family=family, backlog=128)
        except OSError as error:
            problem = error
    raise ArgumentError(
        "coordinator",
        f"got {listen_at!r}, where process 0 can not listen ({os.strerror(problem.errno)}); give "
        "an address of the host that runs process 0 with a port that is free there; where the "
        "others reach it by an address that it does not have itself, "
        "JAX_COORDINATOR_BIND_ADDRESS is where it listens",
    ) from problem


def _come(coordinator: str, processes: int, process: int, timeout_s: float) -> None:
    """Connect to process 0, wait for its go-ahead, and retry while it is unreachable."""
    greeting = {"process": process, "processes": processes, "host": socket.gethostname()}
    end = time.monotonic() + timeout_s
    warned_at = time.monotonic()
    reason = "nobody answers"
    while time.monotonic() < end:
        seconds_left = max(_RETRY_S, end - time.monotonic())
        try:
            with socket.create_connection(
                split_address(coordinator), timeout=min(seconds_left, _SAY_EVERY_S)
            ) as connection:
                # The reason if the connection ends from here on.
                reason = "process 0 left before all were here, or another program has this address"
                connection.sendall(json.dumps(greeting).encode() + b"\n")
                # However long it takes: process 0 knows better than this one how long to wait.
                for answer in _answers(connection):
                    if answer.get("error"):
                        argument, _, message = str(answer["error"]).partition(": ")
                        raise ArgumentError(argument, message)
                    if answer.get("go") is True:
                        return
                    if answer.get("say"):
                        warned_at = time.monotonic()
                        logger.warning(str(answer["say"]))
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() - warned_at >= _SAY_EVERY_S:
            warned_at = time.monotonic()
            logger.warning(
                "process %d: waiting for process 0 at %s (%s)",
                process,
                coordinator,
                reason,
            )
        time.sleep(_RETRY_S)
    raise ArgumentError(
        "coordinator",
        f"process {process} did not find process 0 at {coordinator} in {timeout_s:g} s "
        f"({reason}); give host:port of process 0, start it, or raise `timeout_s`",
    )


def _answers(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Receive what process 0 says, until the connection ends or another program answers."""
    # No JSON, or silence: not process 0, which answers at once and every ten seconds.
    with contextlib.suppress(ValueError, TimeoutError), connection.makefile("rb") as lines:
        while line := lines.readline(_LONGEST_LINE):
            answer = json.loads(line)
            if not isinstance(answer, dict):
                return
            yield answer
            connection.settimeout(1.5 * _SAY_EVERY_S)
