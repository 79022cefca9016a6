"""Two or more calls measured in turn in one run, reported as a ratio with its spread."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

import jax


def interleave(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, taken in turn (A B A B ...) after one round that compiles and is not
    counted.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            if repeat:
                times[name].append(time.perf_counter() - began)
    return times


def median_and_spread(values: list[float], form: str = ".3f") -> str:
    """'0.123 (0.120 - 0.140)'."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def ratio(times: list[float], baseline: list[float]) -> str:
    """Median and spread of the ratio, round by round: what drifts with the machine cancels."""
    return median_and_spread([a / b for a, b in zip(times, baseline, strict=True)], ".2f")


def matmul_gflops(size: int = 1024, dtype: str = "float32") -> float:
    """The rate of a square product, the best of ten: the measure of a busy machine."""
    x = jax.numpy.ones((size, size), dtype)
    return 2 * size**3 / min(interleave({"product": lambda: x @ x}, 10)["product"]) / 1e9


def matmul_gflop_per_cpu_second(size: int = 1024, repeats: int = 20) -> float:
    """The rate of a square float32 product per second of a core, the best of five; other work
    hardly changes it.
    """
    x = jax.numpy.ones((size, size), "float32")
    rates = []
    for _ in range(5):
        began = time.process_time()
        jax.block_until_ready([x @ x for _ in range(repeats)])
        rates.append(2 * size**3 * repeats / (time.process_time() - began) / 1e9)
    return max(rates)


def machine() -> str:
    """A line about where the numbers come from."""
    device = jax.devices()[0]
    return (
        f"{device.platform} {device.device_kind}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, float32 matmul {matmul_gflops():.0f} GFLOP/s, jax "
        f"{jax.__version__}"
    )
