"""Checks of a `Config`: each setting against its declaration, then the rules between settings.

`config/settings.py` imports this module, so `Config` is not named in the types here.
"""

from __future__ import annotations

import difflib
from typing import Any

from dcmdp_jax.config.fields import INT32_MAX, Declared, declared, get_value
from dcmdp_jax.config.rollout import LOWEST_TEMPERATURE, QUANTIZED, RolloutSettings
from dcmdp_jax.errors import UserError
from dcmdp_jax.inputs import shorten

_LONGEST_ROW = 2**21
_MOST_ROW_LENGTHS = 64
_MOST_PARAMETERS = 10**11
_MOST_SAMPLES = 4096
_MOST_COMPLETIONS = 2**20


def validate(config: Any) -> None:
    """Check a config.

    Raises:
        UserError: in one line, for the first rule that is broken, naming setting, value and what is allowed.
    """
    settings = declared(type(config))
    for one in settings.values():
        _check_choice(one.name, get_value(config, one.name), one.about.choices, one.about.why)
    engine = config.rollout.engine
    for name, allowed in engine_choices(type(config), engine).items():
        _check_choice(name, get_value(config, name), allowed, "", f" with rollout.engine={engine}")
    for one in settings.values():
        if one.type in (int, float):
            _check_range(one, get_value(config, one.name))
    _check_between(config)
    _check_products(config)


def engine_choices(kind: type, engine: str) -> dict[str, tuple[str, ...]]:
    """Allowed values of the settings that depend on the engine, by dotted name."""
    settings = declared(kind).values()
    return {one.name: one.about.engine_choices[engine] for one in settings if engine in one.about.engine_choices}


def may_change(name: str, config: Any) -> bool:
    """Whether a resumed run may have another value of a setting. `name` is dotted."""
    if name == "training.steps" and config.optimizer.schedule != "constant":
        # The learning rate ends with the last step.
        return False
    return declared(type(config))[name].about.free


def _check_choice(name: str, value: object, allowed: tuple[str, ...], why: str, when: str = "") -> None:
    if allowed and value not in allowed:
        near = [choice for choice in allowed if str(value) and choice.startswith(str(value))]
        near = near or difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        reason = f" ({why})" if why else ""
        raise UserError(f"config.{name}: got {shorten(value)}, allowed{when} are {', '.join(allowed)}{reason}{hint}")


def _check_range(one: Declared, value: float) -> None:
    low, high, limit = one.about.minimum, one.about.maximum, one.limit()
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        reason = f" ({one.about.why})" if one.about.why else ""
        raise UserError(f"config.{one.name}: got {value}, must be {bounds}{reason}")
    if limit is not None and value > limit[0]:
        raise UserError(f"config.{one.name}: got {value}, must be at most {limit[0]} ({limit[1]})")


def _check_between(config: Any) -> None:
    if 0 < config.evaluation.temperature < LOWEST_TEMPERATURE:
        raise UserError(
            f"config.evaluation.temperature: got {config.evaluation.temperature}, must be 0 (greedy) or at least "
            f"{LOWEST_TEMPERATURE} (below it log-probs reach their clamp at -10000 nats)"
        )
    if wrong := [number for number in config.evaluation.samples if not 1 <= number <= _MOST_SAMPLES]:
        why = f"at most {_MOST_SAMPLES} (avg@4096 of one problem has a standard error of 0.008 at most)"
        raise UserError(f"config.evaluation.samples: got {wrong[0]}, must be {why if wrong[0] > 0 else 'at least 1'}")
    if config.rollout.engine == "vllm":
        _check_vllm_dtypes(config.rollout)
    elif config.rollout.compute_dtype == "float16" and config.rollout.precision in QUANTIZED["local"]:
        raise UserError(
            f"config.rollout.compute_dtype: got 'float16' with rollout.precision={config.rollout.precision!r}, whose "
            "products before scaling leave float16's range; choose bfloat16 or float32"
        )
    forward, rollout = config.model.forward_precision, config.rollout
    if forward != "full" and (rollout.engine, rollout.precision) != ("local", forward):
        raise UserError(
            f"config.model.forward_precision: got {forward!r} with rollout.engine={rollout.engine} and "
            f"rollout.precision={rollout.precision}; it matches the local engine at the same precision, or is 'full'"
        )
    training, algorithm = config.training, config.algorithm
    if training.prompts_per_step % training.prompts_per_mini_batch:
        raise UserError(
            f"config.training.prompts_per_mini_batch: got {training.prompts_per_mini_batch}, must divide "
            f"training.prompts_per_step={training.prompts_per_step}"
        )
    if not algorithm.multiplier_min <= algorithm.multiplier <= algorithm.multiplier_max:
        raise UserError(
            f"config.algorithm.multiplier: got {algorithm.multiplier}, must lie in [multiplier_min, multiplier_max] = "
            f"[{algorithm.multiplier_min}, {algorithm.multiplier_max}]"
        )
    if training.row_lengths:
        if list(training.row_lengths) != sorted(set(training.row_lengths)) or training.row_lengths[0] < 1:
            raise UserError(f"config.training.row_lengths: got {training.row_lengths}, must rise from at least 1")
        if training.row_lengths[-1] > _LONGEST_ROW or len(training.row_lengths) > _MOST_ROW_LENGTHS:
            raise UserError(
                f"config.training.row_lengths: got {len(training.row_lengths)} lengths up to "
                f"{training.row_lengths[-1]}, must be at most {_MOST_ROW_LENGTHS} (a program is compiled for each) up "
                f"to {_LONGEST_ROW}"
            )
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
    if config.evaluation.every_steps and not config.evaluation.task:
        raise UserError("config.evaluation.task: empty; name a task or set evaluation.every_steps=0")
    if not config.run_dir:
        raise UserError("config.run_dir: empty; name the directory that the run writes to")


def _check_products(config: Any) -> None:
    """Sizes that are each in bounds and together are not. Python's integers do not overflow."""
    shape, training, rollout = config.model.architecture, config.training, config.rollout
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    width = max(shape.intermediate_size, shape.num_experts * shape.moe_intermediate_size)
    parameters = shape.num_layers * (attention + 3 * shape.hidden_size * width)
    if not config.model.path and parameters > _MOST_PARAMETERS:
        raise UserError(
            f"config.model.architecture: got {parameters:,} parameters in its layers, must be at most "
            f"{_MOST_PARAMETERS:,} (1.6 TB of parameters, gradients and Adam's moments)"
        )
    completions = training.prompts_per_step * rollout.group_size
    if completions > _MOST_COMPLETIONS:
        raise UserError(
            f"config.training.prompts_per_step: got {training.prompts_per_step}, with rollout.group_size="
            f"{rollout.group_size} {completions:,} completions a step, must be at most {_MOST_COMPLETIONS:,} "
            "(one process judges and packs them; the paper uses 512)"
        )
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


def _check_vllm_dtypes(rollout: RolloutSettings) -> None:
    """vLLM has one dtype for whatever is not quantized."""
    precision, dtype = rollout.precision, rollout.compute_dtype
    if precision in ("float32", "float16", "bfloat16") and precision != dtype:
        raise UserError(
            f"config.rollout.compute_dtype: got {dtype!r} with rollout.precision={precision!r}; vLLM has one dtype for "
            f"weights and activations, set both alike"
        )
    if precision in QUANTIZED["vllm"] and dtype != "bfloat16":
        raise UserError(
            f"config.rollout.compute_dtype: got {dtype!r} with rollout.precision={precision!r}; vLLM computes "
            "quantized layers in bfloat16, set that"
        )
