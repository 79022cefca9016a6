"""Bytes that a compiled program reads from and writes to device memory, from its HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from benchmarks.compiled_parts.hlo import Computation, Instruction, Module, TripCounts, Visit, walk

# Instructions that move nothing, or whose work is that of the computations they call.
_FREE = frozenset(
    """
        parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id
        replica-id iota opt-barrier async-start async-update async-done domain
    """.split()
)
_SLICES = frozenset(("dynamic-slice", "gather", "slice"))
# Each element of their results needs many of their operands.
_MIXING = frozenset("dot convolution scatter sort reduce reduce-window custom-call".split())
# Bytes that a GPU moves at least, wherever it reads or writes.
_SECTOR = 32
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")


def memory_traffic(module: Module, trip_counts: TripCounts) -> float:
    """Bytes read and written by one run on one device, see `moves`."""
    return sum(moved for _, moved in moves(module, trip_counts))


def moves(module: Module, trip_counts: TripCounts) -> Iterator[tuple[Visit, float]]:
    """Every instruction that reads or writes memory, with the bytes of all its executions.

    Each fusion reads its operands and writes its results once; what is inside it stays on the chip. A slice of a larger
    array counts as the slice, an update in place as the update, in sectors of 32 bytes. Caches shared by instructions
    are not modeled.
    """
    fused = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "fusion"
        for name in _CALLS.findall(instruction.attributes)
    }
    for visit in walk(module, trip_counts):
        if visit.count and visit.computation.name not in fused and visit.instruction.opcode not in _FREE:
            yield visit, visit.count * _moved(module, visit.computation, visit.instruction)


def fused_computation(module: Module, instruction: Instruction) -> Computation | None:
    """The computation of a fusion; None for another instruction."""
    return (
        module.computations.get(_CALLS.findall(instruction.attributes)[0]) if instruction.opcode == "fusion" else None
    )


def _moved(module: Module, computation: Computation, instruction: Instruction) -> float:
    if instruction.opcode.endswith("-done"):
        return 0.0
    written = sum(array.bytes for array in instruction.results)
    if instruction.opcode in _SLICES:
        return 2.0 * written
    operands = [computation.instructions.get(name) for name in instruction.operands]
    sizes = [sum(array.bytes for array in operand.results) if operand else 0 for operand in operands]
    if instruction.opcode == "dynamic-update-slice":
        return sizes[1] + _updated(computation, instruction)
    if instruction.opcode == "fusion":
        called = fused_computation(module, instruction)
        return _of_fusion(called, sizes, written) if called else float(sum(sizes) + written)
    return float(sum(sizes) + written)


def _of_fusion(called: Computation, sizes: list[int], written: float) -> float:
    read, elements = 0.0, _elements_read(called)
    for instruction in called.instructions.values():
        if instruction.opcode != "parameter" or not instruction.operands[0].isdigit():
            continue
        index = int(instruction.operands[0])
        whole = sizes[index] if index < len(sizes) else 0
        read += whole * elements[instruction.name] / max(1, sum(array.size for array in instruction.results))
    updates = [one for one in called.instructions.values() if one.opcode == "dynamic-update-slice"]
    for update in updates:
        target = called.instructions[update.operands[0]]
        if target.opcode == "parameter":
            written += _updated(called, update) - update.results[0].bytes
    return read + max(written, 0.0)


def _updated(computation: Computation, update: Instruction) -> float:
    """Bytes that an update in place writes: whole sectors, where few of its elements lie side by side."""
    part, [whole] = computation.instructions[update.operands[1]].results[0], update.results
    together = part.bytes / max(1, part.size)
    for size, of in zip(reversed(part.dims), reversed(whole.dims), strict=True):
        together *= size
        if size < of:
            break
    return part.bytes * max(1.0, _SECTOR / together) if part.size else 0.0


def _elements_read(called: Computation) -> dict[str, int]:
    """Elements of each instruction of a fusion that its results need: those of a slice, also of what is elementwise."""
    read: dict[str, int] = {}
    for one in reversed(called.instructions.values()):
        whole = sum(array.size for array in one.results)
        users = [user for user in called.instructions.values() if one.name in user.operands]
        parts = [_part_read(user, one.name, whole, read) for user in users]
        read[one.name] = min(whole, sum(parts)) if parts else whole
    return read


def _part_read(user: Instruction, name: str, whole: int, read: dict[str, int]) -> int:
    """Elements of `name`, which has `whole`, that one of its users reads; `read` has those of its users."""
    if user.opcode in _SLICES and user.operands[0] == name:
        return read[user.name]
    if user.opcode == "dynamic-update-slice" and user.operands[0] == name:
        return 0
    if user.opcode == "reduce":
        # Each result needs operands of its own.
        return math.ceil(whole * read[user.name] / sum(array.size for array in user.results))
    elementwise = user.opcode not in _MIXING and [array.size for array in user.results] == [whole]
    return read[user.name] if elementwise else whole
