"""The results of an oracle: a table for the terminal, remedies.json, and one figure."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.number_format import number, text_table
from dcmdp_jax.observe.jsonl import json_values
from dcmdp_jax.observe.page_kit import COLORS, INK, LEGEND, make_figure, style_axes
from dcmdp_jax.probe.columns.page import state_lines
from research.oracle.gradients import ZERO, Quality
from research.oracle.oracle import Verdict, Verdicts, summary

JSON_FILE = "remedies.json"
FIGURE_FILE = "remedies.png"
_NO_WIDTH = Quality(*(math.nan,) * 5)


def table(verdicts: Verdicts) -> str:
    """A row for each remedy, the best first, what a gradient of zero has among them, and the result
    in words.
    """
    heading = (
        "remedy",
        "error",
        "+-",
        "less none's",
        "+-",
        "bias^2",
        "+-",
        "variance",
        "length",
        "angle",
        "effective",
        "stopped",
    )
    worse = [one for one in verdicts.remedies if not one.quality.error < 1]
    rows = [_row(one) for one in (*verdicts.remedies, verdicts.control)]
    rows.insert(
        len(verdicts.remedies) - len(worse),
        ("a gradient of zero", *_figures(ZERO), "0.0", "100.0%"),
    )
    rows.insert(0, heading)
    lines = [
        f"{verdicts.engine} on {verdicts.model}: {verdicts.batches} batches of {verdicts.prompts} "
        f"prompts x {verdicts.group_size}, mean |p - q| {verdicts.discrepancy:.2g}, reward "
        f"{verdicts.reward:.3f} (exact {verdicts.control_reward:.3f})",
        *text_table(rows),
        *state_lines(verdicts.states),
        *(f"{topic}: {words}" for topic, words in summary(verdicts).items()),
    ]
    return "\n".join(lines)


def _row(one: Verdict) -> tuple[str, ...]:
    figures = _figures(one.quality, one.half_width, -one.gain, one.gain_half_width)
    return one.name, *figures, f"{one.effective:.1f}", f"{one.dropped:.1%}"


def _figures(
    found: Quality,
    width: Quality = _NO_WIDTH,
    change: float = math.nan,
    change_width: float = math.nan,
) -> Iterator[str]:
    values = (
        found.error,
        width.error,
        change,
        change_width,
        found.squared_bias,
        width.squared_bias,
        found.variance,
    )
    yield from (number(value, ".3f") for value in (*values, found.length))
    yield number(found.angle, ".1f")


def draw(verdicts: Verdicts) -> Figure:
    """The error of each remedy, and its bias^2 and variance, beside those of a gradient of zero;
    the best in words.
    """
    said = summary(verdicts)
    title = textwrap.fill("; ".join(said.values()), 130)
    points = {
        one.name: (
            one.quality.error,
            one.half_width.error,
            one.quality.squared_bias,
            one.half_width.squared_bias,
            one.quality.variance,
        )
        for one in verdicts.remedies
    }
    return draw_oracle(title, {f"{verdicts.engine} on {verdicts.model}": points})


def draw_oracle(title: str, panels: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Figure:
    """Plot an oracle's errors, and bias^2 and variance: a row of panels for each engine, a gradient
    of zero as a line.

    Args:
        title: heading.
        panels: engine -> remedy, in order -> error, half of its interval, bias^2, half of its
            interval, variance.
    """
    sizes = [len(points) + 4 for points in panels.values()]
    figure, places = make_figure(
        9.6, 0.17 * sum(sizes) + 0.6, rows=len(panels), columns=2, sharey="row", height_ratios=sizes
    )
    for left, right, (engine, points) in zip(
        places[::2], places[1::2], panels.items(), strict=True
    ):
        error, width, squared, spread, variance = np.array(list(points.values()), float).T
        rows = np.arange(len(points))
        for axes, values, widths in ((left, error, width), (right, squared, spread)):
            axes.errorbar(
                values, rows, xerr=widths, fmt="o", color=COLORS[0], markersize=4, elinewidth=0.8
            )
            axes.axvline(
                1, color=COLORS[1], linestyle="--", linewidth=1.2, label="a gradient of zero"
            )
        right.plot(variance, rows, "x", color=INK, markersize=4, label="variance of one batch")
        right.set_xscale("symlog", linthresh=1)
        left.set_xlim(min(0.0, np.nanmin(error, initial=0.0)) - 0.05, 1.25)
        left.invert_yaxis()
        style_axes(left, f"{engine}\nerror at the best length, 95% interval")
        style_axes(right, "bias^2 with its 95% interval; x: variance")
        left.set_yticks(rows, list(points), fontsize=7)
    places[1].legend(**LEGEND)
    figure.suptitle(title, fontsize=9, color=INK, x=0.01, ha="left")
    return figure


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
