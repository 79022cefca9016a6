"""Description of a run, printed before it begins and by the dry run."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dcmdp_jax.data.lengths import expected_step, typical_lengths
from dcmdp_jax.data.mixtures import cycle, parse_mixture
from dcmdp_jax.models.params import num_params
from dcmdp_jax.run.run import Run


def describe(run: Run, *, whole: bool = True) -> str:
    """Description of a run: sizes, shapes, memory by arithmetic and what does not fit.

    Args:
        run: checked.
        whole: memory part by part also where more than half of it is free.
    """
    config, model, packing = run.config, run.model, run.packing
    completions = packing.mini_batches * packing.completions
    rows = ", ".join(
        f"{r} x {length}" for r, length in zip(packing.rows_per_micro_batch, packing.row_lengths, strict=True)
    )
    limit = config.rollout.max_completion_tokens
    prompts = np.array([len(ids) for ids in run.train.token_ids])
    expected = expected_step(packing, prompts, typical_lengths(limit))
    resumes = (Path(config.run_dir) / "checkpoints").is_dir()
    mesh = ", ".join(f"{name} {count}" for name, count in run.mesh.shape.items())
    lines = [
        f"run          {config.run_dir}, {config.training.steps} steps{', resumes if it has a checkpoint' * resumes}",
        f"model        {model.model_type}, {num_params(model):,} parameters in {config.model.param_dtype}, "
        f"{config.model.path or 'fresh'}",
        f"devices      {run.mesh.size} x {run.mesh.devices.flat[0].device_kind} ({mesh})",
        f"method       {config.algorithm.method}, c = {config.algorithm.tolerance:g}{_measured(run)}, "
        f"lambda_0 = {config.algorithm.multiplier:g}, eta = {config.algorithm.dual_learning_rate:g}"
        + f", lambda begins at its cap of {config.algorithm.multiplier_max:g}"
        * config.algorithm.begins_at_cap,
        f"engine       {config.rollout.engine}, {config.rollout.precision}, cache {config.rollout.kv_cache_dtype}"
        + _engine_size(run),
        f"problems     {len(run.train.problems):,} to train on ({run.train.dropped} dropped: prompt too long"
        + (f"; {run.train.with_control_tokens:,} hold control tokens)" if run.train.with_control_tokens else ")")
        + "".join(f", {len(prompts.problems):,} of {task.name} x {task.samples}" for task, prompts in run.held_out),
        "rewards      " + ", ".join(f"{reward.weight:g} x {reward.function}" for reward in run.rewards),
        f"step         {config.training.prompts_per_step} prompts x {config.rollout.group_size} = {completions} "
        f"completions of at most {config.rollout.max_completion_tokens} tokens, {packing.mini_batches} update(s)",
        f"rows         micro-batches of {rows} tokens, a program for each; {expected.padding:.0%} padding expected of "
        f"completions with a median of {max(1, limit // 4)} tokens",
        f"warm-up      {config.warmup.steps} supervised steps" if config.warmup.steps else "warm-up      none",
        *_lag(run),
    ]
    if len(run.stream.sizes) > 1:
        shares = zip(parse_mixture(config.task.train), cycle(run.stream.weights), run.stream.sizes, strict=True)
        whole = sum(cycle(run.stream.weights))
        mixed = ", ".join(f"{part.name} {share / whole:.0%} ({size:,})" for part, share, size in shares)
        lines.insert(-4, f"mixture      {mixed}")
    if config.task.environment:
        limits = f"at most {config.task.max_turns} turns of {config.turn_tokens} tokens"
        lines.insert(-3, f"environment  {config.task.environment}, {limits}")
    if run.hosts.count > 1:
        lines.insert(3, f"hosts        {', '.join(run.hosts.names)}")
    memory = run.memory.lines(whole=whole)
    lines += [("memory       " if index == 0 else " " * 13) + line for index, line in enumerate(memory)]
    return "\n".join(lines + _advice(run))


def _lag(run: Run) -> list[str]:
    """How far sampling runs ahead, what overlaps, and what p^Train of older weights costs."""
    rollout = run.config.rollout
    if not rollout.lag:
        return []
    size = num_params(run.model) * np.dtype(jnp.dtype(run.config.model.param_dtype)).itemsize * rollout.lag / 2**20
    how = "while a step trains"
    if not run.samples_beside:
        embedded = not run.engine_kind.own_process
        reason = "the embedded engine has the trainer's devices" if embedded else "several hosts refill a step together"
        how = f"before a step trains: {reason}"
    cost = f"by {rollout.lag} kept copies of the parameters, {size:,.1f} MiB over the training devices"
    return [
        f"lag          {rollout.lag} step(s): the engine samples {how}",
        f"             p_train of the weights that sampled: one forward pass a step, {cost}",
    ]


def _measured(run: Run) -> str:
    """Until when c is the one that is set."""
    settings = run.config.algorithm
    rule = f"{settings.tolerance_factor:g} times the median discrepancy of these"
    return f" for {settings.measured_steps} steps, then {rule}" if settings.measured_steps else ""


def _engine_size(run: Run) -> str:
    """How the engine is split, and how many rows it decodes; nothing where neither is ours to say."""
    kind, most = run.engine_kind, run.config.rollout.max_rows
    split = kind.describe(run.engine_arguments.settings)
    if kind.own_process:
        return split
    fewer = f" (rollout.max_rows={most} does not fit)" if run.memory.rows < most else ""
    return f"{split}, at most {run.memory.rows} rows at a time{fewer}"


def _advice(run: Run) -> list[str]:
    """Faster settings for a CPU, whose bfloat16 products XLA computes from float32 copies."""
    config = run.config
    settings = [("model.compute_dtype", config.model.compute_dtype)]
    if not run.engine_kind.own_process:
        settings.append(("rollout.compute_dtype", config.rollout.compute_dtype))
    slow = [name for name, dtype in settings if dtype == "bfloat16"]
    if run.mesh.devices.flat[0].platform != "cpu" or not slow:
        return []
    sampling = ", and for sampling rollout.engine=vllm too," * (len(settings) > 1)
    return [
        f"advice       {' and '.join(slow)}: float32{sampling} takes less time and memory than bfloat16 on this CPU"
    ]
