"""Types of arguments of the studies."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any


def each_once(number: Callable[[str], Any], noun: str) -> Callable[[str], tuple[Any, ...]]:
    """An argument type: numbers of a type, joined by commas, no two alike."""

    def numbers(text: str) -> tuple[Any, ...]:
        values = tuple(number(word.strip()) for word in text.split(","))
        if len(set(values)) < len(values):
            raise ArgumentTypeError(f"got {text!r}, every {noun} must be there once")
        return values

    return numbers
