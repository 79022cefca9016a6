"""Colors and axes of all figures."""

from __future__ import annotations

from matplotlib.axes import Axes

# Okabe and Ito's, distinguishable with common color blindness; without yellow, which is faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, MUTED, GRID = "#222222", "#666666", "#e3e3e3"


def style_axes(axes: Axes) -> None:
    """Draw a faint grid behind the data, and of the frame the bottom alone."""
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#bbbbbb")
