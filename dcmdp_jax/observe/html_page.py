"""Self-contained HTML pages from the templates in `templates/`: figures, data and scripts embedded, no request.

A page extends `page.html`, which has the style, and uses the macros of `parts.html`: `table`, `figure`, `warnings`. All
text is escaped. A page runs the scripts of `templates/` that it names, and its content security policy allows their
hashes alone.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import re
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe

from dcmdp_jax.number_format import number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 130
_FINEST = 4000
"""Points of a curve or an area above which it is a picture within the SVG: a screen has no more columns."""


def render_page(template: str, **values: Any) -> str:
    """Render a page.

    Args:
        template: file name in `templates/`.
        values: what the template reads; `scripts`, names of scripts in `templates/`, is empty if absent. Filters:
            `as_text` makes text of a JSON value, `number` and `percent` are
            those of `number_format`.

    Raises:
        jinja2.UndefinedError: if the template reads a value that is not given.
    """
    return _ENVIRONMENT.get_template(template).render({"scripts": (), **values})


def inline_svg(figure: Figure) -> markupsafe.Markup:
    """Draw a matplotlib figure as an `<svg>` element: text stays text, the same figure gives the same bytes."""
    # The plotting library takes most of a second to import.
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
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}
_ENVIRONMENT.filters |= {"source": _source, "source_hash": _source_hash}
