"""Every remedy on the demo's policy, early and late, and on SmolLM2-135M: `python -m research
oracle`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcmdp_jax.number_format import markdown_table

_HERE = Path(__file__).resolve().parents[1] / "kept"
KEPT = _HERE / "oracle_remedies.json"
PUBLISHED = _HERE / "oracle_smollm2.json"


def oracle_page(kept: Path = KEPT) -> list[str]:
    """Lines of Markdown, the smallest error first."""
    (found,) = json.loads(kept.read_text(encoding="utf-8"))
    rows = [
        ["remedy", "error", "±", "bias^2", "variance", "length", "without gradient"],
        ["---"] * 7,
    ]
    for one in found["remedies"]:
        quality = one["quality"]
        width = one["half_width"]
        figures = (
            quality["error"],
            width["error"],
            quality["squared_bias"],
            quality["variance"],
            quality["length"],
        )
        shown = ["-" if x is None else f"{x:.2f}" for x in figures]
        rows.append([f"`{one['name']}`", *shown, f"{one['dropped']:.1%}"])
    return [f"| {' | '.join(row)} |" for row in rows]


def recomputed(found: Mapping[str, float | None]) -> tuple[float, bool]:
    """The error of `moments` from what was kept of each remedy, and whether it is exact or the most
    that it can be.

    <E g, G> / |G|^2 follows from bias and lengths, else from the angle. Both were cut at 0: where
    both are 0 it is at least what makes them 0.
    """
    bias, angle, length, variance = (
        found[name] for name in ("bias", "angle", "length", "variance")
    )
    if bias is None:
        return math.nan, True
    cross = max(length, (length**2 + 1) / 2)
    exact = bias > 0 or angle > 0
    if exact:
        cross = (
            (length**2 + 1 - bias**2) / 2 if bias > 0 else length * math.cos(math.radians(angle))
        )
    return 1 - max(cross, 0) ** 2 / (length**2 + variance), exact


def without_sizes(name: str) -> str:
    """A remedy without its numbers: `clip` of clip(low=0.2), `kl_rejection(estimator=k1,over=sum)`
    of its kind.
    """
    return re.sub(r",?\w+=[\d.e+-]+(?=[,)])", "", name).replace("()", "")


def three_policies(oracles: Sequence[Mapping[str, Any]]) -> str:
    """A row for each remedy in the order of the last policy: the error at each."""
    found = [
        {without_sizes(one["name"]): recomputed(one["quality"]) for one in each["remedies"]}
        for each in oracles
    ]
    rows = [
        [f"`{name}`", *(f"{'' if each[name][1] else '<= '}{each[name][0]:.2f}" for each in found)]
        for name in sorted(found[-1], key=lambda name: found[-1][name][0])
    ]
    place = sum(found[-1][row[0].strip("`")][0] < 1 for row in rows)
    rows.insert(place, ["a gradient of zero", "1", "1", "1"])
    return "\n".join(markdown_table(["remedy", *(oracle["model"] for oracle in oracles)], rows))


def text() -> str:
    """Every table of the oracle."""
    parts = [
        "Every remedy on the demo's policy",
        oracle_page(),
        "On SmolLM2-135M",
        oracle_page(PUBLISHED),
    ]
    oracles = json.loads((_HERE / "remedies.json").read_text(encoding="utf-8"))
    for engine in dict.fromkeys(oracle["engine"] for oracle in oracles):
        table = three_policies([oracle for oracle in oracles if oracle["engine"] == engine])
        parts += [f"Early, middle and late, {engine}", [table]]
    return "\n\n".join(part if isinstance(part, str) else "\n".join(part) for part in parts) + "\n"
