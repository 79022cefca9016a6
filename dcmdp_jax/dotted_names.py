"""Nested mappings and objects by dotted names, such as `rollout.max_rows`."""

import functools
from collections.abc import Mapping
from typing import Any

from dcmdp_jax.errors import UserError, shorten


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one dict of dotted names. An empty mapping is a value."""
    flat = {}
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
