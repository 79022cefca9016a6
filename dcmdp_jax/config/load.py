"""Make, check, save and load a `Config`.

A new setting needs nothing here: a saved config without it gets the default, which therefore must
do what was done before. Where a setting goes, `VERSION` is raised.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from dcmdp_jax.config.algorithm import AlgorithmSettings, canonical, spelled_out
from dcmdp_jax.config.checks import check_name, validate, validate_sampling
from dcmdp_jax.config.rollout import RolloutSettings
from dcmdp_jax.config.settings import Config, WarmupSettings, setting_names, to_dict
from dcmdp_jax.config.values import build, nearest_name, parse_text
from dcmdp_jax.dotted_names import flatten, replace_value
from dcmdp_jax.errors import UserError, shorten
from dcmdp_jax.fields import declared

VERSION = 7
"""Version of config.json, raised when a setting is removed. Runs without one have version 0."""


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
    values = config if isinstance(config, Mapping) else config.to_dict()
    settings = _build(values)
    validate(settings, overrides)
    return settings


def _build(values: Mapping[str, Any]) -> Config:
    config = build(Config, values, unknown_setting)
    return dataclasses.replace(config, algorithm=canonical(config.algorithm))


def for_sampling(config: Config, overrides: Mapping[str, Any]) -> Config:
    """A config with other values whose engine samples without a trainer, by fewer rules.

    Args:
        config: a run's config, which an earlier version may have saved, or the defaults.
        overrides: dotted name -> value.

    Raises:
        UserError: in one line, see `from_config_dict`.
    """
    # The run split its devices for a trainer and an engine.
    changes = {"rollout.lag": 0, "rollout.router_replay": False, "mesh.cpu_devices": 0}
    # What belongs to the engine and the functions that the run had.
    engine = config.rollout.engine
    if overrides.get("rollout.engine", engine) != engine:
        changes["rollout.engine_args"] = ""
    if config.supervised:
        changes["algorithm.loss"] = "surrogate"
    if "rewards.functions" in overrides:
        changes["rewards.weights"] = ()

    values = to_dict(config)
    values["rollout"]["local"] = {}
    for name, value in {**changes, **overrides}.items():
        replace_value(values, name, value)
    sampling_config = build(Config, values, unknown_setting)
    # Greedy, or one completion: refused for training alone.
    allowed = {"rollout.temperature": 0, "rollout.group_size": 1}
    names = {name for name, value in overrides.items() if value != allowed.get(name)}
    validate_sampling(sampling_config, names)
    return sampling_config


def for_supervision(config: Config) -> Config:
    """A config to learn from conversations: nothing is sampled, the loss is likelihood."""
    return dataclasses.replace(
        config,
        rollout=RolloutSettings(
            group_size=1, max_completion_tokens=config.rollout.max_completion_tokens
        ),
        algorithm=AlgorithmSettings(
            method="grpo",
            loss="likelihood",
            aggregation="token_mean",
            router_aux_loss=config.algorithm.router_aux_loss,
        ),
        warmup=WarmupSettings(),
        observe=dataclasses.replace(config.observe, samples=0, rollouts_every_steps=0),
        model=dataclasses.replace(config.model, forward_precision="full", forward_cache="full"),
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
    """The error for an unknown setting, with the nearest name."""
    setting = OTHER_NAMES.get(name.rpartition(".")[2])
    if setting:
        return UserError(f"config.{name}: no such setting; did you mean {setting!r}?")
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

    A setting that was not there yet has its default. Rules on values are not checked: an earlier
    version may have allowed what is refused now.

    Raises:
        UserError: in one line, for a newer version, an unknown setting, or a value of a wrong type.
    """
    # A fact of the first start, saved beside the settings.
    values = {name: value for name, value in saved.items() if name != "fitted_rows"}
    version = values.pop("config_version", 0)
    if not isinstance(version, int) or version > VERSION:
        raise UserError(
            f"config_version: got {shorten(version)}, this program knows versions up to {VERSION}"
        )
    nested: dict[str, Any] = {}
    for name, value in flatten(values).items():
        replace_value(nested, name, value)
    config = _build(nested)
    check_name(config.rollout.engine)
    return config
