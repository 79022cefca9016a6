"""Settings as fields of frozen dataclasses: declaration, names, parsing, typed construction.

Nothing here knows a particular setting; `config/settings.py` declares them.
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import re
import sys
import traceback
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dcmdp_jax.errors import UserError, one_line, shorten, suggestion

INT32_MAX = 2**31 - 1
_WEEK_S = 604800


@dataclasses.dataclass(frozen=True)
class Setting:
    """All that is known of one setting, but for its name, type and default.

    Attributes:
        doc: a sentence or two about its effect.
        unit: unit of its value; empty for names and pure numbers.
        source: where the default comes from: the paper with its section, or this project.
        choices: allowed values; empty for any.
        minimum, maximum: range, ends included; None: the number is at most 2^31 - 1, a time at most
            a week.
        why: told with a refused choice or a value below `minimum`.
        free: a resumed run may change it: it alters what is recorded, where the run is computed and
            in what portions, or what happens to broken input, not what is learned.
    """

    doc: str
    unit: str = ""
    source: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    why: str = ""
    free: bool = False


@dataclasses.dataclass(frozen=True)
class Declared:
    """A setting in its place: dotted name, type, default, and the rest."""

    name: str
    type: Any
    default: Any
    about: Setting

    def bounds(self) -> tuple[float, float]:
        """Least and largest value, of each element of a tuple."""
        largest = _WEEK_S if self.about.unit == "seconds" else INT32_MAX
        low = self.about.minimum
        if low is None:
            low = -largest
        high = self.about.maximum
        if high is None:
            high = largest
        return low, high


def setting(default: Any, doc: str = "", **about: Any) -> Any:
    """Declare a setting as a dataclass field. `about` are further attributes of `Setting`.

    Without `doc` the docstring of the class describes it, under "Attributes:", as `name: What it
    does. Source: ours.`
    """
    return dataclasses.field(default=default, metadata={"setting": Setting(doc, **about)})


@functools.cache
def declared(kind: type) -> dict[str, Declared]:
    """All settings of a dataclass and its sections, dotted name -> declaration, in order."""
    settings: dict[str, Declared] = {}
    hints = typing.get_type_hints(kind)
    described = _described(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            for inner in declared(hint).values():
                name = f"{field.name}.{inner.name}"
                settings[name] = dataclasses.replace(inner, name=name)
        else:
            settings[field.name] = Declared(
                name=field.name,
                type=hint,
                default=field.default,
                about=dataclasses.replace(
                    field.metadata["setting"], **described.get(field.name, {})
                ),
            )
    return settings


def _described(kind: type) -> dict[str, dict[str, str]]:
    """Text and source of the settings that the docstring of a class describes."""
    _, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    described = {}
    for entry in re.split(r"\n {4}(?=\w+: )", f"\n{attributes}"):
        name, _, text = " ".join(entry.split()).partition(": ")
        doc, _, source = text.partition(" Source: ")
        described[name] = {"doc": doc}
        if source:
            described[name]["source"] = source.removesuffix(".")
    return described


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one dict of dotted names. An empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def get_value(config: object, name: str) -> Any:
    """The value of a dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def replace_value(values: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name in a nested dict, in place."""
    *sections, last = name.split(".")
    for section in sections:
        if not isinstance(values.setdefault(section, {}), dict):
            raise UserError(
                f"config.{name}: {section} is {shorten(values[section])}, must be a section"
            )
        values = values[section]
    values[last] = value


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


def check_range(declaration: Declared, value: Any, name: str) -> None:
    """Refuse a number, or one of a tuple's, outside the bounds of its setting."""
    low, high = declaration.bounds()
    if not isinstance(value, tuple):
        value = (value,)
    for number in value:
        if not isinstance(number, int | float) or low <= number <= high:
            continue
        bound = f"at most {high}"
        if number < low:
            bound = f"at least {low}"
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
    """Hint for an unknown dotted name: the nearest setting, or the sections."""
    tail = name.rpartition(".")[2]
    near = [other for other in names if other.rpartition(".")[2] == tail]
    if not near:
        near = difflib.get_close_matches(name, names + sections, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"sections are {', '.join(sections)}"


def is_place(text: str) -> bool:
    """Whether a text has the form `module:NAME` or `file.py:NAME`."""
    source, _, name = text.rpartition(":")
    return bool(source) and name.isidentifier()


def load_object(text: str, kind: str = "object") -> Any:
    """Import what a user names. A file is relative to the working directory.

    A file is run once; it is run again when it has changed.

    Args:
        text: `package.module:NAME` or `path/to/file.py:NAME`.
        kind: "function" or "class", which can be called; or "object", which may be anything.

    Raises:
        UserError: in one line, if the file or module can't be imported, or has no such name.
    """
    source, _, name = text.rpartition(":")
    module = _import(text, source)
    loaded = getattr(module, name, None)
    if loaded is None or (kind != "object" and not callable(loaded)):
        names = []
        for other, value in vars(module).items():
            is_kind = {"function": inspect.isfunction, "class": inspect.isclass}.get(kind)
            if not other.startswith("_") and (is_kind is None or is_kind(value)):
                names.append(other)
        raise UserError(
            f"{text}: {source} has no {kind} {name!r}; it has {', '.join(names[:10]) or 'none'}"
        )
    return loaded


def _import(text: str, source: str) -> Any:
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        path = Path(source).resolve()
        return _load_file(path, path.stat().st_mtime_ns)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise UserError(
            f"{text}: can't import {source}: {one_line(describe_error(error, source))}"
        ) from error


@functools.cache
def _load_file(path: Path, changed_ns: int) -> Any:
    del changed_ns
    # A unique name: a file math.py must not replace the module `math`.
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # the modules next to the file, as when Python runs it
    spec.loader.exec_module(module)
    return module


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
