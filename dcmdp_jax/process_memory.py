"""What a command's process loads and keeps. Imports nothing large, so that it can come before everything else."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
from pathlib import Path

# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_PAD_BYTES = 1 << 26
_TUNABLES = "GLIBC_TUNABLES"
_PAGES_OF_1_GIB = Path("/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages")


def hide_torch(package: str) -> None:
    """Has a command do without PyTorch: to whoever imports it there, it is not installed.

    transformers loads it where it is installed, as it is beside vLLM, though its tokenizers need none: 330 MiB and two
    seconds of each start. A library that is imported hides nothing from its process.

    Args:
        package: the package of commands that asks.
    """
    if _is_command(package, sys.orig_argv):
        sys.modules.setdefault("torch", None)


def keep_freed_memory(package: str) -> None:
    """Has glibc keep memory that is freed, whatever its size and whichever thread had it, in commands on the CPU.

    Changes nothing elsewhere: without glibc, where JAX computes on an accelerator (the host would keep what it needed
    once to load a model), and in a process that only imports the package.

    XLA's CPU backend allocates a program's results and temporary memory anew at each call. glibc takes blocks of that
    size from the kernel and gives them back, and the kernel clears each page when it is first touched: a third of a
    training step, and four fifths of an addition.

    How large a block a thread's own heap may hold, glibc reads only when a process starts: a command that was started
    as `python -m package.name` starts once more, in place, with `GLIBC_TUNABLES` set. Nothing is started again where
    that is set already.

    Args:
        package: the package of commands that asks, before it has imported anything else.
    """
    if platform.libc_ver()[0] != "glibc" or not _is_command(package, sys.orig_argv) or not _jax_takes_cpu():
        return
    wanted = _tunables()
    if os.environ.get(_TUNABLES) == wanted:
        # Read by now, and not meant for other processes that this one starts.
        del os.environ[_TUNABLES]
    elif _TUNABLES not in os.environ:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, _TUNABLES: wanted})
    libc = ctypes.CDLL(None)
    for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _PAD_BYTES)):
        libc.mallopt(parameter, value)


def release_freed_memory() -> None:
    """Gives memory that is free now back to the kernel, all threads' of it; for after what happens once.

    A checkpoint that was read leaves its copies on the way to the devices: several times the model, which
    `keep_freed_memory` would have the process keep, and heaps of other threads could not use. Elsewhere than with glibc
    does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _jax_takes_cpu() -> bool:
    """Whether JAX will compute on the CPU, told without importing it: it is told to, or has no other backend."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    # JAX finds GPU backends in the namespace package jax_plugins; TPUs need libtpu.
    return not any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))


def _tunables() -> str:
    """What lets a thread's heap grow to 4 GiB instead of 64 MiB: pages of 1 GiB, where Linux knows of them and has
    none, so that ordinary ones are taken. Else pages of 2 MiB, a tenth of the time to clear, for what is larger."""
    try:
        none = int(_PAGES_OF_1_GIB.read_text()) == 0
    except (OSError, ValueError):
        none = False
    return f"glibc.malloc.hugetlb={1 << 30 if none else 1}"


def _is_command(package: str, arguments: list[str]) -> bool:
    """Whether the process is `python -m package.something`: what stands after the first -m is what runs."""
    place = arguments.index("-m") + 1 if "-m" in arguments else 0
    return arguments[place].split(".")[0] == package
