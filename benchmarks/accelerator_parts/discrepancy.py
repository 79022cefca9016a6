"""Probabilities of sampled tokens on this device: the engine and the training stack in bfloat16 beside float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator_parts.sizes import Size, Tell, run_settings
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.episode import Episode, collect
from dcmdp_jax.data.packing import pack
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params
from dcmdp_jax.models.products import products_in
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.parallel.mesh import one_device_mesh, sampling_mesh
from dcmdp_jax.plan.published import model_of
from dcmdp_jax.run.run import compute_on, packing_on
from dcmdp_jax.training.rescore import OLD_LOGPROBS, make_old_logprobs
from dcmdp_jax.training.state import batch_shardings

_SPREAD = 0.1
"""Standard deviation of the random weights: logits of some nats, so that some tokens are likely and others not."""


def measure(size: Size, tell: Tell, *, precision: str) -> None:
    """Sample with the embedded engine, then give its tokens to the training stack in bfloat16 and in float32."""
    half, full = (_config(size, dtype) for dtype in ("bfloat16", "float32"))
    model = dataclasses.replace(model_of(half), initializer_range=_SPREAD)
    params = jax.block_until_ready(jax.jit(lambda key: init_params(model, key))(jax.random.key(0)))
    sampled = _sample(size, half, model, params, precision)
    trained, engine, compute = _logprobs(half, model, params, sampled)
    exact, _, _ = _logprobs(full, model, params, sampled)
    pairs = {
        "training stack, float32": (trained, exact),
        "engine, float32": (engine, exact),
        "training stack, engine": (trained, engine),
    }
    tell(
        {
            "kind": "discrepancy",
            "precision": precision,
            "tokens": len(exact),
            "attention": compute.attention,
            "median_probability": float(np.median(np.exp(exact))),
            "pairs": {name: _differences(*pair) for name, pair in pairs.items()},
        }
    )


def _config(size: Size, dtype: str) -> Config:
    settings = run_settings(size)
    settings["model"] |= {"compute_dtype": dtype} | ({"attention": "xla"} if dtype == "float32" else {})
    settings["rollout"] |= {"group_size": size.decode_group, "max_completion_tokens": size.new_tokens}
    settings["task"]["max_prompt_tokens"] = size.decode_prompt_tokens
    settings["training"] |= {
        "prompts_per_step": 2,
        "prompts_per_mini_batch": 2,
        "row_lengths": (size.decode_prompt_tokens + size.new_tokens,),
        "segments_per_row": 1,
    }
    return from_config_dict(settings)


def _sample(size: Size, config: Config, model: ModelConfig, params: Any, precision: str) -> list[Episode]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.vocab_size, size.decode_prompt_tokens).astype(np.int32) for _ in range(2)]
    arguments = EngineArguments(
        precision, "bfloat16", model=model, max_rows=2 * size.decode_group, max_total_tokens=config.max_total_tokens
    )
    engine = LocalEngine(arguments, mesh=sampling_mesh(one_device_mesh()))
    engine.push_weights(params, 0)
    return collect(engine.generate(prompts, SamplingParams(size.decode_group, size.new_tokens), seed=0, step=0))


def _logprobs(
    config: Config, model: ModelConfig, params: Any, sampled: list[Episode]
) -> tuple[np.ndarray, np.ndarray, Compute]:
    """Log-probs of the sampled tokens by the training stack and by the engine, both [tokens] float32; how computed."""
    mesh = one_device_mesh()
    compute = compute_on(config, mesh)
    plan = packing_on(config, mesh, compute)
    batch, _ = pack(sampled, np.zeros(len(sampled), np.float32), plan, mask_truncated=False)
    row_logprobs = make_row_logprobs(model, compute, temperature=1.0, mesh=mesh)
    on_device = jax.device_put(batch, batch_shardings(mesh, buckets=len(batch.rows)))
    with products_in(compute.dtype):
        own = make_old_logprobs(row_logprobs, mesh=mesh)(params, on_device)
    masks = [np.asarray(rows.completion_mask) for rows in batch.rows]
    trained = [np.asarray(rows.columns[OLD_LOGPROBS])[mask] for rows, mask in zip(own.rows, masks, strict=True)]
    engine = [np.asarray(rows.rollout_logprobs)[mask] for rows, mask in zip(batch.rows, masks, strict=True)]
    return np.concatenate(trained), np.concatenate(engine), compute


def _differences(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return {
        "mean_abs_p": float(np.abs(np.exp(a) - np.exp(b)).mean()),
        "mean_abs_logp": float(np.abs(a - b).mean()),
        "max_abs_logp": float(np.abs(a - b).max()),
    }
