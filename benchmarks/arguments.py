"""Command-line arguments that several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def names_of(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """For `type=`: names between commas, each of `allowed`, each kept once."""

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(
                f"got {unknown[0]!r}, allowed are {', '.join(allowed)}"
            )
        return names

    return parse


def at_least_one(text: str) -> int:
    """For `type=`: a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number of at least 1")
    return int(text)
