"""Make, check, save and load a `Config`.

A new setting needs nothing here: a saved config without it gets the default, which therefore must
do what was done before. A setting that goes gets an entry in `REMOVED`, and `VERSION` is raised.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from dcmdp_jax.config.algorithm import AlgorithmSettings, canonical, spelled_out
from dcmdp_jax.config.checks import check_name, validate, validate_sampling
from dcmdp_jax.config.rollout import RolloutSettings
from dcmdp_jax.config.settings import Config, WarmupSettings, setting_names, to_dict
from dcmdp_jax.errors import UserError, shorten
from dcmdp_jax.fields import build, declared, flatten, nearest_name, parse_text, replace_value

VERSION = 7
"""Version of config.json in a run directory, raised when a setting is removed. Runs without one
have version 0.
"""


class Removed(NamedTuple):
    """A setting that older runs have.

    Attributes:
        version: First version without the setting.
        meaningless: Values that do what is done without the setting. None: all, since it never
            changed what is learned.
        why: Reason, or remedy.
        values: Removed values of a setting that stays. Empty: the setting itself was removed.
    """

    version: int
    meaningless: tuple[Any, ...] | None
    why: str
    values: tuple[Any, ...] = ()


REMOVED: dict[str, Removed] = {}


def from_config_dict(
    config: ConfigDict | Mapping[str, Any], overrides: Collection[str] = ()
) -> Config:
    """Make and check a `Config`. A setting that is not there has its default.

    Args:
        config: settings by section.
        overrides: see `checks.validate`.

    Raises:
        UserError: in one line, naming the setting, its value and what is allowed: an unknown name
            (with the nearest right one), a wrong type, a value out of range, or two settings that
            do not fit.
    """
    made = build(
        Config, config if isinstance(config, Mapping) else config.to_dict(), unknown_setting
    )
    made = dataclasses.replace(made, algorithm=canonical(made.algorithm))
    validate(made, overrides)
    return made


def for_sampling(config: Config, overrides: Mapping[str, Any]) -> Config:
    """A config with other values whose engine samples without a trainer; rules of training are not
    checked.

    Args:
        config: a run's config, which an earlier version may have saved, or the defaults.
        overrides: dotted name -> value.

    Raises:
        UserError: in one line, see `from_config_dict`.
    """
    values = to_dict(config)
    engine = config.rollout.engine
    # The run split its devices for a trainer and an engine.
    alone = {"rollout.lag": 0, "rollout.router_replay": False, "mesh.cpu_devices": 0}
    # Of the engine and the functions that the run had.
    alone |= (
        {"rollout.engine_args": ""} if overrides.get("rollout.engine", engine) != engine else {}
    )
    alone |= {"algorithm.loss": "surrogate"} if config.supervised else {}
    alone |= {"rewards.weights": ()} if "rewards.functions" in overrides else {}
    values["rollout"]["local"] = {}
    for name, value in {**alone, **overrides}.items():
        replace_value(values, name, value)
    made = build(Config, values, unknown_setting)
    # Greedy, or one completion: refused for training alone.
    alone = {"rollout.temperature": 0, "rollout.group_size": 1}
    validate_sampling(made, {name for name, value in overrides.items() if value != alone.get(name)})
    return made


def for_supervision(config: Config) -> Config:
    """A config to learn from conversations: nothing is sampled, a prompt has one completion, the
    loss is likelihood.
    """
    rollout = RolloutSettings(
        group_size=1, max_completion_tokens=config.rollout.max_completion_tokens
    )
    names = {"method": "grpo", "loss": "likelihood", "aggregation": "token_mean"}
    algorithm = AlgorithmSettings(**names, router_aux_loss=config.algorithm.router_aux_loss)
    changed = {"observe": dataclasses.replace(config.observe, samples=0, rollouts_every_steps=0)}
    changed["model"] = dataclasses.replace(
        config.model, forward_precision="full", forward_cache="full"
    )
    return dataclasses.replace(
        config, rollout=rollout, algorithm=algorithm, warmup=WarmupSettings(), **changed
    )


def parse_value(name: str, text: str) -> Any:
    """Parse the text of a setting, as a command line has it.

    Args:
        name: dotted.
        text: a value of the setting's type, such as `true`, `1e-6`, `(64,128)`; digits are 0-9.

    Raises:
        UserError: in one line, for an unknown setting or text of another type.
    """
    if name in declared(Config):
        return parse_text(declared(Config)[name], text)
    if any(other.startswith(f"{name}.") for other in declared(Config)):
        raise UserError(
            f"config.{name}: got {shorten(text)}, must be a section with named settings"
        )
    raise unknown_setting(name)


OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "epochs": "training.steps",
    "num_generations": "rollout.group_size",
    "beta": "algorithm.kl_coefficient",
    "kl_coef": "algorithm.kl_coefficient",
    "max_new_tokens": "rollout.max_completion_tokens",
    "output_dir": "run_dir",
    "lambda": "algorithm.multiplier",
    "eta": "algorithm.dual_learning_rate",
}
"""What other trainers and the paper call a setting."""


def unknown_setting(name: str) -> UserError:
    """The error for an unknown setting: why it was removed, or the nearest name."""
    if ours := OTHER_NAMES.get(name.rpartition(".")[2]):
        return UserError(f"config.{name}: no such setting; did you mean {ours!r}?")
    if name in REMOVED:
        return UserError(f"config.{name}: no setting any more; {REMOVED[name].why}")
    sections = [field.name for field in dataclasses.fields(Config)]
    return UserError(
        f"config.{name}: no such setting; {nearest_name(name, setting_names(), sections)}"
    )


def to_saved(config: Config) -> dict[str, Any]:
    """Content of a run directory's config.json: with every number of the algorithm's remedies."""
    spelled = dataclasses.replace(config, algorithm=spelled_out(config.algorithm))
    return {"config_version": VERSION, **to_dict(spelled)}


def from_saved(saved: Mapping[str, Any]) -> Config:
    """Make a config from what this or an earlier version saved.

    A setting that was not there yet has its default; a removed one is ignored if its value does
    what is done without it. Other rules on values are not checked: an earlier version may have
    allowed what is refused now.

    Raises:
        UserError: in one line, for a newer version, a setting that is unknown or was removed with a
            value that had a meaning, or a value of a wrong type.
    """
    values = {name: value for name, value in saved.items() if name != "fitted_rows"}
    version = values.pop("config_version", 0)
    if not isinstance(version, int) or version > VERSION:
        raise UserError(
            f"config_version: got {shorten(version)}, this program knows versions up to {VERSION}"
        )
    flat = flatten(values)
    kept = {}
    for name, removed in REMOVED.items():
        if version >= removed.version or name not in flat:
            continue
        said = f"config.{name}: got {shorten(flat[name])}"
        refused = flat[name] in removed.values
        if not removed.values:
            value = flat.pop(name)
            refused = removed.meaningless is not None and value not in removed.meaningless
        if refused:
            raise UserError(
                f"{said}, {'which is gone' if removed.values else 'no setting any more'}; "
                f"{removed.why}"
            )
    for name, value in flat.items():
        replace_value(kept, name, value)
    made = build(Config, kept, unknown_setting)
    made = dataclasses.replace(made, algorithm=canonical(made.algorithm))
    check_name(made.rollout.engine)
    return made
