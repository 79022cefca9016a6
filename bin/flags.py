"""The --config flag: a config file, its argument, and overrides, with one-line errors."""

from __future__ import annotations

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from dcmdp_jax.config import Config, from_config_dict, unknown_setting

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, with an optional :argument.", lock_config=False)


def parse(argv: list[str]) -> Config:
    """Reads the command line into a checked config.

    Args:
        argv: the program's name, then `--config=FILE[:ARGUMENT]`, overrides `--config.section.name=value`, and any
            other absl flags.

    Raises:
        ValueError: in one line, for a misspelt or ill-typed flag, a config file that is not there, or a setting that
            `from_config_dict` refuses.
    """
    _check_file(argv)
    try:
        rest = flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:
        raise _unknown(argv, error) from None
    except flags.Error as error:
        raise ValueError(str(error).replace("\n", " ")) from None
    if len(rest) > 1:
        raise ValueError(f"argument {rest[1]!r} belongs to no flag; settings are given as --config.section.name=value")
    if _CONFIG.value is None:
        raise ValueError("--config is missing; for example --config=configs/demo.py")
    return from_config_dict(_CONFIG.value)


def _check_file(argv: list[str]) -> None:
    """absl reports a missing file only when the value is used, and as a traceback."""
    for argument in argv[1:]:
        name, equals, value = argument.partition("=")
        if name in ("--config", "-config") and equals:
            path = Path(value.split(":", 1)[0])
            if not path.is_file():
                known = ", ".join(sorted(str(p) for p in Path("configs").glob("*.py") if p.stem not in ("__init__", "base")))
                raise ValueError(f"--config: no file {path}; there are {known or 'none in configs/'}")


def _unknown(argv: list[str], error: Exception) -> ValueError:
    missing = str(error).strip("\"' ").split("'")[0]
    for argument in argv[1:]:
        name = argument.lstrip("-").partition("=")[0]
        if name.startswith("config.") and missing in name.split("."):
            return unknown_setting(name.removeprefix("config."))
    return ValueError(f"--config: {error}")
