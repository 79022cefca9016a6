"""What the settings of a run may be: choices, ranges, and the rules between them."""

from __future__ import annotations

import difflib
from typing import Any

CHOICES = {
    "model.param_dtype": ("float32", "bfloat16"),
    "model.compute_dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "dots", "full"),
    "model.attention": ("auto", "xla", "cudnn", "splash"),
    "task.on_bad_row": ("error", "skip"),
    "rollout.engine": ("local", "vllm"),
    "rollout.precision": ("exact", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_per_block"),
    "rollout.compute_dtype": ("float32", "bfloat16", "float16"),
    "rollout.kv_cache_dtype": ("auto", "fp8", "fp8_e5m2"),
    "rollout.on_non_finite": ("error", "drop"),
    "algorithm.method": ("grpo", "dual_grpo", "threshold_grpo", "dc_grpo"),
    "algorithm.measure": ("diff", "ratio", "log"),
    "algorithm.sided": ("two", "one"),
    "algorithm.level": ("token", "sequence"),
    "algorithm.aggregation": ("seq_mean_token_mean", "token_mean", "fixed_length"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
}

# What each engine has of them.
ENGINE_CHOICES = {
    "local": {
        "rollout.precision": ("exact", "float32", "bfloat16", "int8", "fp8"),
        "rollout.compute_dtype": ("float32", "bfloat16"),
        "rollout.kv_cache_dtype": ("auto", "fp8"),
    },
    "vllm": {
        "rollout.precision": ("float32", "float16", "bfloat16", "int8", "fp8_per_block"),
        "rollout.compute_dtype": ("float32", "bfloat16", "float16"),
        "rollout.kv_cache_dtype": ("auto", "fp8", "fp8_e5m2"),
    },
}

# name: (lowest, highest), both allowed; None is no bound.
RANGES: dict[str, tuple[float | None, float | None]] = {
    "model.scan_unroll": (1, None),
    "model.logprob_chunk": (1, None),
    "task.max_prompt_tokens": (1, None),
    "task.verifier_workers": (1, None),
    "task.verifier_timeout": (0.01, None),
    "rollout.max_rows": (1, None),
    "rollout.min_rows": (1, None),
    "rollout.group_size": (2, None),
    "rollout.max_completion_tokens": (1, None),
    "rollout.vllm.tensor_parallel_size": (1, None),
    "rollout.vllm.memory_share": (0.01, 1),
    "rollout.vllm.kv_cache_gib": (0, None),
    "rollout.vllm.cpu_threads": (1, None),
    "rollout.vllm.start_timeout_s": (1, None),
    "rollout.vllm.stall_timeout_s": (1, None),
    "rollout.vllm.max_restarts": (0, None),
    "rollout.vllm.probe_tolerance": (0, None),
    "algorithm.multiplier_min": (0, None),
    "algorithm.tolerance": (0, None),
    "algorithm.dual_learning_rate": (0, None),
    "algorithm.dual_window": (1, None),
    "algorithm.clip_low": (0, 0.999999),
    "algorithm.clip_high": (0, None),
    "algorithm.std_ddof": (0, 1),
    "algorithm.std_epsilon": (0, None),
    "algorithm.kl_coefficient": (0, None),
    "training.steps": (1, None),
    "training.prompts_per_step": (1, None),
    "training.prompts_per_mini_batch": (1, None),
    "training.micro_batch_tokens": (1, None),
    "training.segments_per_row": (0, None),
    "training.seed": (0, 2**31 - 1),
    "training.max_skipped_in_row": (1, None),
    "optimizer.learning_rate": (0, None),
    "optimizer.schedule_warmup_steps": (0, None),
    "optimizer.beta1": (0, 0.999999),
    "optimizer.beta2": (0, 0.999999),
    "optimizer.epsilon": (1e-30, None),
    "optimizer.weight_decay": (0, None),
    "optimizer.max_grad_norm": (0, None),
    "warmup.steps": (0, None),
    "warmup.batch_size": (1, None),
    "warmup.learning_rate": (0, None),
    "evaluation.every_steps": (0, None),
    "evaluation.samples": (1, None),
    "evaluation.temperature": (0, None),
    "evaluation.max_problems": (0, None),
    "checkpoint.every_steps": (1, None),
    "checkpoint.keep_last": (1, None),
    "checkpoint.keep_best": (0, None),
    "observe.samples_every_steps": (1, None),
    "observe.samples": (0, None),
    "mesh.cpu_devices": (0, None),
}


def _get(config: Any, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def _check_choice(config: Any, name: str, allowed: tuple[str, ...], when: str = "") -> None:
    if (value := _get(config, name)) not in allowed:
        near = [choice for choice in allowed if str(value) and choice.startswith(str(value))]
        near = near or difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"config.{name}: got {value!r}, allowed{when} are {', '.join(allowed)}{hint}")


def validate(config: Any) -> None:
    """Holds every rule against a config.

    Args:
        config: a `Config`, which checks itself with this when it is made.

    Raises:
        ValueError: in one line, for the first that is broken.
    """
    for name, allowed in CHOICES.items():
        _check_choice(config, name, allowed)
    for name, allowed in ENGINE_CHOICES[config.rollout.engine].items():
        _check_choice(config, name, allowed, f" with rollout.engine={config.rollout.engine}")
    for name, (low, high) in RANGES.items():
        value = _get(config, name)
        if not ((low is None or value >= low) and (high is None or value <= high)):
            bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
            reason = " (one completion has no group to be compared with)" if name == "rollout.group_size" else ""
            raise ValueError(f"config.{name}: got {value}, must be {bounds}{reason}")
    if config.rollout.top_p != 1.0:
        raise ValueError(
            f"config.rollout.top_p: got {config.rollout.top_p}, training needs 1.0: the engine renormalises over the "
            "nucleus and its probabilities can no longer be compared with the trainer's"
        )
    if not config.rollout.temperature > 0:
        raise ValueError(f"config.rollout.temperature: got {config.rollout.temperature}, must be above 0 to train")
    if config.rollout.engine == "vllm":
        _check_vllm_dtypes(config.rollout)
    training, algorithm = config.training, config.algorithm
    if training.prompts_per_step % training.prompts_per_mini_batch:
        raise ValueError(
            f"config.training.prompts_per_mini_batch: got {training.prompts_per_mini_batch}, must divide "
            f"training.prompts_per_step={training.prompts_per_step}"
        )
    if not algorithm.multiplier_min <= algorithm.multiplier <= algorithm.multiplier_max:
        raise ValueError(
            f"config.algorithm.multiplier: got {algorithm.multiplier}, must lie in [multiplier_min, multiplier_max] = "
            f"[{algorithm.multiplier_min}, {algorithm.multiplier_max}]"
        )
    if training.row_lengths:
        if list(training.row_lengths) != sorted(set(training.row_lengths)) or training.row_lengths[0] < 1:
            raise ValueError(f"config.training.row_lengths: got {training.row_lengths}, must rise from at least 1")
        if training.row_lengths[-1] < config.max_total_tokens:
            raise ValueError(
                f"config.training.row_lengths: longest is {training.row_lengths[-1]}, must hold task.max_prompt_tokens "
                f"+ rollout.max_completion_tokens = {config.max_total_tokens}"
            )
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"config.mesh: got data, fsdp, tensor = {sizes}, sizes are positive and at most one is -1")
    if config.warmup.steps and not config.warmup.task:
        raise ValueError("config.warmup.task: empty; name problems with worked solutions or set warmup.steps=0")
    if not config.task.train:
        raise ValueError("config.task.train: empty; name a .jsonl or .parquet file, a Hub data set, or arithmetic:...")
    if config.evaluation.every_steps and not config.evaluation.task:
        raise ValueError("config.evaluation.task: empty; name a task or set evaluation.every_steps=0")
    if not config.run_dir:
        raise ValueError("config.run_dir: empty; name the directory that the run writes to")


def _check_vllm_dtypes(rollout: Any) -> None:
    """vLLM has one dtype for whatever is not quantised."""
    precision, dtype = rollout.precision, rollout.compute_dtype
    if precision in ("float32", "float16", "bfloat16") and precision != dtype:
        raise ValueError(
            f"config.rollout.compute_dtype: got {dtype!r} with rollout.precision={precision!r}; vLLM has one dtype for "
            f"weights and activations, set both alike"
        )
    if precision in ("int8", "fp8_per_block") and dtype != "bfloat16":
        raise ValueError(
            f"config.rollout.compute_dtype: got {dtype!r} with rollout.precision={precision!r}; vLLM computes "
            "quantised layers in bfloat16, set that"
        )
