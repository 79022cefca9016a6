"""Config and study files are programs: running one, and one line for whatever goes wrong in it."""

from __future__ import annotations

import runpy
import traceback
from pathlib import Path
from typing import Any

from dcmdp_jax.errors import UserError, one_line


def call_function(option: str, path: Path, function: str, *arguments: str) -> Any:
    """Run a file and call one of its functions, once.

    Args:
        option: of the command line, for errors.
        path: of the file.
        function: its name there.
        arguments: its arguments.

    Raises:
        UserError: in one line with the place in the file, for any exception in it, an exit among them.
    """
    try:
        found = runpy.run_path(str(path)).get(function)
        if found is None:
            raise UserError(f"it has no function {function}")
        return found(*arguments)
    except SystemExit as error:
        raise UserError(f"{option}: {path}: it called exit({error.code!r}); let {function} return") from error
    except Exception as error:  # the file is a program and may raise anything
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UserError(f"{option}: {path}: {kind}{one_line(error)}{_line(error, path)}") from error


def _line(error: Exception, path: Path) -> str:
    """The innermost line of the file that an exception went through, as ` (line 12)`."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""
