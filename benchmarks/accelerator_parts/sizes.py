"""Shapes of the measurements on an accelerator, and toy ones for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import moe
from benchmarks.workload import rollout
from dcmdp_jax.data.episode import Episode
from dcmdp_jax.models.config import ModelConfig

Tell = Callable[[dict[str, Any]], None]
"""Takes what a part has found so far: if it fails later, that is not lost."""


class Size(NamedTuple):
    """Shapes of all parts.

    Attributes:
        model_path: `model.path`, whose last part names a published shape; empty: `architecture`.
        architecture: fields of `model.architecture`.
        row_length: of packed rows, the longest of a step, and of attention.
        micro_batch_tokens: of the step; attention has as many rows.
        prompts, group: completions of a step.
        prompt_tokens: of each prompt of a step.
        median_tokens: median of the lengths of a step's completions.
        decode_prompts, decode_group, decode_prompt_tokens, new_tokens: of the engine.
        expert_layer, experts, expert_tokens: of the mixture of experts.
        product: side of the square product whose rate is measured.
        copied_bytes: size of the array whose copy is measured.
        demo: settings of the demo that differ from its own.
        repeats: rounds of each measurement.
    """

    model_path: str
    architecture: dict[str, Any]
    row_length: int
    micro_batch_tokens: int
    prompts: int
    group: int
    prompt_tokens: int
    median_tokens: int
    decode_prompts: int
    decode_group: int
    decode_prompt_tokens: int
    new_tokens: int
    expert_layer: moe.Sizes
    experts: int
    expert_tokens: int
    product: int
    copied_bytes: int
    demo: tuple[tuple[str, int], ...]
    repeats: int


SIZES = {
    # The mixture is a layer of Qwen3-30B-A3B.
    "1.7B": Size(
        "models/Qwen3-1.7B",
        {},
        row_length=8192,
        micro_batch_tokens=16384,
        prompts=4,
        group=8,
        prompt_tokens=128,
        median_tokens=1536,
        decode_prompts=32,
        decode_group=8,
        decode_prompt_tokens=128,
        new_tokens=256,
        expert_layer=moe.Sizes(2048, 768, 8, "bfloat16"),
        experts=128,
        expert_tokens=8192,
        product=8192,
        copied_bytes=1 << 32,
        demo=(),
        repeats=5,
    ),
    "toy": Size(
        "",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
        },
        row_length=128,
        micro_batch_tokens=256,
        prompts=4,
        group=4,
        prompt_tokens=8,
        median_tokens=24,
        decode_prompts=2,
        decode_group=2,
        decode_prompt_tokens=8,
        new_tokens=8,
        expert_layer=moe.Sizes(32, 16, 2, "bfloat16"),
        experts=4,
        expert_tokens=64,
        product=256,
        copied_bytes=1 << 22,
        repeats=2,
        demo=(
            ("training.steps", 5),
            ("warmup.steps", 1),
            ("evaluation.every_steps", 0),
            ("mesh.cpu_devices", 1),
        ),
    ),
}


def size_name(asked: str) -> str:
    """A key of `SIZES`: the one that is asked for; of "auto" the toy on a CPU."""
    if asked != "auto":
        return asked
    return "toy" if jax.default_backend() == "cpu" else "1.7B"


def run_settings(size: Size) -> dict[str, dict[str, Any]]:
    """The settings of a run at this size: bfloat16 products, one update on all completions. The
    others are defaults.
    """
    return {
        "model": {
            "path": size.model_path,
            "architecture": dict(size.architecture),
            "compute_dtype": "bfloat16",
        },
        "task": {"train": "none", "max_prompt_tokens": size.prompt_tokens},
        "rollout": {
            "compute_dtype": "bfloat16",
            "group_size": size.group,
            "max_completion_tokens": size.row_length - size.prompt_tokens,
        },
        "training": {
            "prompts_per_step": size.prompts,
            "prompts_per_mini_batch": size.prompts,
            "micro_batch_tokens": size.micro_batch_tokens,
        },
    }


def completions(size: Size, model: ModelConfig) -> list[Episode]:
    """Random completions of a step, their lengths log-normal."""
    spread = np.random.default_rng(2).normal(0, 0.7, size.prompts * size.group)
    lengths = size.median_tokens * np.exp(spread)
    return rollout(
        model,
        size.prompt_tokens,
        lengths.astype(int).clip(1, size.row_length - size.prompt_tokens),
        size.group,
    )
