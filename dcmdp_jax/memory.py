"""Memory that a process keeps. Imports nothing, so that it can come before everything else."""

from __future__ import annotations

import ctypes
import platform

# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_PAD_BYTES = 1 << 26


def keep_freed_memory() -> None:
    """Has glibc keep memory that is freed; elsewhere does nothing.

    XLA's CPU backend allocates a program's results and temporary memory anew at each call. glibc takes blocks of that
    size from the kernel and gives them back, and the kernel clears each page when it is first touched: a third of a
    training step, and four fifths of an addition. With one arena and no separate mappings the memory stays.
    It takes a few calls to settle: an aligned block fits into a freed one of its own size only beside another.

    For commands, before the first thread is made: importing numpy makes some, whose arenas would be used by others
    later. A library that is imported changes nothing of its process.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _PAD_BYTES), (_ARENA_MAX, 1)):
        libc.mallopt(parameter, value)
