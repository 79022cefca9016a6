"""Collectives, operations and a lower bound of the time of a run's programs, compiled without an
accelerator.

    python -m benchmarks.compiled --config=configs/qwen3_8b.py --topology=h100:8 \
        --json=compiled.json

Compiles what `dcmdp plan` compiles and prints its lines, then reads the programs' text: what is
communicated and computed, against what the model needs, the time that the data sheet allows, and
checks.

Its figures, beside those of `dcmdp plan` (docs/plan.md):

    collectives: the HLO; a loop's body counts as often as the loop runs. Received bytes are those
    of bandwidth-optimal algorithms.
    operations: products in the HLO; attention kernels by their shapes, causal.
    operations of the model: arithmetic: 2 for each weight that multiplies, causal attention;
    three times that for a gradient, and one pass more for p^Train of all mini-batches but the
    first.
    least communication: arithmetic: each parameter gathered once a forward and once a backward
    pass of a micro-batch in the compute dtype, its gradient reduced once in float32.
    memory traffic: the HLO: operands and results of each fusion, without caches; copies, casts,
    slices of stacks by line.
    time: an estimate: the above over the chip's data sheet, at its peak.

Its checks:

    no [tokens, vocabulary] array: always with `model.logprob_chunk` below the tokens of a
    micro-batch on a device.
    no [length, length] attention matrix: splash on TPU, cuDNN on GPU with at most 32 sequences a
    row. `xla`, for float32 on GPUs, has one for each head, as has `blockwise` on a CPU for rows
    under 192 tokens. Rows as long as a parameter is wide are not checked.
    no gather of a parameter of all layers: always: the layers' loop gathers those of one layer.
    compiled / needed operations at most 1.45: `remat=full` costs 4/3 of a gradient.
    received / least bytes at most 1.2: meshes of data and fsdp; along tensor and expert
    activations travel too.
    compilation at most 180 s.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

import jax

from benchmarks.compiled_parts.account import Account, account
from benchmarks.compiled_parts.collectives import KINDS, Collective
from benchmarks.compiled_parts.copies import KINDS as MOVED
from benchmarks.compiled_parts.flops import PARTS
from benchmarks.compiled_parts.goals import check_goals, is_compiled
from benchmarks.compiled_parts.hlo import names_of_this_code
from benchmarks.compiled_parts.least import decode_bytes, least_of
from benchmarks.compiled_parts.lengths import (
    at_lengths,
    describe_lengths,
    forward_flops,
    lengths_asked,
)
from benchmarks.compiled_parts.roofline import ASSUMPTIONS, DATA_SHEETS, DataSheet, roofline
from benchmarks.compiled_parts.traffic import L2_BYTES
from benchmarks.compiled_parts.trips import one_token, step_trip_counts
from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.commands.arguments import Parser, output_file
from dcmdp_jax.commands.failures import run_main
from dcmdp_jax.commands.flags import parse_with
from dcmdp_jax.commands.parsers import add_config
from dcmdp_jax.config.load import for_supervision
from dcmdp_jax.config.settings import Config
from dcmdp_jax.engines.engine_kind import Lowerable
from dcmdp_jax.plan.plan_text import describe_plan, plan_record
from dcmdp_jax.plan.run_plan import GIB, PROGRAMS, Compiled, CompiledRun, PlannedRun, compile_run
from dcmdp_jax.plan.topologies import Topology, known_topologies, load_topology, set_environment

_LARGEST_SHOWN = 8
_REMAT = {
    "full": "; remat=full computes every layer's forward pass twice, 4/3 of a gradient's "
    "operations",
    "dots": "; remat=dots computes all but the matrix products twice",
    "none": "",
}


def main(argv: list[str]) -> int:
    """Parse the arguments (program name first), compile, print; exit code 1 if the run does not
    fit.
    """
    parser = Parser(
        "compiled", description="Collectives, operations and time of a run at full size."
    )
    parser.add_argument(
        "--topology", metavar="KIND:SHAPE", required=True, help=f"devices: {known_topologies()}"
    )
    parser.add_argument(
        "--programs",
        metavar="NAME,NAME",
        default="",
        help=f"of {', '.join(PROGRAMS)}; default: all",
    )
    parser.add_argument(
        "--lengths", default="", help="a step at these lengths too: lognormal(MEDIAN,CAP), or a run"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the figures to FILE"
    )
    add_config(parser)
    arguments = parse_with(parser, argv)
    config = for_supervision(arguments.config) if arguments.config.supervised else arguments.config
    lengths = lengths_asked(arguments.lengths, config)
    set_environment()
    only = tuple(name for name in arguments.programs.split(",") if name)
    plan = compile_and_count(config, load_topology(arguments.topology), only=only)
    print(describe_plan(plan), *describe_account(plan), sep="\n")
    record = account_record(plan)
    if lengths is not None:
        record["at_lengths"] = found = at_lengths(plan, lengths)
        print(describe_lengths(found))
        if is_compiled(plan, "step"):
            worst = record["programs"]["step"]["roofline_seconds"]["overlapped"]
            found |= {
                "worst_seconds": worst,
                "seconds": worst * found["computed"] / found["worst_computed"],
            }
            print(
                f"  time       {found['seconds']:.1f} s of a step at least, worst case {worst:.1f}"
            )
    if arguments.json is not None:
        atomic_write(arguments.json, json.dumps(record, indent=2) + "\n")
    return 0 if plan.fits else 1


def compile_and_count(
    config: Config, topology: Topology, *, only: tuple[str, ...] = ()
) -> CompiledRun:
    """`compile_run`, with an `Account` of each program."""

    def read(run: PlannedRun, program: Lowerable, executable: jax.stages.Compiled) -> Account:
        return account(executable, step_trip_counts(run) if program.name == "step" else one_token)

    with names_of_this_code():
        return compile_run(config, topology, only=only, read=read)


def describe_account(plan: CompiledRun) -> list[str]:
    """Lines of text; every figure is under a heading that says whether it is compiled, arithmetic
    or an estimate.
    """
    lines = ["", *_communication(plan), "", *_operations(plan)] if is_compiled(plan, "step") else []
    return [*lines, "", *_traffic(plan), "", *_times(plan), "", *_checks(plan), "", *_notes(plan)]


def account_record(plan: CompiledRun) -> dict[str, Any]:
    """The record of the plan with the same as a tree for JSON.

    Bytes and operations are on one device where the name does not say otherwise.
    """
    least = least_of(plan)
    record = plan_record(plan)
    for name, compiled in plan.programs.items():
        if compiled.refused is None:
            record["programs"][name] |= _program_record(plan, compiled)
    step = is_compiled(plan, "step")
    return record | {
        "least_gather_bytes": least.gathers,
        "least_reduction_bytes": least.reductions,
        "model_flops_of_all_devices": least.flops,
        "model_flops_by_part": least.parts,
        "compiled_over_model_flops": least.flops_ratio(plan) if step else None,
        "decode_traffic_over_least": _decode_ratio(plan) if is_compiled(plan, "decode") else None,
        "communicated_over_least": least.traffic_ratio(plan) if step else None,
        "checks": [check._asdict() for check in check_goals(plan)],
    }


def _data_sheet(plan: CompiledRun) -> DataSheet:
    return DATA_SHEETS[plan.topology.name.partition(":")[0]]


def _program_record(plan: CompiledRun, compiled: Compiled) -> dict[str, Any]:
    read = compiled.account
    bound = roofline(compiled.account, _data_sheet(plan))
    return {
        "product_flops": read.flops.products,
        "attention_kernel_flops": read.flops.attention,
        "uncounted_kernels": list(read.flops.uncounted),
        "flops_by_part": read.flops.parts,
        "memory_traffic_bytes": read.traffic,
        "read_again_bytes": read.again,
        "moved_bytes": _moved(compiled),
        "unknown_loops": list(read.unknown_loops),
        "collectives": [
            {"kind": kind, "in_micro_batch": inside, "count": count, "received_bytes": received}
            for (kind, inside), (count, received) in _summed(compiled).items()
        ],
        "roofline_seconds": bound._asdict()
        | {"overlapped": bound.overlapped, "in_turn": bound.in_turn},
    }


def _summed(compiled: Compiled) -> dict[tuple[str, bool], tuple[float, float]]:
    found: dict[tuple[str, bool], tuple[float, float]] = {}
    for kind in KINDS:
        for inside in (True, False):
            these = [
                one
                for one in compiled.account.collectives
                if (one.kind, one.in_micro_batch) == (kind, inside)
            ]
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
    for one in compiled.account.collectives:
        grouped[one.kind, one.array, one.in_micro_batch].append(one)
    largest = sorted(grouped.values(), key=lambda ones: -sum(one.received_bytes for one in ones))[
        :_LARGEST_SHOWN
    ]
    lines.append("  the largest:")
    for ones in largest:
        array = ones[0].array
        count = sum(one.count for one in ones)
        received = sum(one.received_bytes for one in ones)
        if received:
            lines.append(f"    {ones[0].kind:18} {array!s:24} {count:8,.0f} {received / GIB:10.2f}")
    least = least_of(plan)
    lines.append(
        "  least (arithmetic): every parameter gathered once a forward and once a backward pass "
        f"{least.gathers / GIB:.2f}, its gradient reduced once in float32 "
        f"{least.reductions / GIB:.2f}; compiled / least {least.traffic_ratio(plan):.2f}"
    )
    if split := [axis for axis in ("tensor", "expert") if plan.run.placement.mesh.shape[axis] > 1]:
        lines.append(
            f"  the least has no activations, which travel along {' and '.join(split)} too"
        )
    return lines


def _operations(plan: CompiledRun) -> list[str]:
    compiled = plan.programs["step"]
    packing = plan.run.placement.packing
    least = least_of(plan)
    flops = compiled.account.flops
    per_token = forward_flops(plan.run.model, packing.row_lengths[-1])
    devices = plan.run.placement.mesh.size
    return [
        "operations of a step",
        f"  compiled, all devices: {flops.total * devices:.3e}, of which matrix products in the "
        f"HLO {flops.products * devices:.3e}, attention kernels by their shapes "
        f"{flops.attention * devices:.3e}",
        f"  needed by the model:   {least.flops:.3e}: {per_token:.3e} for a token forward, three "
        "times that with its gradient, once more for p^Train of all mini-batches but the first",
        *(
            f"    {part:15} {flops.parts[part] * devices:.3e}, needed {least.parts[part]:.3e}"
            for part in PARTS
        ),
        "  compiled / needed "
        f"{least.flops_ratio(plan):.2f}{_REMAT[plan.run.placement.compute.remat]}",
    ]


def _moved(compiled: Compiled) -> dict[str, float]:
    """Bytes of each kind of `copies.KINDS`."""
    return {
        kind: sum(one.bytes for one in compiled.account.copies if one.kind == kind)
        for kind in MOVED
    }


def _decode_ratio(plan: CompiledRun) -> float:
    return plan.programs["decode"].account.traffic / decode_bytes(plan)


def _traffic(plan: CompiledRun) -> list[str]:
    lines = [
        "memory traffic (compiled; GB of a device, decode: of one token)",
        "  program" + 9 * " " + "all  share of",
    ]
    for name, compiled in plan.programs.items():
        if compiled.refused is None:
            whole = compiled.account.traffic
            places = defaultdict[str, float](float)
            shares = ", ".join(
                f"{kind} {moved / whole:.1%}" for kind, moved in _moved(compiled).items()
            )
            lines.append(f"  {name:12} {whole / 1e9:10.4g}: {shares}")
            for one in compiled.account.copies:
                places[f"{one.kind:17} {one.array!s:24} {one.line}"] += one.bytes
            for place in sorted(places, key=places.get, reverse=True)[:_LARGEST_SHOWN]:
                lines.append(
                    f"    {places[place] / 1e9:10.4g} {places[place] / whole:6.1%} {place}"
                )
    lines += [f"  {kind}: {what}" for kind, what in MOVED.items()]
    if is_compiled(plan, "decode"):
        again = plan.programs["decode"].account.again / decode_bytes(plan)
        lines.append(
            "  decode / what weights and full caches need (arithmetic) "
            f"{_decode_ratio(plan):.2f}, {_decode_ratio(plan) - again:.2f} without reads of what "
            f"{L2_BYTES / 1e6:.0f} MB of L2 cache may hold"
        )
    return lines


def _times(plan: CompiledRun) -> list[str]:
    lines = [
        "time (estimate from the data sheet, seconds)",
        "  program       compute   memory   communication   overlapped   in turn",
    ]
    for name, compiled in plan.programs.items():
        if compiled.refused is None:
            bound = roofline(compiled.account, _data_sheet(plan))
            lines.append(
                f"  {name:12} {bound.compute:8.3g} {bound.memory:8.3g} {bound.communication:15.3g} "
                f"{bound.overlapped:12.3g} {bound.in_turn:9.3g}"
            )
    if is_compiled(plan, "decode") and plan.engine is not None:
        bound = roofline(plan.programs["decode"].account, _data_sheet(plan))
        lines.append(
            f"  decode is one token of {plan.engine.rows} rows: at most "
            f"{plan.engine.rows / bound.overlapped:,.0f} tokens/s with full caches"
        )
    return lines + [f"  assumed: {assumption}" for assumption in ASSUMPTIONS]


def _checks(plan: CompiledRun) -> list[str]:
    checks = check_goals(plan)
    width = max(len(check.name) for check in checks)
    return ["checks of the compiled programs"] + [
        f"  {'yes' if check.holds else 'NO ':3}  {check.name:{width}}  {check.found}"
        for check in checks
    ]


def _notes(plan: CompiledRun) -> list[str]:
    lines = [
        "compiled: programs, their memory, collectives, products, traffic. Worst case: every "
        "completion has the longest length, every row is one sequence and all its tokens are in "
        "the loss."
    ]
    for name, compiled in plan.programs.items():
        if compiled.refused is not None:
            continue
        if compiled.account.unknown_loops:
            loops = ", ".join(
                op_name or "a loop without a name" for op_name in compiled.account.unknown_loops
            )
            lines.append(f"{name}: loops of unknown length, counted once: {loops}")
        if compiled.account.flops.uncounted:
            lines.append(
                f"{name}: kernels whose products are not counted: "
                f"{', '.join(compiled.account.flops.uncounted)}"
            )
    return lines


if __name__ == "__main__":
    sys.exit(run_main(main))
