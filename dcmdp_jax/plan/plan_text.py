"""A `CompiledRun` as text and as JSON, and its step at given lengths of completions."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dcmdp_jax.config.checks import PACKING, as_settings
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.lengths import Lengths, expected_step, lognormal, parse_lengths
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import num_params
from dcmdp_jax.plan.run_plan import GIB, CompiledRun

_NOTE = (
    "worst case: every completion has the longest length, every row is one sequence, all its "
    "tokens are in the loss\n`python -m benchmarks.compiled` (from a checkout) counts what the "
    "same programs compute and communicate."
)


def describe_plan(plan: CompiledRun) -> str:
    """Lines of text; every figure is under a heading that says whether it is compiled or
    arithmetic.
    """
    return "\n".join([*_heading(plan), "", *_memory(plan), "", _NOTE])


def plan_record(plan: CompiledRun) -> dict[str, Any]:
    """The same as a tree for JSON. Bytes are of one device."""
    packing = plan.run.placement.packing
    return {
        "topology": plan.topology.name,
        "devices": plan.run.placement.mesh.size,
        "mesh": dict(plan.run.placement.mesh.shape),
        "model_type": plan.run.model.model_type,
        "parameters": num_params(plan.run.model),
        "rows_per_micro_batch": list(packing.rows_per_micro_batch),
        "row_lengths": list(packing.row_lengths),
        "micro_batches": list(packing.micro_batches),
        "mini_batches": packing.mini_batches,
        "usable_bytes": plan.usable,
        "fits": plan.fits,
        "held_bytes": _held(plan),
        "phases": {
            phase.name: {
                "peak_bytes": phase.peak,
                "beside_bytes": phase.beside,
                "total_bytes": phase.total,
            }
            for phase in plan.phases
        },
        "programs": {
            name: {
                "compile_seconds": one.seconds,
                "refused": one.refused,
                "peak_bytes": one.peak,
                "argument_bytes": one.arguments,
                "temporary_bytes": one.temporary,
            }
            for name, one in plan.programs.items()
        },
    }


def _heading(plan: CompiledRun) -> list[str]:
    packing = plan.run.placement.packing
    chip = plan.topology.chip
    config = plan.run.config
    rows = ", ".join(
        f"{rows} x {length} tokens, {count} of them at most"
        for rows, length, count in zip(
            packing.rows_per_micro_batch, packing.row_lengths, packing.micro_batches, strict=True
        )
    )
    model = plan.run.model
    compute = plan.run.placement.compute
    mesh = plan.run.placement.mesh
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    engine = (
        "none"
        if config.supervised
        else f"{config.rollout.engine}, whose programs are not compiled here"
    )
    if plan.engine is not None:
        engine = (
            f"embedded, {config.rollout.precision}, {plan.engine.rows} rows of "
            f"{plan.engine.slots} cache slots"
        )
    return [
        f"model        {model.model_type}, {num_params(model):,} parameters in "
        f"{config.model.param_dtype}, {compute.dtype} products, remat {compute.remat}, attention "
        f"{compute.attention}",
        f"devices      {mesh.size} x {chip.name} ({plan.topology.name}), mesh {axes}",
        f"step         {packing.mini_batches} mini-batches of {packing.completions} completions, "
        "in micro-batches of",
        f"             {rows}; training.micro_batch_tokens={config.training.micro_batch_tokens}, "
        "on each device",
        f"engine       {engine}",
    ]


def _held(plan: CompiledRun) -> dict[str, int]:
    held = dict(plan.step.held)
    if plan.engine is not None:
        held |= {
            "engine's weights": plan.engine.weights_bytes,
            "engine's cache": plan.engine.cache_bytes,
        }
    return held


def _memory(plan: CompiledRun) -> list[str]:
    held = ", ".join(f"{name} {size / GIB:.2f}" for name, size in _held(plan).items())
    lines = [
        "memory of each device, GiB",
        f"  by arithmetic, exact: {held}",
        "  program     compiled: arguments  temporary    peak  by arithmetic, beside it           "
        "   together",
    ]
    for phase in plan.phases:
        beside = (
            ", ".join(f"{name} {size / GIB:.2f}" for name, size in phase.beside.items())
            or "nothing"
        )
        compiled = plan.programs.get(phase.name)
        figures = f"{'by arithmetic alone':>38}"
        if compiled is not None and compiled.refused is not None:
            lines.append(
                f"  {phase.name:11} does not fit by itself ({compiled.refused}); beside it {beside}"
            )
            continue
        if compiled is not None:
            figures = (
                f"{compiled.arguments / GIB:19.2f} {compiled.temporary / GIB:10.2f} "
                f"{phase.peak / GIB:7.2f}"
            )
        lines.append(f"  {phase.name:11} {figures}  {beside:36} {phase.total / GIB:9.2f}")
    usable = f"{plan.usable / GIB:.2f} GiB ({plan.usable_reason})"
    if plan.fits:
        largest = max(plan.phases, key=lambda phase: phase.total)
        return [*lines, f"  fits: {largest.name} needs {largest.total / GIB:.2f} of {usable}"]
    over = [phase for phase in plan.phases if phase.total > plan.usable]
    return lines + [
        f"  does not fit: {phase.name} needs {phase.total / GIB:.2f} of {usable}" for phase in over
    ]


def forward_flops(model: ModelConfig, length: int) -> float:
    """Products of a forward pass, per token of a row of `length` tokens that is one sequence.

    Matrices: 2 per weight that multiplies (a token's own experts only). Causal attention: q k and p
    v over half of the row, 2 x 2 x heads x head_dim x length / 2 in each layer. A recurrent layer
    reads its state twice and adds to it once, 3 x 2 x heads x key x value.
    """
    values = model.linear_num_value_heads * model.linear_value_head_dim
    recurrent = len(model.recurrent_layers)
    queries = model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    attention = (2 + model.family.output_gate) * queries + 2 * keys
    full = model.num_layers - recurrent
    gates = model.num_experts + model.family.shared_expert
    widths = model.num_layers * (3 * model.active_mlp_width + gates) + full * attention
    widths += recurrent * (model.mixed_width + 2 * values + 2 * model.linear_num_value_heads)
    matrices = (
        model.hidden_size * (widths + model.vocab_size)
        + recurrent * 3 * values * model.linear_key_head_dim
    )
    return 2.0 * matrices + full * 2.0 * queries * length


def lengths_asked(text: str, config: Config) -> Lengths | None:
    """The lengths that `--lengths` names, see `parse_lengths`; None without."""
    with as_settings(PACKING):
        return parse_lengths(text, limit=config.rollout.max_completion_tokens) if text else None


def at_lengths(plan: CompiledRun, lengths: Lengths) -> dict[str, Any]:
    """The step of a plan at lengths of completions, all devices together, as a tree for JSON.

    Prompts are lognormal with a median of a quarter of their limit. `worst_computed` are the
    positions of a step whose completions all have the longest length; `model_flops` the operations
    that the model needs for the real tokens.
    """
    packing = plan.run.placement.packing
    limit = plan.run.config.task.max_prompt_tokens
    prompts = lognormal(max(1, limit // 4), limit).draw(4096, seed=0)
    expected = expected_step(packing, np.minimum(prompts, limit), lengths)
    shape = packing.micro_batches[-1], packing.rows_per_micro_batch[-1], packing.row_lengths[-1]
    # A token of a row of n tokens takes a + b n forward.
    matrices = forward_flops(plan.run.model, 0)
    attention = forward_flops(plan.run.model, 1) - matrices
    passes = 3 + (packing.mini_batches - 1) / packing.mini_batches
    return {
        "lengths": lengths.name,
        "tokens": expected.tokens,
        "computed": expected.computed,
        "computed_over_real": expected.computed / expected.tokens,
        "worst_computed": packing.mini_batches * math.prod(shape),
        "model_flops": passes * (matrices * expected.tokens + attention * expected.squares),
    }


def describe_lengths(found: Mapping[str, Any]) -> str:
    """`at_lengths` for people."""
    return (
        f"lengths      {found['lengths']}: {found['tokens']:,.0f} tokens in a step with their "
        f"prompts, whose median is a quarter of the limit\n  computed   {found['computed']:,.0f} "
        f"positions, {found['computed_over_real']:.2f} times the tokens "
        f"({1 - 1 / found['computed_over_real']:.0%} padding); worst case "
        f"{found['worst_computed']:,}\n  operations {found['model_flops']:.3e} needed by the "
        "model for these tokens"
    )
