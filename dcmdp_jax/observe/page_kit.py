"""What all pages and figures share: HTML of the templates, values for JSON, one figure style.

A page extends `templates/page.html`, which has the style, and uses the macros of `parts.html`: `table`, `figure`,
`warnings`. Figures, data and scripts are embedded, all text is escaped, and no page makes a request: it runs the
scripts of `templates/` that it names, and its content security policy allows their hashes alone.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe
import numpy as np

from dcmdp_jax.number_format import number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's, distinguishable with common color blindness; without yellow, which is faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, MUTED = "#222222", "#666666"
LEGEND = {"frameon": False, "fontsize": 9, "labelcolor": INK}
_DPI = 130
_FINEST = 4000
"""Points of a curve or an area above which it is a picture within the SVG: a screen has no more columns."""


def render_page(template: str, **values: Any) -> str:
    """Render a page.

    Args:
        template: file name in `templates/`.
        values: what the template reads; `scripts`, names of scripts in `templates/`, is empty if absent. Filters:
            `as_text` makes text of a JSON value, `number` and `percent` are those of `number_format`.

    Raises:
        jinja2.UndefinedError: if the template reads a value that is not given.
    """
    return _ENVIRONMENT.get_template(template).render({"scripts": (), **values})


def json_values(value: Any) -> Any:
    """Return a tree of what strict JSON holds: NaN and infinity become None, NumPy's numbers Python's."""
    if isinstance(value, Mapping):
        return {str(key): json_values(each) for key, each in value.items()}
    if hasattr(value, "_asdict"):
        return json_values(value._asdict())
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_figure(
    width: float, height: float, title: str = "", *, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Make a figure and its panels, row by row, without pyplot's global state.

    Args:
        width, height: inches.
        title: heading of the whole figure.
        rows, columns: of panels.
        options: further arguments of `Figure.subplots`.
    """
    # The plotting library takes most of a second to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def style_axes(axes: Axes, title: str = "", *, x: str = "", y: str = "", legend: bool = False) -> None:
    """Finish a panel: heading, axis labels, a faint grid behind the data, and of the frame the bottom alone."""
    axes.set_title(title, fontsize=10, color=INK, loc="left", pad=6)
    axes.set_xlabel(x, color=MUTED, fontsize=9)
    axes.set_ylabel(y, color=MUTED, fontsize=9)
    axes.set_axisbelow(True)
    axes.grid(color="#e3e3e3", linewidth=0.8)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#bbbbbb")
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(**LEGEND, loc="best")


def inline_svg(figure: Figure) -> markupsafe.Markup:
    """Draw a matplotlib figure as an `<svg>` element: text stays text, the same figure gives the same bytes."""
    import matplotlib

    for axes in figure.axes:
        for line in axes.get_lines():
            line.set_rasterized(len(line.get_xdata()) > _FINEST)
        for area in axes.collections:
            area.set_rasterized(sum(len(path.vertices) for path in area.get_paths()) > _FINEST)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dcmdp_jax", "font.family": "sans-serif"}):
        figure.savefig(drawn, format="svg", dpi=_DPI, metadata={"Date": None})
    text = drawn.getvalue()
    return markupsafe.Markup(re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL))


@functools.cache
def _source(name: str) -> markupsafe.Markup:
    """A script of `templates/`, as it stands."""
    return markupsafe.Markup(_ENVIRONMENT.loader.get_source(_ENVIRONMENT, name)[0])


def _source_hash(name: str) -> markupsafe.Markup:
    """The hash of a script's bytes, as a content security policy names it."""
    digest = hashlib.sha256(_source(name).encode("utf-8")).digest()
    return markupsafe.Markup(f"'sha256-{base64.b64encode(digest).decode('ascii')}'")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("dcmdp_jax.observe"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"as_text": _as_text, "number": number, "percent": percent}
_ENVIRONMENT.filters |= {"source": _source, "source_hash": _source_hash}
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}
