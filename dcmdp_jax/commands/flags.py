"""Command line of `train`: a config file, its argument, overrides of single settings.

Config and study files are programs; whatever goes wrong in one is said in one line.
"""

import argparse
import contextlib
import dataclasses
import importlib.machinery
import importlib.util
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

from dcmdp_jax.commands import parsers
from dcmdp_jax.commands.arguments import Parser, nearest
from dcmdp_jax.config.load import OTHER_NAMES, from_config_dict, parse_value
from dcmdp_jax.config.settings import Config, setting_names
from dcmdp_jax.dotted_names import flatten, replace_value
from dcmdp_jax.errors import UserError, one_line, shorten
from dcmdp_jax.run.directory import name_suffix

_OVERRIDE = "config."


def parse(argv: Sequence[str], command: str = "train") -> argparse.Namespace:
    """Read the command line of a run.

    Args:
        argv: list like `sys.argv`: the program's name, then `--config=FILE[:ARGUMENT]`, overrides
            `--config.section.name=value`, `--dry-run` and `--print-config`.
        command: the command, "train" or "sft".

    Returns:
        `config`, the checked `Config`; `dry_run`, print the plan and stop; `print_config`, print
        the config and stop.

    Raises:
        UserError: in one line, for a misspelled or ill-typed flag, a config file that is missing or
            fails, or a setting that `from_config_dict` refuses.
    """
    return parse_with(getattr(parsers, command)(), argv)


def parse_with(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line that has a config and other arguments.

    Args:
        parser: with the other arguments and `parsers.add_config`'s.
        argv: see `parse`.

    Returns:
        The other arguments, and `config`, the checked config.

    Raises:
        UserError: see `parse`.
    """
    parsed, overrides = parse_settings(parser, argv[1:])
    if parsed.config is None:
        raise UserError("--config is missing; for example --config=demo")
    parsed.config = load_config(parsed.config, overrides)
    return parsed


def load_config(location: str, overrides: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Run a config file, change single settings, check all.

    Args:
        location: `FILE[:ARGUMENT]`; FILE is the name of a preset, such as `demo`, or the path of a
            config file. A file `*.yaml`, `*.yml` or `*.toml` has settings by section; the others
            have their defaults.
        overrides: dotted name -> value, `{"training.steps": 20}`. What a resumed run may not change
            becomes part of the run directory's name unless `run_dir` is among them, so that two
            experiments do not share one.

    Raises:
        UserError: in one line, for a file that is missing or fails, an unknown setting, or a
            refused value.
    """
    config = from_config_dict(load_values(location, overrides), overrides)
    if "run_dir" in overrides:
        return config
    return dataclasses.replace(config, run_dir=config.run_dir + name_suffix(overrides, config))


def load_values(
    location: str, overrides: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Run a config file, change single settings, and return all by section, without any check.

    Args:
        location, overrides: see `load_config`.

    Raises:
        UserError: in one line, for a file that is missing or fails.
    """
    file, _, argument = location.partition(":")
    if Path(file).suffix in (".yaml", ".yml", ".toml"):
        if argument:
            raise UserError(
                f"--config: {location}: {file} takes no argument; change its settings, as by "
                "--config.algorithm.method=grpo"
            )
        values = _read(file)
    else:
        config = call_function("--config", location, "get_config", (ConfigDict, Mapping))
        values = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    for name, value in overrides.items():
        replace_value(values, name, value)
    return values


def parse_settings(
    parser: Parser, words: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parse a command's arguments and overrides.

    Returns:
        The arguments; values of the overrides by dotted name.

    Raises:
        UserError: in one line, for an argument that is unknown or ill-typed, one that names a
            setting among them, and see `split_overrides`.
    """
    overrides, arguments = split_overrides(words)
    # The short name of a setting: its last name, where no other setting has it.
    settings = {}
    last_names = [name.rpartition(".")[2] for name in setting_names()]
    for last_name, name in zip(last_names, setting_names(), strict=True):
        if last_names.count(last_name) == 1:
            settings[last_name] = name
    settings |= OTHER_NAMES
    settings |= {name: name for name in setting_names()}
    for word in arguments:
        name = word.removeprefix("--").partition("=")[0]
        is_flag = f"--{name.replace('_', '-')}" in parser.flags()
        if name != word and name in settings and not is_flag:
            raise UserError(
                f"--{name}: no such argument; settings are given as --config.{settings[name]}=VALUE"
            )
    return parser.parse_args(arguments), overrides


def split_overrides(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split off overrides, --config.name=value or --config.name value.

    Returns:
        Values by dotted name, and all other words.

    Raises:
        UserError: in one line, for a missing value, an unknown setting, or text of another type.
    """
    overrides = {}
    other_words = []
    unread = iter(words)
    for word in unread:
        name, equals, value = word.lstrip("-").partition("=")
        if word == "--" or not word.startswith("-") or not name.startswith(_OVERRIDE):
            other_words.append(word)
            continue
        if not equals:
            try:
                value = next(unread)
            except StopIteration:
                raise UserError(
                    f"{word}: its value is missing; settings are given as "
                    "--config.section.name=value"
                ) from None
        setting = name.removeprefix(_OVERRIDE)
        overrides[setting] = parse_value(setting, value)
    return overrides, other_words


def _read(location: str) -> dict[str, Any]:
    """Read settings by section from YAML or TOML, and their text as a command line's.

    YAML takes 1e-6 for text.
    """
    path = Path(location)
    if not path.is_file():
        _find("--config", location, "")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"--config: {location}: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise UserError(
            f"--config: {location}: holds {shorten(values)}, must hold settings by section"
        )

    settings = {}
    for name, value in flatten(values).items():
        if isinstance(value, str):
            value = parse_value(name, value)
        replace_value(settings, name, value)
    return settings


def call_function(
    option: str,
    program: str,
    function: str,
    kinds: tuple[type, ...],
    folder: str = "",
) -> Any:
    """Run a config or study file and call one of its functions, once.

    While it runs, `from configs import base` finds, first to last: modules of the directory
    `configs` that the file is in, of `configs` in the working directory, and the presets. A preset
    finds the presets alone.

    Args:
        option: name of the command-line option, for errors.
        program: `FILE[:ARGUMENT]`; FILE is the name of a preset, or a path.
        function: its name in the file.
        kinds: types that it may return, the one for messages first.
        folder: folder of the presets; empty for configs, `studies` for studies.

    Raises:
        UserError: in one line, for a file that is not there, and with the place in the file for any
            exception in it, an exit among them.
    """
    location, colon, argument = program.partition(":")
    path, directories = _find(option, location, folder)
    try:
        with _configs_are(directories):
            call = runpy.run_path(str(path)).get(function)
            if call is None:
                raise UserError(f"it has no function {function}")
            result = call(argument) if colon else call()
            if not isinstance(result, kinds):
                raise UserError(
                    f"{function} returned {type(result).__name__}, must be a {kinds[0].__name__}"
                )
            return result
    except SystemExit as error:
        raise UserError(
            f"{option}: {location}: it called exit({error.code!r}); let {function} return"
        ) from error
    except Exception as error:  # the file is a program and may raise anything
        message = one_line(error)
        if not isinstance(error, ValueError):
            message = f"{type(error).__name__}: {message}"
        # The innermost line of the file that it went through.
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename == str(path):
                message += f" (line {frame.lineno})"
                break
        raise UserError(f"{option}: {location}: {message}") from error


def _find(option: str, location: str, folder: str) -> tuple[Path, list[Path]]:
    """The file, and the directories that are `configs` to it."""
    presets = parsers.preset_names(folder)
    if location in presets:
        return parsers.PRESETS / folder / f"{location}.py", [parsers.PRESETS]
    path = Path(location)
    here = Path("configs")
    with contextlib.suppress(OSError):  # a name that is too long
        if path.is_file():
            directories = [here.resolve(), parsers.PRESETS]
            for parent in path.resolve().parents:
                if parent.name == "configs":
                    directories.insert(0, parent)
                    break
            return path, directories

    files = list(map(str, parsers.config_files(here / folder)))
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
