"""Figures of a study: each arm's mean curve with the baseline's, and differences by seed."""

import functools
import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dcmdp_jax.lab.studies.results import (
    MEASURES,
    Estimate,
    Table,
    curves,
    held_out,
    measure_arms,
    paired_differences,
    recorded,
)
from dcmdp_jax.observe.page_kit import COLORS, INK, MUTED, make_figure, style_axes

BASELINE_COLOR = "#8a8a8a"
DPI = 130
_MOST_COLUMNS = 4
_FAMILY = re.compile(r"^ascent_|(_one)?(_(eta)?[0-9.]+)?$")
_COLORS = {
    "grpo": BASELINE_COLOR, "grpo_perturbed": "#000000", "dc_grpo": "#0072B2", "dual_grpo": "#56B4E9",
    "threshold_grpo": "#009E73", "tis": "#D55E00", "icepop": "#E69F00", "dppo": "#CC79A7", "exact": "#000000",
    "matched": "#7a5195", "token": "#0072B2", "sequence": "#D55E00", "reward": "#009E73", "state": "#CC79A7",
}  # fmt: skip
"""Arms that several studies have."""
_CURVES = {
    "held_out": ("held-out score", "avg@K", ""),
    "reward": ("Reward", "mean reward", "reward/mean"),
    "discrepancy": ("Discrepancy between the engines (dashed: the budget c)", "discrepancy", "discrepancy/mean"),
    "multiplier": ("Lagrange multiplier", "lambda", "dual/multiplier"),
    "entropy": ("Policy entropy", "nats", "policy/entropy"),
}
"""File stem -> heading, unit, and the metric; "" for the held-out score."""


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
        unit: unit of the values.
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
            plot_curve(axes, arms[baseline], BASELINE_COLOR)
        plot_curve(axes, arms[label], color_of(label))
        if level and label in level:
            axes.axhline(level[label], color=color_of(label), linestyle=(0, (5, 2)), linewidth=1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
        style_axes(axes, label)
    figure.supxlabel("training step", color=MUTED, fontsize=9)
    figure.supylabel(unit, color=MUTED, fontsize=9)
    return figure


def plot_curve(axes: Axes, curve: np.ndarray, color: str) -> None:
    steps, mean, half = curve.T
    marker = "o" if len(steps) <= 12 else None
    axes.plot(steps, mean, color=color, linewidth=1.5, marker=marker, markersize=3)
    if np.isfinite(half).any():
        axes.fill_between(steps, mean - half, mean + half, color=color, alpha=0.15, linewidth=0)


def draw_differences(title: str, unit: str, arms: Mapping[str, Estimate]) -> Figure:
    """Plot each arm's paired difference: a point for each seed, the mean with its 95% interval.

    Args:
        title: heading.
        unit: unit of the difference.
        arms: label -> the difference.
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


def save_figures(title: str, baseline: str, series: Table, directory: Path) -> None:
    """Draw held-out score, reward, discrepancy, lambda, entropy, and differences by seed, as far as runs have them."""
    directory.mkdir(exist_ok=True)
    first = {arm: next(iter(seeds.values())) for arm, seeds in series.items() if seeds}
    budgets = {arm: float(run["dual/tolerance"][1][-1]) for arm, run in first.items() if "dual/tolerance" in run}
    for stem, (heading, unit, name) in _CURVES.items():
        if found := curves(series, functools.partial(recorded, name=name) if name else held_out):
            level = budgets if stem == "discrepancy" else None
            figure = draw_curves(f"{title}: {heading}", unit, found, level, baseline=baseline)
            figure.savefig(directory / f"{stem}.png", dpi=DPI)
    for name in ("held_out", "discrepancy"):
        found = paired_differences(measure_arms(series, MEASURES[name]), baseline)
        if shown := {arm: one for arm, one in found.items() if one.values}:
            figure = draw_differences(f"{title}: difference to {baseline} by seed", MEASURES[name].title, shown)
            figure.savefig(directory / f"difference_{name}.png", dpi=DPI)
