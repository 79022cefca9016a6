"""Checks of a `Config`: each setting against its declaration, then the rules between settings.

`config/settings.py` imports this module, so `Config` is not named in the types here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from typing import Any

from dcmdp_jax.config.arguments import as_settings
from dcmdp_jax.config.engine import check_engine, find_trainable, forward_scheme
from dcmdp_jax.config.rollout import LOWEST_TEMPERATURE, TRAINABLE
from dcmdp_jax.engines.kind import EngineKind
from dcmdp_jax.engines.registry import find_engine
from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import INT32_MAX, check_choice, check_range, declared, get_value
from dcmdp_jax.inputs import shorten

# Tests hold these and the names that `environments`, `rewards` and `parallel/hosts` know together, which import JAX.
ENVIRONMENTS = ("calculator",)
BUILT_IN_REWARDS = ("math", "environment", "last_number", "math_verify", "reasoning_gym", "verifiers")
AUTO = "auto"
_LARGEST_WEIGHT = 1e6
_LEAST_MEMORY_GIB = 0.125
_MOST_PARAMETERS = 10**11
_MOST_SAMPLES = 4096


def validate(config: Any) -> None:
    """Check a config.

    Raises:
        UserError: in one line, for the first rule that is broken, naming setting, value and what is allowed.
    """
    _check_each(config, find_trainable(config.rollout.engine), declared(type(config)))
    _check_between(config)
    _check_products(config)


def validate_sampling(config: Any, names: Collection[str]) -> None:
    """Check a config whose engine samples without a trainer: its given settings, and rules of engine and tasks.

    Raises:
        UserError: as `validate`.
    """
    with as_settings({"engine": "rollout.engine"}):
        engine = find_engine(config.rollout.engine)
    _check_each(config, engine, names)
    _check_tasks(config)
    check_engine(config, engine)


def _check_each(config: Any, engine: EngineKind, names: Collection[str]) -> None:
    settings = [one for name, one in declared(type(config)).items() if name in names]
    for one in settings:
        # An engine by path has choices of its own.
        if not one.about.engine_choices or engine in TRAINABLE.values():
            check_choice(one.name, get_value(config, one.name), one.about.choices, one.about.why)
    for name, allowed in engine.choices.items():
        with_engine = f" with rollout.engine={config.rollout.engine}"
        check_choice(f"rollout.{name}", get_value(config.rollout, name), allowed, "", with_engine)
    for one in settings:
        check_range(one, get_value(config, one.name), one.name)


def may_change(name: str, config: Any) -> bool:
    """Whether a resumed run may have another value of a setting. `name` is dotted."""
    if name == "training.steps" and config.optimizer.schedule != "constant":
        # The learning rate ends with the last step.
        return False
    if name == "algorithm.tolerance_factor" and not config.algorithm.tolerance_steps:
        return True  # c is given: it does nothing, and an earlier version had another default
    return declared(type(config))[name].about.free


def _check_tasks(config: Any) -> None:
    if 0 < config.evaluation.temperature < LOWEST_TEMPERATURE:
        raise UserError(
            f"config.evaluation.temperature: got {config.evaluation.temperature}, must be 0 (greedy) or at least "
            f"{LOWEST_TEMPERATURE} (below it log-probs reach their clamp at -10000 nats)"
        )
    if wrong := [number for number in config.evaluation.samples if not 1 <= number <= _MOST_SAMPLES]:
        why = f"at most {_MOST_SAMPLES} (avg@4096 of one problem has a standard error of 0.008 at most)"
        raise UserError(f"config.evaluation.samples: got {wrong[0]}, must be {why if wrong[0] > 0 else 'at least 1'}")
    environment, names = config.task.environment, config.rewards.names
    if environment and environment not in ENVIRONMENTS and not environment.rpartition(":")[0]:
        raise UserError(
            f"config.task.environment: got {shorten(environment)}, allowed are {', '.join(ENVIRONMENTS)}, module:Class "
            "and path.py:Class"
        )
    if "environment" in names and not environment:
        raise UserError("config.rewards.functions: got 'environment' without task.environment, name one there")


def _check_between(config: Any) -> None:
    _check_tasks(config)
    check_engine(config)
    forward_scheme(config)
    rollout, training, algorithm = config.rollout, config.training, config.algorithm
    if training.prompts_per_step % training.prompts_per_mini_batch:
        raise UserError(
            f"config.training.prompts_per_mini_batch: got {training.prompts_per_mini_batch}, must divide "
            f"training.prompts_per_step={training.prompts_per_step}"
        )
    if not 0 <= algorithm.multiplier <= algorithm.multiplier_max:
        raise UserError(
            f"config.algorithm.multiplier: got {algorithm.multiplier}, must lie in [0, multiplier_max] = "
            f"[0, {algorithm.multiplier_max}]"
        )
    if training.row_lengths:
        if list(training.row_lengths) != sorted(set(training.row_lengths)) or training.row_lengths[0] < 1:
            raise UserError(f"config.training.row_lengths: got {training.row_lengths}, must rise from at least 1")
        if training.row_lengths[-1] < config.max_total_tokens:
            raise UserError(
                f"config.training.row_lengths: longest is {training.row_lengths[-1]}, must hold task.max_prompt_tokens "
                f"+ rollout.max_completion_tokens = {config.max_total_tokens}"
            )
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor, config.mesh.expert
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(f"config.mesh: got data, fsdp, tensor, expert = {sizes}, sizes are positive, at most one is -1")
    if config.warmup.steps and not config.warmup.task:
        raise UserError("config.warmup.task: empty; name problems with worked solutions or set warmup.steps=0")
    if not config.task.train:
        raise UserError("config.task.train: empty; name a .jsonl or .parquet file, a Hub dataset, or arithmetic:...")
    if config.task.environment and rollout.router_replay:
        raise UserError(
            "config.rollout.router_replay: got True with task.environment; a later turn reads earlier tokens "
            "again, with other experts; set one of the two off"
        )
    if config.evaluation.every_steps and not config.evaluation.task:
        raise UserError("config.evaluation.task: empty; name a task or set evaluation.every_steps=0")
    if not config.run_dir:
        raise UserError("config.run_dir: empty; name the directory that the run writes to")


def _check_products(config: Any) -> None:
    """Sizes that are each in bounds and together are not. Python's integers do not overflow."""
    shape, training, rollout = config.model.architecture, config.training, config.rollout
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    width = max(shape.intermediate_size, shape.num_experts * (shape.moe_intermediate_size + 1))
    parameters = shape.num_layers * (attention + 3 * shape.hidden_size * width)
    if not config.model.path and parameters > _MOST_PARAMETERS:
        raise UserError(
            f"config.model.architecture: got {parameters:,} parameters in its layers, must be at most "
            f"{_MOST_PARAMETERS:,} (1.6 TB of parameters, gradients and Adam's moments)"
        )
    completions = training.prompts_per_step * rollout.group_size
    tokens = config.max_total_tokens
    products = (
        ("training.prompts_per_step", f"with rollout.group_size={rollout.group_size} and", completions),
        ("rollout.max_rows", "with", rollout.max_rows),
        ("warmup.batch_size", "with", config.warmup.batch_size if config.warmup.steps else 0),
    )
    for name, joined, rows in products:
        if rows * tokens > INT32_MAX:
            raise UserError(
                f"config.{name}: got {get_value(config, name)}, {joined} {tokens} tokens of prompt and completion "
                f"{rows * tokens:,} tokens, must be at most {INT32_MAX:,} (tokens are counted in int32)"
            )
    if training.steps * config.mini_batches > INT32_MAX:
        raise UserError(
            f"config.training.steps: got {training.steps}, with {config.mini_batches} updates a step "
            f"{training.steps * config.mini_batches:,} updates, must be at most {INT32_MAX:,} (counted in int32)"
        )


def check_hosts(hosts: Any, prompts_per_step: int) -> None:
    """Check the rules between the settings of several hosts.

    Raises:
        UserError: in one line, naming setting, value and what is allowed.
    """
    if not hosts.coordinator:
        if hosts.processes > 1 or hosts.process:
            raise UserError(
                f"config.hosts.coordinator: empty, with {hosts.processes} processes; give host:port of process 0, or "
                "auto"
            )
        return
    if hosts.coordinator == AUTO:
        return
    name, _, port = hosts.coordinator.rpartition(":")
    if not name or not port.isdecimal() or not port.isascii() or not 0 < int(port) < 65536:
        raise UserError(f"config.hosts.coordinator: got {shorten(hosts.coordinator)}, must be host:port, or auto")
    if hosts.process >= hosts.processes:
        raise UserError(f"config.hosts.process: got {hosts.process}, must be below hosts.processes={hosts.processes}")
    if prompts_per_step < hosts.processes:
        raise UserError(
            f"config.training.prompts_per_step: got {prompts_per_step}, must be at least hosts.processes="
            f"{hosts.processes}: each samples its share"
        )


def check_rewards(rewards: Any) -> None:
    """Check names and weights. Nothing is imported.

    Raises:
        UserError: in one line, naming setting, value and what is allowed.
    """
    names, weights = rewards.names, rewards.weights
    for name in names:
        place, _, function = name.rpartition(":")
        if name in BUILT_IN_REWARDS or (place and function.isidentifier()):
            continue
        near = difflib.get_close_matches(name, BUILT_IN_REWARDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"config.rewards.functions: got {shorten(name)}, allowed are "
            f"{', '.join(BUILT_IN_REWARDS)}, module:function and "
            f"path.py:function{hint}"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"config.rewards.functions: got {shorten(twice)} twice, name it once and raise its weight")
    if weights and len(weights) != len(names):
        raise UserError(
            f"config.rewards.weights: got {len(weights)} for the {len(names)} functions {rewards.functions}, must be "
            "one for each, or empty"
        )
    if 0 < rewards.memory_limit < _LEAST_MEMORY_GIB:
        raise UserError(
            f"config.rewards.memory_limit: got {rewards.memory_limit} GiB, must be 0 (no limit) or at least "
            f"{_LEAST_MEMORY_GIB} GiB, in which Python starts"
        )
    if weights and not any(weights):
        raise UserError("config.rewards.weights: got only 0, nothing would be learned; one must be another number")
    for weight in weights:
        if not math.isfinite(weight) or abs(weight) > _LARGEST_WEIGHT:
            raise UserError(
                f"config.rewards.weights: got {weight}, must be in [-{_LARGEST_WEIGHT:g}, {_LARGEST_WEIGHT:g}] "
                "(advantages are float32)"
            )
