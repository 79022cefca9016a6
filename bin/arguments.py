"""Types of command-line arguments: numbers in range, written in the digits 0-9, and lists of tasks."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

from dcmdp_jax.inputs import shorten
from dcmdp_jax.tasks.problems import source_name

UNLIMITED = 2**31 - 1
"""No number of tokens, rows or problems is larger."""
# Below, log-probs reach their clamp; above, all tokens are about equally likely. As config.rollout.temperature.
_TEMPERATURES = 0.01, 100.0


def whole(low: int, high: int = UNLIMITED) -> Callable[[str], int]:
    """An argument type: an integer from `low` to `high`, in the digits 0-9."""

    def integer(text: str) -> int:
        # int() also takes the digits of other scripts, underscores and spaces.
        if not re.fullmatch(r"[+-]?[0-9]{1,4000}", text):
            raise argparse.ArgumentTypeError(f"got {shorten(text)}, must be a whole number")
        value = int(text)
        if not low <= value <= high:
            bounds = f"at least {low}" if high == UNLIMITED and value < low else f"in [{low}, {high}]"
            raise argparse.ArgumentTypeError(f"got {shorten(value)}, must be {bounds}")
        return value

    return integer


def real(low: float, high: float) -> Callable[[str], float]:
    """An argument type: a number above `low` and up to `high`, in the digits 0-9."""

    def number(text: str) -> float:
        try:
            value = float(text) if text.isascii() and "_" not in text else None
        except ValueError:
            value = None
        if value is None:
            raise argparse.ArgumentTypeError(f"got {shorten(text)}, must be a number")
        # NaN compares as false.
        if not low < value <= high:
            raise argparse.ArgumentTypeError(f"got {value:g}, must be in ({low:g}, {high:g}]")
        return value

    return number


def temperature(text: str) -> float:
    """An argument type: 0 (greedy), or a temperature at which log-probs can be computed."""
    value = real(-math.inf, math.inf)(text)
    low, high = _TEMPERATURES
    if value != 0 and not low <= value <= high:
        raise argparse.ArgumentTypeError(f"got {value:g}, must be 0 (greedy) or in [{low:g}, {high:g}]")
    return value


def split_tasks(text: str) -> dict[str, str]:
    """Name -> location. A comma before `key=value` belongs to the arithmetic task it continues."""
    locations: list[str] = []
    for part in text.split(","):
        if "=" in part and locations and locations[-1].startswith("arithmetic"):
            locations[-1] += f",{part}"
        else:
            locations.append(part.strip())
    tasks: dict[str, str] = {}
    for location in locations:
        if not location:
            raise argparse.ArgumentTypeError(f"got {shorten(text)}, an empty name is no task")
        name = location if location.startswith("arithmetic") else source_name(location)
        if name in tasks:
            raise argparse.ArgumentTypeError(f"{tasks[name]} and {location} are both called {name!r}; rename one")
        tasks[name] = location
    return tasks
