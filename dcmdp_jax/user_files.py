"""Import what a user names: `package.module:NAME` or `path/to/file.py:NAME`."""

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from dcmdp_jax.errors import UserError, describe_error, one_line


def is_place(text: str) -> bool:
    """Whether a text has the form `module:NAME` or `file.py:NAME`."""
    source, _, name = text.rpartition(":")
    return bool(source) and name.isidentifier()


def is_missing(text: str) -> bool:
    """Whether a `path.py:NAME` has no file, or one without the word NAME; nothing is run."""
    source, _, name = text.rpartition(":")
    if not source.endswith(".py"):
        return False
    try:
        words = re.findall(
            rf"\b{re.escape(name)}\b|import \*", Path(source).read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError):
        return True
    return not words


def load_object(text: str, kind: str = "object") -> Any:
    """Import what a user names. A file is relative to the working directory.

    A file is run once; it is run again when it has changed.

    Args:
        text: `package.module:NAME` or `path/to/file.py:NAME`.
        kind: "function" or "class", which can be called; or "object", which may be anything.

    Raises:
        UserError: in one line, if the file or module can't be imported, or has no such name.
    """
    source, _, name = text.rpartition(":")
    module = _import(text, source)
    loaded = getattr(module, name, None)
    if loaded is None or (kind != "object" and not callable(loaded)):
        names = []
        for other, value in vars(module).items():
            is_kind = {"function": inspect.isfunction, "class": inspect.isclass}.get(kind)
            if not other.startswith("_") and (is_kind is None or is_kind(value)):
                names.append(other)
        raise UserError(
            f"{text}: {source} has no {kind} {name!r}; it has {', '.join(names[:10]) or 'none'}"
        )
    return loaded


def _import(text: str, source: str) -> Any:
    if source.endswith(".py") and not Path(source).exists():
        raise UserError(f"{text}: no such file")
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        path = Path(source).resolve()
        return _load_file(path, path.stat().st_mtime_ns)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise UserError(
            f"{text}: can't import {source}: {one_line(describe_error(error, source))}"
        ) from error


@functools.cache
def _load_file(path: Path, changed_ns: int) -> Any:
    del changed_ns
    # A unique name: a file math.py must not replace the module `math`.
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # the modules next to the file, as when Python runs it
    spec.loader.exec_module(module)
    return module
