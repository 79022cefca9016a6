"""Build everything that a run needs from a config. Cheap checks come first: bad input fails before expensive work."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.arithmetic_tokenizer import build_tokenizer
from dcmdp_jax.data.packing import (
    PackingPlan,
    default_row_lengths,
    make_plan,
    make_shared_plan,
    shared_group_shape,
)
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.prompts import EncodedPrompts, encode_prompts, end_token_ids, load_tokenizer
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.engines.vllm.launch import check_installation
from dcmdp_jax.engines.vllm_limits import check_temperature
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.held_out import HeldOutTask, held_out_tasks
from dcmdp_jax.memory.parts import plan_memory
from dcmdp_jax.memory.plan import MemoryPlan, this_machine
from dcmdp_jax.models.attention import choose_kernel
from dcmdp_jax.models.config import ModelConfig, read_config
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.hf_manifest import check_manifest
from dcmdp_jax.models.params import num_params
from dcmdp_jax.observe.metrics_io import require_wandb
from dcmdp_jax.parallel.compile_cache import enable_compile_cache
from dcmdp_jax.parallel.cpu import set_cpu_devices
from dcmdp_jax.parallel.hosts import ONE_PROCESS, Hosts
from dcmdp_jax.parallel.mesh import check_training_mesh, row_shards, training_mesh
from dcmdp_jax.parallel.sharding import data_parallel_only
from dcmdp_jax.rewards.protocol import MATH, Reward, RewardError
from dcmdp_jax.rewards.scoring import check_rewards, column_names
from dcmdp_jax.training.model_checks import (
    check_engine_mesh,
    check_experts,
    check_kernel,
    check_lengths,
    check_platform,
    check_reductions,
)
from dcmdp_jax.training.run_directory import check_run_directory

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked run, nothing allocated yet.

    Attributes:
        config: the settings.
        model: shape of the model.
        compute: how the training stack computes, its attention kernel the one of this mesh.
        mesh: devices.
        tokenizer: with a chat template and an end token.
        train: encoded problems.
        held_out: the tasks to evaluate on, each with its encoded problems; empty without evaluation.
        worked_solutions: prompts and solutions of the warm-up, token ids; None without one.
        packing: shapes of a batch.
        sampling: the distribution training samples from.
        rewards: what a completion earns.
        columns: names of the data's columns that reward functions get.
        memory: what it takes, and what there is.
        hosts: the processes of the run.
    """

    config: Config
    model: ModelConfig
    compute: Compute
    mesh: Mesh
    tokenizer: PreTrainedTokenizerBase
    train: EncodedPrompts
    held_out: tuple[tuple[HeldOutTask, EncodedPrompts], ...]
    worked_solutions: tuple[list[np.ndarray], list[np.ndarray]] | None
    packing: PackingPlan
    sampling: SamplingParams
    rewards: tuple[Reward, ...]
    columns: tuple[str, ...]
    memory: MemoryPlan
    hosts: Hosts = ONE_PROCESS


def make_plan_of_run(config: Config, hosts: Hosts = ONE_PROCESS) -> Plan:
    """Check everything that can be checked without touching weights or compiling.

    Args:
        config: the settings.
        hosts: the processes of the run; each calls this.

    Raises:
        UserError: one line naming setting or file, value and remedy.
        OSError: for directories and files that can't be read or written.
    """
    check_run_directory(config)
    vllm_on_cpu = False
    if config.rollout.engine == "vllm":
        # Before the mesh: on a shared GPU this says how much memory JAX may take when it starts.
        vllm_on_cpu = check_installation(config.rollout.vllm, config.rollout.precision) == "cpu"
        check_temperature(config.rollout.temperature, "config.rollout.temperature")
        check_temperature(config.evaluation.temperature, "config.evaluation.temperature")
    if config.observe.wandb_project:
        require_wandb(config.observe.wandb_project)
    enable_compile_cache()
    set_cpu_devices(config.mesh.cpu_devices)
    # Before the tokenizer, whose loader would take a directory that is not there for a name on the Hub, and be blamed
    # for a config.json that it reads too.
    model = _saved_model(config)
    platform = jax.devices()[0].platform
    check_platform(platform)
    check_kernel(config, platform, (model or config.model.architecture).head_dim)
    tokenizer = _tokenizer(config, model.vocab_size if model else None)
    model = model or fresh_model(config, tokenizer)
    check_lengths(config, model)
    check_engine_mesh(config, model)
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor, config.mesh.expert
    mesh = training_mesh(*sizes, num_params=num_params(model))
    check_training_mesh(
        mesh, num_heads=model.num_heads, num_experts=model.num_experts, completions=config.completions_per_mini_batch
    )
    check_experts(config, model)
    check_reductions(config, mesh)
    stop = end_token_ids(tokenizer, config.model.path or None, vocab_size=model.vocab_size)
    rewards = tuple(Reward(*each) for each in config.rewards.weighted)
    own = any(reward.function != MATH for reward in rewards)
    train = _load_prompts(config, tokenizer, "task.train", split="train", keep_columns=own)
    columns = tuple(column_names(train.problems)) if own else ()
    try:
        check_rewards(rewards, columns, memory_gib=config.rewards.memory_limit)
    except RewardError as error:
        raise UserError(f"config.rewards.functions: {error}") from error
    held_out = _held_out(config, tokenizer)
    worked_solutions = _worked_solutions(config, tokenizer) if config.warmup.steps else None
    compute, packing = layout(config, mesh)
    sampling = SamplingParams(
        group_size=config.rollout.group_size,
        max_completion_tokens=config.rollout.max_completion_tokens,
        temperature=config.rollout.temperature,
        stop_token_ids=stop,
    )
    completions = config.training.prompts_per_step * config.rollout.group_size
    completions = max(completions, *(len(prompts.problems) * task.samples for task, prompts in held_out), 0)
    asked = [*train.token_ids, *(ids for _, prompts in held_out for ids in prompts.token_ids)]
    memory = plan_memory(
        config, model, compute, mesh, packing, this_machine(mesh.devices.flat[0].platform),
        prompt_lengths=[len(ids) for ids in asked], completions=completions, vllm_on_cpu=vllm_on_cpu,
    )  # fmt: skip
    memory.check()
    return Plan(
        config, model, compute, mesh, tokenizer, train, held_out, worked_solutions, packing, sampling, rewards, columns,
        memory, hosts,
    )  # fmt: skip


def model_and_tokenizer(config: Config) -> tuple[ModelConfig, PreTrainedTokenizerBase]:
    """The model that a config trains and its tokenizer, checked; nothing is allocated.

    Raises:
        UserError: in one line, for a directory or sizes that are refused.
    """
    saved = _saved_model(config)
    tokenizer = _tokenizer(config, saved.vocab_size if saved else None)
    return saved or fresh_model(config, tokenizer), tokenizer


def _tokenizer(config: Config, vocab_size: int | None) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer`, else of `model.path`, else the built-in one."""
    settings = {"model.tokenizer": config.model.tokenizer, "model.path": config.model.path}
    for setting, path in settings.items():
        if path:
            try:
                return load_tokenizer(path, vocab_size=vocab_size)
            except UserError as error:
                hint = "; model.tokenizer may name another" if setting == "model.path" else ""
                raise UserError(f"config.{setting}: {error}{hint}") from error
    return build_tokenizer()


def _saved_model(config: Config) -> ModelConfig | None:
    """The model of `model.path`, its config.json and its tensors' headers checked; None for a fresh model."""
    path = config.model.path
    if not path:
        return None
    if not Path(path).is_dir():
        raise UserError(
            f"config.model.path: no directory {path}; `hf download OWNER/MODEL --local-dir {path}` fetches one"
        )
    model = read_config(path)
    check_manifest(path, model)
    return model


def fresh_model(config: Config, tokenizer: PreTrainedTokenizerBase) -> ModelConfig:
    """The model of `model.architecture`, with the tokenizer's vocabulary."""
    try:
        return ModelConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=config.max_total_tokens,
            **dataclasses.asdict(config.model.architecture),
        )
    except UserError as error:
        raise UserError(f"config.model.architecture.{error}") from None


def _load_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    setting: str,
    *,
    split: str,
    location: str = "",
    limit: int = 0,
    keep_columns: bool = False,
) -> EncodedPrompts:
    """Problems of a setting's location as token ids under the config's template, suffix and limit."""
    location = location or functools.reduce(getattr, setting.split("."), config)
    try:
        problems = load_problems(
            location,
            split=split,
            limit=limit or None,
            on_bad_row=config.task.on_bad_row,
            keep_columns=keep_columns,
        )
        return encode_prompts(
            problems,
            tokenizer,
            prompt_suffix=config.task.prompt_suffix,
            max_prompt_tokens=config.task.max_prompt_tokens,
            chat_template_kwargs=config.task.chat_template_kwargs,
        )
    except UserError as error:
        where = "task." if str(error).startswith("chat_template_kwargs:") else f"{setting}: "
        raise UserError(f"config.{where}{error}") from error


def _held_out(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[HeldOutTask, EncodedPrompts], ...]:
    settings = config.evaluation
    if not settings.every_steps:
        return ()
    load = functools.partial(
        _load_prompts, config, tokenizer, "evaluation.task", split="test", limit=settings.max_problems
    )
    tasks = held_out_tasks(settings.task, settings.samples)
    return tuple((task, load(location=task.location)) for task in tasks)


def _worked_solutions(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts and worked solutions of `warmup.task` as token ids, the end token after each solution."""
    encoded = _load_prompts(config, tokenizer, "warmup.task", split="train")
    if bare := [problem.index for problem in encoded.problems if not problem.solution]:
        raise UserError(f"config.warmup.task: row {bare[0]} of {config.warmup.task} has no worked solution")
    solutions = tokenizer([problem.solution for problem in encoded.problems], add_special_tokens=False)["input_ids"]
    return encoded.token_ids, [np.array([*ids, tokenizer.eos_token_id], np.int32) for ids in solutions]


def layout(config: Config, mesh: Mesh) -> tuple[Compute, PackingPlan]:
    """Computation of the training stack on a mesh, and the shapes of a batch."""
    platform = mesh.devices.flat[0].platform
    kernel = choose_kernel(config.model.attention, np.dtype(jnp.dtype(config.model.compute_dtype)), platform)
    skips = kernel == "splash"
    segments = config.training.segments_per_row or (2**31 - 1 if skips else 1)
    row_lengths = config.training.row_lengths or default_row_lengths(config.max_total_tokens, skips_segments=skips)
    if skips and (odd := [length for length in row_lengths if length % 128]):
        raise UserError(f"config.training.row_lengths: got {odd[0]}, splash attention needs multiples of 128")
    shapes = {
        "micro_batch_tokens": config.training.micro_batch_tokens,
        "mini_batches": config.mini_batches,
        "completions": config.completions_per_mini_batch,
        "row_shards": row_shards(mesh),
    }
    if _shares_prompts(config, mesh, kernel, row_lengths, segments):
        packing = make_shared_plan(
            max_prompt_tokens=config.task.max_prompt_tokens,
            max_completion_tokens=config.rollout.max_completion_tokens,
            group_size=config.rollout.group_size,
            **shapes,
        )
    else:
        packing = make_plan(row_lengths=row_lengths, segments_per_row=segments, **shapes)
    compute = Compute(
        dtype=config.model.compute_dtype,
        remat=config.model.remat,
        scan_unroll=config.model.scan_unroll,
        attention=kernel,
        logprob_chunk=config.model.logprob_chunk,
        one_segment=segments == 1,
    )
    return compute, packing


def _shares_prompts(config: Config, mesh: Mesh, kernel: str, row_lengths: tuple[int, ...], segments: int) -> bool:
    """Whether a group's prompt is computed once for all its completions, and not in each of their rows.

    Rows of one length say that completions are about as long as each other: then a row for each in its group's place
    costs nothing. Only the "xla" kernel can do it, only where whole rows are computed on one device, and a device's
    part of a micro-batch has to hold a group.
    """
    alike = segments == 1 and len(row_lengths) == 1
    several = config.rollout.group_size > 1 and config.task.max_prompt_tokens > 1
    _, group_tokens = shared_group_shape(
        config.task.max_prompt_tokens, config.rollout.max_completion_tokens, config.rollout.group_size
    )
    fits = group_tokens <= config.training.micro_batch_tokens
    enough = config.training.prompts_per_mini_batch >= row_shards(mesh)
    return alike and several and kernel == "xla" and data_parallel_only(mesh) and fits and enough


def describe(plan: Plan) -> str:
    """Description of a run: sizes, shapes, memory by arithmetic and what does not fit."""
    config, model, packing = plan.config, plan.model, plan.packing
    completions = packing.mini_batches * packing.completions
    rows = ", ".join(
        f"{r} x {length}" for r, length in zip(packing.rows_per_micro_batch, packing.row_lengths, strict=True)
    )
    resumes = (Path(config.run_dir) / "checkpoints").is_dir()
    mesh = ", ".join(f"{name} {count}" for name, count in plan.mesh.shape.items())
    lines = [
        f"run          {config.run_dir}, {config.training.steps} steps{', resumes if it has a checkpoint' * resumes}",
        f"model        {model.model_type}, {num_params(model):,} parameters in {config.model.param_dtype}, "
        f"{config.model.path or 'fresh'}",
        f"devices      {plan.mesh.size} x {plan.mesh.devices.flat[0].device_kind} ({mesh})",
        f"method       {config.algorithm.method}, c = {config.algorithm.tolerance:g}, "
        f"lambda_0 = {config.algorithm.multiplier:g}, eta = {config.algorithm.dual_learning_rate:g}",
        f"engine       {config.rollout.engine}, {config.rollout.precision}, cache {config.rollout.kv_cache_dtype}"
        + _engine_size(plan),
        f"problems     {len(plan.train.problems):,} to train on ({plan.train.dropped} dropped: prompt too long"
        + (f"; {plan.train.with_control_tokens:,} hold control tokens)" if plan.train.with_control_tokens else ")")
        + "".join(f", {len(prompts.problems):,} of {task.name} x {task.samples}" for task, prompts in plan.held_out),
        "rewards      " + ", ".join(f"{reward.weight:g} x {reward.function}" for reward in plan.rewards),
        f"step         {config.training.prompts_per_step} prompts x {config.rollout.group_size} = {completions} "
        f"completions of at most {config.rollout.max_completion_tokens} tokens, {packing.mini_batches} update(s)",
        f"rows         micro-batches of {rows} tokens"
        + (
            f", prompts of {packing.prompt_length} computed once for {packing.group_size} rows"
            * bool(packing.group_size)
        ),
        f"warm-up      {config.warmup.steps} supervised steps" if config.warmup.steps else "warm-up      none",
    ]
    if plan.hosts.count > 1:
        lines.insert(3, f"hosts        {', '.join(plan.hosts.names)}")
    lines += [("memory       " if index == 0 else " " * 13) + line for index, line in enumerate(plan.memory.table())]
    return "\n".join(lines + _advice(plan))


def _engine_size(plan: Plan) -> str:
    """The embedded engine's mesh, and how many rows it decodes; nothing for another engine."""
    local, most = plan.config.rollout.local, plan.config.rollout.max_rows
    if not plan.memory.rows:
        return ""
    split = "".join(f", {name} {ways}" for name, ways in dataclasses.asdict(local).items() if ways > 1)
    fewer = f" (rollout.max_rows={most} does not fit)" if plan.memory.rows < most else ""
    return f"{split}, at most {plan.memory.rows} rows at a time{fewer}"


def _advice(plan: Plan) -> list[str]:
    """Faster settings for a CPU, whose bfloat16 products XLA computes from float32 copies."""
    config = plan.config
    settings = [("model.compute_dtype", config.model.compute_dtype)]
    if config.rollout.engine == "local":
        settings.append(("rollout.compute_dtype", config.rollout.compute_dtype))
    slow = [name for name, dtype in settings if dtype == "bfloat16"]
    if plan.mesh.devices.flat[0].platform != "cpu" or not slow:
        return []
    sampling = ", and for sampling rollout.engine=vllm too," * (len(settings) > 1)
    return [
        f"advice       {' and '.join(slow)}: float32{sampling} takes less time and memory than bfloat16 on this CPU"
    ]
