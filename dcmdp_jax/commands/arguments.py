"""Types of command-line arguments: numbers in range, written in the digits 0-9, lists of tasks, files to write."""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcmdp_jax.errors import shorten

UNLIMITED = 2**31 - 1
"""No number of tokens, rows or problems is larger."""


def whole(low: int) -> Callable[[str], int]:
    """An argument type: an integer from `low` to `UNLIMITED`, in the digits 0-9."""

    def integer(text: str) -> int:
        # int() also takes the digits of other scripts, underscores and spaces.
        if not re.fullmatch(r"[+-]?[0-9]{1,4000}", text):
            raise argparse.ArgumentTypeError(f"got {shorten(text)}, must be a whole number")
        value = int(text)
        if not low <= value <= UNLIMITED:
            bounds = f"at least {low}" if value < low else f"in [{low}, {UNLIMITED}]"
            raise argparse.ArgumentTypeError(f"got {shorten(value)}, must be {bounds}")
        return value

    return integer


def real(low: float, high: float) -> Callable[[str], float]:
    """An argument type: a number above `low` and up to `high`, in the digits 0-9."""

    def number(text: str) -> float:
        try:
            value = float(text if text.isascii() and "_" not in text else "")
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {shorten(text)}, must be a number") from None
        # NaN compares as false.
        if not low < value <= high:
            raise argparse.ArgumentTypeError(f"got {value:g}, must be in ({low:g}, {high:g}]")
        return value

    return number


def each_once(number: Callable[[str], Any], noun: str) -> Callable[[str], tuple[Any, ...]]:
    """An argument type: numbers of a type, joined by commas, no two alike."""

    def numbers(text: str) -> tuple[Any, ...]:
        values = tuple(number(part.strip()) for part in text.split(","))
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"got {text!r}, every {noun} must be there once")
        return values

    return numbers


def output_file(text: str) -> Path:
    """An argument type: a file that can be written once the work is done; nothing is made yet."""
    path = Path(text)
    try:
        possible = path.is_file() or (path.parent.is_dir() and not path.exists())
        writable = possible and os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"got {shorten(text)}: {error.strerror}") from error
    if not writable:
        said = "must be a regular file, or a new one in a directory that is there, and writable; name another"
        raise argparse.ArgumentTypeError(f"got {shorten(text)}, {said}")
    return path


def output_directory(text: str) -> Path:
    """An argument type: a directory that is there and writable, or can be made; nothing is made yet."""
    path = existing = Path(text)
    try:
        while not existing.exists():
            existing = existing.parent
        writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"got {shorten(text)}: {error.strerror}") from error
    if not writable:
        raise argparse.ArgumentTypeError(f"got {shorten(text)}, which can't be written ({existing}); choose another")
    return path
