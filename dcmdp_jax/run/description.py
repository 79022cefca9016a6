"""Description of a run, printed before it begins and by the dry run."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.lengths import expected_step, typical_lengths
from dcmdp_jax.data.mixtures import cycle, parse_mixture
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import num_params
from dcmdp_jax.run.memory_use import EngineSetup
from dcmdp_jax.run.placement import Placement
from dcmdp_jax.run.run import Run


def describe(run: Run, *, whole: bool = True) -> str:
    """Description of a run: sizes, shapes, memory by arithmetic and what does not fit.

    Args:
        run: checked.
        whole: memory part by part also where more than half of it is free.
    """
    task, place = run.task, run.placement
    config, model, packing = task.config, task.model, place.packing
    completions = packing.mini_batches * packing.completions
    rows = ", ".join(
        f"{r} x {length}" for r, length in zip(packing.rows_per_micro_batch, packing.row_lengths, strict=True)
    )
    limit = config.rollout.max_completion_tokens
    prompts = np.array([len(ids) for ids in task.train.token_ids])
    expected = expected_step(packing, prompts, typical_lengths(limit))
    resumes = (Path(config.run_dir) / "checkpoints").is_dir()
    mesh = ", ".join(f"{name} {count}" for name, count in place.mesh.shape.items())
    lines = [
        f"run          {config.run_dir}, {config.training.steps} steps{', resumes if it has a checkpoint' * resumes}",
        f"model        {model.model_type}, {num_params(model):,} parameters in {config.model.param_dtype}, "
        f"{config.model.path or 'fresh'}",
        f"devices      {place.mesh.size} x {place.mesh.devices.flat[0].device_kind} ({mesh})",
        f"method       {config.algorithm.method}, c = {config.algorithm.tolerance:g}{_measured(config.algorithm)}, "
        f"lambda_0 = {config.algorithm.multiplier:g}, eta = {config.algorithm.dual_learning_rate:g}"
        + f", lambda begins at its cap of {config.algorithm.multiplier_max:g}"
        * config.algorithm.begins_at_cap,
        f"engine       {config.rollout.engine}, {config.rollout.precision}, cache {config.rollout.kv_cache_dtype}"
        + _engine_size(config, place.engine),
        f"problems     {len(task.train.problems):,} to train on ({task.train.dropped} dropped: prompt too long"
        + (f"; {task.train.with_control_tokens:,} hold control tokens)" if task.train.with_control_tokens else ")")
        + "".join(
            f", {len(prompts.problems):,} of {held_out.name} x {held_out.samples}"
            for held_out, prompts in task.held_out
        ),
        "rewards      " + ", ".join(f"{reward.weight:g} x {reward.function}" for reward in task.rewards),
        f"step         {config.training.prompts_per_step} prompts x {config.rollout.group_size} = {completions} "
        f"completions of at most {config.rollout.max_completion_tokens} tokens, {packing.mini_batches} update(s)",
        f"rows         micro-batches of {rows} tokens, a program for each; {expected.padding:.0%} padding expected of "
        f"completions with a median of {max(1, limit // 4)} tokens",
        f"warm-up      {config.warmup.steps} supervised steps" if config.warmup.steps else "warm-up      none",
        *_lag(config, model, place),
    ]
    if len(task.stream.sizes) > 1:
        shares = zip(parse_mixture(config.task.train), cycle(task.stream.weights), task.stream.sizes, strict=True)
        whole = sum(cycle(task.stream.weights))
        mixed = ", ".join(f"{part.name} {share / whole:.0%} ({size:,})" for part, share, size in shares)
        lines.insert(-4, f"mixture      {mixed}")
    if config.task.environment:
        limits = f"at most {config.task.max_turns} turns of {config.turn_tokens} tokens"
        lines.insert(-3, f"environment  {config.task.environment}, {limits}")
    if place.hosts.count > 1:
        lines.insert(3, f"hosts        {', '.join(place.hosts.names)}")
    memory = place.engine.memory.lines(whole=whole)
    lines += [("memory       " if index == 0 else " " * 13) + line for index, line in enumerate(memory)]
    return "\n".join(lines + _advice(config, place))


def _lag(config: Config, model: ModelConfig, place: Placement) -> list[str]:
    """How far sampling runs ahead, what overlaps, and what p^Train of older weights costs."""
    lag = config.rollout.lag
    if not lag:
        return []
    size = num_params(model) * np.dtype(jnp.dtype(config.model.param_dtype)).itemsize * lag / 2**20
    how = "while a step trains"
    if not place.samples_while_training:
        embedded = not place.engine.kind.own_process
        reason = "the embedded engine has the trainer's devices" if embedded else "several hosts refill a step together"
        how = f"before a step trains: {reason}"
    cost = f"by {lag} kept copies of the parameters, {size:,.1f} MiB over the training devices"
    return [
        f"lag          {lag} step(s): the engine samples {how}",
        f"             p_train of the weights that sampled: one forward pass a step, {cost}",
    ]


def _measured(settings: AlgorithmSettings) -> str:
    """How long the configured c applies before calibration."""
    rule = f"{settings.tolerance_factor:g} times the median discrepancy of these"
    return f" for {settings.measured_steps} steps, then {rule}" if settings.measured_steps else ""


def _engine_size(config: Config, engine: EngineSetup) -> str:
    """Engine parallelism and batch size; empty for external engines."""
    most, rows = config.rollout.max_rows, engine.memory.rows
    split = engine.kind.describe(engine.arguments.settings)
    if engine.kind.own_process:
        return split
    fewer = f" (rollout.max_rows={most} does not fit)" if rows < most else ""
    return f"{split}, at most {rows} rows at a time{fewer}"


def _advice(config: Config, place: Placement) -> list[str]:
    """Faster settings for a CPU, whose bfloat16 products XLA computes from float32 copies."""
    settings = [("model.compute_dtype", config.model.compute_dtype)]
    if not place.engine.kind.own_process:
        settings.append(("rollout.compute_dtype", config.rollout.compute_dtype))
    slow = [name for name, dtype in settings if dtype == "bfloat16"]
    if place.mesh.devices.flat[0].platform != "cpu" or not slow:
        return []
    sampling = ", and for sampling rollout.engine=vllm too," * (len(settings) > 1)
    return [
        f"advice       {' and '.join(slow)}: float32{sampling} takes less time and memory than bfloat16 on this CPU"
    ]
