"""Policies over a few actions as a grid of bar charts: the paper's two toy figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

_INK, _MUTED, _GRID = "#222222", "#666666", "#e3e3e3"
_POSITIVE, _NEGATIVE, _UNMET = "#0072B2", "#D55E00", "#bbbbbb"


class Panel(NamedTuple):
    """One chart.

    Attributes:
        policy: [n] probabilities.
        note: one line over the bars.
        met: False draws the bars gray: the policy does not spend the column's budget.
    """

    policy: np.ndarray
    note: str
    met: bool


def draw_policies(
    title: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[Panel]],
    *,
    actions: Sequence[str],
    reference: np.ndarray,
    advantages: np.ndarray,
) -> Figure:
    """Draw a chart for each row and column: bars of the policy over outlines of the reference policy.

    Args:
        title: of the figure.
        columns: a heading for each column.
        rows: heading -> a panel for each column.
        actions: [n] names.
        reference: [n] probabilities, drawn as outlines.
        advantages: [n]; their sign colors the bars.
    """
    figure = Figure(figsize=(2.5 * len(columns) + 0.6, 1.9 * len(rows) + 0.9), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK)
    grid = figure.subplots(len(rows), len(columns), squeeze=False, sharey=True, sharex=True)
    place = np.arange(len(actions))
    colors = np.where(np.asarray(advantages) > 0, _POSITIVE, _NEGATIVE)
    for axes_row, (heading, panels) in zip(grid, rows.items(), strict=True):
        for axes, panel in zip(axes_row, panels, strict=True):
            axes.bar(place, panel.policy, width=0.62, color=colors if panel.met else _UNMET, zorder=2)
            axes.bar(place, reference, width=0.86, fill=False, edgecolor=_INK, linewidth=0.9, zorder=3)
            axes.set_title(panel.note, fontsize=7.5, color=_MUTED, pad=3)
            axes.set_ylim(0, 1)
            axes.set_xticks(place, actions)
            axes.grid(axis="y", color=_GRID, linewidth=0.8)
            axes.tick_params(colors=_MUTED, labelsize=8, length=0)
            for spine in axes.spines.values():
                spine.set_visible(False)
        axes_row[0].set_ylabel(heading, fontsize=9, color=_INK)
    for axes, heading in zip(grid[0], columns, strict=True):
        axes.set_title(f"{heading}\n{axes.get_title()}", fontsize=8.5, color=_INK, pad=3)
    return figure
