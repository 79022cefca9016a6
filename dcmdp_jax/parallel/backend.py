"""JAX's backend on this machine: CPU devices, compiler flags, the compile cache, GPUs."""

import functools
import hashlib
import importlib.util
import logging
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jaxlib

from dcmdp_jax.activity import COMPILING

logger = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")
"""Where Linux tells what the processor can do."""

MAX_IN_FLIGHT_PROGRAMS = 16
"""Max in-flight multi-device CPU programs. XLA:CPU deadlocks above 32 on one device."""

_MAX_DEFAULT_DEVICES = 4
_MIN_COMPILE_SECONDS = 0.05


def prepare_jax(cpu_devices: int = 0) -> None:
    """Enable the compile cache and split the CPU into JAX devices, before JAX is used.

    The cache is `program_directory()`. `JAX_COMPILATION_CACHE_DIR` selects another directory,
    `JAX_ENABLE_COMPILATION_CACHE=false` disables the cache. The CPU is left as it is after JAX has
    started, or where the user has set the count in `XLA_FLAGS`.

    Args:
        cpu_devices: number of devices; 0 is one per core, at most 4.
    """
    _replace_unreadable_programs()
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(program_directory()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update(
            "jax_num_cpu_devices", cpu_devices or min(usable_cores(), _MAX_DEFAULT_DEVICES)
        )
    except RuntimeError:
        logger.debug("JAX has started with %d devices", jax.device_count())


@functools.cache
def _replace_unreadable_programs() -> None:
    """Let a compiled program replace an entry of the compile cache; JAX keeps any file.

    JAX compiles where it finds no entry or can't read it: a process that is killed leaves a part of
    one. Of processes that compile the same program at the same time, the last one's entry stays.
    """
    from jax._src.lru_cache import LRUCache  # jax (0.10 to 0.12) has no public hook

    keep = LRUCache.put

    def replace(cache: LRUCache, key: str, value: bytes) -> None:
        (cache.path / f"{key}-cache").unlink(missing_ok=True)
        keep(cache, key, value)

    LRUCache.put = replace


def program_directory() -> Path:
    """The user's directory of compiled programs, by kind of processor and version of jaxlib."""
    base = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcmdp_jax" / "programs"
    )
    features = " ".join(sorted(processor_features())) or platform.processor()
    kind = hashlib.sha256(features.encode()).hexdigest()[:12]
    # Without links: JAX hashes the path into the key of each program.
    return base.resolve() / f"{platform.machine()}-{kind}-jaxlib-{jaxlib.__version__}"


def processor_features() -> frozenset[str]:
    """Instruction sets of this processor, by Linux's names; empty where unknown."""
    if not CPU_INFO.exists():
        return frozenset()
    for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
        name, _, features = line.partition(":")
        # "flags" on x86, "Features" on Arm; the first processor's.
        if name.startswith(("flags", "Features")):
            return frozenset(features.split())
    return frozenset()


def cpu_is_split() -> bool:
    """Whether `prepare_jax` made several devices of the CPU."""
    return jax.default_backend() == "cpu" and jax.config.jax_num_cpu_devices > 1


def usable_cores() -> int:
    """Number of cores that this process may run on; all cores where the system doesn't tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compile_beside(program: Callable[[], object], name: str) -> Callable[[], None]:
    """Compile a program in a thread; return a function that waits for it.

    JAX caches the result for the call that needs the program. After a failure that call compiles
    it, and raises what is wrong.
    """

    def run() -> None:
        # Tried twice: on several hosts, the others wait for a process that compiles it later.
        for _ in range(2):
            try:
                program()
                return
            except Exception:  # the call raises it
                logger.debug("a program was not compiled ahead", exc_info=True)

    thread = threading.Thread(target=run, name=COMPILING + name)
    thread.start()
    return thread.join


def compiler_options(platform: str) -> dict[str, str] | None:
    """Compiler options of the training programs on "cpu", "gpu" or "tpu".

    On CPU, YNNPACK computes matrix products only. By default it also takes the operations around
    them, with one pass over memory for each, where XLA's own fusions read memory once: 5 to 20% of
    a training step.
    """
    if platform != "cpu":
        return None
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def present_gpus() -> list[str]:
    """Numbers of this machine's NVIDIA GPUs, as CUDA counts them. Does not start JAX."""
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return list(map(str, range(count)))


def has_cuda_plugin() -> bool:
    """Whether JAX's plugin for NVIDIA GPUs is installed."""
    return any(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin")))
