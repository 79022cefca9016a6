"""Sidecars that are restarted when they break, and calls of several, a thread each."""

import collections
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.engines.sidecar.process import EngineProcess, SidecarBroken, Stopped

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 30.0
# The caller can look for a signal that often.
_PAUSE_S = 0.5
_POLL_S = 0.05


class Calls:
    """Blocking calls that run at the same time, a thread each.

    Attributes:
        stopped: set when the caller gives the calls up; whatever blocks in them looks at it.
        failed: whether one has raised an error.
    """

    def __init__(self, calls: "Sequence[Callable[[Calls], Any]]") -> None:
        """Start the calls, each of this object; `values` or `results` waits for them."""
        self.stopped = threading.Event()
        self.failed = False
        self._results: dict[int, Any] = {}
        self._arrived: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._run,
                args=numbered,
                name="sidecar-call",
                daemon=True,
            )
            for numbered in enumerate(calls)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            # Nobody else can end those that run.
            self.stopped.set()
            raise

    def put(self, value: object) -> None:
        """Hand a value of a call to the caller."""
        self._arrived.put(("value", value))

    def _run(self, number: int, call: "Callable[[Calls], Any]") -> None:
        try:
            self._results[number] = call(self)
            self._arrived.put(("end", None))
        except BaseException as error:
            self.failed = True
            self._arrived.put(("error", error))

    def values(self) -> Iterator[Any]:
        """Yield what the calls `put`, as it comes, and None where nothing came for half a second.

        The first error ends all calls and is raised. So does closing the iterator.
        """
        try:
            running = len(self._threads)
            while running:
                try:
                    kind, value = self._arrived.get(timeout=_PAUSE_S)
                except queue.Empty:
                    yield None
                    continue
                if kind == "error":
                    if type(value) is Stopped:
                        raise EngineError("ended by a later request to the process")
                    raise value
                if kind == "end":
                    running -= 1
                else:
                    yield value
        finally:
            self.stop()

    def results(self) -> list[Any]:
        """Wait for all calls, and return their results in order."""
        for _ in self.values():
            pass
        return [self._results[number] for number in range(len(self._threads))]

    def stop(self) -> None:
        """End the calls and wait for their ends. Safe to call twice."""
        self.stopped.set()
        for thread in self._threads:
            thread.join()


class Supervisor:
    """Keeps a sidecar running: repeats a failed request with a new one, up to a limit.

    One thread at a time.

    Attributes:
        name: name of its engine, in errors and logs.
        sidecar: the one that works; None before it is ready, and while a new one is started.
        max_restarts: Restarts in a row without success, after which the run ends.
        work: restarts, and tokens and seconds of the sidecars that broke, since the last
            `take_work`.
    """

    max_restarts = 5

    def __init__(self, name: str, start: Callable[[threading.Event], EngineProcess]) -> None:
        """Store the arguments; `start` comes next.

        Args:
            name: name of its engine, in errors and logs.
            start: starts a sidecar and waits until it is ready, or the event is set.
        """
        self.name = name
        self._start = start
        self.sidecar: EngineProcess | None = None
        self.work: collections.Counter[str] = collections.Counter()
        self._failures = 0
        self._not_before = 0.0

    def start(self, calls: Calls) -> None:
        """Start the first sidecar.

        Raises:
            EngineError: if it does not start, with the reason.
        """
        try:
            self._begin(calls)
        except SidecarBroken as error:
            raise EngineError(f"the {self.name} process does not start: {error}") from error

    def _begin(self, calls: Calls) -> None:
        self.sidecar = self._start(calls.stopped)

    def run(self, calls: Calls, call: Callable[[EngineProcess], T]) -> T:
        """Return what `call` returns on a sidecar that works.

        Args:
            calls: stop the wait for a restart.
            call: everything that must be asked of one sidecar. Made again, whole, for the next one
                if it breaks on the way; it must not repeat what it `put`.

        Raises:
            EngineError: after `max_restarts` restarts in a row without success, with the reason and
                the end of the log.
        """
        while True:
            worker = self
            try:
                with self._working(calls) as worker:
                    result = call(worker.sidecar)
                    worker._failures = 0
                    return result
            except SidecarBroken as error:
                worker._recover(error)

    @contextlib.contextmanager
    def _working(self, calls: Calls) -> "Iterator[Supervisor]":
        """Whose sidecar makes a call: this one's, started after a moment if there is none."""
        if self.sidecar is None:
            if calls.stopped.wait(max(0.0, self._not_before - time.monotonic())):
                raise Stopped
            try:
                self._begin(calls)
            except EngineError as error:
                # An engine that once stood and is refused now lacks memory or a device: that may
                # pass.
                raise SidecarBroken(str(error)) from error
        yield self

    def _recover(self, error: SidecarBroken) -> None:
        """Clear away what is broken, and say when the next one starts, or give up."""
        self._failures += 1
        self.work["restarts"] += 1
        lines = ""
        if self.sidecar is not None:
            self.sidecar.kill()
            self.work += self.sidecar.work
            lines = "\n".join(self.sidecar.last_lines)
            self.sidecar = None

        failures = self._failures
        if failures > self.max_restarts:
            self._failures = 0
            message = f"the {self.name} process failed {failures} times in a row, at last: {error}"
            if lines:
                message += f"; the end of its log:\n{lines}"
            raise EngineError(message) from error

        pause = min(_FIRST_BACK_OFF_S * 2 ** (failures - 1), _LONGEST_BACK_OFF_S)
        logger.warning("%s process: %s; restart %d in %.1f s", self.name, error, failures, pause)
        self._not_before = time.monotonic() + pause

    def take_work(self) -> dict[str, float]:
        """Return the work since the last such call, broken sidecars' included, and the restarts."""
        done = self.work
        self.work = collections.Counter()
        if self.sidecar is not None:
            done = done + self.sidecar.work
            self.sidecar.work = collections.Counter()
        return {name: done[name] for name in ("restarts", "tokens", "seconds")}

    def close(self) -> None:
        """Stop the sidecar. Safe to call twice."""
        if self.sidecar is not None:
            self.sidecar.close()
            self.sidecar = None


class Fleet:
    """Supervisors that stand in for each other.

    Attributes:
        least: fewest sidecars to go on with, once all have started.
        limit_s: longest wait for so many, over calls; the time between calls does not count.
        members: all of them.
    """

    def __init__(self, least: int, limit_s: float, check: Callable[[], None]) -> None:
        """Begin without members, which join by themselves.

        Args:
            least, limit_s: see the attributes.
            check: called while one waits; raises what ends the run.
        """
        self.least = least
        self.limit_s = limit_s
        self.members: list[Member] = []
        self._check = check
        self._all_started_once = False
        # Seconds of the monotonic clock: since when too few have started, and the last look.
        self._below_since: float | None = None
        self._last_wait = 0.0
        self._calls: Calls | None = None

    def count(self) -> int:
        """Number of members whose sidecar has started."""
        # A member's own thread may replace its sidecar meanwhile.
        num_started = 0
        for member in self.members:
            sidecar = member.sidecar
            if sidecar is not None and sidecar.started:
                num_started += 1
        return num_started

    def wait(self, calls: Calls, seconds: float = _POLL_S) -> None:
        """Wait a moment.

        Raises:
            EngineError: if there were too few for too long.
        """
        num_started = self.count()
        now = time.monotonic()
        if calls is not self._calls:
            # The time between two calls does not count.
            self._calls = calls
            if self._below_since is not None:
                self._below_since += now - self._last_wait
        self._last_wait = now

        self._all_started_once = self._all_started_once or num_started == len(self.members)
        required = self.least if self._all_started_once else len(self.members)
        if num_started >= required:
            self._below_since = None
        elif self._below_since is None:
            self._below_since = now
        elif now - self._below_since > self.limit_s:
            raise EngineError(
                f"{num_started} of at least {required} replicas for {self.limit_s:g} s "
                "(`start_timeout_s`): Ray has no room for more, or they don't start"
            )

        if calls.stopped.wait(seconds):
            raise Stopped
        self._check()


class Member(Supervisor):
    """Supervisor in a fleet, whose sidecar starts while the others work.

    A call whose own sidecar is not there goes to the first one that is free, whole: log-probs
    depend on what is sampled together, not on where.
    """

    def __init__(self, name: str, start: Callable[[threading.Event], Any], fleet: Fleet) -> None:
        """See `Supervisor`; `start` does not wait: the sidecar's `ready` tells."""
        super().__init__(name, start)
        self._fleet = fleet
        self._lock = threading.Lock()
        fleet.members.append(self)

    def _begin(self, calls: Calls) -> None:
        while not self._is_ready():
            self._fleet.wait(calls)

    def _is_ready(self) -> bool:
        if self.sidecar is None and time.monotonic() >= self._not_before:
            self.sidecar = self._start(threading.Event())
        return self.sidecar is not None and self.sidecar.ready()

    @contextlib.contextmanager
    def _working(self, calls: Calls) -> Iterator[Supervisor]:
        self._fleet.wait(calls, 0)
        member = self._free()
        while member is None:
            self._fleet.wait(calls)
            member = self._free()
        try:
            yield member
        finally:
            member._lock.release()

    def _free(self) -> "Member | None":
        """The first one that is ready and not at work, locked; this one if it can be."""
        for member in (self, *self._fleet.members):
            if member._lock.acquire(blocking=False):
                try:
                    if member._is_ready():
                        return member
                except SidecarBroken as error:
                    if self._fleet.count() >= self._fleet.least:
                        # Enough others work: it is tried again after a pause, and ends no run.
                        member._failures = min(member._failures, self.max_restarts - 1)
                    member._recover(error)
                member._lock.release()
        return None
