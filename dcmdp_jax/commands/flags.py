"""Command line of `train`: a config file, its argument, overrides of single settings, with one-line errors."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from dcmdp_jax.commands.cli import Parser
from dcmdp_jax.commands.config_files import call_function
from dcmdp_jax.config.settings import Config, from_config_dict, parse_value
from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import replace_value
from dcmdp_jax.run.directory import name_suffix

_OVERRIDE = "config."


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        config: the settings, checked.
        dry_run: print the plan and stop.
        print_config: print the config and stop.
    """

    config: Config
    dry_run: bool
    print_config: bool


def parse(argv: Sequence[str]) -> Arguments:
    """Read the command line into a checked config.

    Args:
        argv: as `sys.argv`: the program's name, then `--config=FILE[:ARGUMENT]`, overrides
            `--config.section.name=value`, `--dry_run` and `--print_config`.

    Raises:
        UserError: in one line, for a misspelled or ill-typed flag, a config file that is missing or fails, or a
            setting that `from_config_dict` refuses.
    """
    config, parsed = parse_with(_parser(), argv)
    return Arguments(config, parsed.dry_run, parsed.print_config)


def parse_with(parser: Parser, argv: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """Read a command line that has a config beside other arguments.

    Args:
        parser: with the other arguments.
        argv: as for `parse`.

    Returns:
        The checked config, and the other arguments.

    Raises:
        UserError: as `parse`.
    """
    parser.add_argument("--config", metavar="FILE[:ARGUMENT]", help="preset or config file, and its argument")
    overrides, rest = split_overrides(argv[1:])
    parsed = parser.parse_args(rest)
    if parsed.config is None:
        raise UserError("--config is missing; for example --config=demo")
    return load_config(parsed.config, overrides), parsed


def load_config(given: str, overrides: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Run a config file, change single settings, check all.

    Args:
        given: `FILE[:ARGUMENT]`; FILE is the name of a preset, such as `demo`, or the path of a config file.
        overrides: dotted name -> value, `{"training.steps": 20}`. Those that a resumed run may not change become part
            of the run directory's name unless `run_dir` is among them, so that two experiments do not share one.

    Raises:
        UserError: in one line, for a file that is missing or fails, an unknown setting, or a refused value.
    """
    values = _load(given)
    for name, value in overrides.items():
        replace_value(values, name, value)
    config = from_config_dict(values)
    if "run_dir" in overrides:
        return config
    return dataclasses.replace(config, run_dir=config.run_dir + name_suffix(overrides, config))


def _parser() -> Parser:
    parser = Parser(
        "train",
        description="Train a policy. --config.section.name=value overrides a setting; the same command resumes a run.",
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="check everything, print the plan (shapes, memory, steps), and stop"
    )
    parser.add_argument(
        "--print_config", action="store_true", help="print every setting, mark what differs from the default, and stop"
    )
    return parser


def split_overrides(
    words: Sequence[str], gone: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, Any], list[str]]:
    """Split off overrides, --config.name=value or --config.name value: values by dotted name, and all other words.

    Args:
        words: arguments.
        gone: argument of earlier versions -> the one that took its place.

    Raises:
        UserError: in one line, for a missing value, an unknown setting, text that is no value of its type, or an
            argument of earlier versions.
    """
    overrides: dict[str, Any] = {}
    rest: list[str] = []
    pairs = itertools.pairwise([*words, None])
    for word, following in pairs:
        name, equals, value = word.lstrip("-").partition("=")
        if place := gone.get(word.partition("=")[0]):
            raise UserError(f"{word.partition('=')[0]} is gone: its place is {place}=...")
        if word == "--" or not word.startswith("-") or not name.startswith(_OVERRIDE):
            rest.append(word)
            continue
        if not equals:
            if following is None:
                raise UserError(f"{word}: its value is missing; settings are given as --config.section.name=value")
            value = following
            next(pairs)
        setting = name.removeprefix(_OVERRIDE)
        overrides[setting] = parse_value(setting, value)
    return overrides, rest


def _load(given: str) -> dict[str, Any]:
    """Run a config file's `get_config`, once."""
    made = call_function("--config", given, "get_config")
    if not isinstance(made, Mapping | ConfigDict):
        location = given.partition(":")[0]
        raise UserError(f"--config: {location}: get_config returned {type(made).__name__}, must be a ConfigDict")
    return made.to_dict() if isinstance(made, ConfigDict) else dict(made)
