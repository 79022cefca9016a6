"""The results of an oracle: a table for the terminal, remedies.json, and one figure."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.lab.oracle.moments import ZERO, Quality
from dcmdp_jax.lab.oracle.oracle import Verdict, Verdicts, summary
from dcmdp_jax.number_format import number, text_table
from dcmdp_jax.observe.page_kit import json_values
from dcmdp_jax.observe.study_figures import draw_oracle

JSON_FILE, FIGURE_FILE = "remedies.json", "remedies.png"
_NO_WIDTH = Quality(*(math.nan,) * 5)


def table(verdicts: Verdicts) -> str:
    """A row for each remedy, the best first, what a gradient of zero has among them, and the result in words."""
    heading = (
        "remedy", "error", "+-", "less none's", "+-", "bias^2", "+-", "variance", "length", "angle", "effective",
        "stopped",
    )  # fmt: skip
    worse = [one for one in verdicts.remedies if not one.quality.error < 1]
    rows = [_row(one) for one in (*verdicts.remedies, verdicts.control)]
    rows.insert(len(verdicts.remedies) - len(worse), ("a gradient of zero", *_figures(ZERO), "0.0", "100.0%"))
    rows.insert(0, heading)
    lines = [
        f"{verdicts.engine} on {verdicts.model}: {verdicts.batches} batches of {verdicts.prompts} prompts x "
        f"{verdicts.group_size}, mean |dp| {verdicts.discrepancy:.2g}, reward {verdicts.reward:.3f} "
        f"(exact {verdicts.control_reward:.3f})",
        *text_table(rows),
        *(f"{topic}: {words}" for topic, words in summary(verdicts).items()),
    ]
    return "\n".join(lines)


def _row(one: Verdict) -> tuple[str, ...]:
    figures = _figures(one.quality, one.half_width, -one.gain, one.gain_half_width)
    return one.name, *figures, f"{one.effective:.1f}", f"{one.dropped:.1%}"


def _figures(
    found: Quality, width: Quality = _NO_WIDTH, change: float = math.nan, change_width: float = math.nan
) -> Iterator[str]:
    values = (found.error, width.error, change, change_width, found.squared_bias, width.squared_bias, found.variance)
    yield from (number(value, ".3f") for value in (*values, found.length))
    yield number(found.angle, ".1f")


def draw(verdicts: Verdicts) -> Figure:
    """The error of each remedy, and its bias^2 and variance, beside those of a gradient of zero; the best in words."""
    said = summary(verdicts)
    title = textwrap.fill("; ".join(said.values()), 130)
    points = {
        one.name: (
            one.quality.error, one.half_width.error, one.quality.squared_bias, one.half_width.squared_bias,
            one.quality.variance,
        )
        for one in verdicts.remedies
    }  # fmt: skip
    return draw_oracle(title, {f"{verdicts.engine} on {verdicts.model}": points})


def write(results: Sequence[Verdicts], out_dir: Path) -> list[Path]:
    """Write `out_dir`/remedies.json and a figure for each engine; existing ones are replaced."""
    out_dir.mkdir(parents=True, exist_ok=True)
    record = [dataclasses.asdict(one) | {"words": dict(summary(one))} for one in results]
    paths = [out_dir / JSON_FILE]
    atomic_write(paths[0], json.dumps(json_values(record), indent=1, allow_nan=False) + "\n")
    for place, one in enumerate(results):
        name = FIGURE_FILE if len(results) == 1 else f"{Path(FIGURE_FILE).stem}-{place}.png"
        draw(one).savefig(out_dir / name, dpi=110)
        paths.append(out_dir / name)
    return paths
