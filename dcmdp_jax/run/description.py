"""Description of a run, printed before it begins and by the dry run."""

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
    task = run.task
    place = run.placement
    config = task.config
    model = task.model
    packing = place.packing
    completions = packing.mini_batches * packing.completions
    rows = ", ".join(
        f"{r} x {length}"
        for r, length in zip(packing.rows_per_micro_batch, packing.row_lengths, strict=True)
    )
    limit = config.rollout.max_completion_tokens
    lengths = np.array([*map(len, task.train.token_ids)])
    learns = config.supervised
    expected = expected_step(packing, lengths - learns, typical_lengths(1 if learns else limit))
    resumes = (Path(config.run_dir) / "checkpoints").is_dir()
    mesh = ", ".join(f"{name} {count}" for name, count in place.mesh.shape.items())
    train = task.train
    method = config.algorithm
    rule = f"then {method.tolerance_factor:g} times the median discrepancy of these"
    measured = f" for {method.measured_steps} steps, {rule}" if method.measured_steps else ""
    cap = f", lambda begins at its cap of {method.multiplier_max:g}" if method.begins_at_cap else ""
    # Parameters of older versions stay, for the p^Train of their batches.
    lag = config.rollout.lag
    how = "while" if place.samples_while_training else "before"
    size = num_params(model) * np.dtype(jnp.dtype(config.model.param_dtype)).itemsize * lag / 2**20
    ahead = (
        f"{lag} step(s): the engine samples {how} a step trains; {lag} copies of parameters "
        f"take {size:,.1f} MiB"
    )
    engine = place.engine
    fitted = place.engine.memory.rows
    most = config.rollout.max_rows
    fewer = f" (rollout.max_rows={most} does not fit)" if fitted < most else ""
    sized = "" if engine.kind.own_process else f", at most {fitted} rows at a time{fewer}"
    known = (
        f"; {train.with_control_tokens:,} hold control tokens" if train.with_control_tokens else ""
    )
    held = "".join(
        f", {len(each.problems):,} of {one.name} x {one.samples}" for one, each in task.held_out
    )
    mixed = ""
    if len(task.stream.sizes) > 1:
        shares = zip(
            parse_mixture(config.task.train),
            cycle(task.stream.weights),
            task.stream.sizes,
            strict=True,
        )
        total = sum(cycle(task.stream.weights))
        mixed = ", ".join(
            f"{part.name} {share / total:.0%} ({size:,})" for part, share, size in shares
        )
    turns = (
        f"{config.task.environment}, at most {config.task.max_turns} turns of "
        f"{config.turn_tokens} tokens"
    )
    parts = {
        "run": f"{config.run_dir}, {config.training.steps} "
        f"steps{', resumes if it has a checkpoint' * resumes}",
        "model": f"{model.model_type}, {num_params(model):,} parameters in "
        f"{config.model.param_dtype}, {config.model.path or 'fresh'}",
        "devices": f"{place.mesh.size} x {place.mesh.devices.flat[0].device_kind} ({mesh})",
        "hosts": ", ".join(place.hosts.names) if place.hosts.count > 1 else "",
        "method": f"{method.method}, c = {method.tolerance:g}{measured}, lambda_0 = "
        f"{method.multiplier:g}, eta = {method.dual_learning_rate:g}{cap}",
        "engine": (
            f"{config.rollout.engine}, {config.rollout.precision}, cache "
            f"{config.rollout.kv_cache_dtype}"
        )
        + engine.kind.describe(engine.arguments.settings)
        + sized,
        "problems": (
            f"{len(train.problems):,} to train on ({train.dropped} dropped: prompt too long{known})"
        )
        + held,
        "mixture": mixed,
        "rewards": ", ".join(
            f"{weight:g} x {function}" for function, weight in config.rewards.weighted
        ),
        "environment": turns if config.task.environment else "",
        "step": f"{config.training.prompts_per_step} prompts x {config.rollout.group_size} = "
        f"{completions} completions of at most {limit} tokens, {packing.mini_batches} "
        "update(s)",
        "rows": f"micro-batches of {rows} tokens, a program for each; "
        f"{1 - expected.tokens / expected.computed:.0%} padding expected of completions "
        f"with a median of {max(1, limit // 4)} tokens",
        "warm-up": f"{config.warmup.steps} supervised steps" if config.warmup.steps else "none",
        "lag": ahead if lag else "",
        "memory": ("\n" + " " * 13).join(place.engine.memory.lines(whole=whole)),
    }
    if learns:
        targets = sum(int(each.sum()) for each in train.targets)
        held = held.rpartition(" x ")[0]
        counted = (
            f"{len(lengths):,} to learn from ({train.dropped} dropped: too long), {targets:,} of "
        )
        parts |= dict.fromkeys(("method", "engine", "rewards"), "")
        parts["problems"] = f"{counted}{lengths.sum():,} tokens are the assistant's{held}"
        parts["step"] = f"{completions} conversations, {packing.mini_batches} update(s)"
        parts |= {"rows": parts["rows"].partition(" of completions")[0], "warm-up": ""}
    return "\n".join(f"{label:13}{text}" for label, text in parts.items() if text)
