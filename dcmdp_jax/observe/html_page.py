"""Self-contained HTML pages from the templates in `templates/`: images embedded, no script, no request.

A page extends `page.html`, which has the style, and uses the macros of `parts.html`: `table`, `figure`, `warnings`.
All text is escaped.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import jinja2

from dcmdp_jax.number_format import number, percent


def render_page(template: str, **values: Any) -> str:
    """Render a page.

    Args:
        template: file name in `templates/`.
        values: what the template reads. Filters: `png` makes an image's address of PNG bytes, `as_text` makes text of a
            JSON value, `number` and `percent` are those of `number_format`.

    Raises:
        jinja2.UndefinedError: if the template reads a value that is not given.
    """
    return _ENVIRONMENT.get_template(template).render(values)


def _png(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("dcmdp_jax.observe"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"png": _png, "as_text": _as_text, "number": number, "percent": percent}
