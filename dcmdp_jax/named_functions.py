"""Functions that a setting names with parameters: `name(parameter=value,...)`, of ours or from a
user's file.

`tis(high=2),veto` are built in, `my_remedies.py:huber(knee=0.01)` is in a file, relative to the
working directory, and `package.module:huber` in a module that can be imported.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dcmdp_jax.errors import UserError, shorten

# A path may hold spaces; the first colon after `.py` ends it.
_CALL = re.compile(r"\s*((?:[^,()]*?\.py:)?[^\s,()]+)\s*(?:\(([^()]*)\))?\s*(?:,|$)")
_WORDS = {"true": True, "false": False}
_NUMBERS = "nan", "inf", "infinity"

Parameter = float | bool | str


class Call(NamedTuple):
    """A function as a setting names it.

    Attributes:
        function: a built-in name, `path.py:function` or `package.module:function`.
        parameters: values by name: numbers, true or false, or words of letters and digits.
    """

    function: str
    parameters: dict[str, Parameter]

    @property
    def own(self) -> bool:
        """Whether it is a user's function."""
        return ":" in self.function

    @property
    def name(self) -> str:
        """The function's own name."""
        return self.function.rpartition(":")[2]

    def __str__(self) -> str:
        values = self.parameters.items()
        written = ",".join(
            f"{key}={str(x).lower() if isinstance(x, bool) else x}" for key, x in values
        )
        return f"{self.function}({written})" if written else self.function


def parse_calls(
    text: str, built_in: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> list[Call]:
    """`tis(high=2),veto` as [Call("tis", {"high": 2.0}), Call("veto", {})].

    Args:
        text: the setting.
        built_in: the functions of ours, for the example in an error.

    Raises:
        UserError: in one line that begins with "got", for text of another form, or a function that
            is named twice (ours may be, with other words).
    """
    found = []
    position = 0
    while position < len(text):
        part = _CALL.match(text, position)
        if part is None:
            hint = (
                "write name, or name(parameter=value,...), joined by commas; a function of "
                "yours is path.py:function"
            )
            raise UserError(f"got {shorten(text[position:])}; {hint}")
        position = part.end()
        found.append(
            Call(part[1], _parse_parameters(part[1], part[2] or "", built_in.get(part[1])))
        )
    kinds = [
        (call.name, *(value for value in call.parameters.values() if isinstance(value, str)))
        for call in found
    ]
    if twice := [name for name, *words in kinds if kinds.count((name, *words)) > 1]:
        raise UserError(f"got {twice[0]} twice; name it once")
    return found


def _parse_parameters(
    name: str, text: str, function: Callable[..., Any] | None
) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    for word in text.split(",") if text.strip() else []:
        key, equals, value = (piece.strip() for piece in word.partition("="))
        try:
            # float() takes the digits of every script.
            if not (equals and key.isidentifier() and word.isascii()) or key in parameters:
                raise ValueError
            parameters[key] = _WORDS[value] if value in _WORDS else _number_or_word(value)
        except ValueError:
            example = "" if function is None else f", as in {_example(name, function)}"
            hint = f"parameters are name=number (or true, false, a word), each once{example}"
            raise UserError(f"got {name}({shorten(text)}); {hint}") from None
    return parameters


def _example(name: str, function: Callable[..., Any]) -> Call:
    """A call that is accepted: each parameter with its default, or 0.1 without one."""
    values = {
        one.name: 0.1 if one.default is one.empty else one.default for one in _parameters(function)
    }
    return Call(
        name, {key: value for key, value in values.items() if isinstance(value, int | float | str)}
    )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters behind the tokens that a call may name, without those that are bound."""
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    known = list(inspect.signature(function).parameters.values())[1:]
    by_name = [one for one in known if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return [one for one in by_name if one.name not in fixed]


def _number_or_word(text: str) -> float | str:
    return text if text.isidentifier() and text.lower() not in _NUMBERS else float(text)


def check_call(call: Call, built_in: Mapping[str, Callable[..., Any]]) -> None:
    """Check the name of a function, and the parameters of one of ours. Nothing is imported.

    Raises:
        UserError: in one line that begins with "got", or with the function's name for its
            parameters.
    """
    if not call.own:
        if call.function not in built_in:
            word = call.function.lower()
            near = [name for name in built_in if name.startswith(word)]
            near = near or difflib.get_close_matches(word, built_in, n=3)
            hint = f"did you mean {' or '.join(near[:3])}? " if near else ""
            allowed = (
                f"allowed are {', '.join(built_in)}, and functions of yours as path.py:function"
            )
            raise UserError(f"got {shorten(call.function)}; {hint}{allowed}")
        check_parameters(call, built_in[call.function])
    elif not call.name.isidentifier() or call.function.startswith(":"):
        raise UserError(
            f"got {shorten(call.function)}; a function of yours is path.py:function or "
            "module:function"
        )


def check_parameters(call: Call, function: Callable[..., Any]) -> None:
    """Check that a function takes one argument and these parameters by name.

    Raises:
        UserError: in one line that begins with the function.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    first, *known = signature.parameters.values() or [None]
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise UserError(
            f"{call.function}{signature} takes no token arrays; its first argument must be `tokens`"
        )
    names = [one.name for one in _parameters(function)]
    anything = any(one.kind is one.VAR_KEYWORD for one in known)
    if unknown := [name for name in call.parameters if name not in names and not anything]:
        said = f"it has {', '.join(names)}" if names else "it has none"
        raise UserError(f"{call.function} has no parameter {unknown[0]!r}; {said}")
    words = [one.name for one in known if isinstance(one.default, str)]
    numbers = [
        one.name
        for one in known
        if one.annotation in (float, "float") or type(one.default) in (int, float)
    ]
    for name, value in call.parameters.items():
        if (isinstance(value, str) and name not in words) or (
            isinstance(value, bool) and name in numbers
        ):
            raise UserError(f"{call}: {name} must be a number")
    needed = [one.name for one in known if one.name in names and one.default is one.empty]
    if missing := [name for name in needed if name not in call.parameters]:
        raise UserError(
            f"{call.function} needs {missing[0]}, such as {_example(call.function, function)}"
        )
