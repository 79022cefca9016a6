"""What a command asks of JAX before it starts: CPU devices, and a cache of compiled programs."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from dcmdp_jax.parallel.mesh import make_mesh

logger = logging.getLogger(__name__)

MOST_UNDER_WAY = 16
"""Programs over several CPU devices that may be under way at one time. XLA's CPU client counts 32 of a device; whoever
starts another waits in one of the few threads that those under way need, and all of them stand still for ever."""

_MOST_CPU_DEVICES = 4
_MOST_REPEATED_PARAMS = 1 << 25
_WORTH_CACHING_S = 0.05


def prepare_host(cpu_devices: int) -> None:
    """Call before the first use of JAX; what comes too late, or the user has set already, is left as it is.

    Args:
        cpu_devices: how many devices the CPU counts as; 0 is one for each core, at most 4.
    """
    _cache_programs()
    count = cpu_devices or min(usable_cores(), _MOST_CPU_DEVICES)
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        logger.debug("JAX has started with %d devices", jax.device_count())


def usable_cores() -> int:
    """Cores that this process may run on; where the system doesn't tell, all that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def training_mesh(data: int = 1, fsdp: int = -1, tensor: int = 1, expert: int = 1, *, num_params: int) -> Mesh:
    """`make_mesh`; where `prepare_host` made several devices of the CPU, the devices left over split rows alone.

    Each core with rows of its own waits for the others once in an update, not at the end of every operation: a step of
    a small model takes 0.8 of the time that it takes one device with all cores. Every device holds the whole state: a
    large model, whose operations are long, gains nothing and stays on one, and so does any where devices are fewer than
    cores.

    Args:
        data, fsdp, tensor, expert: of `make_mesh`, from the config.
        num_params: of the model.
    """
    devices, sizes = jax.devices(), (data, fsdp, tensor, expert)
    if _cpu_is_divided():
        fixed = math.prod(size for size in sizes if size != -1)
        if -1 not in sizes:
            devices = devices[:fixed]
        elif fixed == 1:
            alone = num_params > _MOST_REPEATED_PARAMS or len(devices) < usable_cores()
            devices, sizes = devices[:1] if alone else devices, (-1, 1, 1, 1)
    return make_mesh(*sizes, devices=devices)


def sampling_mesh(training: Mesh) -> Mesh:
    """The devices that the embedded engine splits rows over: the training mesh's, or all that the CPU was made into.

    Decoding runs many small products, for which waking a second thread costs as much as it saves: two devices with half
    of the rows each take 0.68 to 0.75 of the time of one that uses both cores.
    """
    if _cpu_is_divided():
        return Mesh(np.asarray(jax.devices()), ("rows",))
    return training


def compiler_options(platform: str) -> dict[str, str] | None:
    """What a program of training is compiled with on "cpu", "gpu" or "tpu".

    On CPU YNNPACK computes products alone. By default it computes what is around them too, one pass for each
    operation, where XLA's own fusions read memory once: 5 to 20% of a training step.
    """
    if platform != "cpu":
        return None
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def _cpu_is_divided() -> bool:
    """Whether `prepare_host` made several devices of the CPU."""
    return jax.default_backend() == "cpu" and jax.config.jax_num_cpu_devices > 1


def _cache_programs() -> None:
    """Keeps compiled programs in the user's cache directory, apart for each kind of processor.

    `JAX_COMPILATION_CACHE_DIR` names another place, `JAX_ENABLE_COMPILATION_CACHE=false` switches it off.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "dcmdp_jax" / "programs" / _processor()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_CACHING_S)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _processor() -> str:
    """A name for the processor's instruction set: a program compiled for another one may not run."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    told = next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return f"{platform.machine()}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
