"""Arguments of commands: a parser with one-line errors, and types of arguments."""

import argparse
import difflib
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dcmdp_jax.errors import UserError, shorten


def nearest(word: str, names: Iterable[str], otherwise: str) -> str:
    """A hint that names what is nearest to an unknown word, or other advice if nothing is near."""
    near = difflib.get_close_matches(word, names, n=1)
    if not near:
        return otherwise
    return f"did you mean {near[0]}?"


class Parser(argparse.ArgumentParser):
    """Argument parser with one-line errors for `run_main`, which name the nearest flag."""

    def __init__(self, command: str = "", *, example: str = "", **options: Any) -> None:
        self._example = example
        if command:
            installed = f"dcmdp {command}"
            options["prog"] = installed if sys.argv[0] == installed else f"python -m bin.{command}"
        # An abbreviated flag would change its meaning when a new one is added.
        super().__init__(
            epilog="--debug shows the traceback of a failure.",
            allow_abbrev=False,
            **options,
        )

    def format_help(self) -> str:
        """The help, and the example on a line of its own."""
        text = super().format_help()
        if self._example:
            text += f"\nexample:\n  {self._example}\n"
        return text

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing the usage and exiting."""
        raise UserError(message)

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> argparse.Namespace:
        """Parse as argparse does, but raise a one-line UserError for an unknown argument."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hint = nearest(unknown[0].partition("=")[0], self.flags(), "see --help")
            if getattr(parsed, "config", "") is None and not unknown[0].startswith("-"):
                hint = f"did you mean --config={unknown[0]}?"
            self.error(f"{unknown[0]}: no such argument; {hint}")
        return parsed

    def flags(self) -> list[str]:
        """Names of all options, of subcommands too."""
        names = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    names += parser.flags()
        return names


UNLIMITED = 2**31 - 1
"""No number of tokens, rows or problems is larger."""


def whole(low: int) -> Callable[[str], int]:
    """An argument type: an integer from `low` to `UNLIMITED`, in the digits 0-9."""

    def integer(text: str) -> int:
        # int() also takes the digits of other scripts, underscores and spaces.
        if not re.fullmatch(r"[+-]?[0-9]{1,4000}", text):
            raise ArgumentTypeError(f"got {shorten(text)}, must be a whole number")
        value = int(text)
        if not low <= value <= UNLIMITED:
            bounds = f"at least {low}" if value < low else f"in [{low}, {UNLIMITED}]"
            raise ArgumentTypeError(f"got {shorten(value)}, must be {bounds}")
        return value

    return integer


def real(high: float) -> Callable[[str], float]:
    """An argument type: a number above 0 and up to `high`, in the digits 0-9."""

    def number(text: str) -> float:
        try:
            # float() also takes the digits of other scripts, and underscores.
            if not text.isascii() or "_" in text:
                raise ValueError
            value = float(text)
        except ValueError:
            raise ArgumentTypeError(f"got {shorten(text)}, must be a number") from None
        # NaN compares as false.
        if not 0 < value <= high:
            raise ArgumentTypeError(f"got {value:g}, must be in (0, {high:g}]")
        return value

    return number


def output_file(text: str) -> Path:
    """An argument type: a file that can be written once the work is done; nothing is made yet."""
    path = Path(text)
    try:
        if path.exists():
            writable = path.is_file() and os.access(path, os.W_OK)
        else:
            writable = path.parent.is_dir() and os.access(path.parent, os.W_OK)
    except OSError as error:
        raise ArgumentTypeError(f"got {shorten(text)}: {error.strerror}") from error
    if not writable:
        raise ArgumentTypeError(
            f"got {shorten(text)}, must be a regular file, or a new one in a directory that is "
            "there, and writable; name another"
        )
    return path


def output_directory(text: str) -> Path:
    """An argument type: a writable directory, or one that can be made; nothing is made yet."""
    path = existing = Path(text)
    try:
        while not existing.exists():
            existing = existing.parent
        writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    except OSError as error:
        raise ArgumentTypeError(f"got {shorten(text)}: {error.strerror}") from error
    if not writable:
        raise ArgumentTypeError(
            f"got {shorten(text)}, which can't be written ({existing}); choose another"
        )
    return path
