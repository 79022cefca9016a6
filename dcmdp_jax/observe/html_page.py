"""Self-contained HTML pages from the templates in `templates/`: images, data and scripts embedded, no request.

A page extends `page.html`, which has the style, and uses the macros of `parts.html`: `table`, `figure`, `chart`,
`warnings`. All text is escaped. A page runs the scripts of `templates/` that it names, and its content security policy
allows their hashes alone.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from typing import Any

import jinja2
import markupsafe

from dcmdp_jax.number_format import number, percent


def render_page(template: str, **values: Any) -> str:
    """Render a page.

    Args:
        template: file name in `templates/`.
        values: what the template reads; `scripts`, names of scripts in `templates/`, is empty if absent. Filters: `png`
            makes an image's address of PNG bytes, `as_text` makes text of a JSON value, `number` and `percent` are
            those of `number_format`.

    Raises:
        jinja2.UndefinedError: if the template reads a value that is not given.
    """
    return _ENVIRONMENT.get_template(template).render({"scripts": (), **values})


def _png(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"


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
_ENVIRONMENT.filters |= {"png": _png, "as_text": _as_text, "number": number, "percent": percent}
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}
_ENVIRONMENT.filters |= {"source": _source, "source_hash": _source_hash}
