"""Code that users name by where they are: `package.module:NAME` or `path/to/file.py:NAME`."""

import functools
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from dcmdp_jax.errors import UserError, one_line


def is_place(text: str) -> bool:
    """Whether a text has the form `module:NAME` or `file.py:NAME`."""
    place, _, name = text.rpartition(":")
    return bool(place) and name.isidentifier()


def load_object(text: str, what: str = "object") -> Any:
    """Import what a user names. A file is relative to the working directory.

    A file is run once; it is run again when it has changed.

    Args:
        text: `package.module:NAME` or `path/to/file.py:NAME`.
        what: "function" or "class", which can be called; or "object", which may be anything.

    Raises:
        UserError: in one line, if the file or module can't be imported, or has no such name.
    """
    place, _, name = text.rpartition(":")
    module = _import(text, place)
    loaded = getattr(module, name, None)
    if loaded is None or (what != "object" and not callable(loaded)):
        is_there = {"function": inspect.isfunction, "class": inspect.isclass}.get(what, lambda value: True)
        there = [key for key, value in vars(module).items() if is_there(value) and not key.startswith("_")]
        raise UserError(f"{text}: {place} has no {what} {name!r}; it has {', '.join(there[:10]) or 'none'}")
    return loaded


def _import(text: str, place: str) -> Any:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place).resolve()
        return _load_file(path, path.stat().st_mtime_ns)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise UserError(f"{text}: can't import {place}: {one_line(describe_error(error, place))}") from error


@functools.cache
def _load_file(path: Path, changed_ns: int) -> Any:
    del changed_ns
    # A unique name: a file math.py must not replace the module `math`.
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    if (directory := str(path.parent)) not in sys.path:
        sys.path.append(directory)  # the modules next to the file, as when Python runs it
    spec.loader.exec_module(module)
    return module


def describe_error(error: BaseException, place: str) -> str:
    """`KeyError: 'x' (length_reward.py, line 12)`, the last line of the user's file that ran.

    Args:
        error: the exception.
        place: the file, or the module, of the function.
    """
    return f"{type(error).__name__}: {error}{error_place(error, place)}"


def error_place(error: BaseException, place: str) -> str:
    """` (length_reward.py, line 12)`, the last line of the user's file that ran; empty if none did."""
    module = sys.modules.get(place)
    file = place if place.endswith(".py") else getattr(module, "__file__", None)
    own = Path(file).resolve() if file else None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == own]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def callback_error(error: BaseException) -> str:
    """`KeyError: 'x' (mine.py, line 3)` of an error within `jax.pure_callback`, whose text XLA gives; else empty."""
    frames = re.findall(r'^  File "(.+)", line (\d+)', str(error), re.MULTILINE)
    if "callback: Traceback (most recent call last)" not in str(error) or not frames:
        return ""
    file, line = frames[-1]
    return f"{one_line(str(error).splitlines()[-1])} ({Path(file).name}, line {line})"
