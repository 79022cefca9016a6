"""Errors for the user to correct, short quotes of bad values, and the line of a user's failure."""

import contextlib
import difflib
import re
import reprlib
import sys
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path

_QUOTED = 80
"""Characters of a value in a message."""

_REPR = reprlib.Repr()
_REPR.maxother = _REPR.maxlong = _REPR.maxstring = _QUOTED


class UserError(ValueError):
    """Bad input: a setting, a file, an argument.

    Its message is one line that says what is wrong and what to do. Commands print the message
    alone. Every other exception is taken for a defect, whose traceback is kept.
    """


class ArgumentError(UserError):
    """A wrong argument of library code. `config.checks` says it as one of a setting or a flag.

    Args:
        argument: the argument's name.
        message: the fault and the remedy. Other arguments are in back quotes.
        detail: follows the name: a piece of the argument, ".size", or what it holds, " (data=2)".
    """

    def __init__(self, argument: str, message: str, detail: str = "") -> None:
        super().__init__(argument, message, detail)
        self.argument = argument
        self.message = message
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.argument}{self.detail}: {self.message}"


@contextlib.contextmanager
def naming(topic: str) -> Iterator[None]:
    """Name what a UserError of the block is about: a setting, a file, a piece of the work."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{topic}: {error}") from error


class EngineError(RuntimeError):
    """The engine gave something that must not be trained on, or broke."""


class TrainingStopped(RuntimeError):
    """Training gave up: too many updates had no finite gradient, or an alarm ends the run."""


def one_line(text: object, limit: int | None = None) -> str:
    """A text, or an error's message, on one line, cut between words to `limit` characters."""
    line = " ".join(str(text).split())
    if limit is None or len(line) <= limit:
        return line
    # A single long word is cut within.
    words, _, _ = line[: limit + 1].rpartition(" ")
    return f"{words or line[:limit]}..."


def shorten(value: object) -> str:
    """The `repr` of a value from outside, cut to about 80 characters for a line of an error.

    A cut text states its length: `'aaa'... (1,000,000 characters)`.
    """
    if not isinstance(value, str | bytes):
        text = _REPR.repr(value)
        if len(text) > _QUOTED:
            text = f"{text[:_QUOTED]}..."
        return text
    if len(value) <= _QUOTED:
        return repr(value)
    unit = "characters" if isinstance(value, str) else "bytes"
    return f"{value[:_QUOTED]!r}... ({len(value):,} {unit})"


def shorten_name(name: str) -> str:
    """A name from a file as it is, without quotes; cut like `shorten`, to 160 characters."""
    limit = 2 * _QUOTED
    if len(name) <= limit:
        return name
    return f"{name[:limit]}... ({len(name):,} characters)"


def suggestion(name: str, allowed: Collection[str]) -> str:
    """The end of an error about an unknown name: the nearest one, whatever its case; "" without."""
    lowered = {other.lower(): other for other in allowed}
    near = [other for other in lowered if name and other.startswith(name.lower())]
    if not near:
        near = difflib.get_close_matches(name.lower(), lowered, n=1)
    return f"; did you mean {lowered[near[0]]!r}?" if near else ""


def install_extra(extra: str) -> str:
    """The end of an error about a package that an extra has; nothing but a checkout has them."""
    return f"pip install 'PATH_OF_A_CHECKOUT[{extra}]'"


def describe_error(error: BaseException, source: str) -> str:
    """`KeyError: 'x' (length_reward.py, line 12)`, the last line of the user's file that ran.

    Args:
        error: the exception.
        source: the file, or the module, of the function.
    """
    return f"{type(error).__name__}: {error}{error_place(error, source)}"


def error_place(error: BaseException, source: str) -> str:
    """` (length_reward.py, line 12)`, the last line of the user's file that ran, if one did."""
    file = source
    if not source.endswith(".py"):
        file = getattr(sys.modules.get(source), "__file__", None)
    if not file:
        return ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).resolve() == Path(file).resolve():
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def callback_error(error: BaseException) -> str:
    """`KeyError: 'x' (mine.py, line 3)` of an error within `jax.pure_callback`; else empty."""
    # XLA gives the error's text alone.
    frames = re.findall(r'^  File "(.+)", line (\d+)', str(error), re.MULTILINE)
    if "callback: Traceback (most recent call last)" not in str(error) or not frames:
        return ""
    file, line = frames[-1]
    return f"{one_line(str(error).splitlines()[-1])} ({Path(file).name}, line {line})"
