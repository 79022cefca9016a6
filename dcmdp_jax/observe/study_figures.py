"""Figures of a study: each arm's mean curve beside the baseline's, differences by seed, and doses."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dcmdp_jax.observe.page_kit import COLORS, INK, LEGEND, MUTED, make_figure, style_axes

_BASELINE = "#8a8a8a"
_MOST_COLUMNS = 4
_FAMILY = re.compile(r"^ascent_|(_one)?(_[0-9.]+)?$")
_COLORS = {
    "grpo": _BASELINE, "grpo_perturbed": "#000000", "dc_grpo": "#0072B2", "dual_grpo": "#56B4E9",
    "threshold_grpo": "#009E73", "tis": "#D55E00", "icepop": "#E69F00", "dppo": "#CC79A7", "exact": "#000000",
    "matched": "#7a5195", "token": "#0072B2", "sequence": "#D55E00", "reward": "#009E73", "state": "#CC79A7",
}  # fmt: skip
"""Arms that several studies have."""


def color_of(name: str) -> str:
    """The color of an arm, by its name alone: the same in every panel, figure and study.

    An arm that is named after a charge and its strength has the charge's, `token_10` that of `token`.
    """
    family = _FAMILY.sub("", name)
    return _COLORS.get(family) or COLORS[zlib.crc32(family.encode()) % len(COLORS)]


def draw_curves(
    title: str, unit: str, arms: Mapping[str, np.ndarray], level: Mapping[str, float] | None = None, *, baseline: str
) -> Figure:
    """Plot mean and 95% interval over seeds by training step: a panel for each arm, the baseline in gray in each.

    Args:
        title: heading.
        unit: of the values.
        arms: label -> [n, 3]: step, mean, half width of the interval; no band where that is NaN.
        level: label -> value of a horizontal dashed line in the arm's color, such as its budget.
        baseline: label of the arm that the others are compared with.
    """
    shown = [label for label in arms if label != baseline] or list(arms)
    columns = min(_MOST_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, panels = make_figure(
        2.9 * columns + 0.4, 2.1 * rows + 0.7, f"{title} (gray: {baseline})",
        rows=rows, columns=columns, sharex=True, sharey=True,
    )  # fmt: skip
    for spare in panels[len(shown) :]:
        spare.set_visible(False)
    for axes, label in zip(panels, shown, strict=False):
        if baseline in arms and label != baseline:
            _curve(axes, arms[baseline], _BASELINE)
        _curve(axes, arms[label], color_of(label))
        if level and label in level:
            axes.axhline(level[label], color=color_of(label), linestyle=(0, (5, 2)), linewidth=1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
        style_axes(axes, label)
    figure.supxlabel("training step", color=MUTED, fontsize=9)
    figure.supylabel(unit, color=MUTED, fontsize=9)
    return figure


def _curve(axes: Axes, curve: np.ndarray, color: str) -> None:
    steps, mean, half = curve.T
    marker = "o" if len(steps) <= 12 else None
    axes.plot(steps, mean, color=color, linewidth=1.5, marker=marker, markersize=3)
    if np.isfinite(half).any():
        axes.fill_between(steps, mean - half, mean + half, color=color, alpha=0.15, linewidth=0)


def draw_doses(
    title: str, baseline: str, panels: Mapping[str, tuple[float, float, Mapping[str, np.ndarray]]]
) -> Figure:
    """Plot what a fixed lambda does: a panel for each response, a line for each charge, the baseline in gray.

    Args:
        title: heading.
        baseline: label of the runs without a charge.
        panels: heading -> the baseline's mean and half width, and charge -> [n, 3]: lambda, mean, half width.
    """
    columns = math.ceil(len(panels) / 2)
    figure, places = make_figure(3.2 * columns + 0.4, 5.8, title, rows=2, columns=columns)
    for axes, (heading, panel) in zip(places, panels.items(), strict=False):
        _doses(axes, heading, baseline, panel)
    axes.legend(**LEGEND)
    return figure


def _doses(axes: Axes, heading: str, baseline: str, panel: tuple[float, float, Mapping[str, np.ndarray]]) -> None:
    """One response by fixed lambda."""
    mean, half, charges = panel
    axes.axhline(mean, color=_BASELINE, linewidth=1.5, label=baseline)
    if math.isfinite(half):
        axes.axhspan(mean - half, mean + half, color=_BASELINE, alpha=0.25, linewidth=0)
    for charge, points in charges.items():
        strength, values, widths = points.T
        widths = np.where(np.isfinite(widths), widths, 0)
        axes.errorbar(
            strength, values, yerr=widths, color=color_of(charge), marker="o", markersize=4, capsize=3, linewidth=1.5,
            label=charge, linestyle="--" if charge.endswith("_one") else "-",
        )  # fmt: skip
    axes.set_xscale("log")
    style_axes(axes, heading, x="lambda, fixed")


def draw_oracle(title: str, panels: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Figure:
    """Plot an oracle's errors, and bias^2 and variance: a row of panels for each engine, a gradient of zero as a line.

    Args:
        title: heading.
        panels: engine -> remedy, in order -> error, half of its interval, bias^2, half of its interval, variance.
    """
    sizes = [len(points) + 4 for points in panels.values()]
    figure, places = make_figure(
        9.6, 0.17 * sum(sizes) + 0.6, rows=len(panels), columns=2, sharey="row", height_ratios=sizes
    )
    for left, right, (engine, points) in zip(places[::2], places[1::2], panels.items(), strict=True):
        error, width, squared, spread, variance = np.array(list(points.values()), float).T
        rows = np.arange(len(points))
        for axes, values, widths in ((left, error, width), (right, squared, spread)):
            axes.errorbar(values, rows, xerr=widths, fmt="o", color=COLORS[0], markersize=4, elinewidth=0.8)
            axes.axvline(1, color=COLORS[1], linestyle="--", linewidth=1.2, label="a gradient of zero")
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


def draw_answer(
    title: str,
    baseline: str,
    panels: Mapping[str, tuple[float, float, Mapping[str, np.ndarray]]],
    multipliers: Mapping[str, np.ndarray],
    discrepancies: Mapping[str, np.ndarray],
    budget: float,
) -> Figure:
    """Plot whether the charge lowers the discrepancy: by fixed lambda above, by dual ascent below.

    Args:
        title: heading.
        baseline: label of the runs without a charge.
        panels: two of `draw_doses`.
        multipliers, discrepancies: label -> [n, 3]: step, mean, half width, of arms with dual ascent; the second has
            the baseline too.
        budget: c of these arms.
    """
    figure, places = make_figure(8.6, 6.2, title, rows=2, columns=2)
    for axes, (heading, panel) in zip(places[:2], panels.items(), strict=True):
        _doses(axes, heading, baseline, panel)
    places[0].legend(**LEGEND)
    headings = {"lambda by dual ascent": multipliers, "delta under dual ascent; dashed: c": discrepancies}
    for axes, (heading, curves) in zip(places[2:], headings.items(), strict=True):
        for label, curve in curves.items():
            _curve(axes, curve, _BASELINE if label == baseline else color_of(label))
            axes.lines[-1].set_label(label)
        style_axes(axes, heading, x="training step", legend=True)
    places[3].axhline(budget, color=INK, linestyle=(0, (5, 2)), linewidth=1)
    return figure


def draw_differences(title: str, unit: str, arms: Mapping[str, tuple[float, float, Mapping[int, float]]]) -> Figure:
    """Plot each arm's paired difference: a point for each seed, the mean with its 95% interval.

    Args:
        title: heading.
        unit: of the difference.
        arms: label -> (mean, half width, seed -> difference).
    """
    figure, (axes,) = make_figure(8.6, 0.6 * len(arms) + 1.5)
    axes.axvline(0, color=INK, linewidth=1)
    for place, (label, (mean, half, values)) in enumerate(arms.items()):
        color = color_of(label)
        axes.plot(list(values.values()), [place + 0.18] * len(values), "o", color=color, alpha=0.45, markersize=5)
        axes.errorbar(mean, place - 0.12, xerr=half if np.isfinite(half) else None, fmt="D", color=color, capsize=4)
    axes.set_yticks(range(len(arms)), list(arms))
    axes.set_ylim(len(arms) - 0.4, -0.6)
    style_axes(axes, title, x=unit)
    return figure
