"""Build everything that a run needs from a config. Cheap checks come first: bad input fails before expensive work."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from dcmdp_jax.activity import activity
from dcmdp_jax.config.algorithm import check_own_remedies
from dcmdp_jax.config.arguments import HOSTS, MESH, as_settings, of_engine
from dcmdp_jax.config.engine import engine_arguments, find_trainable
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.lengths import expected_step, typical_lengths
from dcmdp_jax.data.mixtures import PromptStream, cycle, parse_mixture
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.data.row_layout import ANY_NUMBER, RowShapes, make_row_shapes
from dcmdp_jax.engines.kind import EngineArguments
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.held_out import HeldOutTask
from dcmdp_jax.memory.parts import memory_of_run
from dcmdp_jax.memory.use import MemoryUse, this_machine
from dcmdp_jax.models.attention import SKIP_SEGMENTS, choose_kernel
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import num_params
from dcmdp_jax.observe.metrics_io import read_metrics
from dcmdp_jax.observe.run_files import METRICS_FILE
from dcmdp_jax.observe.run_summary import overlap
from dcmdp_jax.observe.trackers import require
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.parallel.hosts import ONE_PROCESS, Hosts, join_hosts
from dcmdp_jax.parallel.mesh import check_training_mesh, row_shards, sampling_mesh, training_mesh
from dcmdp_jax.rewards.protocol import Reward
from dcmdp_jax.training.model_checks import check_forward, check_kernel, check_platform, check_reductions
from dcmdp_jax.training.run_directory import check_run_directory
from dcmdp_jax.training.run_files import RunFiles, read_files

logger = logging.getLogger(__name__)

_CPU_UNROLL = 8
"""Layers in one iteration of the scan over layers on a CPU, where the layers' gradients are copied in a loop."""


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
        stream: the order in which training problems are asked.
        engine: arguments of the engine.
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
    packing: RowShapes
    sampling: SamplingParams
    rewards: tuple[Reward, ...]
    columns: tuple[str, ...]
    memory: MemoryUse
    stream: PromptStream
    engine: EngineArguments
    hosts: Hosts = ONE_PROCESS


class _Machine(NamedTuple):
    """What this machine gives a run; attributes as of `Plan`."""

    engine: EngineArguments
    mesh: Mesh
    compute: Compute
    packing: RowShapes


@contextlib.contextmanager
def joined_hosts(config: Config) -> Iterator[Hosts]:
    """Join the processes of a run, see `hosts.join_hosts`; errors name the settings."""
    with contextlib.ExitStack() as stack:
        with as_settings(HOSTS):
            hosts = stack.enter_context(join_hosts(**dataclasses.asdict(config.hosts)))
        yield hosts


def make_plan_of_run(config: Config, hosts: Hosts = ONE_PROCESS) -> Plan:
    """Check everything that can be checked without touching weights or compiling.

    Args:
        config: the settings.
        hosts: the processes of the run; each calls this.

    Raises:
        UserError: one line naming setting or file, value and remedy.
        OSError: for directories and files that can't be read or written.
    """
    config, engine = _check_alone(config)
    with activity("reading model files, tokenizer and data"):
        files = read_files(config)
    engine = dataclasses.replace(engine, model=files.model)
    machine = _start_machine(config, engine, hosts, shortest=1 + min(map(len, files.train.token_ids)))
    config, memory = _fit_memory(config, files, machine)
    return Plan(
        config=config, model=files.model, compute=machine.compute, mesh=machine.mesh, tokenizer=files.tokenizer,
        train=files.train, held_out=files.held_out, worked_solutions=files.worked_solutions, packing=machine.packing,
        sampling=SamplingParams(
            group_size=config.rollout.group_size,
            max_completion_tokens=config.rollout.max_completion_tokens,
            temperature=config.rollout.temperature,
            stop_token_ids=files.stop_token_ids,
        ),
        rewards=files.rewards, columns=files.columns, memory=memory, stream=files.stream,
        engine=dataclasses.replace(machine.engine, max_rows=memory.rows), hosts=hosts,
    )  # fmt: skip


def _check_alone(config: Config) -> tuple[Config, EngineArguments]:
    """Check the run's directory and what the settings need installed; take over what the run has fitted before."""
    saved = check_run_directory(config)
    if saved is not None and not config.rollout.fitted_rows and saved.rollout.max_rows == config.rollout.max_rows:
        config = _with_fitted_rows(config, saved.rollout.fitted_rows)
    for kind in ("wandb", "trackio"):
        if project := getattr(config.observe, f"{kind}_project"):
            require(kind, project)
    kind, engine = engine_arguments(config)
    with as_settings(of_engine(kind)):
        return config, dataclasses.replace(engine, platform=kind.check_machine(engine))


def _with_fitted_rows(config: Config, rows: int) -> Config:
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, fitted_rows=rows))


def _start_machine(config: Config, engine: EngineArguments, hosts: Hosts, *, shortest: int) -> _Machine:
    """Start JAX's devices, and lay out the model, the engine and the batch on them.

    No sequence has fewer tokens than `shortest`.
    """
    model, kind = engine.model, find_trainable(config.rollout.engine)
    with as_settings(of_engine(kind)):
        kind.check(engine)
    prepare_jax(config.mesh.cpu_devices)
    platform = jax.devices()[0].platform
    check_platform(platform)
    check_kernel(config, platform, model.head_dim)
    check_forward(config, engine, platform)
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor, config.mesh.expert
    with as_settings(MESH):
        mesh = training_mesh(*sizes, num_params=num_params(model))
        check_training_mesh(
            mesh, num_heads=model.num_heads, num_experts=model.num_experts,
            completions=config.completions_per_mini_batch,
        )  # fmt: skip
    check_reductions(config, mesh)
    check_own_remedies(config.algorithm)
    compute, packing = layout(config, mesh, shortest)
    engine = dataclasses.replace(
        engine,
        mesh=functools.partial(sampling_mesh, mesh),
        directory=engine.directory.with_name(engine.directory.name + f"_{hosts.index}" * bool(hosts.index)),
    )
    return _Machine(engine, mesh, compute, packing)


def _fit_memory(config: Config, files: RunFiles, machine: _Machine) -> tuple[Config, MemoryUse]:
    """The memory of the run, and the config with the rows that fit, so that a resumed run decodes the same batches."""
    completions = config.training.prompts_per_step * config.rollout.group_size
    completions = max(completions, *(len(prompts.problems) * task.samples for task, prompts in files.held_out), 0)
    asked = [*files.train.token_ids, *(ids for _, prompts in files.held_out for ids in prompts.token_ids)]
    memory = memory_of_run(
        config, files.model, machine.compute, machine.mesh, machine.packing,
        this_machine(machine.mesh.devices.flat[0].platform), engine=machine.engine,
        prompt_lengths=[len(ids) for ids in asked], completions=completions,
    )  # fmt: skip
    memory.check()
    return _with_fitted_rows(config, memory.rows if memory.rows < config.rollout.max_rows else 0), memory


def layout(config: Config, mesh: Mesh, shortest: int = 1) -> tuple[Compute, RowShapes]:
    """Computation of the training stack on a mesh, and the shapes of a batch of sequences of at least `shortest`."""
    platform = mesh.devices.flat[0].platform
    dtype = np.dtype(jnp.dtype(config.model.compute_dtype))
    longest = -(-max((config.max_total_tokens, *config.training.row_lengths)) // 128) * 128
    kernel = choose_kernel(config.model.attention, dtype, platform, longest)
    # Where other segments cost nothing rows are long and hold many.
    segments = config.training.segments_per_row or (ANY_NUMBER if kernel in SKIP_SEGMENTS else 1)
    row_lengths = config.training.row_lengths
    if kernel == "splash" and (odd := [length for length in row_lengths if length % 128]):
        raise UserError(f"config.training.row_lengths: got {odd[0]}, splash attention needs multiples of 128")
    packing = make_row_shapes(
        row_lengths=row_lengths,
        longest=config.max_total_tokens,
        shortest=shortest,
        length_multiple=512 if kernel == "splash" else 8,
        micro_batch_tokens=config.training.micro_batch_tokens,
        mini_batches=config.mini_batches,
        completions=config.completions_per_mini_batch,
        segments_per_row=segments,
        row_shards=row_shards(mesh),
    )
    compute = Compute(
        dtype=config.model.compute_dtype,
        remat=config.model.remat,
        scan_unroll=config.model.scan_unroll or (_CPU_UNROLL if platform == "cpu" else 1),
        attention=kernel,
        logprob_chunk=config.model.logprob_chunk,
        one_segment=segments == 1,
        segments=config.training.segments_per_row,
    )
    return compute, packing


def describe(plan: Plan) -> str:
    """Description of a run: sizes, shapes, memory by arithmetic and what does not fit."""
    config, model, packing = plan.config, plan.model, plan.packing
    completions = packing.mini_batches * packing.completions
    rows = ", ".join(
        f"{r} x {length}" for r, length in zip(packing.rows_per_micro_batch, packing.row_lengths, strict=True)
    )
    limit = config.rollout.max_completion_tokens
    prompts = np.array([len(ids) for ids in plan.train.token_ids])
    expected = expected_step(packing, prompts, typical_lengths(limit))
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
        f"rows         micro-batches of {rows} tokens, a program for each; {expected.padding:.0%} padding expected of "
        f"completions with a median of {max(1, limit // 4)} tokens",
        f"warm-up      {config.warmup.steps} supervised steps" if config.warmup.steps else "warm-up      none",
        *_lag(plan),
    ]
    if len(plan.stream.sizes) > 1:
        shares = zip(parse_mixture(config.task.train), cycle(plan.stream.weights), plan.stream.sizes, strict=True)
        whole = sum(cycle(plan.stream.weights))
        mixed = ", ".join(f"{part.name} {share / whole:.0%} ({size:,})" for part, share, size in shares)
        lines.insert(-4, f"mixture      {mixed}")
    if config.task.environment:
        limits = f"at most {config.task.max_turns} turns of {config.turn_tokens} tokens"
        lines.insert(-3, f"environment  {config.task.environment}, {limits}")
    if plan.hosts.count > 1:
        lines.insert(3, f"hosts        {', '.join(plan.hosts.names)}")
    lines += [("memory       " if index == 0 else " " * 13) + line for index, line in enumerate(plan.memory.table())]
    return "\n".join(lines + _advice(plan))


def samples_beside(plan: Plan) -> bool:
    """Whether the engine samples while the trainer trains: in a process of its own.

    On several hosts in one call a step: whether there is another is for all of them to say, at a meeting.
    """
    refills = plan.config.algorithm.refill_rounds > 0 and plan.hosts.count > 1
    return find_trainable(plan.config.rollout.engine).own_process and not refills


def _lag(plan: Plan) -> list[str]:
    """How far sampling runs ahead, what overlaps, and what p^Train of older weights costs."""
    rollout = plan.config.rollout
    if not rollout.lag:
        return []
    size = num_params(plan.model) * np.dtype(jnp.dtype(plan.config.model.param_dtype)).itemsize * rollout.lag / 2**20
    how = "while a step trains"
    if not samples_beside(plan):
        embedded = not find_trainable(rollout.engine).own_process
        reason = "the embedded engine has the trainer's devices" if embedded else "several hosts refill a step together"
        how = f"before a step trains: {reason}"
    cost = f"by {rollout.lag} kept copies of the parameters, {size:,.1f} MiB over the training devices"
    return [
        f"lag          {rollout.lag} step(s): the engine samples {how}",
        f"             p_train of the weights that sampled: one forward pass a step, {cost}",
        *_overlap_so_far(Path(plan.config.run_dir)),
    ]


def _overlap_so_far(run_dir: Path) -> list[str]:
    """What the steps that a run has done say about it."""
    if not (run_dir / METRICS_FILE).exists() or (found := overlap(read_metrics(run_dir))) is None:
        return []
    return [f"             overlap won {found[0]} so far: {found[1]}"]


def _engine_size(plan: Plan) -> str:
    """How the engine is split, and how many rows it decodes; nothing where neither is ours to say."""
    kind, most = find_trainable(plan.config.rollout.engine), plan.config.rollout.max_rows
    split = kind.describe(plan.engine.settings)
    if kind.own_process:
        return split
    fewer = f" (rollout.max_rows={most} does not fit)" if plan.memory.rows < most else ""
    return f"{split}, at most {plan.memory.rows} rows at a time{fewer}"


def _advice(plan: Plan) -> list[str]:
    """Faster settings for a CPU, whose bfloat16 products XLA computes from float32 copies."""
    config = plan.config
    settings = [("model.compute_dtype", config.model.compute_dtype)]
    if not find_trainable(config.rollout.engine).own_process:
        settings.append(("rollout.compute_dtype", config.rollout.compute_dtype))
    slow = [name for name, dtype in settings if dtype == "bfloat16"]
    if plan.mesh.devices.flat[0].platform != "cpu" or not slow:
        return []
    sampling = ", and for sampling rollout.engine=vllm too," * (len(settings) > 1)
    return [
        f"advice       {' and '.join(slow)}: float32{sampling} takes less time and memory than bfloat16 on this CPU"
    ]
