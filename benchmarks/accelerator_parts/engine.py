"""The embedded engine: tokens a second in one precision, and its decode step beside the chip's
bounds.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator_parts import limits
from benchmarks.accelerator_parts.sizes import Size, Tell, run_settings
from benchmarks.compiled_parts.lengths import forward_flops
from benchmarks.compiled_parts.trips import one_token
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.models.params import init_params, num_params
from dcmdp_jax.parallel.mesh import one_device_mesh, sampling_mesh
from dcmdp_jax.plan.run_plan import plan_engine, planned_run


def measure(size: Size, tell: Tell, *, precision: str) -> None:
    """Sample `size.new_tokens` tokens for each completion, without a stop token."""
    settings = run_settings(size)
    settings["rollout"] |= {
        "precision": precision,
        "group_size": size.decode_group,
        "max_completion_tokens": size.new_tokens,
    }
    settings["task"]["max_prompt_tokens"] = size.decode_prompt_tokens
    settings["training"] |= {
        "prompts_per_step": size.decode_prompts,
        "prompts_per_mini_batch": size.decode_prompts,
    }
    config = from_config_dict(settings)
    mesh = one_device_mesh()
    run = planned_run(config, mesh)
    model = run.model
    rows = size.decode_prompts * size.decode_group
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(0, model.vocab_size, size.decode_prompt_tokens).astype(np.int32)
        for _ in range(size.decode_prompts)
    ]
    arguments = EngineArguments(
        precision,
        config.rollout.compute_dtype,
        model=model,
        max_rows=rows,
        max_total_tokens=config.max_total_tokens,
    )
    engine = LocalEngine(arguments, mesh=sampling_mesh(mesh))
    params = jax.block_until_ready(jax.jit(lambda key: init_params(model, key))(jax.random.key(0)))
    engine.sync_weights(params, 0)
    began = time.perf_counter()
    engine.sync_weights(params, 1)
    synced = time.perf_counter() - began
    sampling = SamplingParams(size.decode_group, size.new_tokens)
    seconds = []
    tokens = 0
    for step in range(size.repeats + 1):
        began = time.perf_counter()
        episodes = collect(engine.generate(prompts, sampling, seed=0, step=step))
        seconds.append(time.perf_counter() - began)
        tokens = sum(episode.num_sampled for episode in episodes)
    first, *seconds = seconds
    found: dict[str, Any] = {
        "kind": "engine",
        "parameters": num_params(model),
        "precision": precision,
        "rows": rows,
        "prompt_tokens": size.decode_prompt_tokens,
        "new_tokens": size.new_tokens,
        "tokens": tokens,
        "push_seconds": synced,
        "first_call_seconds": first,
        "seconds": seconds,
        "tokens_per_second": [tokens / each for each in seconds],
        "peak_bytes": limits.memory_peak(),
    }
    tell(found)

    plan = plan_engine(run, rows)
    _, decode = limits.read(
        next(program for program in plan.programs if program.name == "decode"), one_token
    )
    chip, source = limits.chip_here(size)
    # A call is the prefill and a decode step for each token: the prefill's time is counted as
    # theirs.
    per_step = float(np.median(seconds)) / size.new_tokens
    needed = rows * forward_flops(model, size.decode_prompt_tokens * 2 + size.new_tokens)
    found |= {
        "cache_slots": plan.slots,
        "cache_bytes": plan.cache_bytes,
        "weights_bytes": plan.weights_bytes,
        "predicted_decode_peak_bytes": decode.peak,
        "seconds_per_token_of_all_rows": per_step,
        "chip_figures": source,
    }
    found |= limits.limits(decode, chip, per_step, needed)
    tell(found)
