"""Collectives of a compiled program: how many, how many bytes, inside and outside the micro-batch
loop.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from benchmarks.compiled_parts.hlo import Array, Computation, Instruction, Module, TripCounts, walk

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """A collective of the program.

    Attributes:
        kind: one of `KINDS`.
        array: what is gathered, reduced or exchanged, whole: the result of a gather, the operand of
            a reduction.
        devices: size of the group that takes part.
        count: executions in one run of the program.
        in_micro_batch: whether the loop over micro-batches surrounds it.
        op_name: JAX's name of it.
    """

    kind: str
    array: Array
    devices: int
    count: float
    in_micro_batch: bool
    op_name: str

    @property
    def received_bytes(self) -> float:
        """Bytes that each device receives in all executions, by the bandwidth-optimal algorithm.

        (n - 1) / n of the whole array for a gather, a reduce-scatter or an all-to-all among n
        devices, twice that for an all-reduce, all of it for a permute.
        """
        share = (self.devices - 1) / self.devices
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return self.count * self.array.bytes * factor


def collectives(
    module: Module, trip_counts: TripCounts, *, micro_batch_scope: str
) -> list[Collective]:
    """Every collective of the program with its executions.

    Args:
        module: the program.
        trip_counts: for loops whose count the compiler does not know.
        micro_batch_scope: name scope of the loop over micro-batches.
    """
    found = []
    for visit in walk(module, trip_counts):
        kind = _kind(visit.instruction, visit.computation)
        if kind is None:
            continue
        devices = _group_size(visit.instruction, module.devices)
        arrays = visit.computation.operands(visit.instruction)
        if kind == "all-gather":
            # Results come after operands in the tuple of an asynchronous one.
            arrays = visit.instruction.results[-len(arrays) :]
        for array in arrays:
            if devices > 1 and visit.count:
                found.append(
                    Collective(
                        kind,
                        array,
                        devices,
                        visit.count,
                        visit.inside(micro_batch_scope),
                        visit.instruction.op_name,
                    )
                )
    return found


def _kind(instruction: Instruction, computation: Computation) -> str | None:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "all-reduce" and "all-reduce-scatter" in computation.name:
        # TPU's fusion of an all-reduce and the slice that follows it: the devices exchange the
        # slices only.
        return "reduce-scatter"
    return opcode if opcode in KINDS else None


def _group_size(instruction: Instruction, devices: int) -> int:
    attributes = instruction.attributes
    if "source_target_pairs" in attributes:
        return devices
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(counted.group(1))
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        # mesh['a'=2,'b'=4] {'b'}, or {'b':(1)2} for a part of an axis.
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named.group(1)))
        taken = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named.group(2))
        return math.prod(int(part or sizes[axis]) for axis, part in taken)
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return listed.group(1).count(",") + 1
    return devices
