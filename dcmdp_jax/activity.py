"""Status of the program for people, so that nothing that takes more than a few seconds is silent.

    with activity("sampling", total=64, unit="completions") as doing:
        ...
        doing.done += 1

On a terminal, whatever takes more than three seconds is a line that is redrawn in place, with time left where the total
is known; Progress shows it below its own lines. Elsewhere it is a line when it is done, and one every ten seconds while
it runs. The innermost activity of the main thread is shown. DCMDP_ACTIVITY=off in the environment shows nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator

_SHOWN_AFTER_S = 3.0
_SIGN_EVERY_S = 10.0
_REDRAW_S = 0.5
_ERASE = "\r\x1b[2K"
_SETTING = "DCMDP_ACTIVITY"
_XLA_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


@dataclasses.dataclass
class Activity:
    """Something that takes a while.

    Attributes:
        what: a gerund and its object: "converting model.gguf".
        total: number of units in all; 0 where unknown.
        unit: name of the units.
        done: how many of them are done; whoever works on it counts.
        began: start, a value of `time.monotonic`.
    """

    what: str
    total: int = 0
    unit: str = ""
    done: int = 0
    began: float = dataclasses.field(default_factory=time.monotonic)

    def text(self, now: float) -> str:
        """`sampling: 12 of 64 completions, 8 s, 35 s left`."""
        seconds = now - self.began
        counted = f"{self.done:,} of {self.total:,} {self.unit}, " if self.total else ""
        left = f", {seconds * (self.total - self.done) / self.done:.0f} s left" if 0 < self.done < self.total else ""
        return f"{self.what}: {counted}{seconds:.0f} s{left}"


class _Display:
    """The running activities, and the thread that shows the innermost."""

    def __init__(self) -> None:
        self.running: list[Activity] = []
        self.live = False
        self._drawn, self._last_line = False, float("-inf")
        self._ticker: threading.Thread | None = None

    def start(self) -> None:
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, daemon=True, name="activity")
            self._ticker.start()

    def _tick(self) -> None:
        while True:
            time.sleep(_REDRAW_S)
            self.show(time.monotonic())

    def show(self, now: float) -> None:
        """Draw or print what has run for long enough."""
        running = self.running[-1:]
        if self.live or not running or now - running[0].began < _SHOWN_AFTER_S:
            return
        if sys.stderr.isatty():
            self._write(f"{_ERASE}{running[0].text(now)}")
            self._drawn = True
        elif now - self._last_line >= _SIGN_EVERY_S:
            text = running[0].text(now)
            self._write(f"{text}{'' if text.endswith(' left') else ' so far'}\n")
            self._last_line = now

    def ended(self, activity: Activity, now: float) -> None:
        """Erase the line on a terminal; elsewhere say how long it took."""
        if self._drawn:
            self._write(_ERASE)
            self._drawn = False
        elif not self.live and now - activity.began >= _SHOWN_AFTER_S and not sys.stderr.isatty():
            self._write(f"{activity.text(now)}\n")
            self._last_line = now

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone ends no run
            sys.stderr.write(text)
            sys.stderr.flush()


_DISPLAY = _Display()
_starting: Activity | None = None


def begin(what: str, total: int = 0, unit: str = "") -> Activity:
    """Begin an activity that `end` ends, for what is no block."""
    if threading.current_thread() is threading.main_thread() and os.environ.get(_SETTING) != "off":
        _DISPLAY.start()
        _DISPLAY.running.append(doing := Activity(what, total, unit))
        return doing
    return Activity(what, total, unit)


def end(doing: Activity) -> None:
    """End an activity. Safe to call twice."""
    if doing in _DISPLAY.running:
        _DISPLAY.running.remove(doing)
        _DISPLAY.ended(doing, time.monotonic())


@contextlib.contextmanager
def activity(what: str, total: int = 0, unit: str = "") -> Iterator[Activity]:
    """Say what the block does while it runs.

    Args:
        what, total, unit: see `Activity`.
    """
    doing = begin(what, total, unit)
    try:
        yield doing
    finally:
        end(doing)


def command_starts() -> None:
    """Say that a command imports its libraries, until `command_started`. Call it before anything heavy is imported.

    XLA's own messages are left out below fatal ones: it calls a compilation of two minutes a bug of its own, and its
    errors are raised as exceptions besides.
    """
    global _starting
    os.environ.setdefault(_XLA_LOG_LEVEL, "3")
    _starting = begin("starting")


def command_started() -> None:
    """End what `command_starts` began, if it did."""
    if _starting is not None:
        end(_starting)


@contextlib.contextmanager
def shown_elsewhere() -> Iterator[None]:
    """Within the block a live display shows `current_text`, and nothing is drawn here."""
    _DISPLAY.live = True
    try:
        yield
    finally:
        _DISPLAY.live = False


def current_text() -> str:
    """Text of a live display for the innermost activity; empty where it has just begun."""
    now, running = time.monotonic(), _DISPLAY.running[-1:]
    return running[0].text(now) if running and now - running[0].began >= _SHOWN_AFTER_S else ""
