"""A `CompiledRun` as text and as JSON."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from dcmdp_jax.models.params import num_params
from dcmdp_jax.plan.collectives import KINDS, Collective
from dcmdp_jax.plan.compiled import Compiled
from dcmdp_jax.plan.flops import forward_flops
from dcmdp_jax.plan.goals import check_goals
from dcmdp_jax.plan.roofline import ASSUMPTIONS, roofline
from dcmdp_jax.plan.run_plan import GIB, CompiledRun

_LARGEST_SHOWN = 8
_REMAT = {
    "full": "; remat=full computes every layer's forward pass twice, 4/3 of a gradient's operations",
    "dots": "; remat=dots computes all but the matrix products twice",
    "none": "",
}


def describe_plan(plan: CompiledRun) -> str:
    """Lines of text; every figure is under a heading that says whether it is compiled, arithmetic or an estimate."""
    lines = [*_heading(plan), "", *_memory(plan)]
    if "step" in plan.programs and plan.programs["step"].refused is None:
        lines += ["", *_communication(plan), "", *_operations(plan)]
    lines += ["", *_times(plan), "", *_checks(plan), "", *_notes(plan)]
    return "\n".join(lines)


def plan_record(plan: CompiledRun) -> dict[str, Any]:
    """The same as a tree for JSON. Bytes and operations are on one device where the name does not say otherwise."""
    step = plan.step
    return {
        "topology": plan.topology.name,
        "devices": plan.mesh.size,
        "mesh": dict(plan.mesh.shape),
        "model_type": plan.model.model_type,
        "parameters": num_params(plan.model),
        "rows_per_micro_batch": list(step.packing.rows_per_micro_batch),
        "row_lengths": list(step.packing.row_lengths),
        "micro_batches": list(step.packing.micro_batches),
        "mini_batches": step.packing.mini_batches,
        "usable_bytes": plan.usable,
        "fits": plan.fits,
        "held_bytes": _held(plan),
        "phases": {phase.name: {"peak_bytes": phase.peak, "beside_bytes": phase.beside, "total_bytes": phase.total}
                   for phase in plan.phases},
        "programs": {name: _program_record(plan, compiled) for name, compiled in plan.programs.items()},
        "least_gather_bytes": plan.least.gathers,
        "least_reduction_bytes": plan.least.reductions,
        "model_flops_of_all_devices": plan.model_flops,
        "compiled_over_model_flops": plan.flops_ratio if _compiled(plan, "step") else None,
        "communicated_over_least": plan.traffic_ratio if _compiled(plan, "step") else None,
        "checks": [check._asdict() for check in check_goals(plan)],
    }  # fmt: skip


def _program_record(plan: CompiledRun, compiled: Compiled) -> dict[str, Any]:
    bound = roofline(compiled, plan.topology.chip)
    return {
        "compile_seconds": compiled.seconds,
        "refused": compiled.refused,
        "peak_bytes": compiled.peak,
        "argument_bytes": compiled.arguments,
        "temporary_bytes": compiled.temporary,
        "product_flops": compiled.flops.products,
        "attention_kernel_flops": compiled.flops.attention,
        "uncounted_kernels": list(compiled.flops.uncounted),
        "memory_traffic_bytes": compiled.traffic,
        "unknown_loops": list(compiled.unknown_loops),
        "collectives": [
            {"kind": kind, "in_micro_batch": inside, "count": count, "received_bytes": received}
            for (kind, inside), (count, received) in _summed(compiled).items()
        ],
        "roofline_seconds": bound._asdict() | {"overlapped": bound.overlapped, "in_turn": bound.in_turn},
    }


def _compiled(plan: CompiledRun, name: str) -> bool:
    return name in plan.programs and plan.programs[name].refused is None


def _heading(plan: CompiledRun) -> list[str]:
    packing, chip, config = plan.step.packing, plan.topology.chip, plan.config
    rows = ", ".join(
        f"{rows} x {length} tokens, {count} of them at most"
        for rows, length, count in zip(
            packing.rows_per_micro_batch, packing.row_lengths, packing.micro_batches, strict=True
        )
    )
    mesh = ", ".join(f"{name} {size}" for name, size in plan.mesh.shape.items())
    engine = f"{config.rollout.engine}, whose programs are not compiled here"
    if plan.engine is not None:
        engine = f"embedded, {config.rollout.precision}, {plan.engine.rows} rows of {plan.engine.slots} cache slots"
    return [
        f"model        {plan.model.model_type}, {num_params(plan.model):,} parameters in {config.model.param_dtype}, "
        f"{plan.step.compute.dtype} products, remat {plan.step.compute.remat}, "
        f"attention {plan.step.compute.attention}",
        f"devices      {plan.mesh.size} x {chip.name} ({plan.topology.name}), mesh {mesh}",
        f"step         {packing.mini_batches} mini-batches of {packing.completions} completions, in micro-batches of",
        f"             {rows}; training.micro_batch_tokens={config.training.micro_batch_tokens}, on each device",
        f"engine       {engine}",
    ]


def _held(plan: CompiledRun) -> dict[str, int]:
    held = dict(plan.step.program.held)
    if plan.engine is not None:
        held |= {"engine's weights": plan.engine.weights_bytes, "engine's cache": plan.engine.cache_bytes}
    return held


def _memory(plan: CompiledRun) -> list[str]:
    held = ", ".join(f"{name} {size / GIB:.2f}" for name, size in _held(plan).items())
    lines = [
        "memory of each device, GiB",
        f"  by arithmetic, exact: {held}",
        "  program     compiled: arguments  temporary    peak  by arithmetic, beside it              together",
    ]
    for phase in plan.phases:
        beside = ", ".join(f"{name} {size / GIB:.2f}" for name, size in phase.beside.items()) or "nothing"
        if phase.name not in plan.programs:
            lines.append(f"  {phase.name:11} {'by arithmetic alone':>38}  {beside:36} {phase.total / GIB:9.2f}")
            continue
        compiled = plan.programs[phase.name]
        if compiled.refused is not None:
            lines.append(f"  {phase.name:11} does not fit by itself ({compiled.refused}); beside it {beside}")
            continue
        lines.append(
            f"  {phase.name:11} {compiled.arguments / GIB:19.2f} {compiled.temporary / GIB:10.2f} "
            f"{phase.peak / GIB:7.2f}  {beside:36} {phase.total / GIB:9.2f}"
        )
    usable = f"{plan.usable / GIB:.2f} GiB ({plan.usable_reason})"
    over = [phase for phase in plan.phases if phase.total > plan.usable]
    if plan.fits:
        largest = max(plan.phases, key=lambda phase: phase.total)
        lines.append(f"  fits: {largest.name} needs {largest.total / GIB:.2f} of {usable}")
    else:
        lines += [f"  does not fit: {phase.name} needs {phase.total / GIB:.2f} of {usable}" for phase in over]
    return lines


def _summed(compiled: Compiled) -> dict[tuple[str, bool], tuple[float, float]]:
    found: dict[tuple[str, bool], tuple[float, float]] = {}
    for kind in KINDS:
        for inside in (True, False):
            these = [one for one in compiled.collectives if (one.kind, one.in_micro_batch) == (kind, inside)]
            if these:
                count = sum(one.count for one in these)
                found[kind, inside] = (count, sum(one.received_bytes for one in these))
    return found


def _communication(plan: CompiledRun) -> list[str]:
    compiled = plan.programs["step"]
    lines = ["collectives of a step (compiled; GiB that a device receives)"]
    for (kind, inside), (count, received) in _summed(compiled).items():
        where = "in the micro-batch loop" if inside else "outside it"
        lines.append(f"  {kind:18} {where:24} {count:10,.0f} {received / GIB:10.2f}")
    grouped: dict[tuple[Any, ...], list[Collective]] = defaultdict(list)
    for one in compiled.collectives:
        grouped[one.kind, one.array, one.in_micro_batch].append(one)
    largest = sorted(grouped.values(), key=lambda ones: -sum(one.received_bytes for one in ones))[:_LARGEST_SHOWN]
    lines.append("  the largest:")
    for ones in largest:
        array, count = ones[0].array, sum(one.count for one in ones)
        received = sum(one.received_bytes for one in ones)
        if received:
            lines.append(f"    {ones[0].kind:18} {array!s:24} {count:8,.0f} {received / GIB:10.2f}")
    least = plan.least
    lines.append(
        f"  least (arithmetic): every parameter gathered once a forward and once a backward pass "
        f"{least.gathers / GIB:.2f}, its gradient reduced once in float32 {least.reductions / GIB:.2f}; compiled / "
        f"least {plan.traffic_ratio:.2f}"
    )
    if split := [axis for axis in ("tensor", "expert") if plan.mesh.shape[axis] > 1]:
        lines.append(f"  the least has no activations, which travel along {' and '.join(split)} too")
    return lines


def _operations(plan: CompiledRun) -> list[str]:
    compiled, packing = plan.programs["step"], plan.step.packing
    flops = compiled.flops
    per_token = forward_flops(plan.model, packing.row_lengths[-1])
    return [
        "operations of a step",
        f"  compiled, all devices: {flops.total * plan.mesh.size:.3e}, of which matrix products in the HLO "
        f"{flops.products * plan.mesh.size:.3e}, attention kernels by their shapes "
        f"{flops.attention * plan.mesh.size:.3e}",
        f"  needed by the model:   {plan.model_flops:.3e}: {per_token:.3e} for a token forward, three times that with "
        "its gradient, once more for p^Train of all mini-batches but the first",
        f"  compiled / needed {plan.flops_ratio:.2f}{_REMAT[plan.step.compute.remat]}",
    ]  # fmt: skip


def _times(plan: CompiledRun) -> list[str]:
    lines = ["time (estimate from the data sheet, seconds)",
             "  program       compute   memory   communication   overlapped   in turn"]  # fmt: skip
    for name, compiled in plan.programs.items():
        if compiled.refused is None:
            bound = roofline(compiled, plan.topology.chip)
            lines.append(
                f"  {name:12} {bound.compute:8.3g} {bound.memory:8.3g} {bound.communication:15.3g} "
                f"{bound.overlapped:12.3g} {bound.in_turn:9.3g}"
            )
    if _compiled(plan, "decode") and plan.engine is not None:
        bound = roofline(plan.programs["decode"], plan.topology.chip)
        lines.append(f"  decode is one token of {plan.engine.rows} rows: at most "
                     f"{plan.engine.rows / bound.overlapped:,.0f} tokens/s with full caches")  # fmt: skip
    return lines + [f"  assumed: {assumption}" for assumption in ASSUMPTIONS]


def _checks(plan: CompiledRun) -> list[str]:
    checks = check_goals(plan)
    width = max(len(check.name) for check in checks)
    return ["checks of the compiled programs"] + [
        f"  {'yes' if check.holds else 'NO ':3}  {check.name:{width}}  {check.found}" for check in checks
    ]


def _notes(plan: CompiledRun) -> list[str]:
    lines = ["compiled: programs, their memory, collectives, products, traffic. Worst case: every completion has the "
             "longest length, every row is one sequence and all its tokens are in the loss."]  # fmt: skip
    for name, compiled in plan.programs.items():
        if compiled.unknown_loops:
            loops = ", ".join(op_name or "a loop without a name" for op_name in compiled.unknown_loops)
            lines.append(f"{name}: loops of unknown length, counted once: {loops}")
        if compiled.flops.uncounted:
            lines.append(f"{name}: kernels whose products are not counted: {', '.join(compiled.flops.uncounted)}")
    return lines
