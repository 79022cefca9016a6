"""A program's time on this device beside the lower bounds of `benchmarks.compiled`: the nearer one
limits it.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.accelerator_parts.sizes import Size, Tell
from benchmarks.compiled_parts.account import account
from benchmarks.compiled_parts.hlo import TripCounts, names_of_this_code
from benchmarks.compiled_parts.roofline import DATA_SHEETS, DataSheet, roofline
from benchmarks.compiled_parts.trips import blocks_at_most
from benchmarks.timing import interleave, matmul_gflops
from dcmdp_jax.engines.engine_kind import Lowerable
from dcmdp_jax.plan.run_plan import Compiled, compile_program

GOAL_FLOPS = {"h200": 790e12}
"""bfloat16 operations a second of which half is the goal for a training step."""

# Part of a device's kind, as JAX names it -> the chip. The first that is found counts.
_KINDS = {"H200": "h200", "H100": "h100", "v5 lite": "v5e", "v5e": "v5e", "v5": "v5p", "v6": "v6e"}


def chip_name(device: jax.Device) -> str:
    """A key of `DATA_SHEETS`; empty for a device without a data sheet."""
    return next((name for part, name in _KINDS.items() if part in device.device_kind), "")


def measured_rates(size: Size) -> tuple[float, float]:
    """Operations a second of a large bfloat16 product, and bytes a second of a copy, read and
    written.
    """
    x = jnp.ones(size.copied_bytes // 4, jnp.float32)
    copy = jax.jit(jnp.negative)
    seconds = min(interleave({"copy": lambda: copy(x)}, size.repeats)["copy"])
    return 1e9 * matmul_gflops(size.product, "bfloat16"), 2 * size.copied_bytes / seconds


def chip_here(size: Size) -> tuple[DataSheet, str]:
    """The chip that programs are judged by, and where its figures come from."""
    device = jax.local_devices()[0]
    if name := chip_name(device):
        return DATA_SHEETS[name], "data sheet"
    flops, bandwidth = measured_rates(size)
    unlimited = float("inf")
    chip = DataSheet(
        name=device.device_kind,
        flops=flops,
        memory_bandwidth=bandwidth,
        link_bandwidth=unlimited,
        far_bandwidth=unlimited,
        devices_near=1,
    )
    return chip, "measured here, no data sheet"


def compile_and_read(
    name: str, function: Any, *arguments: Any
) -> tuple[jax.stages.Compiled, Compiled]:
    """Compile a jitted function whose only loops that depend on data are those over blocks of
    rows.
    """
    program = Lowerable(
        name=name,
        trace=lambda: function.trace(*arguments),
        resident={},
        row_lengths=(),
        tokens=0,
    )
    return read(program, blocks_at_most)


def read(program: Lowerable, trip_counts: TripCounts) -> tuple[jax.stages.Compiled, Compiled]:
    """Compile a program, to run it and to read it."""
    kept = []
    with names_of_this_code():
        compiled = compile_program(
            program, lambda executable: kept.append(executable) or account(executable, trip_counts)
        )
    return kept[0], compiled


def limits(
    compiled: Compiled, chip: DataSheet, seconds: float, needed_flops: float
) -> dict[str, Any]:
    """Compare a measured time with the chip's figures.

    Args:
        compiled: the program.
        chip: from `chip_here`.
        seconds: of one run, measured.
        needed_flops: operations that the result needs, however it is computed.

    Returns:
        "bounds" are the least seconds for products and for memory traffic as compiled, "nearer" the
        larger one's name, "share_of_bound" that bound over the measured time. A bound that is far
        from the time too means that neither
        limits: waiting between kernels, small products, kernels that reach less.
    """
    bound = roofline(compiled.account, chip)
    return {
        "bounds": {"compute": bound.compute, "memory": bound.memory},
        "nearer": bound.limit,
        "share_of_bound": bound.overlapped / seconds,
        "needed_flops": needed_flops,
        "flops_per_second": needed_flops / seconds,
        "share_of_peak": needed_flops / seconds / chip.flops,
        "compiled_flops": compiled.account.flops.total,
        "compiled_over_needed": compiled.account.flops.total / needed_flops,
        "memory_traffic_bytes": compiled.account.traffic,
        "uncounted_kernels": list(compiled.account.flops.uncounted),
        "unknown_loops": list(compiled.account.unknown_loops),
    }


def memory_peak() -> int | None:
    """The most bytes in use on the first device since the process started; None where the backend
    does not count.
    """
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def measure(size: Size, tell: Tell) -> None:
    """The part "device": what it is, and the rates that simple programs reach."""
    device = jax.local_devices()[0]
    found: dict[str, Any] = {
        "kind": "device",
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.local_device_count(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
    }
    tell(found)
    chip, source = chip_here(size)
    flops, bandwidth = measured_rates(size)
    found |= {
        "chip": chip.name,
        "chip_figures": source,
        "peak_flops": chip.flops,
        "peak_bandwidth": chip.memory_bandwidth,
        "measured_flops": flops,
        "measured_bandwidth": bandwidth,
    }
    tell(found)
