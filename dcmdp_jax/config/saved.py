"""Versions of a run's config.json, and the settings that only earlier ones have.

A new setting needs nothing here: a config.json without it gets the default, which therefore must do what was done
before. A setting that goes gets an entry in `REMOVED`, and `VERSION` is raised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import flatten, replace_value
from dcmdp_jax.inputs import shorten

VERSION = 7
"""Version of config.json in a run directory, raised when a setting is removed. Runs without one have version 0."""


@dataclasses.dataclass(frozen=True)
class Removed:
    """A setting that older runs have.

    Attributes:
        version: First version without the setting.
        meaningless: Values that do what is done without the setting. None: all, since it never changed what is learned.
        why: Reason, or remedy.
        values: Removed values of a setting that stays. Empty: the setting itself was removed.
    """

    version: int
    meaningless: tuple[Any, ...] | None
    why: str
    values: tuple[Any, ...] = ()


REMOVED: dict[str, Removed] = {}


def without_removed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a saved config that are settings still.

    A removed setting is ignored if its value does what is done without it.

    Raises:
        UserError: in one line, for a newer version, or a removed setting with another value.
    """
    values = {name: value for name, value in saved.items() if name != "fitted_rows"}
    version = values.pop("config_version", 0)
    if not isinstance(version, int) or version > VERSION:
        raise UserError(f"config_version: got {shorten(version)}, this program knows versions up to {VERSION}")
    flat, kept = flatten(values), {}
    for name, removed in REMOVED.items():
        if version >= removed.version or name not in flat:
            continue
        said, refused = f"config.{name}: got {shorten(flat[name])}", flat[name] in removed.values
        if not removed.values:
            value = flat.pop(name)
            refused = removed.meaningless is not None and value not in removed.meaningless
        if refused:
            raise UserError(f"{said}, {'which is gone' if removed.values else 'no setting any more'}; {removed.why}")
    for name, value in flat.items():
        replace_value(kept, name, value)
    return kept
