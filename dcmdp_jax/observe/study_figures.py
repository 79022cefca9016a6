"""Figures of a study: each arm's mean curve with its interval, and differences to the baseline by seed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dcmdp_jax.observe.figure_style import COLORS, INK, MUTED, style_axes

_STYLES = ("-", "--", ":", "-.")


def draw_curves(
    title: str, unit: str, arms: Mapping[str, np.ndarray], level: Mapping[str, float] | None = None
) -> Figure:
    """Plot mean and 95% interval over seeds by training step.

    Args:
        title: heading.
        unit: of the values.
        arms: label -> [n, 3]: step, mean, half width of the interval; no band where that is NaN.
        level: label -> value of a horizontal dashed line in the arm's color, such as its budget.
    """
    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, (label, curve) in enumerate(arms.items()):
        color, style = COLORS[index % len(COLORS)], _STYLES[index // len(COLORS) % len(_STYLES)]
        steps, mean, half = curve.T
        marker = "o" if len(steps) <= 12 else None
        axes.plot(steps, mean, color=color, linestyle=style, linewidth=1.6, marker=marker, markersize=4, label=label)
        if np.isfinite(half).any():
            axes.fill_between(steps, mean - half, mean + half, color=color, alpha=0.13, linewidth=0)
        if level and label in level:
            axes.axhline(level[label], color=color, linestyle=(0, (5, 2)), linewidth=1)
    axes.set_title(title, fontsize=12, fontweight="bold", color=INK, loc="left")
    axes.set_xlabel("training step", color=MUTED, fontsize=9)
    axes.set_ylabel(unit, color=MUTED, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    style_axes(axes)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure


def draw_differences(title: str, unit: str, arms: Mapping[str, tuple[float, float, Mapping[int, float]]]) -> Figure:
    """Plot each arm's paired difference: a point for each seed, the mean with its 95% interval.

    Args:
        title: heading.
        unit: of the difference.
        arms: label -> (mean, half width, seed -> difference).
    """
    figure = Figure(figsize=(8.6, 0.6 * len(arms) + 1.5), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=INK, linewidth=1)
    for place, (mean, half, values) in enumerate(arms.values()):
        color = COLORS[place % len(COLORS)]
        axes.plot(list(values.values()), [place + 0.18] * len(values), "o", color=color, alpha=0.45, markersize=5)
        axes.errorbar(mean, place - 0.12, xerr=half if np.isfinite(half) else None, fmt="D", color=color, capsize=4)
    axes.set_yticks(range(len(arms)), list(arms))
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.set_title(title, fontsize=12, fontweight="bold", color=INK, loc="left")
    axes.set_xlabel(unit, color=MUTED, fontsize=9)
    style_axes(axes)
    return figure
