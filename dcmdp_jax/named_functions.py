"""Functions that a setting names with parameters: `name(parameter=value,...)`.

`tis(high=2),veto` are built in, `my_remedies.py:huber(knee=0.01)` is in a file, relative to the
working directory, and `package.module:huber` in a module that can be imported.
"""

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dcmdp_jax.errors import UserError, shorten

# A path may hold spaces; the first colon after `.py` ends it.
_CALL = re.compile(r"\s*((?:[^,()]*?\.py:)?[^\s,()]+)\s*(?:\(([^()]*)\))?\s*(?:,|$)")
_WORDS = {"true": True, "false": False}
_NUMBERS = "nan", "inf", "infinity"

Parameter = float | bool | str
Function = Callable[..., Any]
Functions = Mapping[str, Function]
"""Ours by name."""


@dataclasses.dataclass(frozen=True)
class Call:
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
        if not self.parameters:
            return self.function
        texts = []
        for name, value in self.parameters.items():
            text = str(value)
            if isinstance(value, bool):
                text = text.lower()
            texts.append(f"{name}={text}")
        return f"{self.function}({','.join(texts)})"


def parse_calls(text: str, built_in: Functions = MappingProxyType({})) -> list[Call]:
    """`tis(high=2),veto` as [Call("tis", {"high": 2.0}), Call("veto", {})].

    Args:
        text: the setting.
        built_in: the functions of ours, for the example in an error.

    Raises:
        UserError: in one line that begins with "got", for text of another form, or a function that
            is named twice (ours may be, with other words).
    """
    calls = []
    position = 0
    while position < len(text):
        match = _CALL.match(text, position)
        if match is None:
            raise UserError(
                f"got {shorten(text[position:])}; write name, or name(parameter=value,...), joined "
                "by commas; a function of yours is path.py:function"
            )
        position = match.end()
        function, parameters = match.groups(default="")
        calls.append(Call(function, _parse_parameters(function, parameters, built_in)))

    kinds = []
    for call in calls:
        words = [value for value in call.parameters.values() if isinstance(value, str)]
        kinds.append((call.name, words))
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise UserError(f"got {kind[0]} twice; name it once")
    return calls


def _parse_parameters(function: str, text: str, built_in: Functions) -> dict[str, Parameter]:
    parameters = {}
    if not text.strip():
        return parameters
    for word in text.split(","):
        name, equals, value = (piece.strip() for piece in word.partition("="))
        try:
            # float() takes the digits of every script.
            if not (equals and name.isidentifier() and word.isascii()) or name in parameters:
                raise ValueError
            parameters[name] = _parse_value(value)
        except ValueError:
            hint = "parameters are name=number (or true, false, a word), each once"
            if function in built_in:
                hint += f", as in {_example(function, built_in[function])}"
            raise UserError(f"got {function}({shorten(text)}); {hint}") from None
    return parameters


def _example(name: str, function: Function) -> Call:
    """A call that is accepted: each parameter with its default, or 0.1 without one."""
    values = {}
    for parameter in _parameters(function):
        value = 0.1 if parameter.default is parameter.empty else parameter.default
        if isinstance(value, int | float | str):
            values[parameter.name] = value
    return Call(name, values)


def _parameters(function: Function) -> list[inspect.Parameter]:
    """The parameters behind the tokens that a call may name, without those that are bound."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    _, *parameters = inspect.signature(function).parameters.values()
    return [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name not in bound
    ]


def _parse_value(text: str) -> Parameter:
    """The value that a text writes; ValueError for one that is no number and no word."""
    if text in _WORDS:
        return _WORDS[text]
    if text.isidentifier() and text.lower() not in _NUMBERS:
        return text
    return float(text)


def check_call(call: Call, built_in: Functions) -> None:
    """Check the name of a function, and the parameters of one of ours. Nothing is imported.

    Raises:
        UserError: in one line that begins with "got", or with the function's name for its
            parameters.
    """
    if call.own:
        if not call.name.isidentifier() or call.function.startswith(":"):
            raise UserError(
                f"got {shorten(call.function)}; a function of yours is path.py:function or "
                "module:function"
            )
        return
    if call.function not in built_in:
        word = call.function.lower()
        near = [name for name in built_in if name.startswith(word)]
        near = near or difflib.get_close_matches(word, built_in, n=3)
        hint = f"did you mean {' or '.join(near[:3])}? " if near else ""
        raise UserError(
            f"got {shorten(call.function)}; {hint}allowed are {', '.join(built_in)}, and functions "
            "of yours as path.py:function"
        )
    check_parameters(call, built_in[call.function])


def check_parameters(call: Call, function: Function) -> None:
    """Check that a function takes one argument and these parameters by name.

    Raises:
        UserError: in one line that begins with the function.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    first, *others = signature.parameters.values() or [None]
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise UserError(
            f"{call.function}{signature} takes no token arrays; its first argument must be `tokens`"
        )

    parameters = {parameter.name: parameter for parameter in _parameters(function)}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in others)
    for name in call.parameters:
        if name not in parameters and not takes_any:
            names = ", ".join(parameters) or "none"
            raise UserError(f"{call.function} has no parameter {name!r}; it has {names}")
    for name, value in call.parameters.items():
        if _is_wrong_kind(value, parameters.get(name)):
            raise UserError(f"{call}: {name} must be a number")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in call.parameters:
            raise UserError(
                f"{call.function} needs {name}, such as {_example(call.function, function)}"
            )


def _is_wrong_kind(value: Parameter, parameter: inspect.Parameter | None) -> bool:
    """Whether a word stands for a number, or true or false do."""
    default = None if parameter is None else parameter.default
    if isinstance(value, str):
        return not isinstance(default, str)
    if parameter is None or not isinstance(value, bool):
        return False
    return parameter.annotation in (float, "float") or type(default) in (int, float)
