"""The training step: tokens a second, share of the peak, memory beside the compiler's figure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator_parts import limits
from benchmarks.accelerator_parts.sizes import Size, Tell, completions, run_settings
from benchmarks.compiled_parts.flops import step_flops
from benchmarks.compiled_parts.trips import step_trip_counts
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.episode import Episode
from dcmdp_jax.data.packing import pack
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params, num_params
from dcmdp_jax.parallel.mesh import one_device_mesh
from dcmdp_jax.parallel.sharding import batch_shardings
from dcmdp_jax.plan.run_plan import plan_step, planned_run
from dcmdp_jax.training.state import initial_dual
from dcmdp_jax.training.step_programs import make_step_programs


def step_config(size: Size, *, segments: int, remat: str) -> Config:
    """The run whose step is measured, `segments` sequences a row at most, 0: its default; lengths
    are chosen.
    """
    config = run_settings(size)
    config["model"]["remat"] = remat
    config["training"]["segments_per_row"] = segments
    return from_config_dict(config)


def needed_flops(model: ModelConfig, episodes: Sequence[Episode]) -> float:
    """Products of an update on these sequences: each attends to itself alone, and only sampled
    tokens have logits.
    """
    lengths = [len(episode.token_ids) for episode in episodes]
    whole = sum(step_flops(model, length=n, tokens=n, recomputed_tokens=0) for n in lengths)
    prompts = sum(lengths) - sum(episode.num_sampled for episode in episodes)
    return whole - 3 * 2.0 * model.hidden_size * model.vocab_size * prompts


def measure(size: Size, tell: Tell, *, remat: str, segments: int = 0) -> None:
    """Train on one batch, `size.repeats` times after two steps that are not counted.

    The program is the one that `bin.plan` compiles, and `bin.train` runs; parameters and tokens are
    random.
    """
    mesh = one_device_mesh()
    config = step_config(size, segments=segments, remat=remat)
    run = planned_run(config, mesh)
    model = run.model
    step = plan_step(run)
    sampled = completions(size, model)
    rewards = np.random.default_rng(1).integers(0, 2, len(sampled)).astype(np.float32)
    batch, (tokens, computed) = pack(sampled, rewards, run.placement.packing, mask_truncated=False)
    micro_batches = [int(count) for count in batch.micro_batches[0]]
    executable, compiled = limits.read(step, step_trip_counts(run, micro_batches))
    found: dict[str, Any] = {
        "kind": "step",
        "parameters": num_params(model),
        "most_sequences_per_row": run.placement.packing.segments_per_row,
        "row_lengths": run.placement.packing.row_lengths,
        "remat": remat,
        "attention": run.placement.compute.attention,
        "sequences": len(sampled),
        "tokens": tokens,
        "computed_tokens": computed,
        "micro_batches": sum(micro_batches),
        "compile_seconds": compiled.seconds,
        "predicted_peak_bytes": compiled.peak,
        "predicted_argument_bytes": compiled.arguments,
        "predicted_temporary_bytes": compiled.temporary,
    }
    tell(found)

    programs = make_step_programs(config, model, run.placement)
    dual = initial_dual(config.algorithm)
    create = jax.jit(
        lambda key: programs.create(init_params(model, key), dual),
        out_shardings=programs.shardings,
    )
    state = jax.block_until_ready(create(jax.random.key(0)))
    batch = jax.device_put(batch, batch_shardings(mesh))
    found["peak_bytes_before"] = limits.memory_peak()
    seconds = []
    for repeat in range(size.repeats + 2):
        began = time.perf_counter()
        state, metrics, _ = jax.block_until_ready(executable(state, batch, None))
        if repeat >= 2:
            seconds.append(time.perf_counter() - began)
    found |= {
        "seconds": seconds,
        "tokens_per_second": [tokens / each for each in seconds],
        "peak_bytes": limits.memory_peak(),
        "loss": float(metrics["policy/loss"]),
        "skipped_updates": float(metrics["optimizer/skipped_updates"]),
    }
    tell(found)
    chip, source = limits.chip_here(size)
    needed = needed_flops(model, sampled)
    found |= limits.limits(compiled, chip, float(np.median(seconds)), needed) | {
        "chip_figures": source
    }
    if goal := limits.GOAL_FLOPS.get(limits.chip_name(jax.local_devices()[0])):
        found["share_of_goal_rate"] = found["flops_per_second"] / goal
    tell(found)
    if not math.isfinite(found["loss"]) or found["skipped_updates"]:
        raise FloatingPointError(
            f"the step's loss is {found['loss']}, {found['skipped_updates']:.0f} updates skipped"
        )
