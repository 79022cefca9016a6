"""Settings as fields of frozen dataclasses: how they are declared and found."""

import dataclasses
import functools
import inspect
import re
import typing
from typing import Any

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
    settings = {}
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
