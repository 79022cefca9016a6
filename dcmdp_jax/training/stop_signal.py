"""SIGTERM and SIGINT: end a run at any point, with everything saved."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupted(Exception):
    """A signal ended the run. Every finished step is saved; the next run repeats the unfinished one."""

    def __init__(self, signal_number: int, where: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} {where}")
        self.signal_number = signal_number


class StopSignal:
    """Records SIGTERM and SIGINT; the run looks for them where it can stop. A second SIGINT interrupts."""

    def __init__(self) -> None:
        self.received: int | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Install the handlers for the block."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
