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
L2_BYTES = 50e6
"""The cache of an H100 or H200 between its processors and its memory."""
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")


def memory_traffic(module: Module, trip_counts: TripCounts) -> float:
    """Bytes read and written by one run on one device, see `moves`."""
    return sum(moved for _, moved in moves(module, trip_counts))


def moves(module: Module, trip_counts: TripCounts) -> Iterator[tuple[Visit, float]]:
    """Every instruction that reads or writes memory, with the bytes of all its executions.

    Each fusion reads its operands and writes its results once; what is inside it stays on the chip.
    A slice of a larger array counts as the slice, an update in place as the update, in sectors of
    32 bytes. Caches shared by instructions are not modeled.
    """
    fused = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "fusion"
        for name in _CALLS.findall(instruction.attributes)
    }
    for visit in walk(module, trip_counts):
        if (
            visit.count
            and visit.computation.name not in fused
            and visit.instruction.opcode not in _FREE
        ):
            reads, written = _reads_and_writes(module, visit.computation, visit.instruction)
            yield visit, visit.count * (sum(reads) + written)


def fused_computation(module: Module, instruction: Instruction) -> Computation | None:
    """The computation of a fusion; None for another instruction."""
    return (
        module.computations.get(_CALLS.findall(instruction.attributes)[0])
        if instruction.opcode == "fusion"
        else None
    )


def read_again(module: Module, trip_counts: TripCounts, within: float) -> float:
    """Bytes of `memory_traffic` that a cache of `within` bytes may give: of arrays that were
    touched so little before.

    An array that instructions write or read whole, each in the same order, is read at a distance of
    the traffic in between, its own included. Inside one iteration of a loop; arrays that are
    updated in place count as not touched.
    """
    place = 0.0
    again = 0.0
    touched = dict[tuple[str, str], tuple[float, float]]()
    for visit, moved in moves(module, trip_counts):
        inside = visit.computation
        instruction = visit.instruction
        start = place
        place = place + moved / visit.count
        reads, written = _reads_and_writes(module, inside, instruction)
        for name, read in zip(instruction.operands, reads, strict=True):
            key = inside.name, _origin(inside, name)
            if before := touched.get(key):
                nearest, farthest = sorted((start - before[0], place - before[1]))
                share = (within - nearest) / max(farthest - nearest, 1.0)
                again += visit.count * read * min(1.0, max(0.0, share))
            if read >= _bytes(inside, name):
                touched[key] = start, place
        if written >= _bytes(inside, instruction.name):
            touched[inside.name, instruction.name] = start, place
    return again


def _origin(computation: Computation, name: str) -> str:
    """The instruction whose array this one is, under another shape."""
    instruction = computation.instructions[name]
    return (
        _origin(computation, instruction.operands[0]) if instruction.opcode == "bitcast" else name
    )


def _bytes(computation: Computation, name: str) -> int:
    instruction = computation.instructions.get(name)
    return sum(array.bytes for array in instruction.results) if instruction else 0


def _reads_and_writes(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[list[float], float]:
    """Bytes read of each operand, and written."""
    sizes = [float(_bytes(computation, name)) for name in instruction.operands]
    written = float(_bytes(computation, instruction.name))
    if instruction.opcode.endswith("-done"):
        return [0.0 for _ in sizes], 0.0
    if instruction.opcode in _SLICES:
        return [written, *(0.0 for _ in sizes[1:])], written
    if instruction.opcode == "dynamic-update-slice":
        return [0.0, sizes[1], *(0.0 for _ in sizes[2:])], _updated(computation, instruction)
    called = fused_computation(module, instruction)
    return _of_fusion(called, sizes, written) if called else (sizes, written)


def _of_fusion(
    called: Computation, sizes: list[float], written: float
) -> tuple[list[float], float]:
    elements = _elements_read(called)
    reads = [0.0 for _ in sizes]
    for instruction in called.instructions.values():
        if instruction.opcode != "parameter" or not instruction.operands[0].isdigit():
            continue
        index = int(instruction.operands[0])
        if index < len(sizes):
            whole = max(1, sum(array.size for array in instruction.results))
            reads[index] = sizes[index] * elements[instruction.name] / whole
    updates = [one for one in called.instructions.values() if one.opcode == "dynamic-update-slice"]
    for update in updates:
        target = called.instructions[update.operands[0]]
        if target.opcode == "parameter":
            written += _updated(called, update) - update.results[0].bytes
    return reads, max(written, 0.0)


def _updated(computation: Computation, update: Instruction) -> float:
    """Bytes that an update in place writes: whole sectors, where few of its elements lie side by
    side.
    """
    part, [whole] = computation.instructions[update.operands[1]].results[0], update.results
    together = part.bytes / max(1, part.size)
    for size, of in zip(reversed(part.dims), reversed(whole.dims), strict=True):
        together *= size
        if size < of:
            break
    return part.bytes * max(1.0, _SECTOR / together) if part.size else 0.0


def _elements_read(called: Computation) -> dict[str, int]:
    """Elements of each instruction of a fusion that its results need: those of a slice, also of
    what is elementwise.
    """
    read: dict[str, int] = {}
    for one in reversed(called.instructions.values()):
        whole = sum(array.size for array in one.results)
        users = [user for user in called.instructions.values() if one.name in user.operands]
        parts = [_part_read(user, one.name, whole, read) for user in users]
        read[one.name] = min(whole, sum(parts)) if parts else whole
    return read


def _part_read(user: Instruction, name: str, whole: int, read: dict[str, int]) -> int:
    """Elements of `name`, which has `whole`, that one of its users reads; `read` has those of its
    users.
    """
    if user.opcode in _SLICES and user.operands[0] == name:
        return read[user.name]
    if user.opcode == "dynamic-update-slice" and user.operands[0] == name:
        return 0
    if user.opcode == "reduce":
        # Each result needs operands of its own.
        return math.ceil(whole * read[user.name] / sum(array.size for array in user.results))
    elementwise = user.opcode not in _MIXING and [array.size for array in user.results] == [whole]
    return read[user.name] if elementwise else whole
