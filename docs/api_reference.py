"""Write docs/api_reference.md from the docstrings: `python -m docs.api_reference`."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcmdp_jax

PAGE = Path(__file__).with_suffix(".md")
_INTRO = """\
# API reference

[api.md](api.md) says what is public. Written from the docstrings by `python -m docs.api_reference`.
"""
_SECTIONS = {
    "Runs": ("load_config", "train", "read_metrics", "write_report", "Config", "UserError"),
    "The method, as functions of arrays": (
        "dc_grpo_loss",
        "DcGrpoAux",
        "token_discrepancy",
        "group_advantages",
        "penalized_advantages",
        "importance_ratio",
        "clipped_surrogate",
        "dual_update",
    ),
    "Remedies, engines and episodes": ("Tokens", "Engine", "Episode"),
}
"""Heading -> names of `dcmdp_jax`."""
_MODULES = (
    "algorithm.penalties",
    "algorithm.corrections",
    "integrations.dc_grpo_torch",
    "record",
)
"""Modules whose public functions and classes follow."""
_FIELD = re.compile(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*):(?: |$)")


def page() -> str:
    """The page's text."""
    parts = [_INTRO]
    for heading, names in _SECTIONS.items():
        parts.append(f"## {heading}\n")
        for name in names:
            parts.extend(_entry(f"dcmdp_jax.{name}", getattr(dcmdp_jax, name)))
    for module_name in _MODULES:
        module = importlib.import_module(f"dcmdp_jax.{module_name}")
        parts.append(f"## dcmdp_jax.{module_name}\n\n{_markdown(inspect.getdoc(module) or '')}\n")
        for name, value in vars(module).items():
            is_own = getattr(value, "__module__", "") == module.__name__
            if is_own and not name.startswith("_") and inspect.getdoc(value):
                parts.extend(_entry(f"dcmdp_jax.{module_name}.{name}", value))
    return "\n".join(parts)


def _entry(name: str, value: Any) -> Iterator[str]:
    """Heading, signature and docstring of a function or class, and of a class's public methods."""
    yield f"### {name}\n"
    is_function = inspect.isfunction(value)
    if is_function:
        yield f"```python\n{_signature(name.rpartition('.')[2], value)}\n```\n"
    yield f"{_markdown(inspect.getdoc(value) or '')}\n"
    if is_function:
        return
    for method_name, method in vars(value).items():
        if inspect.isfunction(method) and not method_name.startswith("_") and method.__doc__:
            yield f"#### {method_name}\n"
            yield f"```python\n{_signature(method_name, method)}\n```\n"
            yield f"{_markdown(inspect.getdoc(method) or '')}\n"


def _signature(name: str, function: Any) -> str:
    """`name(arguments)`, one argument a line where a line is too long; defaults, no types."""
    parameters = inspect.signature(function).parameters.values()
    untyped = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    text = f"{name}{inspect.Signature(untyped)}"
    if len(text) <= 100:
        return text
    inside = text[len(name) + 1 : -1]
    lines = "".join(f"    {argument},\n" for argument in inside.split(", "))
    return f"{name}(\n{lines})"


def _markdown(docstring: str) -> str:
    """A docstring's sections as bold words, their fields as list items; the rest as it is."""
    lines = []
    in_section = False
    for line in docstring.splitlines():
        if re.fullmatch(r"(Args|Attributes|Returns|Raises):", line):
            in_section = True
            lines.extend([f"**{line[:-1]}**", ""])
        elif in_section and line.startswith("    "):
            lines.append(_field_line(line[4:]))
        else:
            if line:
                in_section = False
            lines.append(line)
    return "\n".join(lines).strip()


def _field_line(line: str) -> str:
    field = _FIELD.match(line)
    if field:
        return f"- `{field[1]}`: {line[field.end() :]}".rstrip()
    return line


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
