"""Memory of a command's process: unneeded libraries, freed heap. Imports nothing large, so it can come first."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_PAD_BYTES = 1 << 26
_TUNABLES = "GLIBC_TUNABLES"
_PAGES_OF_1_GIB = Path("/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages")


def hide_torch(package: str) -> None:
    """Make PyTorch look not installed in a command's process.

    transformers imports it wherever it is installed, though its tokenizers do not need it: 330 MiB and two seconds per
    start. A process that only imports the package is left unchanged.

    Args:
        package: the process is a command if it was started as `python -m package` or `python -m package.name`, or as a
            script that is called so.
    """
    if is_command(package):
        sys.modules.setdefault("torch", None)


def show_torch() -> None:
    """Undo `hide_torch`, where a command needs PyTorch itself."""
    if sys.modules.get("torch", sys) is None:
        del sys.modules["torch"]


def keep_freed_memory(package: str) -> None:
    """Make glibc keep freed memory in the process, in commands on the CPU.

    Does nothing without glibc, where JAX uses an accelerator (the host would keep the memory that loading a model
    takes), and in a process that only imports the package.

    XLA's CPU backend allocates a program's results and temporary memory at each call. glibc takes blocks of that size
    from the kernel and returns them, and the kernel clears each page at its first use: a third of a training step, and
    four fifths of an addition.

    glibc reads the size limit of a thread's heap only at process start: a command restarts once, in place, with
    `GLIBC_TUNABLES` set. If that is set already, nothing is restarted.

    Args:
        package: as for `hide_torch`. Call it before anything else is imported.
    """
    if platform.libc_ver()[0] != "glibc" or not is_command(package) or not jax_takes_cpu():
        return
    wanted = malloc_tunables()
    if os.environ.get(_TUNABLES) == wanted:
        # glibc has read it; child processes must not inherit it.
        del os.environ[_TUNABLES]
    elif _TUNABLES not in os.environ:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, _TUNABLES: wanted})
    libc = ctypes.CDLL(None)
    for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _PAD_BYTES)):
        libc.mallopt(parameter, value)


def release_freed_memory() -> None:
    """Return freed memory of all threads to the kernel, after a large one-time use.

    Reading a checkpoint leaves several times the model's size in freed copies, which `keep_freed_memory` would keep and
    the heaps of other threads could not use. Does nothing without glibc.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def jax_takes_cpu() -> bool:
    """Whether JAX will use the CPU: `JAX_PLATFORMS` says so, or no other backend is installed. Does not import JAX."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    # JAX finds GPU backends in the namespace package jax_plugins; TPUs need libtpu.
    return not any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))


def malloc_tunables() -> str:
    """Value of GLIBC_TUNABLES that lets a thread's heap grow to 4 GiB instead of 64 MiB.

    It asks for pages of 1 GiB where Linux supports them and has none, so ordinary pages are used. Elsewhere it asks for
    pages of 2 MiB, which are cleared in a tenth of the time.
    """
    try:
        none = int(_PAGES_OF_1_GIB.read_text()) == 0
    except (OSError, ValueError):
        none = False
    return f"glibc.malloc.hugetlb={1 << 30 if none else 1}"


def is_command(package: str, arguments: Sequence[str] = ()) -> bool:
    """Whether this process, or a command line, runs a module of the package, or a script with its name."""
    words = iter((arguments or sys.orig_argv)[1:])
    for word in words:
        if word in ("-X", "-W"):  # options of Python with a value
            next(words, None)
        elif word == "-m":
            return next(words, "").split(".")[0] == package
        elif word == "-c" or not word.startswith("-"):
            return Path(word).name == package
    return False
