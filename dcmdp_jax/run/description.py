"""Description of a run, printed before it begins and by the dry run."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.lengths import expected_step, typical_lengths
from dcmdp_jax.data.mixtures import cycle, parse_mixture
from dcmdp_jax.data.row_layout import RowShapes
from dcmdp_jax.models.params import num_params
from dcmdp_jax.number_format import labelled
from dcmdp_jax.run.run import Run
from dcmdp_jax.run.task import Task


def describe(run: Run, *, full: bool = True) -> str:
    """Description of a run: sizes, shapes, memory by arithmetic and what does not fit.

    Args:
        run: checked.
        full: memory part by part also where more than half of it is free.
    """
    config = run.task.config
    model = run.task.model
    placement = run.placement
    hosts = placement.hosts
    device = placement.mesh.devices.flat[0].device_kind
    mesh = ", ".join(f"{name} {count}" for name, count in placement.mesh.shape.items())
    steps = f"{config.training.steps} steps"
    if (Path(config.run_dir) / "checkpoints").is_dir():
        steps += ", resumes if it has a checkpoint"
    if config.supervised:
        described = _described_data(run)
    else:
        described = _described_sampling(run)

    lines = {
        "run": f"{config.run_dir}, {steps}",
        "model": f"{model.model_type}, {num_params(model):,} parameters in "
        f"{config.model.param_dtype}, {config.model.path or 'fresh'}",
        "devices": f"{placement.mesh.size} x {device} ({mesh})",
        "hosts": ", ".join(hosts.names) if hosts.count > 1 else "",
        **described,
        "lag": _lag(run),
        "memory": "\n".join(placement.engine.memory.lines(full=full)),
        "warning": _without_ascent(config),
    }
    return labelled(lines)


def _described_data(run: Run) -> dict[str, str]:
    """The lines of a supervised run about its conversations."""
    train = run.task.train
    packing = run.placement.packing
    lengths = np.array([*map(len, train.token_ids)])
    targets = sum(int(mask.sum()) for mask in train.targets)
    held_out = "".join(
        f", {len(prompts.problems):,} of {task.name}" for task, prompts in run.task.held_out
    )
    completions = packing.mini_batches * packing.completions
    return {
        "problems": f"{len(lengths):,} to learn from ({train.dropped} dropped: too long), "
        f"{targets:,} of {lengths.sum():,} tokens are the assistant's{held_out}",
        "mixture": _mixture(run.task),
        "step": f"{completions} conversations, {packing.mini_batches} update(s)",
        "rows": _rows(packing, lengths - 1, 1),
    }


def _described_sampling(run: Run) -> dict[str, str]:
    """The lines of a run about what it samples."""
    config = run.task.config
    train = run.task.train
    packing = run.placement.packing
    limit = run.task.sampling.max_completion_tokens
    lengths = np.array([*map(len, train.token_ids)])
    control = ""
    if train.with_control_tokens:
        control = f"; {train.with_control_tokens:,} hold control tokens"
    held_out = "".join(
        f", {len(prompts.problems):,} of {task.name} x {task.samples}"
        for task, prompts in run.task.held_out
    )
    environment = config.task.environment
    if environment:
        environment += f", at most {config.task.max_turns} turns of {config.turn_tokens} tokens"
    suffix = config.task.prompt_suffix
    completions = packing.mini_batches * packing.completions
    warm_up = "none"
    if run.task.worked_solutions is not None:
        warm_up = f"{config.warmup.steps} supervised steps on {config.warmup.task}"

    return {
        "method": _method(config.algorithm),
        "engine": _engine(run),
        "problems": f"{len(train.problems):,} to train on ({train.dropped} dropped: prompt too "
        f"long{control}){held_out}",
        "suffix": f"{suffix!r} after each problem" if suffix else "",
        "mixture": _mixture(run.task),
        "rewards": ", ".join(f"{weight:g} x {name}" for name, weight in config.rewards.weighted),
        "environment": environment,
        "step": f"{config.training.prompts_per_step} prompts x {run.task.sampling.group_size} = "
        f"{completions} completions of at most {limit} tokens, {packing.mini_batches} update(s)",
        "rows": f"{_rows(packing, lengths, limit)} of completions with a median of "
        f"{max(1, limit // 4)} tokens",
        "warm start": warm_up,
    }


def _method(settings: AlgorithmSettings) -> str:
    fixed = settings.fixed_multiplier
    if fixed == 0:
        return settings.method
    if fixed is not None:
        return f"{settings.method}, c = {settings.tolerance:g}, lambda = {fixed:g} throughout"

    measured = cap = ""
    if settings.measured_steps:
        measured = (
            f" for {settings.measured_steps} steps, then {settings.tolerance_factor:g} times their "
            "median discrepancy (noise floor, if larger)"
        )
    if settings.begins_at_cap:
        cap = f", lambda begins at its cap of {settings.multiplier_max:g}"
    return (
        f"{settings.method}, c = {settings.tolerance:g}{measured}, lambda_0 = "
        f"{settings.multiplier:g}, eta = {settings.dual_learning_rate:g}{cap}"
    )


def _without_ascent(config: Config) -> str:
    settings = config.algorithm
    if config.supervised or settings.measured_steps < config.training.steps:
        return ""
    return (
        f"algorithm.tolerance_steps={settings.tolerance_steps} is not below "
        f"training.steps={config.training.steps}: lambda stays at lambda_0 throughout"
    )


def _engine(run: Run) -> str:
    rollout = run.task.config.rollout
    engine = run.placement.engine
    rows = engine.memory.rows
    text = f"{rollout.engine}, {rollout.precision}, cache {rollout.kv_cache_dtype}"
    text += engine.kind.describe(engine.arguments.settings)
    if not engine.kind.own_process:
        text += f", at most {rows} rows at a time"
        if rows < rollout.max_rows:
            text += f" (rollout.max_rows={rollout.max_rows} does not fit)"
    return text


def _mixture(task: Task) -> str:
    """The share of each task of a mixture, and its problems."""
    sizes = task.stream.sizes
    if len(sizes) < 2:
        return ""
    weights = cycle(task.stream.weights)
    mixture = zip(parse_mixture(task.config.task.train), weights, sizes, strict=True)
    total = sum(weights)
    return ", ".join(
        f"{task.name} {weight / total:.0%} ({size:,})" for task, weight, size in mixture
    )


def _rows(packing: RowShapes, lengths: np.ndarray, limit: int) -> str:
    shapes = zip(packing.rows_per_micro_batch, packing.row_lengths, strict=True)
    rows = ", ".join(f"{count} x {length}" for count, length in shapes)
    expected = expected_step(packing, lengths, typical_lengths(limit))
    padding = 1 - expected.tokens / expected.computed
    return f"micro-batches of {rows} tokens, each shape compiled; {padding:.0%} padding expected"


def _lag(run: Run) -> str:
    config = run.task.config
    lag = config.rollout.lag
    if not lag:
        return ""
    # Parameters of older versions stay, for the p^Train of their batches.
    item = np.dtype(jnp.dtype(config.model.param_dtype)).itemsize
    size = num_params(run.task.model) * item * lag / 2**20
    when = "while" if run.placement.samples_while_training else "before"
    return (
        f"{lag} step(s): the engine samples {when} a step trains; {lag} copies of parameters take "
        f"{size:,.1f} MiB"
    )
