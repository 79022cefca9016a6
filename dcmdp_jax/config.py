"""Every setting of a run as frozen dataclasses, made and checked once from a ConfigDict.

`configs/base.py` holds the values, with unit and source; here are names, types and the rules between them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Shape of a freshly initialised model, used when `model.path` is empty."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    tie_word_embeddings: bool


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Which model, in which precision, computed how."""

    path: str
    tokenizer: str
    architecture: Architecture
    param_dtype: str
    compute_dtype: str
    remat: str
    scan_unroll: int
    attention: str
    logprob_chunk: int


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """Where problems come from and how they become prompts and rewards."""

    train: str
    prompt_suffix: str
    max_prompt_tokens: int
    on_bad_row: str
    verifier_workers: int
    verifier_timeout: float


@dataclasses.dataclass(frozen=True)
class VllmSettings:
    """The vLLM sidecar, used with `rollout.engine=vllm`."""

    python: str
    tensor_parallel_size: int
    expert_parallel: bool
    visible_devices: str
    memory_share: float
    kv_cache_gib: float
    cpu_threads: int
    engine_args: str
    start_timeout_s: float
    stall_timeout_s: float
    max_restarts: int
    probe_tolerance: float


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """The inference engine and the distribution it samples from."""

    engine: str
    precision: str
    compute_dtype: str
    kv_cache_dtype: str
    max_rows: int
    min_rows: int
    group_size: int
    max_completion_tokens: int
    temperature: float
    top_p: float
    on_non_finite: str
    vllm: VllmSettings


@dataclasses.dataclass(frozen=True)
class AlgorithmSettings:
    """The loss: spec sections 2 and 3."""

    method: str
    measure: str
    sided: str
    level: str
    multiplier: float
    tolerance: float
    dual_learning_rate: float
    multiplier_min: float
    multiplier_max: float
    dual_window: int
    clip_low: float
    clip_high: float
    aggregation: str
    std_ddof: int
    std_epsilon: float
    normalize_std: bool
    mask_truncated: bool
    kl_coefficient: float
    kl_estimator: str


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Sizes of a step and when to give up."""

    steps: int
    prompts_per_step: int
    prompts_per_mini_batch: int
    micro_batch_tokens: int
    row_lengths: tuple[int, ...]
    segments_per_row: int
    seed: int
    max_skipped_in_row: int


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, its schedule, and gradient clipping."""

    learning_rate: float
    schedule: str
    schedule_warmup_steps: int
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Devices along each axis; one of them may be -1, the rest of the devices."""

    data: int
    fsdp: int
    tensor: int


@dataclasses.dataclass(frozen=True)
class WarmupSettings:
    """Supervised start on worked solutions, for a model without a policy to improve."""

    task: str
    steps: int
    batch_size: int
    learning_rate: float


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Held-out evaluation by the inference engine's policy while training."""

    task: str
    every_steps: int
    samples: int
    temperature: float
    max_problems: int


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """When to save and what to keep."""

    every_steps: int
    keep_last: int
    keep_best: int


@dataclasses.dataclass(frozen=True)
class ObserveSettings:
    """What is recorded beside the metrics."""

    samples_every_steps: int
    samples: int
    wandb_project: str


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run. Sections are described at their classes, values in configs/base.py."""

    run_dir: str
    model: ModelSettings
    task: TaskSettings
    rollout: RolloutSettings
    algorithm: AlgorithmSettings
    training: TrainingSettings
    optimizer: OptimizerSettings
    mesh: MeshSettings
    warmup: WarmupSettings
    evaluation: EvaluationSettings
    checkpoint: CheckpointSettings
    observe: ObserveSettings

    @property
    def mini_batches(self) -> int:
        """Optimizer updates in a step."""
        return self.training.prompts_per_step // self.training.prompts_per_mini_batch

    @property
    def completions_per_mini_batch(self) -> int:
        """N of one mini-batch."""
        return self.training.prompts_per_mini_batch * self.rollout.group_size

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt and completion together."""
        return self.task.max_prompt_tokens + self.rollout.max_completion_tokens


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
}


def from_config_dict(config: ConfigDict | Mapping[str, Any]) -> Config:
    """Makes and checks a `Config`.

    Raises:
        ValueError: in one line, naming the setting, its value and what is allowed: an unknown or missing name (with
            the nearest right one), a wrong type, a value out of range, or two settings that do not fit.
    """
    values = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    made = _build(Config, values, "")
    _validate(made)
    return made


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dict with JSON types, as written to the run directory's config.json."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def setting_names(kind: type = Config, prefix: str = "") -> list[str]:
    """All dotted names, for nearest-name messages."""
    names = []
    for name, hint in typing.get_type_hints(kind).items():
        dotted = f"{prefix}{name}"
        names += setting_names(hint, f"{dotted}.") if dataclasses.is_dataclass(hint) else [dotted]
    return names


def unknown_setting(name: str) -> ValueError:
    """The error for a dotted name that is no setting, with the nearest one that is."""
    names = setting_names()
    sections = [field.name for field in dataclasses.fields(Config)]
    tail = name.rpartition(".")[2]
    near = [other for other in names if other.rpartition(".")[2] == tail][:1]
    near = near or difflib.get_close_matches(name, names + sections, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"sections are {', '.join(sections)}"
    return ValueError(f"config.{name}: no such setting; {hint}")


def _build(kind: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"config.{prefix[:-1]}: got {values!r}, must be a section with named settings")
    hints = typing.get_type_hints(kind)
    for name in values:
        if name not in hints:
            raise unknown_setting(f"{prefix}{name}")
    made = {}
    for name, hint in hints.items():
        if name not in values:
            raise ValueError(f"config.{prefix}{name}: missing; configs/base.py has every setting")
        dotted, value = f"{prefix}{name}", values[name]
        made[name] = (
            _build(hint, value, f"{dotted}.") if dataclasses.is_dataclass(hint) else _typed(hint, value, dotted)
        )
    return kind(**made)


def _typed(hint: Any, value: Any, dotted: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if typing.get_origin(hint) is tuple:
        if isinstance(value, list | tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            return tuple(value)
        raise ValueError(f"config.{dotted}: got {value!r}, must be a tuple of int")
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"config.{dotted}: got {value!r}, must be a finite number")
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"config.{dotted}: got {value!r} ({type(value).__name__}), must be {hint.__name__}")


def _get(config: Config, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def _check_choice(config: Config, name: str, allowed: tuple[str, ...], when: str = "") -> None:
    if (value := _get(config, name)) not in allowed:
        near = [choice for choice in allowed if str(value) and choice.startswith(str(value))]
        near = near or difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"config.{name}: got {value!r}, allowed{when} are {', '.join(allowed)}{hint}")


def _validate(config: Config) -> None:
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
    sizes = dataclasses.astuple(config.mesh)
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


def _check_vllm_dtypes(rollout: RolloutSettings) -> None:
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
