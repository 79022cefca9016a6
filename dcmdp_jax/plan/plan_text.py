"""A `CompiledRun` as text and as JSON, and its step at given lengths of completions."""

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
    """The plan as text; a heading says whether a figure is compiled or arithmetic."""
    return "\n".join([*_heading(plan), "", *_memory(plan), "", _NOTE])


def plan_record(plan: CompiledRun) -> dict[str, Any]:
    """The same as a tree for JSON. Bytes are of one device."""
    packing = plan.run.placement.packing
    mesh = plan.run.placement.mesh
    phases = {}
    for phase in plan.phases:
        phases[phase.name] = {
            "peak_bytes": phase.peak,
            "beside_bytes": phase.beside,
            "total_bytes": phase.total,
        }
    programs = {}
    for name, compiled in plan.programs.items():
        programs[name] = {
            "compile_seconds": compiled.seconds,
            "refused": compiled.refused,
            "peak_bytes": compiled.peak,
            "argument_bytes": compiled.arguments,
            "temporary_bytes": compiled.temporary,
        }

    return {
        "topology": plan.topology.name,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "model_type": plan.run.model.model_type,
        "parameters": num_params(plan.run.model),
        "rows_per_micro_batch": list(packing.rows_per_micro_batch),
        "row_lengths": list(packing.row_lengths),
        "micro_batches": list(packing.micro_batches),
        "mini_batches": packing.mini_batches,
        "usable_bytes": plan.usable,
        "fits": plan.fits,
        "held_bytes": _resident_bytes(plan),
        "phases": phases,
        "programs": programs,
    }


def _heading(plan: CompiledRun) -> list[str]:
    config = plan.run.config
    model = plan.run.model
    compute = plan.run.placement.compute
    mesh = plan.run.placement.mesh
    packing = plan.run.placement.packing
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    buckets = []
    for rows, length, count in zip(
        packing.rows_per_micro_batch,
        packing.row_lengths,
        packing.micro_batches,
        strict=True,
    ):
        buckets.append(f"{rows} x {length} tokens, {count} of them at most")
    micro_batches = ", ".join(buckets)

    if plan.engine is not None:
        engine = (
            f"embedded, {config.rollout.precision}, {plan.engine.rows} rows of "
            f"{plan.engine.slots} cache slots"
        )
    elif config.supervised:
        engine = "none"
    else:
        engine = f"{config.rollout.engine}, whose programs are not compiled here"
    return [
        f"model        {model.model_type}, {num_params(model):,} parameters in "
        f"{config.model.param_dtype}, {compute.dtype} products, remat {compute.remat}, attention "
        f"{compute.attention}",
        f"devices      {mesh.size} x {plan.topology.chip.name} ({plan.topology.name}), mesh {axes}",
        f"step         {packing.mini_batches} mini-batches of {packing.completions} completions, "
        "in micro-batches of",
        f"             {micro_batches}; training.micro_batch_tokens="
        f"{config.training.micro_batch_tokens}, on each device",
        f"engine       {engine}",
    ]


def _resident_bytes(plan: CompiledRun) -> dict[str, int]:
    resident_bytes = dict(plan.step.resident)
    if plan.engine is not None:
        resident_bytes["engine's weights"] = plan.engine.weights_bytes
        resident_bytes["engine's cache"] = plan.engine.cache_bytes
    return resident_bytes


def _in_gib(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes.items())


def _memory(plan: CompiledRun) -> list[str]:
    lines = [
        "memory of each device, GiB",
        f"  by arithmetic, exact: {_in_gib(_resident_bytes(plan))}",
        "  program     compiled: arguments  temporary    peak  by arithmetic, beside it           "
        "   together",
    ]
    for phase in plan.phases:
        beside = _in_gib(phase.beside) or "nothing"
        compiled = plan.programs.get(phase.name)
        if compiled is None:
            figures = f"{'by arithmetic alone':>38}"
        elif compiled.refused is None:
            figures = (
                f"{compiled.arguments / GIB:19.2f} {compiled.temporary / GIB:10.2f} "
                f"{phase.peak / GIB:7.2f}"
            )
        else:
            lines.append(
                f"  {phase.name:11} does not fit by itself ({compiled.refused}); beside it {beside}"
            )
            continue
        lines.append(f"  {phase.name:11} {figures}  {beside:36} {phase.total / GIB:9.2f}")

    usable = f"{plan.usable / GIB:.2f} GiB ({plan.usable_reason})"
    if plan.fits:
        largest = max(plan.phases, key=lambda phase: phase.total)
        return [*lines, f"  fits: {largest.name} needs {largest.total / GIB:.2f} of {usable}"]
    for phase in plan.phases:
        if phase.total > plan.usable:
            lines.append(f"  does not fit: {phase.name} needs {phase.total / GIB:.2f} of {usable}")
    return lines


def forward_flops(model: ModelConfig, length: int) -> float:
    """Products of a forward pass, per token of a row of `length` tokens that is one sequence.

    Matrices: 2 per weight that multiplies (a token's own experts only). Causal attention: q k and p
    v over half of the row, 2 x 2 x heads x head_dim x length / 2 in each layer. A recurrent layer
    reads its state twice and adds to it once, 3 x 2 x heads x key x value.
    """
    recurrent_layers = len(model.recurrent_layers)
    full_layers = model.num_layers - recurrent_layers
    values = model.linear_num_value_heads * model.linear_value_head_dim
    queries = model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim

    # Columns of the matrices that a token's hidden state meets.
    mlp = 3 * model.active_mlp_width + model.num_experts + model.family.shared_expert
    attention = (2 + model.family.output_gate) * queries + 2 * keys
    recurrence = model.mixed_width + 2 * values + 2 * model.linear_num_value_heads
    widths = model.num_layers * mlp + full_layers * attention + recurrent_layers * recurrence
    matrices = model.hidden_size * (widths + model.vocab_size)
    matrices += recurrent_layers * 3 * values * model.linear_key_head_dim
    return 2.0 * matrices + full_layers * 2.0 * queries * length


def lengths_asked(text: str, config: Config) -> Lengths | None:
    """The lengths that `--lengths` names, see `parse_lengths`; None without."""
    if not text:
        return None
    with as_settings(PACKING):
        return parse_lengths(text, limit=config.rollout.max_completion_tokens)


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
    longest_rows = packing.micro_batches[-1] * packing.rows_per_micro_batch[-1]

    # A token of a row of n tokens takes a + b n forward.
    matrices = forward_flops(plan.run.model, 0)
    attention = forward_flops(plan.run.model, 1) - matrices
    passes = 3 + (packing.mini_batches - 1) / packing.mini_batches
    return {
        "lengths": lengths.name,
        "tokens": expected.tokens,
        "computed": expected.computed,
        "computed_over_real": expected.computed / expected.tokens,
        "worst_computed": packing.mini_batches * longest_rows * packing.row_lengths[-1],
        "model_flops": passes * (matrices * expected.tokens + attention * expected.squares),
    }


def describe_lengths(step: Mapping[str, Any]) -> str:
    """`at_lengths` for people."""
    return (
        f"lengths      {step['lengths']}: {step['tokens']:,.0f} tokens in a step with their "
        f"prompts, whose median is a quarter of the limit\n  computed   {step['computed']:,.0f} "
        f"positions, {step['computed_over_real']:.2f} times the tokens "
        f"({1 - 1 / step['computed_over_real']:.0%} padding); worst case "
        f"{step['worst_computed']:,}\n  operations {step['model_flops']:.3e} needed by the "
        "model for these tokens"
    )
