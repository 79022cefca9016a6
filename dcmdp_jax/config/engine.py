"""The engine that a config names: its record, its settings, its arguments, and the rules between them."""

from pathlib import Path
from typing import Any

from dcmdp_jax.config.arguments import as_settings, of_engine
from dcmdp_jax.config.rollout import TRAINABLE, RolloutSettings
from dcmdp_jax.config.settings import Config
from dcmdp_jax.engines.engine_kind import EngineArguments, EngineKind
from dcmdp_jax.engines.registry import find_engine, unknown_engine
from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import build, check_choice, check_range, declared, get_value, nearest_name
from dcmdp_jax.inputs import json_object
from dcmdp_jax.models.scheme import Scheme
from dcmdp_jax.user_code import is_place

_ARGUMENTS = ("precision", "compute_dtype", "kv_cache_dtype", "max_rows", "min_rows", "top_logprobs", "lag")
"""Arguments of an engine that are settings of the rollout."""


def check_name(name: str) -> None:
    """Refuse a name that does not denote a trainable engine. Nothing is imported.

    Raises:
        UserError: in one line, naming the setting.
    """
    if name not in TRAINABLE and not is_place(name):
        raise UserError(f"config.rollout.{unknown_engine(name, tuple(TRAINABLE))}")


def find_trainable(name: str) -> EngineKind:
    """The record of an engine that takes the trainer's weights; one by path is imported.

    Raises:
        UserError: in one line, naming the setting.
    """
    check_name(name)
    with as_settings({"engine": "rollout.engine"}):
        kind = find_engine(name)
    if not kind.pushes:
        raise UserError(f"config.rollout.engine: {name} holds weights of its own; training pushes the trainer's")
    return kind


def settings_of(rollout: RolloutSettings, kind: EngineKind) -> Any:
    """The engine's own settings: its section, or the JSON object `rollout.engine_args` for an engine by path.

    Raises:
        UserError: in one line, for anything but an object, an unknown name, a wrong type or a value out of range.
    """
    section, given = "rollout.engine_args", rollout.engine_args
    if kind in TRAINABLE.values():
        if given:
            own = f"config.rollout.{kind.name}.*"
            raise UserError(f"config.{section}: only valid for user-defined engines; {kind.name} has {own}")
        return get_value(rollout, kind.name)
    values, known = json_object(given, f"config.{section}"), declared(kind.settings)

    def unknown(dotted: str) -> UserError:
        near = nearest_name(dotted.removeprefix(f"{section}."), list(known), list(known) or ["none"])
        return UserError(f"config.{dotted}: no setting of {kind.name}; {near}")

    made = build(kind.settings, values, unknown, f"{section}.")
    for one in known.values():
        name, value = f"{section}.{one.name}", get_value(made, one.name)
        check_choice(name, value, one.about.choices, one.about.why)
        check_range(one, value, name)
    return made


def engine_arguments(
    config: Config, host: int = 0, *, kind: EngineKind | None = None, **found: Any
) -> tuple[EngineKind, EngineArguments]:
    """The engine of a run and its arguments.

    Args:
        config: the settings.
        host: index of this process, whose engine has a directory of its own.
        kind: the engine's record; None for one that can be trained with.
        found: further arguments that are known by now, such as `model` and `mesh`.
    """
    rollout = config.rollout
    kind = kind or find_trainable(rollout.engine)
    directory = (kind.name if kind in TRAINABLE.values() else "engine") + (f"_{host}" if host else "")
    known = {name: getattr(rollout, name) for name in _ARGUMENTS} | {
        "max_total_tokens": config.max_total_tokens,
        "settings": settings_of(rollout, kind),
        "routed_experts": rollout.router_replay,
        "directory": Path(config.run_dir) / directory,
    }
    return kind, EngineArguments(**known | found)


def check_engine(config: Config, kind: EngineKind | None = None) -> None:
    """Check the settings alone by the engine's record, see `engine_arguments`.

    Raises:
        UserError: in one line, naming the setting.
    """
    kind, arguments = engine_arguments(config, kind=kind)
    with as_settings(of_engine(kind)):
        kind.check(arguments)
        kind.check_temperature(config.rollout.temperature)
        kind.check_top_logprobs(config.rollout.top_logprobs)
    with as_settings({"temperature": "evaluation.temperature"}):
        kind.check_temperature(config.evaluation.temperature)
    if config.rollout.router_replay and not kind.routes:
        raise UserError(f"config.rollout.router_replay: got True, {kind.name} can't return experts; set False")


def forward_scheme(config: Config, platform: str = "", **found: Any) -> Scheme:
    """The roundings of the engine that `model.forward_precision` and `model.forward_cache` repeat.

    Args:
        config: the settings.
        platform: platform of the trainer's devices; "" if it is unknown, for the checks alone.
        found: see `engine_arguments`; with `model`, roundings that it can't have are refused.

    Raises:
        UserError: in one line, for another precision or cache than the engine's, or what the trainer can't repeat.
    """
    model, rollout = config.model, config.rollout
    kind, arguments = engine_arguments(config, **found)
    for name, chosen, setting, emulated in (
        ("forward_precision", model.forward_precision, "precision", kind.emulated),
        ("forward_cache", model.forward_cache, "kv_cache_dtype", kind.emulated_caches),
    ):
        if chosen != "full" and (chosen != (own := getattr(rollout, setting)) or chosen not in emulated):
            repeated = ", ".join(emulated) or "none"
            raise UserError(
                f"config.model.{name}: got {chosen!r} with rollout.engine={rollout.engine} and rollout.{setting}="
                f"{own}; it is the engine's own, one of those that the trainer can repeat ({repeated}), or 'full'"
            )
    with as_settings(of_engine(kind) | {name: f"model.{name}" for name in ("forward_precision", "forward_cache")}):
        return kind.scheme(arguments, model.forward_precision, model.forward_cache, platform)
