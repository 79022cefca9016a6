"""Status of the program for people: nothing that takes more than a few seconds is silent.

    with activity("sampling", total=64, unit="completions") as doing:
        ...
        doing.done += 1

On a terminal the painter owns the last lines: a scroll region keeps whatever else is written, by
print, a logger, C code or a child process, above them, where it stays. They show the innermost
activity of the main thread once it has taken more than three seconds, with time left where the
total is known, and above it what `stays`, as the progress of a run. In a log an activity is a line
when it is done, and lines while it runs, in intervals that double, with date and time. DCMDP_ACTIVITY=off in
the environment shows none.

Why no library: rich (15.0) and tqdm (4.70) move the cursor up and write over the lines of others.
At 80 and at 120 columns rich's Live erased the answer to Ctrl-C and a logger's line, and tqdm broke
them in two.
"""

import atexit
import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence

COMPILING = "compiling "
"""Begins the name of a thread that compiles ahead; a process that ends need not wait for it."""
_SHOWN_AFTER_S = 3.0
_SIGN_EVERY_S = 10.0
"""Least time between two lines of activities in a log."""
_REDRAW_S = 0.5
_LEAST_LINES = 10
_LEAST_COLUMNS = 20
"""Size of a terminal that has room for lines of ours."""
# Control sequences of a VT100, which all terminals know.
_SAVE = "\x1b7"
_RESTORE = "\x1b8"
_DOWN = "\x1bD"
_DIM = "\x1b[2m"
_PLAIN = "\x1b[0m"
_ERASE_BELOW = "\x1b[J"
_WHOLE_SCREEN = "\x1b[r"


@dataclasses.dataclass
class Activity:
    """Something that takes a while.

    Attributes:
        gerund: a gerund and its object: "converting model.gguf".
        total: number of units in all; 0 where unknown.
        unit: name of the units.
        done: how many of them are done; whoever works on it counts.
        began: start, a value of `time.monotonic`.
        stays: it is shown while another one is within it, and has its own lines in a log.
        next_line: earliest time of its next line in a log.
    """

    gerund: str
    total: int = 0
    unit: str = ""
    done: int = 0
    began: float = dataclasses.field(default_factory=time.monotonic)
    stays: bool = False
    next_line: float = 0.0

    def text(self, now: float) -> str:
        """`sampling: 12 of 64 completions, 8 s, 35 s left`."""
        seconds = now - self.began
        text = f"{self.gerund}: "
        if self.total:
            text += f"{self.done:,} of {self.total:,} {self.unit}, "
        text += f"{seconds:.0f} s"
        if 0 < self.done < self.total:
            text += f", {seconds * (self.total - self.done) / self.done:.0f} s left"
        return text

    def lines(self, columns: int, now: float) -> list[str]:
        """What a terminal of so many columns shows; nothing for the first three seconds."""
        if now - self.began < _SHOWN_AFTER_S:
            return []
        return [colored((self.text(now) + _compiling_text())[:columns], _DIM)]


def colored(text: str, color: str) -> str:
    """Put a terminal's color around a text, unless NO_COLOR is set (no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return text
    return color + text + _PLAIN


def compiling() -> list[str]:
    """The programs that threads are compiling."""
    names = [thread.name for thread in threading.enumerate()]
    return [name.removeprefix(COMPILING) for name in names if name.startswith(COMPILING)]


def _compiling_text() -> str:
    """The same for the console: `; also compiling: the step, decode`."""
    names = compiling()
    return f"; also compiling: {', '.join(names)}" if names else ""


class _Painter:
    """The running activities, and the thread that shows them."""

    def __init__(self) -> None:
        self.running: list[Activity] = []
        self._lock = threading.RLock()
        self._owned = 0
        self._size = None
        self._next_line = float("-inf")
        self._ticker: threading.Thread | None = None

    def start(self) -> None:
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, daemon=True, name="activity")
            self._ticker.start()
            atexit.register(self.close)

    def _tick(self) -> None:
        while True:
            time.sleep(_REDRAW_S)
            self.show(time.monotonic())

    def show(self, now: float) -> None:
        """Paint the terminal's last lines, or print what has run for long enough in a log."""
        with self._lock:
            staying = [activity for activity in self.running if activity.stays]
            innermost = [activity for activity in self.running if not activity.stays][-1:]
            size = terminal_size()
            if size:
                lines = []
                for activity in staying + innermost:
                    lines += activity.lines(size.columns - 1, now)
                self._paint(lines, size)
            elif innermost:
                [doing] = innermost
                if now < max(doing.began + _SHOWN_AFTER_S, doing.next_line, self._next_line):
                    return
                text = doing.text(now)
                if not text.endswith(" left"):
                    text += " so far"
                say(text + _compiling_text())
                self._next_line = now + _SIGN_EVERY_S
                doing.next_line = now + (now - doing.began)

    def ended(self, activity: Activity, now: float) -> None:
        """Take an activity that was shown off the terminal; in a log say how long it took."""
        was_shown = now - activity.began >= _SHOWN_AFTER_S
        if was_shown and not activity.stays and not terminal_size():
            say(activity.text(now))
            self._next_line = now + _SIGN_EVERY_S
        if was_shown or activity.stays:
            self.show(now)

    def _paint(self, lines: Sequence[str], size: os.terminal_size) -> None:
        if not lines:
            self._give_back()
            return
        text = ""
        if size != self._size and self._owned:
            text = f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}{_ERASE_BELOW}"
            self._owned = 0
        new_lines = len(lines) - self._owned
        if new_lines > 0:
            # What stands there goes up, and the cursor with it.
            text += f"{_DOWN * new_lines}\x1b[{new_lines}A"
            self._owned = len(lines)
        self._size = size

        # The region again: programs reset it.
        first = size.lines - self._owned + 1
        text += f"{_SAVE}\x1b[1;{first - 1}r"
        for row in range(self._owned):
            line = lines[row] if row < len(lines) else ""
            text += f"\x1b[{first + row};1H\x1b[2K{line}"
        # In one call: what another process writes comes before or after.
        _write(text + _RESTORE)

    def close(self) -> None:
        """Erase the painter's lines for good: the thread that shows them would paint them again."""
        self.running.clear()
        self._give_back()

    def _give_back(self) -> None:
        """Erase the painter's lines, and let the terminal scroll as a whole again."""
        # A terminal that is stopped (Ctrl-S) keeps no process from leaving.
        if self._lock.acquire(timeout=1):
            if self._owned:
                first = self._size.lines - self._owned + 1
                _write(f"{_SAVE}\x1b[{first};1H{_ERASE_BELOW}{_WHOLE_SCREEN}{_RESTORE}")
                self._owned = 0
            self._lock.release()


def terminal_size() -> os.terminal_size | None:
    """Size of the terminal that standard error is; None for a log, or one without room for us.

    A notebook's `!command` has a pseudo-terminal, but what it prints is kept as text: a log.
    """
    unable = os.environ.get("TERM", "dumb") in ("dumb", "unknown") or "JPY_PARENT_PID" in os.environ
    if unable or not sys.stderr.isatty():
        return None
    with contextlib.suppress(OSError, ValueError):
        size = os.get_terminal_size(sys.stderr.fileno())
        if size.lines >= _LEAST_LINES and size.columns >= _LEAST_COLUMNS:
            return size
    return None


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone ends no run
        sys.stderr.flush()
        os.write(sys.stderr.fileno(), text.encode())


def say(line: str) -> None:
    """Write a line on standard error, in a log with date and time."""
    with contextlib.suppress(OSError, ValueError):
        date = "" if terminal_size() else time.strftime("%Y-%m-%d %H:%M:%S  ")
        sys.stderr.write(f"{date}{line}\n")
        sys.stderr.flush()


_PAINTER = _Painter()
give_back_terminal = _PAINTER.close
"""Call it before `os._exit`: the terminal would keep the scroll region."""
_starting = Activity("starting")


def register(doing: Activity) -> bool:
    """Have an activity shown until `end`. Return whether it is: another thread's is not."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if os.environ.get("DCMDP_ACTIVITY") == "off":
        return False
    _PAINTER.start()
    _PAINTER.running.append(doing)
    return True


def refresh() -> None:
    """Show at once what has changed."""
    _PAINTER.show(time.monotonic())


def end(doing: Activity) -> None:
    """End an activity. Safe to call twice."""
    if doing in _PAINTER.running:
        _PAINTER.running.remove(doing)
        _PAINTER.ended(doing, time.monotonic())


@contextlib.contextmanager
def activity(gerund: str, total: int = 0, unit: str = "") -> Iterator[Activity]:
    """Say what the block does while it runs.

    Args:
        gerund, total, unit: see `Activity`.
    """
    doing = Activity(gerund, total, unit)
    register(doing)
    try:
        yield doing
    finally:
        end(doing)


def command_starts() -> None:
    """Say that a command imports its libraries, until `command_started`; call it before they are.

    XLA's own messages are left out below fatal ones: it calls a compilation of two minutes a bug of
    its own, and its errors are raised as exceptions besides.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    register(_starting)


def command_started() -> None:
    """End what `command_starts` began, if it did."""
    end(_starting)
