"""Figures of a page that can be hovered and zoomed: a matplotlib figure's panels as data, drawn by `charts.js`.

The figure stays the one declaration of what is drawn: this module reads its axes, so the PNG and the page show the same
curves in the same colors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

_DIGITS = 6
"""Significant digits of the values of a page."""
_FINEST = 4000
"""Points of a curve above which some are left out: a screen has no more columns."""


def figure_data(figure: Figure) -> dict[str, Any]:
    """Read a drawn figure.

    Args:
        figure: lines, bars and areas on linear or logarithmic axes; what else it holds is not read.

    Returns:
        Values that JSON can hold: `title`, and `panels`, each with its texts, limits, `lines`, `bars` and `areas`.
        A value that is not finite is null.
    """
    figure.draw_without_rendering()  # fixes limits and ticks
    title = figure.get_suptitle()
    return {"title": title, "panels": [_panel(axes) for axes in figure.axes]}


def _panel(axes: Axes) -> dict[str, Any]:
    texts = [label.get_text() for label in axes.get_yticklabels()]
    named = any(text and not _is_number(text) for text in texts)
    labels = {id(patch): group.get_label() for group in axes.containers for patch in group}
    lines = [line for line in axes.get_lines() if line.get_visible()]
    return {
        "title": axes.get_title(loc="left") or axes.get_title(),
        "x": axes.get_xlabel(),
        "y": axes.get_ylabel(),
        "xlim": [_value(v) for v in axes.get_xlim()],
        "ylim": [_value(v) for v in axes.get_ylim()],
        "log": [axes.get_xscale() == "log", axes.get_yscale() == "log"],
        "percent": isinstance(axes.yaxis.get_major_formatter(), PercentFormatter),
        "rows": [[_value(p), t] for p, t in zip(axes.get_yticks(), texts, strict=True) if t] if named else [],
        "lines": [_line(line, axes) for line in lines],
        "bars": [_bar(patch, labels) for patch in axes.patches if isinstance(patch, Rectangle)],
        "areas": [area for c in axes.collections for area in _areas(c)],
        "points": [points for c in axes.collections if isinstance(c, PathCollection) for points in _points(c)],
    }


def _line(line: Line2D, axes: Axes) -> dict[str, Any]:
    x, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
    level = line.get_transform() == axes.get_yaxis_transform(which="grid")  # axhline: x is a share of the width
    keep = _thinned(y)
    label = line.get_label()
    dash = line.get_linestyle() not in ("-", "None", "none", " ", "")
    return {
        "label": "" if label.startswith("_") else label,
        "color": to_hex(line.get_color()),
        "width": line.get_linewidth(),
        "opacity": 1 if line.get_alpha() is None else line.get_alpha(),
        "dash": [round(v, 1) for v in line._dash_pattern[1] or ()] if dash else [],
        "marker": line.get_marker() not in ("None", "none", None, ""),
        "level": _value(y[0]) if level and len(y) else None,
        "data": [] if level else [[_value(a), _value(b)] for a, b in zip(x[keep], y[keep], strict=True)],
    }


def _bar(patch: Rectangle, labels: dict[int, str]) -> dict[str, Any]:
    label = labels.get(id(patch), "_")
    box = [patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()]
    return {"label": "" if label.startswith("_") else label, "color": to_hex(patch.get_facecolor()),
            "box": [_value(v) for v in box]}  # fmt: skip


def _areas(collection: Any) -> list[dict[str, Any]]:
    if not isinstance(collection, PolyCollection):
        return []
    label, color = collection.get_label(), collection.get_facecolor()
    return [
        {"label": "" if label.startswith("_") or place else label, "color": to_hex(color[0]),
         "opacity": float(color[0][3]), "data": [[_value(a), _value(b)] for a, b in path.vertices]}
        for place, path in enumerate(collection.get_paths())
    ]  # fmt: skip


def _points(collection: PathCollection) -> list[dict[str, Any]]:
    label, color = collection.get_label(), collection.get_facecolor()
    data = np.asarray(collection.get_offsets(), float)
    data = data[_thinned(data[:, 1])]
    return [{"label": "" if label.startswith("_") else label, "color": to_hex(color[0]),
             "opacity": float(color[0][3]), "data": [[_value(a), _value(b)] for a, b in data]}]  # fmt: skip


def _thinned(values: np.ndarray) -> np.ndarray:
    """Places to keep of a long curve: lowest and highest of each stretch, so that no spike is lost."""
    if len(values) <= _FINEST:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), _FINEST // 2):
        known = part[np.isfinite(values[part])]
        if len(known):
            kept |= {int(known[np.argmin(values[known])]), int(known[np.argmax(values[known])])}
    return np.array(sorted(kept))


def _value(number: Any) -> float | None:
    number = float(number)
    return float(f"{number:.{_DIGITS}g}") if math.isfinite(number) else None


def _is_number(text: str) -> bool:
    try:
        float(text.replace("−", "-").rstrip("%").replace("$\\mathdefault{", "").replace("}$", ""))
    except ValueError:
        return "mathdefault" in text
    return True
