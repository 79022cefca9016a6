"""Bytes that a compiled program moves without computing with them, from its HLO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.compiled_parts.hlo import Array, Computation, Instruction, Module, TripCounts
from benchmarks.compiled_parts.traffic import fused_computation, moves

COPIED = "copied"
CONVERTED = "converted"
STACKED = "slices of stacks"
KINDS = {
    COPIED: "moved, sliced, filled or transposed, nothing else",
    CONVERTED: "cast to another dtype, nothing else",
    STACKED: "read from a slice of a larger array, or written to one, by what computes",
}
_MOVING = frozenset(
    "copy slice dynamic-slice dynamic-update-slice concatenate transpose pad reverse broadcast".split()
)
_NOTHING = frozenset("parameter constant bitcast tuple get-tuple-element reshape iota".split())


class Copy(NamedTuple):
    """An instruction that moves data.

    Attributes:
        kind: one of `KINDS`.
        array: the largest of its results.
        bytes: read and written by all executions; of "slices of stacks" the slices alone.
        line: of Python and JAX's name of the instruction, or "the compiler" for one that has
            neither.
    """

    kind: str
    array: Array
    bytes: float
    line: str


def copies(module: Module, trip_counts: TripCounts) -> Iterator[Copy]:
    """Every instruction that moves data, in the order of the program."""
    for visit, moved in moves(module, trip_counts):
        instruction = visit.instruction
        called = fused_computation(module, instruction)
        inside = visit.computation if called is None else called
        within = [instruction] if called is None else list(called.instructions.values())
        # Scalars are indices.
        opcodes = {
            one.opcode.removesuffix("-start") for one in within if any(x.dims for x in one.results)
        } - _NOTHING
        kind = (
            COPIED
            if opcodes <= _MOVING
            else CONVERTED
            if opcodes <= _MOVING | {"convert"}
            else STACKED
        )
        size = (
            visit.count * sum(_slice(one, inside) for one in within) if kind == STACKED else moved
        )
        if size:
            array = max(instruction.results, key=lambda array: array.bytes)
            line = (
                f"{module.lines.get(instruction.frame, '')} "
                f"{instruction.op_name.rsplit('/', 1)[-1]}"
            ).strip()
            yield Copy(kind, array, size, line or "the compiler")


def _slice(instruction: Instruction, computation: Computation) -> int:
    """Bytes that a slice at an index reads, or an update of one writes."""
    if instruction.opcode == "dynamic-slice":
        return instruction.results[0].bytes
    return (
        computation.operands(instruction)[1].bytes
        if instruction.opcode == "dynamic-update-slice"
        else 0
    )
