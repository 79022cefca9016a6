"""Anonymous shared memory for weights: no name in any file system, gone with the last process that holds it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

_CGROUP = Path("/sys/fs/cgroup")


class Segment:
    """Shared memory of a fixed size, mapped writable. The descriptor is inherited by children that are told to."""

    def __init__(self, name: str, size: int) -> None:
        """Allocate every page now, so that no write fails later.

        Raises:
            MemoryError: in one line, if there is no room.
        """
        if size > (available := available_bytes()):
            # Asked for more than there is, Linux (6.18) hands out page after page until it kills a process.
            raise MemoryError(
                f"shared memory {name}: {size / 2**30:.2f} GiB cannot be allocated ({available / 2**30:.2f} GiB free)"
            )
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, size)
            self.bytes: np.ndarray | None = attach(self.descriptor, size)
        except OSError as error:
            os.close(self.descriptor)
            raise MemoryError(f"shared memory {name}: {size / 2**30:.2f} GiB cannot be allocated ({error})") from error

    def close(self) -> None:
        """Free the memory once no array points into it. Safe to call twice."""
        if self.bytes is not None:
            self.bytes = None
            os.close(self.descriptor)


def attach(file: int | str, size: int) -> np.ndarray:
    """[size] uint8 view of a descriptor's memory, or of that behind a /proc path."""
    path = f"/proc/self/fd/{file}" if isinstance(file, int) else file
    return np.memmap(path, np.uint8, mode="r+", shape=(size,)).view(np.ndarray)


def available_bytes() -> int:
    """Memory that can still be allocated: the machine's, or the control group's where that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        # Pages of files that were read count as used and are given up when memory is wanted.
        stat = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        used -= sum(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
        return free if limit == "max" else max(0, min(free, int(limit) - used))
    except (OSError, ValueError):
        return free
