"""What a compiled program computes and moves, from its text."""

from __future__ import annotations

from typing import NamedTuple

import jax

from benchmarks.compiled_parts.collectives import Collective, collectives
from benchmarks.compiled_parts.copies import Copy, copies
from benchmarks.compiled_parts.flops import CompiledFlops, compiled_flops
from benchmarks.compiled_parts.hlo import Array, TripCounts, parse, walk
from benchmarks.compiled_parts.traffic import L2_BYTES, memory_traffic, read_again
from dcmdp_jax.training.accumulate import MICRO_BATCHES


class Account(NamedTuple):
    """Operations and traffic of one run of a program on one device.

    Attributes:
        flops: operations of the matrix products.
        collectives: every collective.
        arrays: types of all arrays that the program computes, those inside fusions included.
        traffic: bytes read from and written to device memory.
        again: of them those that an L2 cache may give, see `read_again`.
        copies: what moves data and computes nothing, and the slices of stacks.
        unknown_loops: op_names of loops whose count nobody knows; they count once.
    """

    flops: CompiledFlops
    collectives: tuple[Collective, ...]
    arrays: frozenset[Array]
    traffic: float
    again: float
    copies: tuple[Copy, ...]
    unknown_loops: tuple[str, ...]


def account(executable: jax.stages.Compiled, trip_counts: TripCounts) -> Account:
    """Read the text of a program; `trip_counts` has the loops whose end is data."""
    module = parse(executable.as_text())
    visits = list(walk(module, trip_counts))
    return Account(
        flops=compiled_flops(module, trip_counts),
        collectives=tuple(collectives(module, trip_counts, micro_batch_scope=MICRO_BATCHES)),
        arrays=frozenset(array for visit in visits for array in visit.instruction.results),
        traffic=memory_traffic(module, trip_counts),
        again=read_again(module, trip_counts, L2_BYTES),
        copies=tuple(copies(module, trip_counts)),
        unknown_loops=tuple(
            sorted({loop.op_name for visit in visits for loop in visit.loops if not loop.known})
        ),
    )
