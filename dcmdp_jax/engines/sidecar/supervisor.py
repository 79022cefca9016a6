"""Sidecars that are restarted when they break, and calls of several of them at the same time, a thread each."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.engines.sidecar.process import Sidecar, SidecarBroken, Stopped

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_BACK_OFF_S, _LONGEST_BACK_OFF_S = 0.5, 30.0
# The caller can look for a signal that often.
_PAUSE_S = 0.5


class Calls:
    """Blocking calls that run at the same time, a thread each.

    Attributes:
        stopped: set when the caller gives the calls up; whatever blocks in them looks at it.
        failed: whether one has raised an error.
    """

    def __init__(self, calls: Sequence[Callable[[Calls], Any]]) -> None:
        """Store the calls; `begin`, `values` or `results` starts them. Each is given this object."""
        self.stopped, self.failed = threading.Event(), False
        self._results: dict[int, Any] = {}
        self._arrived: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=numbered, name="sidecar-call", daemon=True)
            for numbered in enumerate(calls)
        ]

    def put(self, value: object) -> None:
        """Hand a value of a call to the caller."""
        self._arrived.put(("value", value))

    def _run(self, number: int, call: Callable[[Calls], Any]) -> None:
        try:
            self._results[number] = call(self)
            self._arrived.put(("end", None))
        except BaseException as error:
            self.failed = True
            self._arrived.put(("error", error))

    def begin(self) -> Calls:
        """Start the calls, unless they are; `values` or `results` waits for them later."""
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        return self

    def values(self) -> Iterator[Any]:
        """Yield what the calls `put`, as it comes, and None where nothing came for half a second.

        The first error ends all calls and is raised. So does closing the iterator.
        """
        try:
            left = len(self.begin()._threads)
            while left:
                try:
                    kind, value = self._arrived.get(timeout=_PAUSE_S)
                except queue.Empty:
                    yield None
                    continue
                if kind == "error":
                    raise EngineError("ended by a later request to the sidecar") if type(value) is Stopped else value
                if kind == "end":
                    left -= 1
                else:
                    yield value
        finally:
            self.stop()

    def results(self) -> list[Any]:
        """Wait for all calls; what they return, in their order."""
        for _ in self.values():
            pass
        return [self._results[number] for number in range(len(self._threads))]

    def stop(self) -> None:
        """End the calls and wait for their ends. Safe to call twice."""
        self.stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()


class Supervisor:
    """Keeps a sidecar running. A failed request is repeated with a new sidecar, up to a limit. One thread at a time.

    Attributes:
        sidecar: the one that works; None before it is ready, and while a new one is started.
        max_restarts: Restarts in a row without success, after which the run ends.
    """

    max_restarts = 5

    def __init__(self, name: str, start: Callable[[threading.Event], Sidecar]) -> None:
        """Store the arguments; `start` comes next.

        Args:
            name: name of its engine, in errors and logs.
            start: starts a sidecar and waits until it is ready, or the event is set.
        """
        self._name, self._start = name, start
        self.sidecar: Sidecar | None = None

    def start(self, calls: Calls) -> None:
        """Start the first sidecar.

        Raises:
            EngineError: if it does not start, with the reason.
        """
        try:
            self.sidecar = self._start(calls.stopped)
        except SidecarBroken as error:
            raise EngineError(f"the {self._name} sidecar does not start: {error}") from error

    def run(self, calls: Calls, call: Callable[[Sidecar], T]) -> T:
        """Return what `call` returns on a sidecar that works.

        Args:
            calls: stop the wait for a restart.
            call: everything that must be asked of one sidecar. Made again, whole, for the next one if it breaks on the
                way; it must not repeat what it `put`.

        Raises:
            EngineError: after `max_restarts` restarts in a row without success, with the reason and the end of the log.
        """
        failures = 0
        while True:
            try:
                if self.sidecar is None:
                    try:
                        self.sidecar = self._start(calls.stopped)
                    except EngineError as error:
                        # An engine that once stood and is refused now lacks memory or a device: that may pass.
                        raise SidecarBroken(str(error)) from error
                return call(self.sidecar)
            except SidecarBroken as error:
                failures += 1
                self._recover(error, failures, calls)

    def _recover(self, error: SidecarBroken, failures: int, calls: Calls) -> None:
        """Clear away what is broken and wait a moment, or give up."""
        lines = ""
        if self.sidecar is not None:
            self.sidecar.kill()
            lines = "\n".join(self.sidecar.last_lines)
            self.sidecar = None
        if failures > self.max_restarts:
            raise EngineError(
                f"the {self._name} sidecar failed {failures} times in a row, at last: {error}"
                + (f"; the end of its log:\n{lines}" if lines else "")
            ) from error
        pause = min(_FIRST_BACK_OFF_S * 2 ** (failures - 1), _LONGEST_BACK_OFF_S)
        logger.warning("%s sidecar: %s; restart %d in %.1f s", self._name, error, failures, pause)
        if calls.stopped.wait(pause):
            raise Stopped

    def close(self) -> None:
        """Stop the sidecar. Safe to call twice."""
        if self.sidecar is not None:
            self.sidecar.close()
            self.sidecar = None
