"""The persistent cache of compiled programs."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax

_MIN_COMPILE_SECONDS = 0.05


def enable_compile_cache() -> None:
    """Keep compiled programs in the user's cache directory, separately for each kind of processor.

    `JAX_COMPILATION_CACHE_DIR` selects another directory, `JAX_ENABLE_COMPILATION_CACHE=false` disables the cache.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "dcmdp_jax" / "programs" / _processor()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _processor() -> str:
    """A name for the processor's instruction set: a program compiled for another one may not run."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
