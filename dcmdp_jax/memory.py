"""Memory of a command's process. Imports nothing large, so that it can come before everything else."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_PAD_BYTES = 1 << 26
_TUNABLES, _LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def prepare_memory(package: str) -> None:
    """Has glibc keep memory that is freed and ask for large pages; elsewhere does nothing.

    XLA's CPU backend allocates a program's results and temporary memory anew at each call. glibc takes blocks of that
    size from the kernel and gives them back, and the kernel clears each page when it is first touched: a third of a
    training step, and four fifths of an addition. Kept, most of it stays; of what does not (blocks over 64 MiB that a
    thread other than the first asks for) pages of 2 MiB take a tenth of the time of 512 small ones.

    glibc reads about large pages only when a process starts: a command that was started as `python -m package.name`
    starts once more, in place, with `GLIBC_TUNABLES` set. Nothing happens to a process that was told something there.
    A library that is imported changes nothing of its process.

    Args:
        package: the package of commands that asks, before it has imported anything else.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    if os.environ.get(_TUNABLES) == _LARGE_PAGES:
        # Read by now, and not meant for other processes that this one starts.
        del os.environ[_TUNABLES]
    elif _TUNABLES not in os.environ and _is_command(package, sys.orig_argv):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, _TUNABLES: _LARGE_PAGES})
    libc = ctypes.CDLL(None)
    for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _PAD_BYTES)):
        libc.mallopt(parameter, value)


def _is_command(package: str, arguments: list[str]) -> bool:
    """Whether the process is `python -m package.something`: what stands after the first -m is what runs."""
    place = arguments.index("-m") + 1 if "-m" in arguments else 0
    return arguments[place].split(".")[0] == package
