"""A terminal for tests: runs a command in a pty and keeps its screen, as a VT100 does with the
sequences used here.
"""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

from tests.support.waiting import HANGS_S

_SEQUENCE = re.compile(r"\x1b(?:([78D])|\[\??([0-9;]*)([A-Za-z]))")


class Screen:
    """What a terminal shows after the bytes given so far, the lines that scrolled out at its top
    included.
    """

    def __init__(self, lines, columns):
        self.columns = columns
        self.lines = lines
        self.rows = [[] for _ in range(lines)]
        self.history = []
        self.row = self.column = 0
        self.saved = (0, 0)
        self.region = (0, lines - 1)
        self._rest = ""

    def feed(self, text):
        text = self._rest + text
        self._rest = ""
        while text:
            if text[0] == "\x1b" and not _SEQUENCE.match(text) and len(text) < 20:
                self._rest = text  # a sequence that another read goes on with
                return
            if found := _SEQUENCE.match(text):
                self._obey(*found.groups())
                text = text[found.end() :]
                continue
            self._put(text[0])
            text = text[1:]

    def text(self):
        """Everything that can be read, line by line."""
        return [*self.history, *("".join(row).rstrip() for row in self.rows)]

    def _put(self, character):
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        elif character >= " ":
            if self.column == self.columns:
                self.column = 0
                self._down()
            row = self.rows[self.row]
            row.extend(" " * (self.column + 1 - len(row)))
            row[self.column] = character
            self.column += 1

    def _down(self):
        top, bottom = self.region
        if self.row != bottom:
            self.row = min(self.row + 1, self.lines - 1)
            return
        gone = self.rows.pop(top)
        self.rows.insert(bottom, [])
        if top == 0:
            self.history.append("".join(gone).rstrip())

    def _obey(self, single, numbers, final):
        if single == "7":
            self.saved = self.row, self.column
        elif single == "8":
            self.row, self.column = self.saved
        elif single == "D":
            self._down()
        elif final == "H":
            row, column = (int(each) for each in (numbers or "1;1").split(";"))
            self.row = min(row, self.lines) - 1
            self.column = column - 1
        elif final == "A":
            self.row = max(self.region[0], self.row - int(numbers or 1))
        elif final == "r":
            top, bottom = (int(each) for each in (numbers or f"1;{self.lines}").split(";"))
            self.region = (top - 1, bottom - 1)
            self.row = 0
            self.column = 0
        elif final == "K":
            self.rows[self.row] = []
        elif final == "J":
            self.rows[self.row] = self.rows[self.row][: self.column]
            self.rows[self.row + 1 :] = [[] for _ in self.rows[self.row + 1 :]]
        elif final != "m":
            raise AssertionError(f"the terminal does not know {single or numbers} {final}")


def run_in_terminal(program, *, lines=24, columns=100, at=None, environment=()):
    """Run Python code in a terminal until it ends.

    Args:
        program: the code.
        at: texts on the screen, divided by "&" -> called once, with the process and the screen,
            when all of them are there first. What it returns is typed.

    Returns:
        The screen and the exit code.
    """
    main, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "DCMDP_ACTIVITY": "on", **dict(environment)}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=child,
        stdout=child,
        stderr=child,
        env=env,
        start_new_session=True,
    )
    os.close(child)
    screen = Screen(lines, columns)
    waiting = dict(at or {})
    ends = time.monotonic() + HANGS_S
    try:
        while time.monotonic() < ends:
            if select.select([main], [], [], 0.1)[0]:
                try:
                    screen.feed(os.read(main, 65536).decode("utf-8", "replace"))
                except OSError:  # nobody has the other end any more
                    break
            shown = "\n".join(screen.text())
            for texts in [
                texts for texts in waiting if all(map(shown.__contains__, texts.split("&")))
            ]:
                os.write(main, (waiting.pop(texts)(process, screen) or "").encode())
        return screen, process.wait(timeout=max(0.1, ends - time.monotonic()))
    finally:
        process.kill()
        process.wait()
        os.close(main)
