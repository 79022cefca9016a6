"""Values of settings: their types, their text, what is allowed, the nearest name."""

import dataclasses
import difflib
import functools
import math
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

from dcmdp_jax.errors import UserError, shorten, suggestion
from dcmdp_jax.fields import Declared


def build(kind: type, values: Any, unknown: Callable[[str], Exception], prefix: str = "") -> Any:
    """Make a dataclass of settings from nested mappings; a missing setting has its default.

    Args:
        kind: the dataclass.
        values: nested mappings, keys as the fields.
        unknown: makes the exception for an unknown dotted name.
        prefix: begins the dotted names in messages.

    Raises:
        UserError: in one line, for a value of a wrong type.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            f"config.{prefix[:-1]}: got {shorten(values)}, must be a section with named settings"
        )
    hints = typing.get_type_hints(kind)
    settings: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        if name not in hints:
            raise unknown(dotted)
        if dataclasses.is_dataclass(hints[name]):
            settings[name] = build(hints[name], value, unknown, f"{dotted}.")
        else:
            settings[name] = _typed(hints[name], value, dotted)
    return kind(**settings)


def _typed(hint: Any, value: Any, dotted: str) -> Any:
    if typing.get_origin(hint) is tuple:
        return _typed_tuple(typing.get_args(hint)[0], value, dotted)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is float and _is_number(value, int):
        if abs(value) <= sys.float_info.max:
            value = float(value)
        else:
            value = math.inf if value > 0 else -math.inf
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"config.{dotted}: got {shorten(value)}, must be a finite number")
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise UserError(
        f"config.{dotted}: got {shorten(value)} ({type(value).__name__}), must be {hint.__name__}"
    )


def _typed_tuple(element: type, value: Any, dotted: str) -> tuple[Any, ...]:
    # An earlier version had one number.
    values = (value,) if _is_number(value, int) else value
    kind = int | float if element is float else int
    if isinstance(values, list | tuple) and all(_is_number(number, kind) for number in values):
        return tuple(_typed(element, number, dotted) for number in values)
    raise UserError(
        f"config.{dotted}: got {shorten(values)}, must be a tuple of {element.__name__}"
    )


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def parse_text(declaration: Declared, text: str) -> Any:
    """Parse the text of a setting, as a command line has it: `true`, `1e-6`, `(64,128)`.

    Digits are 0-9.

    Raises:
        UserError: in one line, for text of another type.
    """
    if declaration.type is str:
        return text
    expected, parse = _PARSERS[declaration.type]
    try:
        # int() and float() take the digits of every script.
        if not text.isascii():
            raise UserError
        return parse(text)
    except (ValueError, KeyError):
        raise UserError(
            f"config.{declaration.name}: got {shorten(text)}, must be {expected}"
        ) from None


def _parse_tuple(element: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    words = [word.strip() for word in text.strip().removeprefix("(").removesuffix(")").split(",")]
    if not words[-1]:
        words.pop()
    return tuple(element(word) for word in words)


def check_value(declaration: Declared, value: Any, name: str) -> None:
    """Refuse what is none of a setting's choices, and a number or one of a tuple's out of bounds."""
    check_choice(name, value, declaration.about.choices, declaration.about.why)
    low, high = declaration.bounds()
    if not isinstance(value, tuple):
        value = (value,)
    for number in value:
        if not isinstance(number, int | float) or low <= number <= high:
            continue
        bound = f"at most {high}"
        if number < low:
            bound = f"at least {low}"
            # The declared reason is that of the minimum.
            if declaration.about.why:
                bound += f" ({declaration.about.why})"
        raise UserError(f"config.{name}: got {number}, must be {bound}")


def check_choice(
    name: str,
    value: object,
    allowed: tuple[str, ...],
    why: str = "",
    when: str = "",
) -> None:
    """Refuse a value that is none of `allowed`; empty allows any."""
    if allowed and value not in allowed:
        reason = f" ({why})" if why else ""
        raise UserError(
            f"config.{name}: got {shorten(value)}, allowed{when} are {', '.join(allowed)}{reason}"
            f"{suggestion(str(value), allowed)}"
        )


_WORDS = {
    "true": True,
    "t": True,
    "1": True,
    "yes": True,
    "false": False,
    "f": False,
    "0": False,
    "no": False,
}


_PARSERS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("a whole number in digits 0-9", int),
    float: ("a number in digits 0-9, such as 0.001 or 1e-6", float),
    bool: ("true or false", lambda text: _WORDS[text.lower()]),
    tuple[int, ...]: (
        "whole numbers in digits 0-9, such as (64,128)",
        functools.partial(_parse_tuple, int),
    ),
    tuple[float, ...]: (
        "numbers in digits 0-9, such as (1,0.1)",
        functools.partial(_parse_tuple, float),
    ),
}


def nearest_name(name: str, names: list[str], sections: list[str]) -> str:
    """Hint for an unknown dotted name: the nearest setting of its section, or the sections."""
    section, _, tail = name.rpartition(".")
    near = [other for other in names if other.rpartition(".")[2] == tail]
    siblings = [other for other in names if section and other.startswith(f"{section}.")]
    if siblings and not near:
        # By the words behind the section: any two names with one section are alike.
        words = [other.removeprefix(f"{section}.").partition(".")[0] for other in siblings]
        near = [f"{section}.{word}" for word in difflib.get_close_matches(tail, words, n=1)]
        if not near:
            return f"`dcmdp settings {section}` lists those of the section"
    if not near:
        near = difflib.get_close_matches(name, names + sections, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"sections are {', '.join(sections)}"
