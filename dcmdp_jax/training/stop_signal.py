"""SIGTERM and SIGINT end a run with everything saved, whatever it was doing."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupted(Exception):
    """A signal asked the run to end; every finished step is saved, and what was begun is repeated by the next run."""

    def __init__(self, signal_number: int, where: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} {where}")
        self.signal_number = signal_number


class StopSignal:
    """Notes SIGTERM and SIGINT, for `check` to obey where nothing is half done. A second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Installs the handlers for the block."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self, where: str) -> None:
        """Raises `Interrupted` if a signal came; `where` tells people what was going on and what is kept."""
        if self.received is not None:
            raise Interrupted(self.received, where)
