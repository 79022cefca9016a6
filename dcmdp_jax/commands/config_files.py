"""Config and study files are programs: finding one, running it, and one line for whatever goes wrong in it."""

from __future__ import annotations

import contextlib
import difflib
import importlib.machinery
import importlib.util
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcmdp_jax
from dcmdp_jax.errors import UserError, one_line

PRESETS = Path(dcmdp_jax.__file__).parent / "presets"
"""`configs/` of the repository, as the package has it."""
_NO_PRESETS = ("__init__", "base")


def call_function(option: str, given: str, function: str, folder: str = "") -> Any:
    """Run a config or study file and call one of its functions, once.

    While it runs, `from configs import base` finds, first to last: modules of the directory `configs` that the file is
    in, those of `configs` in the working directory, and the presets. A preset finds the presets alone.

    Args:
        option: of the command line, for errors.
        given: `FILE[:ARGUMENT]`; FILE is the name of a preset, or a path.
        function: its name in the file.
        folder: of the presets; empty: configs, `studies`: studies.

    Raises:
        UserError: in one line, for a file that is not there, and with the place in the file for any exception in it,
            an exit among them.
    """
    location, colon, argument = given.partition(":")
    path, directories = _find(option, location, folder)
    try:
        with _configs_are(directories):
            found = runpy.run_path(str(path)).get(function)
            if found is None:
                raise UserError(f"it has no function {function}")
            return found(*([argument] if colon else []))
    except SystemExit as error:
        raise UserError(f"{option}: {location}: it called exit({error.code!r}); let {function} return") from error
    except Exception as error:  # the file is a program and may raise anything
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UserError(f"{option}: {location}: {kind}{one_line(error)}{_line(error, path)}") from error


def _find(option: str, location: str, folder: str) -> tuple[Path, list[Path]]:
    """The file, and the directories that are `configs` to it."""
    presets = {path.stem: path for path in sorted((PRESETS / folder).glob("*.py")) if path.stem not in _NO_PRESETS}
    if location in presets:
        return presets[location], [PRESETS]
    path, here = Path(location), Path("configs")
    with contextlib.suppress(OSError):  # a name that is too long
        if path.is_file():
            own = [parent for parent in path.resolve().parents if parent.name == "configs"][:1]
            return path, [*own, here.resolve(), PRESETS]
    files = [str(path) for path in sorted((here / folder).glob("*.py")) if path.stem not in _NO_PRESETS]
    near = difflib.get_close_matches(location, [*files, *presets], n=1)
    near = near or difflib.get_close_matches(path.stem, presets, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(files or presets)}"
    raise UserError(f"{option}: no file {location}; {hint}")


@contextlib.contextmanager
def _configs_are(directories: list[Path]) -> Iterator[None]:
    """Make `configs` a package whose modules are in these directories, for the block."""

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "configs"]

    before = {name: sys.modules.pop(name) for name in loaded()}
    spec = importlib.machinery.ModuleSpec("configs", None, is_package=True)
    spec.submodule_search_locations = [str(directory) for directory in directories]
    sys.modules["configs"] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)


def _line(error: Exception, path: Path) -> str:
    """The innermost line of the file that an exception went through, as ` (line 12)`."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""
