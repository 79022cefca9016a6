"""Compilation of a program for a topology, and what its text and the compiler say of it."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

import jax

from dcmdp_jax.parallel.sharding import Lowerable
from dcmdp_jax.plan.collectives import Collective, collectives
from dcmdp_jax.plan.flops import CompiledFlops, compiled_flops
from dcmdp_jax.plan.hlo import Array, parse, walk
from dcmdp_jax.plan.traffic import memory_traffic
from dcmdp_jax.training.accumulate import MICRO_BATCHES

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


class Compiled(NamedTuple):
    """A compiled program, on one device.

    Attributes:
        name: of the program.
        seconds: of compilation.
        row_lengths, tokens: as of `Lowerable`.
        peak: bytes in use at most, arguments included, as the compiler reports it; what it would need, if it says so,
            of a program that does not fit.
        temporary: bytes of temporary memory; 0 if it does not fit.
        arguments: bytes of the arguments.
        flops, collectives: of one run.
        arrays: types of all arrays that the program computes, those inside fusions included.
        traffic: bytes read from and written to device memory in one run.
        unknown_loops: op_names of loops whose count nobody knows; they count once.
        refused: why the compiler refused it; None for a compiled program.
    """

    name: str
    seconds: float
    row_lengths: tuple[int, ...]
    tokens: int
    peak: int
    temporary: int = 0
    arguments: int = 0
    flops: CompiledFlops = CompiledFlops(0.0, 0.0, ())
    collectives: tuple[Collective, ...] = ()
    arrays: frozenset[Array] = frozenset()
    traffic: float = 0.0
    unknown_loops: tuple[str, ...] = ()
    refused: str | None = None


def compile_program(program: Lowerable) -> Compiled:
    """Lower and compile a program, and read the result. A program that does not fit is a result too.

    Raises:
        jax.errors.JaxRuntimeError: if the compiler fails for another reason than memory.
    """
    began = time.monotonic()
    try:
        executable = program.trace().lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY not in str(error):
            raise
        needed, reason = _shortage(str(error))
        seconds = time.monotonic() - began
        return Compiled(program.name, seconds, program.row_lengths, program.tokens, needed, refused=reason)
    return read_executable(program, executable, time.monotonic() - began)


def read_executable(program: Lowerable, executable: jax.stages.Compiled, seconds: float) -> Compiled:
    """Read the memory, operations and traffic of a program that was compiled in `seconds`."""
    memory = executable.memory_analysis()
    module = parse(executable.as_text())
    unknown = {loop.op_name for visit in walk(module, program.trip_counts) for loop in visit.loops if not loop.known}
    return Compiled(
        name=program.name,
        seconds=seconds,
        row_lengths=program.row_lengths,
        tokens=program.tokens,
        peak=_peak(memory),
        temporary=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        flops=compiled_flops(module, program.trip_counts),
        collectives=tuple(collectives(module, program.trip_counts, micro_batch_scope=MICRO_BATCHES)),
        arrays=frozenset(array for visit in walk(module, program.trip_counts) for array in visit.instruction.results),
        traffic=memory_traffic(module, program.trip_counts),
        unknown_loops=tuple(sorted(unknown)),
    )


def _peak(memory: jax.stages.CompiledMemoryStats) -> int:
    """The compiler's figure; where it has none, everything at once."""
    arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    together = arguments + temporary + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return getattr(memory, "peak_memory_in_bytes", 0) or together


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _shortage(message: str) -> tuple[int, str]:
    """Bytes that a program needs that does not fit, 0 if the compiler doesn't say, and its reason in a line."""
    used = re.search(r"(?:Used |HLO temporaries \()([\d.]+)([KMGT])", message)
    reason = " ".join(message.removeprefix(f"{_OUT_OF_MEMORY}: ").split())[:200]
    return (int(float(used.group(1)) * _UNITS[used.group(2)]) if used else 0), reason
