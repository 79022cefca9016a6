"""The --config flag: a config file, its argument, and overrides, with one-line errors."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import runpy
import zlib
from collections.abc import Iterator
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from dcmdp_jax.config import Config, from_config_dict, setting_names, unknown_setting
from dcmdp_jax.training.run_directory import FREE_SETTINGS

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, with an optional :argument.", lock_config=False)


def parse(argv: list[str]) -> Config:
    """Reads the command line into a checked config.

    Args:
        argv: `sys.argv`, where ml_collections looks for the overrides itself: the program's name, then
            `--config=FILE[:ARGUMENT]`, overrides `--config.section.name=value`, and any other absl flags.

    Raises:
        ValueError: in one line, for a misspelt or ill-typed flag, a config file that is not there or breaks, or a
            setting that `from_config_dict` refuses.
    """
    # ml_collections reports these late, with tracebacks in its messages, or without the right name.
    for name, value in _given(argv):
        if name == "config":
            _check_file(value)
        elif name.startswith("config."):
            _check_name(name.removeprefix("config."))
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        raise ValueError(" ".join(str(error).split())) from None
    if len(rest) > 1:
        raise ValueError(f"argument {rest[1]!r} belongs to no flag; settings are given as --config.section.name=value")
    if _CONFIG.value is None:
        raise ValueError("--config is missing; for example --config=configs/demo.py")
    config = _CONFIG.value
    config.run_dir += _suffix(argv)
    return from_config_dict(config)


def _suffix(argv: list[str]) -> str:
    """`-precision=exact`: what the command line changes, so that two experiments never share a directory by default.

    Empty if the directory itself is given. Settings that one run may change on the way are left out.
    """
    changed = {name.removeprefix("config."): value for name, value in _given(argv) if name.startswith("config.")}
    if "run_dir" in changed:
        return ""
    learnt = {name: value for name, value in changed.items() if not name.startswith(FREE_SETTINGS)}
    pieces = [f"-{name.rpartition('.')[2]}={value.rpartition('/')[2]}" for name, value in sorted(learnt.items())]
    text = re.sub(r"[^\w.=-]+", "_", "".join(pieces))
    return text if len(text) <= 100 else f"{text[:90]}-{zlib.crc32(text.encode()):08x}"


def _given(argv: list[str]) -> Iterator[tuple[str, str]]:
    """Name and value of every flag, whether written --name=value or --name value."""
    words = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    for word, following in itertools.pairwise([*words, ""]):
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            yield name, value if equals else following


def _check_file(value: str) -> None:
    location, colon, argument = value.partition(":")
    path = Path(location)
    if not path.is_file():
        known = [str(p) for p in sorted(Path("configs").glob("*.py")) if p.stem not in ("__init__", "base")]
        near = difflib.get_close_matches(location, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none in configs/'}"
        raise ValueError(f"--config: no file {location}; {hint}")
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        if get_config is None:
            raise ValueError("it has no function get_config")
        get_config(*([argument] if colon else []))
    except Exception as error:  # the file is a program: anything may be wrong with it
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"--config: {path}: {kind}{' '.join(str(error).split())}") from error


def _check_name(dotted: str) -> None:
    sections = {name.rpartition(".")[0] for name in setting_names()} | {f.name for f in dataclasses.fields(Config)}
    if dotted not in sections and dotted not in setting_names():
        raise unknown_setting(dotted)
