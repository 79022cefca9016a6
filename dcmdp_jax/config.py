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

from dcmdp_jax.config_rules import validate


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
    cpu_devices: int


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


def from_config_dict(config: ConfigDict | Mapping[str, Any]) -> Config:
    """Makes and checks a `Config`.

    Raises:
        ValueError: in one line, naming the setting, its value and what is allowed: an unknown or missing name (with
            the nearest right one), a wrong type, a value out of range, or two settings that do not fit.
    """
    values = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    made = _build(Config, values, "")
    validate(made)
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
