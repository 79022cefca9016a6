"""The results of an oracle: a table for the terminal, remedies.json, and one figure."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from dcmdp_jax.algorithm.losses import TRUST_REGIONS
from dcmdp_jax.algorithm.penalties import PENALTIES
from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.lab.oracle.entries import CONFIGURED as _OWN
from dcmdp_jax.lab.oracle.entries import NOTHING
from dcmdp_jax.lab.oracle.oracle import Verdicts, summary
from dcmdp_jax.number_format import number
from dcmdp_jax.observe.plots import COLORS, INK, MUTED, style_axes

JSON_FILE, FIGURE_FILE = "remedies.json", "remedies.png"
_LABELED = 8


def table(verdicts: Verdicts) -> str:
    """A row for each remedy, the best first, and the result in words."""
    rows = [("remedy", "bias", "+-", "angle", "length", "variance", "effective", "stopped")]
    for one in (*verdicts.remedies, verdicts.control):
        found = one.quality
        rows.append((
            one.name, number(found.bias, ".3f"), number(one.error.bias, ".3f"), number(found.angle, ".1f"),
            number(found.length, ".3f"), number(found.variance, ".3f"), f"{one.effective:.1f}", f"{one.dropped:.1%}",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"{verdicts.engine} on {verdicts.model}: {verdicts.batches} batches of {verdicts.prompts} prompts x "
        f"{verdicts.group_size}, mean |dp| {verdicts.discrepancy:.2g}, reward {verdicts.reward:.3f} "
        f"(exact {verdicts.control_reward:.3f})",
        *(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ),
        *(f"{topic}: {words}" for topic, words in summary(verdicts).items()),
    ]
    return "\n".join(lines)


def draw(verdicts: Verdicts) -> Figure:
    """Bias against variance of each remedy, the best marked and its cost in the title."""
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.subplots()
    style_axes(axes)
    shown = [one for one in verdicts.remedies if math.isfinite(one.squared_error)]
    groups = {NOTHING: INK, "penalty": COLORS[1], "correction": COLORS[0], "trust region": COLORS[2], _OWN: COLORS[4]}
    for kind, color in groups.items():
        if not (own := [one for one in shown if _kind(one.name) == kind]):
            continue
        axes.errorbar(
            [one.quality.variance for one in own], [one.quality.bias for one in own],
            [one.error.bias for one in own], [one.error.variance for one in own],
            fmt="o", color=color, markersize=5, elinewidth=0.7, label=kind,
        )  # fmt: skip
    for place, one in enumerate(shown):
        if place < _LABELED or one.name == NOTHING:
            axes.annotate(
                one.name, (one.quality.variance, one.quality.bias), xytext=(5, 4), textcoords="offset points",
                fontsize=7, color=MUTED,
            )  # fmt: skip
    if shown:
        best = shown[0].quality
        axes.plot(best.variance, best.bias, "o", markersize=13, fillstyle="none", color=COLORS[3], label="best")
        axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("variance of one batch's gradient / |G|^2", fontsize=9)
    axes.set_ylabel("bias |E g - G| / |G|", fontsize=9)
    said = summary(verdicts)
    cost = textwrap.fill(f"best: {verdicts.remedies[0].name}, {said['cost']}" if "cost" in said else said["best"], 100)
    axes.set_title(f"{verdicts.engine} on {verdicts.model}\n{cost}", fontsize=8, loc="left")
    return figure


def write(results: Sequence[Verdicts], out_dir: Path) -> list[Path]:
    """Write `out_dir`/remedies.json and a figure for each engine; existing ones are replaced."""
    out_dir.mkdir(parents=True, exist_ok=True)
    record = [dataclasses.asdict(one) | {"words": dict(summary(one))} for one in results]
    paths = [out_dir / JSON_FILE]
    atomic_write(paths[0], json.dumps(_plain(record), indent=1, allow_nan=False) + "\n")
    for place, one in enumerate(results):
        buffer = io.BytesIO()
        draw(one).savefig(buffer, format="png", dpi=110)
        name = FIGURE_FILE if len(results) == 1 else f"{Path(FIGURE_FILE).stem}-{place}.png"
        atomic_write(out_dir / name, buffer.getvalue())
        paths.append(out_dir / name)
    return paths


def _kind(name: str) -> str:
    if name in (NOTHING, _OWN):
        return name
    short = name.partition("(")[0].partition(",")[0]
    return "penalty" if short in PENALTIES else "trust region" if short in TRUST_REGIONS else "correction"


def _plain(value: object) -> object:
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
