"""Tuning for XLA's CPU backend: the number of devices, programs in flight, compiler flags."""

from __future__ import annotations

import logging
import os

import jax

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT_PROGRAMS = 16
"""Max in-flight multi-device CPU programs. XLA:CPU deadlocks above 32 on one device."""

_MAX_DEFAULT_DEVICES = 4


def set_cpu_devices(count: int) -> None:
    """Split the CPU into several JAX devices. Call before the first use of JAX.

    Does nothing after JAX has started, or where the user has set the count in `XLA_FLAGS`.

    Args:
        count: number of devices; 0 is one per core, at most 4.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count or min(usable_cores(), _MAX_DEFAULT_DEVICES))
    except RuntimeError:
        logger.debug("JAX has started with %d devices", jax.device_count())


def cpu_is_split() -> bool:
    """Whether `set_cpu_devices` made several devices of the CPU."""
    return jax.default_backend() == "cpu" and jax.config.jax_num_cpu_devices > 1


def usable_cores() -> int:
    """Number of cores that this process may run on; of all cores where the system doesn't tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compiler_options(platform: str) -> dict[str, str] | None:
    """Compiler options of the training programs on "cpu", "gpu" or "tpu".

    On CPU, YNNPACK computes matrix products only. By default it also takes the operations around them, with one pass
    over memory for each, where XLA's own fusions read memory once: 5 to 20% of a training step.
    """
    if platform != "cpu":
        return None
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
