"""Sidecars that are restarted when they break, and several of them at work at the same time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.engines.sidecar.process import Sidecar, SidecarBroken

logger = logging.getLogger(__name__)

T, Y = TypeVar("T"), TypeVar("Y")

_FIRST_BACK_OFF_S, _LONGEST_BACK_OFF_S = 0.5, 30.0
_TURN_S = 0.02


class Supervisor:
    """Keeps a sidecar running: what fails is asked again of a new one, up to a limit. For one thread."""

    def __init__(self, name: str, start: Callable[[], Sidecar], *, max_restarts: int) -> None:
        """Store the arguments; `started` comes next.

        Args:
            name: of its engine, in errors and logs.
            start: starts a sidecar's process.
            max_restarts: restarts in a row without success, after which the run ends.
        """
        self._name, self._start = name, start
        self._max_restarts = max_restarts
        self.sidecar: Sidecar | None = None
        """The one that works; None before it is ready, and while a new one is started."""

    def started(self) -> Generator[None, None, None]:
        """Start the first sidecar.

        Raises:
            EngineError: if it does not start, with the reason.
        """
        try:
            yield from self._ready()
        except SidecarBroken as error:
            raise EngineError(f"the {self._name} sidecar does not start: {error}") from error

    def _ready(self) -> Generator[None, None, None]:
        sidecar = self._start()
        yield from sidecar.wait_until_ready()
        self.sidecar = sidecar

    def _restarted(self) -> Generator[None, None, None]:
        try:
            yield from self._ready()
        except EngineError as error:
            # An engine that once stood and is refused now lacks memory or a device: that may pass.
            raise SidecarBroken(str(error)) from error

    def run(self, call: Callable[[Sidecar], Generator[Y, None, T]]) -> Generator[Y | None, None, T]:
        """Yield what `call` yields on a sidecar that works, None while one is restarted; return what it returns.

        Args:
            call: everything that must be asked of one sidecar. Made again, whole, for the next one if it breaks on the
                way; it must not repeat what it yielded.

        Raises:
            EngineError: after `max_restarts` restarts in a row without success, with the reason and the end of the log.
        """
        failures = 0
        while True:
            try:
                if self.sidecar is None:
                    yield from self._restarted()
                return (yield from call(self.sidecar))
            except SidecarBroken as error:
                failures += 1
                yield from self._recovered(error, failures)

    def _recovered(self, error: SidecarBroken, failures: int) -> Generator[None, None, None]:
        """Clear away what is broken and wait a moment, or give up."""
        lines = ""
        if self.sidecar is not None:
            self.sidecar.kill()
            lines = self.sidecar.last_lines()
            self.sidecar = None
        if failures > self._max_restarts:
            raise EngineError(
                f"the {self._name} sidecar failed {failures} times in a row, at last: {error}"
                + (f"; the end of its log:\n{lines}" if lines else "")
            ) from error
        pause = min(_FIRST_BACK_OFF_S * 2 ** (failures - 1), _LONGEST_BACK_OFF_S)
        logger.warning("%s sidecar: %s; restart %d in %.1f s", self._name, error, failures, pause)
        until = time.monotonic() + pause
        while time.monotonic() < until:
            time.sleep(_TURN_S)
            yield None

    def close(self) -> None:
        """Stop the sidecar. Safe to call twice."""
        if self.sidecar is not None:
            self.sidecar.close()
            self.sidecar = None


def in_turn(streams: Sequence[Iterator[Y]]) -> Iterator[Y]:
    """Advance all streams, one after the other, until each has ended; closed, or after an error, close those left.

    Each is asked before the first answer is waited for, and none waits long (`Sidecar.stream`), so that all sidecars
    work at the same time, and one that is restarted holds up no other.
    """
    left = list(streams)
    try:
        while left:
            for stream in tuple(left):
                try:
                    value = next(stream)
                except StopIteration:
                    left.remove(stream)
                else:
                    yield value
    finally:
        for stream in left:
            stream.close()


def gathered(calls: Sequence[Generator[object, None, T]]) -> list[T]:
    """Run calls to their ends `in_turn`; what each returns."""
    results: dict[int, T] = {}

    def kept(index: int, call: Generator[object, None, T]) -> Iterator[None]:
        results[index] = yield from call

    for _ in in_turn([kept(index, call) for index, call in enumerate(calls)]):
        pass
    return [results[index] for index in range(len(calls))]
