"""Command line of `train`: a config file, its argument, overrides of single settings, with one-line
errors.

Config and study files are programs; whatever goes wrong in one is said in one line.
"""

import argparse
import contextlib
import dataclasses
import importlib.machinery
import importlib.util
import itertools
import runpy
import sys
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from ml_collections import ConfigDict

import dcmdp_jax
from dcmdp_jax.commands.cli import Parser, nearest
from dcmdp_jax.config.load import OTHER_NAMES, from_config_dict, parse_value
from dcmdp_jax.config.settings import Config, setting_names
from dcmdp_jax.errors import UserError, one_line, shorten
from dcmdp_jax.fields import flatten, replace_value
from dcmdp_jax.run.directory import name_suffix

PRESETS = Path(dcmdp_jax.__file__).parent / "presets"
"""`configs/` of the repository, as the package has it."""
_NO_PRESETS = ("__init__", "base")
_OVERRIDE = "config."


def parse(argv: Sequence[str], command: str = "train") -> argparse.Namespace:
    """Read the command line of a run.

    Args:
        argv: list like `sys.argv`: the program's name, then `--config=FILE[:ARGUMENT]`, overrides
            `--config.section.name=value`, `--dry_run` and `--print_config`.
        command: the command, "train" or "sft".

    Returns:
        `config`, the checked `Config`; `dry_run`, print the plan and stop; `print_config`, print
        the config and stop.

    Raises:
        UserError: in one line, for a misspelled or ill-typed flag, a config file that is missing or
            fails, or a setting that `from_config_dict` refuses.
    """
    what = "Train a policy" if command == "train" else "Learn from the conversations of task.train"
    rest = (
        "the same command resumes a run. dcmdp settings lists settings, "
        "--config.section.name=value."
    )
    parser = Parser(command, description=f"{what}; {rest}")
    parser.add_argument(
        "--dry_run", action="store_true", help="check everything, print the plan, and stop"
    )
    parser.add_argument(
        "--print_config",
        action="store_true",
        help="print every setting, mark what differs, and stop",
    )
    return parse_with(parser, argv)


def parse_with(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line that has a config and other arguments.

    Args:
        parser: with the other arguments.
        argv: see `parse`.

    Returns:
        The other arguments, and `config`, the checked config.

    Raises:
        UserError: see `parse`.
    """
    about = (
        f"a preset ({', '.join(preset_names())}), a config file and its argument, or a .yaml "
        "or .toml file"
    )
    parser.add_argument("--config", metavar="FILE[:ARGUMENT]", help=about)
    parsed, overrides = parse_settings(parser, argv[1:])
    if parsed.config is None:
        raise UserError("--config is missing; for example --config=demo")
    parsed.config = load_config(parsed.config, overrides)
    return parsed


def load_config(given: str, overrides: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Run a config file, change single settings, check all.

    Args:
        given: `FILE[:ARGUMENT]`; FILE is the name of a preset, such as `demo`, or the path of a
            config file. A file `*.yaml`, `*.yml` or `*.toml` has settings by section; the others
            have their defaults.
        overrides: dotted name -> value, `{"training.steps": 20}`. What a resumed run may not change
            becomes part of the run directory's name unless `run_dir` is among them, so that two
            experiments do not share one.

    Raises:
        UserError: in one line, for a file that is missing or fails, an unknown setting, or a
            refused value.
    """
    config = from_config_dict(load_values(given, overrides), overrides)
    if "run_dir" in overrides:
        return config
    return dataclasses.replace(config, run_dir=config.run_dir + name_suffix(overrides, config))


def load_values(given: str, overrides: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Run a config file and change single settings; nested, without any check.

    Args:
        given, overrides: see `load_config`.

    Raises:
        UserError: in one line, for a file that is missing or fails.
    """
    if Path(given).suffix in (".yaml", ".yml", ".toml"):
        values = _read(given)
    else:
        made = call_function("--config", given, "get_config", (ConfigDict, Mapping))
        values = made.to_dict() if isinstance(made, ConfigDict) else dict(made)
    for name, value in overrides.items():
        replace_value(values, name, value)
    return values


def parse_settings(
    parser: Parser, words: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parse a command's arguments and overrides; an argument that names a setting is told how those
    are given.

    Returns:
        The arguments; values of the overrides by dotted name.

    Raises:
        UserError: in one line, for an argument that is unknown or ill-typed, and see
            `split_overrides`.
    """
    overrides, rest = split_overrides(words)
    tails = [name.rpartition(".")[2] for name in setting_names()]
    settings = {
        tail: name
        for tail, name in zip(tails, setting_names(), strict=True)
        if tails.count(tail) == 1
    }
    settings |= {**OTHER_NAMES, **{name: name for name in setting_names()}}
    for word in rest:
        name = word.removeprefix("--").partition("=")[0]
        if name != word and name in settings and f"--{name}" not in parser.flags():
            raise UserError(
                f"--{name}: no such argument; settings are given as --config.{settings[name]}=VALUE"
            )
    return parser.parse_args(rest), overrides


def split_overrides(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split off overrides, --config.name=value or --config.name value: values by dotted name, and
    all other words.

    Raises:
        UserError: in one line, for a missing value, an unknown setting, or text of another type.
    """
    overrides: dict[str, Any] = {}
    rest: list[str] = []
    pairs = itertools.pairwise([*words, None])
    for word, following in pairs:
        name, equals, value = word.lstrip("-").partition("=")
        if word == "--" or not word.startswith("-") or not name.startswith(_OVERRIDE):
            rest.append(word)
            continue
        if not equals:
            if following is None:
                raise UserError(
                    f"{word}: its value is missing; settings are given as "
                    "--config.section.name=value"
                )
            value = following
            next(pairs)
        setting = name.removeprefix(_OVERRIDE)
        overrides[setting] = parse_value(setting, value)
    return overrides, rest


def _read(given: str) -> dict[str, Any]:
    """Read settings by section from YAML or TOML. YAML takes 1e-6 for text: text is parsed as on a
    command line.
    """
    path = Path(given)
    if not path.is_file():
        _find("--config", given, "")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"--config: {given}: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise UserError(
            f"--config: {given}: holds {shorten(values)}, must hold settings by section"
        )

    settings: dict[str, Any] = {}
    for name, value in flatten(values).items():
        replace_value(settings, name, parse_value(name, value) if isinstance(value, str) else value)
    return settings


def preset_names(folder: str = "") -> list[str]:
    """Names of the presets, or of the studies."""
    return [
        path.stem
        for path in sorted((PRESETS / folder).glob("*.py"))
        if path.stem not in _NO_PRESETS
    ]


def call_function(
    option: str, given: str, function: str, kinds: tuple[type, ...], folder: str = ""
) -> Any:
    """Run a config or study file and call one of its functions, once.

    While it runs, `from configs import base` finds, first to last: modules of the directory
    `configs` that the file is in, of `configs` in the working directory, and the presets. A preset
    finds the presets alone.

    Args:
        option: name of the command-line option, for errors.
        given: `FILE[:ARGUMENT]`; FILE is the name of a preset, or a path.
        function: its name in the file.
        kinds: types that it may return, the one for messages first.
        folder: folder of the presets; empty for configs, `studies` for studies.

    Raises:
        UserError: in one line, for a file that is not there, and with the place in the file for any
            exception in it, an exit among them.
    """
    location, colon, argument = given.partition(":")
    path, directories = _find(option, location, folder)
    try:
        with _configs_are(directories):
            found = runpy.run_path(str(path)).get(function)
            if found is None:
                raise UserError(f"it has no function {function}")
            made = found(*([argument] if colon else []))
            if not isinstance(made, kinds):
                raise UserError(
                    f"{function} returned {type(made).__name__}, must be a {kinds[0].__name__}"
                )
            return made
    except SystemExit as error:
        raise UserError(
            f"{option}: {location}: it called exit({error.code!r}); let {function} return"
        ) from error
    except Exception as error:  # the file is a program and may raise anything
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        # The innermost line of the file that it went through.
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        place = f" (line {lines[-1]})" if lines else ""
        raise UserError(f"{option}: {location}: {kind}{one_line(error)}{place}") from error


def _find(option: str, location: str, folder: str) -> tuple[Path, list[Path]]:
    """The file, and the directories that are `configs` to it."""
    presets = {name: PRESETS / folder / f"{name}.py" for name in preset_names(folder)}
    if location in presets:
        return presets[location], [PRESETS]
    path = Path(location)
    here = Path("configs")
    with contextlib.suppress(OSError):  # a name that is too long
        if path.is_file():
            own = [parent for parent in path.resolve().parents if parent.name == "configs"][:1]
            return path, [*own, here.resolve(), PRESETS]
    files = [
        str(path) for path in sorted((here / folder).glob("*.py")) if path.stem not in _NO_PRESETS
    ]
    hint = nearest(path.stem, presets, f"there are {', '.join(files or presets)}")
    hint = nearest(location, [*files, *presets], hint)
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
