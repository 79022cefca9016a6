"""Results of the parts as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.timing import median_and_spread

Found = Mapping[str, Any]


def table(part: Found) -> str:
    """A row for each value of a part that has found something; empty for one that has not."""
    rows = [f"| {name} | {_text(value)} |" for name, value in _flat(part)]
    return "\n".join(["| value | |", "|---|---|", *rows]) if "kind" in part else ""


def _flat(values: Found, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}, ")
        else:
            yield prefix + name, value


def _text(value: Any) -> str:
    """Lists of measurements as median (least - most); numbers in four digits, counts whole."""
    if isinstance(value, list) and value and all(isinstance(each, float) for each in value):
        return median_and_spread(value, ".4g")
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def summary(record: Found) -> str:
    """A line for each part: its figure, its error, or that it was left out."""
    lines = []
    for name, part in record["parts"].items():
        figure = ""
        if rates := part.get("tokens_per_second"):
            figure = f"{statistics.median(rates):,.0f} tokens/s"
        lines.append(f"{name}: {part['error'] or figure or 'done'} ({part['part_seconds']:.0f} s)")
    lines += [
        f"{name}: left out: the {record['budget_s']:g} s were over, or it needs an argument"
        for name in record["left_out"]
    ]
    return "\n".join(lines)
