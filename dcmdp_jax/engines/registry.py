"""The inference engines by name, and one that a user brings."""

from __future__ import annotations

import difflib
import functools

from dcmdp_jax.engines import http, local, vllm
from dcmdp_jax.engines.kind import EngineKind
from dcmdp_jax.errors import UserError
from dcmdp_jax.inputs import shorten
from dcmdp_jax.user_code import is_place

ENGINES = {"local": local.ENGINE, "vllm": vllm.ENGINE, "http": http.ENGINE}
FORMER_NAMES = {"remote": "http"}
"""Names in files of earlier versions."""


@functools.cache
def find_engine(name: str) -> EngineKind:
    """The record of an engine: a built-in one, or that of `package.module:NAME` or `path/to/file.py:NAME`.

    Raises:
        UserError: in one line, for a name that is none of these, or what is no record of an engine.
    """
    if (kind := ENGINES.get(FORMER_NAMES.get(name, name))) is not None:
        return kind
    if not is_place(name):
        raise unknown_engine(name, tuple(ENGINES))
    from dcmdp_jax.engines.outside import load_engine

    return load_engine(name)


def unknown_engine(name: str, allowed: tuple[str, ...]) -> UserError:
    """The error for a name that is no engine."""
    near = [one for one in allowed if name and one.startswith(name)] or difflib.get_close_matches(name, allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(
        f"engine: got {shorten(name)}, allowed are {', '.join(allowed)}, module:NAME and path.py:NAME{hint}"
    )
