"""All processes below one, found in /proc, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ATTEMPTS = 1000
_LIBC = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends, daemons included."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Ids of the living processes below a process, zombies not counted."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(stat.parent.name)] = (int(parent), state)
    found = [pid]
    for each in found:
        found += [child for child, (parent, _) in parents.items() if parent == each]
    return [child for child in found[1:] if parents[child][1] not in "ZX"]


def kill_descendants(pid: int) -> None:
    """Kill all processes below one that adopts orphans, those too that are started meanwhile."""
    for attempt in range(_ATTEMPTS):
        below = descendants(pid)
        if not below:
            return
        for each in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        time.sleep(min(0.001 * attempt, 0.05))


def reap_orphans(child: int | None) -> None:
    """Collect what ended below this process, except its child."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)
