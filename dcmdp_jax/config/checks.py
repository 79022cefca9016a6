"""Checks of a `Config`: each setting, the rules between them, its engine.

Library code names its own arguments: an `ArgumentError` has one as an attribute, and a message
others in back quotes. A user knows settings.
"""

import contextlib
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dcmdp_jax.config.algorithm import algorithm_rules
from dcmdp_jax.config.rollout import LOWEST_TEMPERATURE, TRAINABLE, RolloutSettings
from dcmdp_jax.config.settings import TEACHER, Config
from dcmdp_jax.config.values import build, check_choice, check_value, nearest_name
from dcmdp_jax.dotted_names import get_value
from dcmdp_jax.engines.engine_kind import EngineArguments, EngineKind
from dcmdp_jax.engines.registry import find_engine, unknown_engine
from dcmdp_jax.errors import ArgumentError, EngineError, UserError, shorten, suggestion
from dcmdp_jax.fields import INT32_MAX, declared
from dcmdp_jax.inputs import is_address, is_url, json_object
from dcmdp_jax.models.scheme import Scheme
from dcmdp_jax.user_files import is_place

# Argument of library code -> the setting that it is.
HOSTS = {name: f"hosts.{name}" for name in ("coordinator", "processes", "process", "timeout_s")}
MESH = {
    "mesh": "mesh",
    "completions": "training.prompts_per_mini_batch",
    "data": "mesh.data",
    "fsdp": "mesh.fsdp",
    "tensor": "mesh.tensor",
    "expert": "mesh.expert",
}
PACKING = {
    "limit": "rollout.max_completion_tokens",
    "max_completion_tokens": "rollout.max_completion_tokens",
    "row_lengths": "training.row_lengths",
    "segments_per_row": "training.segments_per_row",
    "completions": "training.prompts_per_mini_batch or rollout.group_size",
}
# A conversation has no group.
SUPERVISED_PACKING = PACKING | {"completions": "training.prompts_per_mini_batch"}
EPISODES = {
    "drop": "rollout.on_non_finite=drop",
    "routed_experts": "rollout.router_replay",
    "top_logprobs": "rollout.top_logprobs",
}
EVALUATION = {"task": "evaluation.task", "samples": "evaluation.samples"}
LORA = {"lora_rank": "model.lora_rank", "lora_targets": "model.lora_targets"}
REWARDS = {"memory_gib": "rewards.memory_limit"}


def of_engine(kind: EngineKind) -> dict[str, str]:
    """The settings of a run's engine, by argument."""
    section = "rollout.engine_args"
    if kind in TRAINABLE.values():
        section = f"rollout.{kind.name}"
    names = {
        "model": "model",
        "tokenizer": "model.tokenizer",
        "seed": "training.seed",
        "mesh": section,
        "routed_experts": "rollout.router_replay",
        "max_total_tokens": "task.max_prompt_tokens and rollout.max_completion_tokens",
    }
    for field in dataclasses.fields(RolloutSettings):
        names[field.name] = f"rollout.{field.name}"
    for field in dataclasses.fields(kind.settings):
        names[field.name] = f"{section}.{field.name}"
    return names


def in_settings(message: str, names: Mapping[str, str]) -> str:
    """A message whose arguments in back quotes are said as settings.

    Args:
        message: text from library code.
        names: argument -> dotted name of the setting.
    """
    for argument, setting in names.items():
        message = message.replace(f"`{argument}`", setting)
    return message


@contextlib.contextmanager
def as_settings(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about arguments leave the block as errors about settings."""
    try:
        yield
    except ArgumentError as error:
        if error.argument not in names:
            raise
        setting = names[error.argument]
        message = in_settings(error.message, names)
        raise UserError(f"config.{setting}{error.detail}: {message}") from error
    except (UserError, EngineError, MemoryError) as error:
        message = in_settings(str(error), names)
        if message == str(error):
            raise
        raise type(error)(message) from error


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
    if not kind.takes_weights:
        raise UserError(
            f"config.rollout.engine: {name} holds weights of its own; training syncs the trainer's"
        )
    return kind


def engine_of_run(config: Config) -> EngineKind:
    """The record of a run's engine; that of no engine for a run that samples nothing."""
    if config.supervised:
        return EngineKind()
    return find_trainable(config.rollout.engine)


def settings_of(rollout: RolloutSettings, kind: EngineKind) -> Any:
    """The engine's own settings: its section, or `rollout.engine_args` of an engine by path.

    Raises:
        UserError: in one line, for anything but an object, an unknown name, a wrong type or a value
            out of range.
    """
    section = "rollout.engine_args"
    if kind in TRAINABLE.values():
        if rollout.engine_args:
            raise UserError(
                f"config.{section}: only valid for user-defined engines; {kind.name} has "
                f"config.rollout.{kind.name}.*"
            )
        return get_value(rollout, kind.name)

    values = json_object(rollout.engine_args, f"config.{section}")
    names = list(declared(kind.settings))

    def unknown_setting(dotted: str) -> UserError:
        name = dotted.removeprefix(f"{section}.")
        hint = nearest_name(name, names, sections=names or ["none"])
        return UserError(f"config.{dotted}: no setting of {kind.name}; {hint}")

    settings = build(kind.settings, values, unknown_setting, f"{section}.")
    for setting in declared(kind.settings).values():
        name = f"{section}.{setting.name}"
        value = get_value(settings, setting.name)
        check_value(setting, value, name)
    return settings


def engine_arguments(
    config: Config,
    kind: EngineKind,
    host: int = 0,
    **further: Any,
) -> EngineArguments:
    """The arguments of a run's engine.

    Args:
        config: the settings.
        kind: the engine's record.
        host: index of this process, whose engine has a directory of its own.
        further: further arguments that are known by now, such as `model` and `mesh`.
    """
    rollout = config.rollout
    directory = kind.name if kind in TRAINABLE.values() else "engine"
    if host:
        directory += f"_{host}"
    arguments = EngineArguments(
        precision=rollout.precision,
        compute_dtype=rollout.compute_dtype,
        kv_cache_dtype=rollout.kv_cache_dtype,
        max_total_tokens=config.max_total_tokens,
        max_rows=rollout.max_rows,
        min_rows=rollout.min_rows,
        settings=settings_of(rollout, kind),
        routed_experts=rollout.router_replay,
        top_logprobs=rollout.top_logprobs,
        directory=Path(config.run_dir) / directory,
        lag=rollout.lag,
    )
    return dataclasses.replace(arguments, **further)


def check_engine(config: Config, kind: EngineKind) -> None:
    """Check the settings alone by the engine's record, see `engine_arguments`.

    Raises:
        UserError: in one line, naming the setting.
    """
    arguments = engine_arguments(config, kind)
    with as_settings(of_engine(kind)):
        kind.check(arguments)
        kind.check_temperature(config.rollout.temperature)
        kind.check_top_logprobs(config.rollout.top_logprobs)
    with as_settings({"temperature": "evaluation.temperature"}):
        kind.check_temperature(config.evaluation.temperature)
    if config.rollout.router_replay and not kind.routes:
        raise UserError(
            f"config.rollout.router_replay: got True, {kind.name} can't return experts; set False"
        )


def forward_scheme(config: Config, platform: str = "", **further: Any) -> Scheme:
    """The roundings of the engine that `model.forward_precision` and `model.forward_cache` repeat.

    Args:
        config: the settings.
        platform: platform of the trainer's devices; "" if it is unknown, for the checks alone.
        further: see `engine_arguments`; with `model`, roundings that it can't have are refused.

    Raises:
        UserError: in one line, for another precision or cache than the engine's, or what the
            trainer can't repeat.
    """
    model = config.model
    kind = find_trainable(config.rollout.engine)
    arguments = engine_arguments(config, kind, **further)
    _check_repeated(config, "forward_precision", "precision", kind.emulated)
    _check_repeated(config, "forward_cache", "kv_cache_dtype", kind.emulated_caches)
    names = of_engine(kind)
    for name in ("forward_precision", "forward_cache"):
        names[name] = f"model.{name}"
    with as_settings(names):
        return kind.scheme(arguments, model.forward_precision, model.forward_cache, platform)


def _check_repeated(config: Config, name: str, setting: str, emulated: Collection[str]) -> None:
    """Refuse a rounding of the trainer that is not the engine's, or that it can't repeat."""
    value = getattr(config.model, name)
    engine_value = getattr(config.rollout, setting)
    if value != "full" and (value != engine_value or value not in emulated):
        repeated = ", ".join(emulated) or "none"
        raise UserError(
            f"config.model.{name}: got {value!r} with rollout.engine={config.rollout.engine} and "
            f"rollout.{setting}={engine_value}; it is the engine's own, one of those that the "
            f"trainer can repeat ({repeated}), or 'full'"
        )


# Tests hold these equal to the names in `rewards` and `parallel/hosts`, which import JAX.
BUILT_IN_REWARDS = ("math", "environment", "last_number", "math_verify")
AUTO = "auto"
_LEAST_MEMORY_GIB = 0.125
"""Memory that Python starts in."""
_MOST_PARAMETERS = 10**11
"""Parameters of a fresh model's layers: more than anybody trains from nothing."""

Broken = Iterator[tuple[Any, ...]]
"""Broken rules: dotted name of a setting, what is wrong, and the value if not the setting's."""


def validate(config: Config, overrides: Collection[str] = ()) -> None:
    """Check a config. No function of a user is imported.

    Args:
        config: the config.
        overrides: settings that were changed after the config file: of two that do not fit, one of
            these is blamed.

    Raises:
        UserError: in one line, for the first rule that is broken, naming setting, value and what is
            allowed.
    """
    kind = find_trainable(config.rollout.engine)
    _check_each(config, kind, declared(Config))
    _refuse(config, _task_rules(config), overrides)
    check_engine(config, kind)
    forward_scheme(config)
    for rules in (_step_rules, _size_rules, _reward_rules, _teacher_rules, _host_rules):
        _refuse(config, rules(config), overrides)
    _refuse(
        config, algorithm_rules(config.algorithm, config.rollout.max_completion_tokens), overrides
    )


def validate_sampling(config: Config, names: Collection[str]) -> None:
    """Check a config whose engine samples without a trainer: settings, engine and tasks.

    Args:
        config: the config.
        names: the settings that were given.

    Raises:
        UserError: in one line, see `validate`.
    """
    with as_settings({"engine": "rollout.engine"}):
        engine = find_engine(config.rollout.engine)
    _check_each(config, engine, names)
    _refuse(config, _task_rules(config), names)
    check_engine(config, engine)
    _refuse(config, _reward_rules(config), names)


def _refuse(config: Config, broken: Broken, overrides: Collection[str]) -> None:
    """Raise for the first broken rule."""
    for name, message, *other_value in broken:
        value = other_value[0] if other_value else get_value(config, name)
        if value == "":
            raise UserError(f"config.{name}: empty; {message}")
        blamed = _blamed(config, name, message, overrides)
        if blamed == name:
            raise UserError(f"config.{name}: got {shorten(value)}, {message}")
        raise UserError(
            f"config.{blamed}: got {shorten(get_value(config, blamed))}; {name}={shorten(value)}: "
            f"{message}"
        )


def _blamed(config: Config, name: str, message: str, overrides: Collection[str]) -> str:
    """The setting of a broken rule that was changed: by an override, else from its default.

    Args:
        config: the config.
        name: the setting that the rule is about, which is blamed if it was changed, or none was.
        message: what is wrong; it names other settings of the rule in full.
        overrides: see `validate`.
    """
    words = re.findall(r"[a-z][\w.]*\w", message)
    settings = [word for word in (name, *words) if word in declared(Config)]
    for setting in settings:
        if setting in overrides:
            return setting
    defaults = Config()
    for setting in settings:
        if get_value(config, setting) != get_value(defaults, setting):
            return setting
    return name


def _check_each(config: Config, engine: EngineKind, names: Collection[str]) -> None:
    for name, setting in declared(Config).items():
        if name in names:
            check_value(setting, get_value(config, name), name)
    with_engine = f" with rollout.engine={config.rollout.engine}"
    for name, allowed in engine.choices.items():
        check_choice(f"rollout.{name}", getattr(config.rollout, name), allowed, "", with_engine)


def may_change(name: str, config: Config) -> bool:
    """Whether a resumed run may have another value of a setting. `name` is dotted."""
    if name == "training.steps" and config.optimizer.schedule != "constant":
        # The learning rate ends with the last step.
        return False
    if name == "algorithm.tolerance_factor" and not config.algorithm.tolerance_steps:
        return True  # c is given: it does nothing
    return declared(Config)[name].about.free


def _task_rules(config: Config) -> Broken:
    if 0 < config.evaluation.temperature < LOWEST_TEMPERATURE:
        yield "evaluation.temperature", f"must be 0 (greedy) or at least {LOWEST_TEMPERATURE}"
    environment = config.task.environment
    if environment and not environment.rpartition(":")[0]:
        yield (
            "task.environment",
            "allowed are module:Class, path.py:Class and tools:path.py:function,...",
        )
    if "environment" in config.rewards.names and (config.task.tools or not environment):
        fault = "name one in task.environment; tools give no reward"
        yield "rewards.functions", fault, "environment"


def _step_rules(config: Config) -> Broken:
    """The rules between the settings of training, algorithm, rollout and mesh."""
    yield from _adapter_rules(config)
    training = config.training
    algorithm = config.algorithm
    rollout = config.rollout
    if training.prompts_per_step % training.prompts_per_mini_batch:
        yield (
            "training.prompts_per_mini_batch",
            f"must divide training.prompts_per_step={training.prompts_per_step}",
        )
    if algorithm.multiplier > algorithm.multiplier_max:
        yield (
            "algorithm.multiplier_max",
            f"is below algorithm.multiplier={algorithm.multiplier}: raise it, or lower "
            "algorithm.multiplier",
        )
    yield from _row_rules(config)
    sizes = config.mesh.sizes
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        yield "mesh", "data, fsdp, tensor and expert must be positive, at most one is -1", sizes

    if config.warmup.steps and not config.warmup.task:
        yield "warmup.task", "name problems with worked solutions or set warmup.steps=0"
    if not config.task.train:
        yield "task.train", "name a .jsonl or .parquet file, a Hub dataset, or arithmetic:..."
    if config.task.environment and rollout.router_replay:
        yield (
            "rollout.router_replay",
            "must be False with task.environment: a later turn reads tokens by other experts",
        )
    if config.evaluation.every_steps and not config.evaluation.task:
        yield "evaluation.task", "name a task or set evaluation.every_steps=0"

    if algorithm.differentiates_head and not rollout.top_logprobs:
        name = "algorithm.corrections"
        if algorithm.state_penalty:
            name = "algorithm.method"
        yield (
            name,
            "needs the engine's top-k tokens; set rollout.top_logprobs=32 or more",
        )
    if rollout.cuts and rollout.top_logprobs < max(1, rollout.top_k):
        name = "rollout.top_p"
        if rollout.top_k:
            name = "rollout.top_k"
        yield (
            name,
            "the trainer needs all tokens that it keeps; set rollout.top_logprobs to their number",
        )
    if not config.run_dir:
        yield "run_dir", "name the directory that the run writes to"


def _adapter_rules(config: Config) -> Broken:
    has_adapters = config.model.lora_rank or config.model.adapter
    rollout = config.rollout
    if rollout.engine == "vllm" and rollout.vllm.adapters and not has_adapters:
        yield "rollout.vllm.adapters", "there are none: set model.lora_rank or model.adapter"
    if has_adapters and config.model.forward_precision != "full":
        yield (
            "model.forward_precision",
            "must be full with adapters, whose sum with the base the engine alone rounds",
        )


def _row_rules(config: Config) -> Broken:
    lengths = config.training.row_lengths
    longest = config.max_total_tokens
    if list(lengths) != sorted(set(lengths)):
        yield "training.row_lengths", "must rise"
    if lengths and lengths[-1] < longest:
        sum_of = "task.max_prompt_tokens + rollout.max_completion_tokens"
        yield "training.row_lengths", f"the longest must hold {sum_of} = {longest}"


def _size_rules(config: Config) -> Broken:
    """Sizes that are in bounds one by one but not together. Python's integers do not overflow."""
    shape = config.model.architecture
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    # The 1 counts the router, generously: it has a row of hidden_size for each expert.
    width = max(shape.intermediate_size, shape.num_experts * (shape.moe_intermediate_size + 1))
    parameters = shape.num_layers * (attention + 3 * shape.hidden_size * width)
    if not config.model.path and parameters > _MOST_PARAMETERS:
        fault = f"must have at most {_MOST_PARAMETERS:,} parameters in its layers"
        yield "model.architecture", fault, parameters

    training = config.training
    rollout = config.rollout
    tokens = config.max_total_tokens
    warmup_rows = config.warmup.batch_size if config.warmup.steps else 0
    row_unit = "tokens of prompt and completion"
    for name, size, unit in (
        (
            "training.prompts_per_step",
            training.prompts_per_step * rollout.group_size * tokens,
            f"{row_unit} with {rollout.group_size=}",
        ),
        ("rollout.max_rows", rollout.max_rows * tokens, row_unit),
        ("warmup.batch_size", warmup_rows * tokens, row_unit),
        ("training.steps", training.steps * config.mini_batches, "updates"),
    ):
        if size > INT32_MAX:
            yield name, f"its {size:,} {unit} must be at most {INT32_MAX:,} (counted in int32)"


def _host_rules(config: Config) -> Broken:
    """The rules between the settings of several hosts."""
    hosts = config.hosts
    prompts = config.training.prompts_per_step
    if not hosts.coordinator and (hosts.processes > 1 or hosts.process):
        yield (
            "hosts.coordinator",
            f"with {hosts.processes} processes give host:port of process 0, or auto",
        )
    if hosts.coordinator in ("", AUTO):
        return
    if not is_address(hosts.coordinator):
        yield (
            "hosts.coordinator",
            "must be host:port (1 to 65535; an IPv6 host in brackets), or auto",
        )
    if hosts.process >= hosts.processes:
        yield "hosts.process", f"must be below hosts.processes={hosts.processes}"
    if prompts < hosts.processes:
        yield (
            "training.prompts_per_step",
            f"must be at least hosts.processes={hosts.processes}: each samples its share",
        )


def _teacher_rules(config: Config) -> Broken:
    """The rules of training with a teacher; its model is not looked at."""
    teacher, _ = config.teacher
    if teacher and config.algorithm.drop_equal_groups:
        yield (
            "algorithm.drop_equal_groups",
            "must be False with a teacher, which teaches where rewards are equal too",
        )
    if not teacher or config.loads_teacher:
        return
    # A server has the teacher.
    if teacher.startswith("http") and not is_url(teacher):
        yield (
            "rewards.functions",
            "must be teacher:http://host:port (1 to 65535) or https://host",
            teacher,
        )
    if config.rollout.cuts or config.rollout.temperature != 1:
        yield (
            "rollout.temperature",
            "must be 1, with top_p=1 and top_k=0: a teacher's server scores nothing else",
        )


def _reward_rules(config: Config) -> Broken:
    """Names and weights of the functions. Nothing is imported."""
    names = config.rewards.names
    weights = config.rewards.weights
    for name in names:
        is_teacher = name.startswith(TEACHER) and not name.endswith(":")
        if name in BUILT_IN_REWARDS or is_place(name) or is_teacher:
            continue
        allowed = (
            f"{', '.join(BUILT_IN_REWARDS)}, teacher:MODEL, module:function and path.py:function"
        )
        fault = f"allowed are {allowed}{suggestion(name, BUILT_IN_REWARDS)}"
        yield "rewards.functions", fault, name

    if len(set(names)) < len(names):
        yield "rewards.functions", "must name each once; raise its weight instead"
    if sum(name.startswith(TEACHER) for name in names) > 1:
        yield "rewards.functions", "must name one teacher at most"
    if weights and len(weights) != len(names):
        yield "rewards.weights", f"must be one for each of the {len(names)} functions, or empty"
    if weights and not any(weights):
        yield "rewards.weights", "nothing would be learned; one must be another number than 0"
    if 0 < config.rewards.memory_limit < _LEAST_MEMORY_GIB:
        yield (
            "rewards.memory_limit",
            f"must be 0 (no limit) or at least {_LEAST_MEMORY_GIB} GiB: Python starts in it",
        )
