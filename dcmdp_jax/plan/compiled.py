"""Compilation of a program for a topology, and its memory by the compiler."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from dcmdp_jax.parallel.sharding import Lowerable

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


class Compiled(NamedTuple):
    """A compiled program, on one device.

    Attributes:
        name: the program's name.
        seconds: compilation time.
        peak: largest number of bytes in use, arguments included, as the compiler reports it; what it would need, if it
            says so, of a program that does not fit.
        temporary: bytes of temporary memory; 0 if it does not fit.
        arguments: bytes of the arguments.
        account: what the reader given to `compile_program` returned; None without one.
        refused: why the compiler refused it; None for a compiled program.
    """

    name: str
    seconds: float
    peak: int
    temporary: int = 0
    arguments: int = 0
    account: Any = None
    refused: str | None = None


def compile_program(
    program: Lowerable, read: Callable[[jax.stages.Compiled], Any] = lambda executable: None
) -> Compiled:
    """Lower and compile a program. A program that does not fit is a result too.

    Args:
        program: what to compile.
        read: called with the executable, which is not kept; its result is kept as `account`.

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
        return Compiled(program.name, time.monotonic() - began, needed, refused=reason)
    seconds, memory = time.monotonic() - began, executable.memory_analysis()
    return Compiled(
        program.name, seconds, _peak(memory), memory.temp_size_in_bytes, memory.argument_size_in_bytes, read(executable)
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
