"""A `CompiledRun` as text and as JSON."""

from collections.abc import Mapping
from typing import Any

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
    """The plan as a tree for JSON. Bytes are of one device."""
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
        "mesh": mesh.shape,
        "model_type": plan.run.model.model_type,
        "parameters": num_params(plan.run.model),
        "rows_per_micro_batch": packing.rows_per_micro_batch,
        "row_lengths": packing.row_lengths,
        "micro_batches": packing.micro_batches,
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
    buckets = zip(
        packing.rows_per_micro_batch,
        packing.row_lengths,
        packing.micro_batches,
        strict=True,
    )
    micro_batches = ", ".join(
        f"{rows} x {length} tokens, {count} of them at most" for rows, length, count in buckets
    )

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
