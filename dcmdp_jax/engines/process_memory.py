"""Memory of a command's process: unneeded libraries, freed heap. Imports nothing large."""

import ctypes
import importlib.util
import os
import platform
import sys

# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
_ARENA_MAX = -8
_PAD_BYTES = 1 << 26
_TUNABLES = "GLIBC_TUNABLES"
LARGE_PAGES = "glibc.malloc.hugetlb=1"
_keeps_freed_memory = False


def hide_torch() -> None:
    """Make PyTorch look not installed in a command's process.

    transformers imports it wherever it is installed, though its tokenizers do not need it: 330 MiB
    and two seconds per start.
    """
    sys.modules.setdefault("torch", None)


def show_torch() -> None:
    """Undo `hide_torch`, where a command needs PyTorch itself."""
    if sys.modules.get("torch", sys) is None:
        del sys.modules["torch"]


def keep_freed_memory() -> None:
    """Make glibc keep freed memory in the process, in commands on the CPU.

    Does nothing without glibc, and where JAX uses an accelerator (the host would keep the memory
    that loading a model takes). Call it before anything else is imported.

    XLA's CPU backend allocates a program's results and temporary memory at each call. glibc takes
    blocks of that size from the kernel and returns them, and the kernel clears each page at its
    first use: a third of a training step, and four fifths of an addition.

    glibc reads only at process start that the heap asks for pages of 2 MiB, which are cleared in a
    tenth of the time: a command restarts once, in place, with `GLIBC_TUNABLES` set. If that is set
    already, nothing is restarted.
    """
    global _keeps_freed_memory
    if platform.libc_ver()[0] != "glibc" or not jax_takes_cpu():
        return
    if os.environ.get(_TUNABLES) == LARGE_PAGES:
        # glibc has read it; child processes must not inherit it.
        del os.environ[_TUNABLES]
    elif _TUNABLES not in os.environ:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, _TUNABLES: LARGE_PAGES})
    libc = ctypes.CDLL(None)
    for parameter, value in (
        (_MMAP_MAX, 0),
        (_TRIM_THRESHOLD, -1),
        (_TOP_PAD, _PAD_BYTES),
    ):
        libc.mallopt(parameter, value)
    _keeps_freed_memory = True


def share_heap() -> None:
    """Make all threads that start from now on share one heap, after `keep_freed_memory`.

    By default each thread has its own, where a block has at most 64 MiB and what one thread frees
    is of no use to the others: a model of 135M parameters took 12 GiB where 6.8 do. But compilation
    leaves a shared heap full of freed blocks, and every later allocation waits for its lock: in the
    run that compiled it a step of the demo took 1.0 s, in later runs 0.4 s.
    """
    if _keeps_freed_memory:
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


class _Mallinfo2(ctypes.Structure):
    """glibc's count of its heaps: ten numbers of bytes and blocks."""

    _fields_ = (
        ("others", ctypes.c_size_t * 8),
        ("free_bytes", ctypes.c_size_t),
        ("top_bytes", ctypes.c_size_t),
    )


def release_freed_memory(above: int = 0) -> None:
    """Return freed memory of all threads to the kernel, after a large use.

    Reading a checkpoint leaves several times the model's size in freed copies, and a phase of a
    large model's step leaves its temporary memory, which the next phase can use in part only. Does
    nothing without glibc.

    Args:
        above: do nothing unless more bytes than these are free. Memory of a small model stays for
            the next call.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    if above:
        if not hasattr(libc, "mallinfo2"):  # before glibc 2.33
            return
        libc.mallinfo2.restype = _Mallinfo2
        if libc.mallinfo2().free_bytes <= above:
            return
    libc.malloc_trim(0)


def jax_takes_cpu() -> bool:
    """Whether JAX will use the CPU, by `JAX_PLATFORMS` or for want of another installed backend.

    Does not import JAX.
    """
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms.split(",")[0] == "cpu"
    # JAX finds GPU backends in the namespace package jax_plugins; TPUs need libtpu.
    return not any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))
