"""Bytes that a compiled program reads from and writes to device memory, from its HLO."""

from __future__ import annotations

import re

from benchmarks.compiled_parts.hlo import Computation, Instruction, Module, TripCounts, walk

# Instructions that move nothing, or whose work is that of the computations they call.
_FREE = frozenset(
    """
        parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id
        replica-id iota opt-barrier async-start async-update async-done domain
    """.split()
)
_SLICES = frozenset(("dynamic-slice", "gather", "slice"))
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")


def memory_traffic(module: Module, trip_counts: TripCounts) -> float:
    """Bytes read and written by one run on one device.

    Each fusion reads its operands and writes its results once; what is inside it stays on the chip. A slice of a larger
    array counts as the slice, an update in place as the update. Caches shared by instructions are not modeled.
    """
    fused = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "fusion"
        for name in _CALLS.findall(instruction.attributes)
    }
    total = 0.0
    for visit in walk(module, trip_counts):
        instruction = visit.instruction
        if visit.count and visit.computation.name not in fused and instruction.opcode not in _FREE:
            total += visit.count * _moved(module, visit.computation, instruction)
    return total


def _moved(module: Module, computation: Computation, instruction: Instruction) -> float:
    if instruction.opcode.endswith("-done"):
        return 0.0
    written = sum(array.bytes for array in instruction.results)
    if instruction.opcode in _SLICES:
        return 2.0 * written
    operands = [computation.instructions.get(name) for name in instruction.operands]
    sizes = [sum(array.bytes for array in operand.results) if operand else 0 for operand in operands]
    if instruction.opcode == "dynamic-update-slice":
        return 2.0 * sizes[1]
    if instruction.opcode == "fusion":
        called = module.computations.get(_CALLS.findall(instruction.attributes)[0])
        return _of_fusion(called, sizes, written) if called else float(sum(sizes) + written)
    return float(sum(sizes) + written)


def _of_fusion(called: Computation, sizes: list[int], written: float) -> float:
    read = 0.0
    for instruction in called.instructions.values():
        if instruction.opcode != "parameter" or not instruction.operands[0].isdigit():
            continue
        index = int(instruction.operands[0])
        users = [user for user in called.instructions.values() if instruction.name in user.operands]
        parts = [_part_read(called, user, instruction.name) for user in users]
        whole = sizes[index] if index < len(sizes) else 0
        read += min(whole, sum(whole if part is None else part for part in parts))
    updates = [one for one in called.instructions.values() if one.opcode == "dynamic-update-slice"]
    for update in updates:
        target = called.instructions[update.operands[0]]
        if target.opcode == "parameter":
            written += called.instructions[update.operands[1]].results[0].bytes - update.results[0].bytes
    return read + max(written, 0.0)


def _part_read(called: Computation, user: Instruction, name: str) -> int | None:
    """Bytes of parameter `name` that one of its users reads; None for all of it."""
    if user.opcode in _SLICES and user.operands[0] == name:
        return user.results[0].bytes
    if user.opcode == "dynamic-update-slice" and user.operands[0] == name:
        return 0
    return None
