"""A worker program whose calls do what a test says, and tools to look at worker processes.

    python tests/rewards/planted_worker.py [KIND VALUE] SOCKET_FD

`PROGRAM` is what a `WorkerPool` is given to run it. Every call says what it does, as the arguments of `act`; with KIND
and VALUE each call does that instead, whatever its arguments.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from dcmdp_jax.rewards.worker_process import serve

PROGRAM = (str(Path(__file__).resolve()),)


def act(kind: str, value: Any = None) -> Any:
    """Actions of a planted worker."""
    if kind == "echo":
        return value
    if kind == "compute":
        end = time.process_time() + value
        while time.process_time() < end:
            pass
        return True
    if kind == "sleep":
        time.sleep(float(value))
        return True
    if kind == "raise":
        raise ValueError(value)
    if kind == "exit":
        sys.exit(value)
    if kind == "allocate":
        return len(bytearray(value))
    if kind == "pid":
        return os.getpid()
    # The rest ("hang", "die", "die once", "log") leave a line per call in the file `value`.
    with open(value, "a+") as calls:
        calls.seek(0)
        first = not calls.read()
        calls.write("call\n")
    if kind == "hang":
        return max(itertools.repeat(0))  # one C call that never returns to Python
    if kind == "die" or (kind == "die once" and first):
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def _ignoring_arguments(kind: str, value: str, *_: Any) -> Any:
    return act(kind, value)


def is_alive(pid: int) -> bool:
    """Whether a process runs, zombies not counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """Process ids of the living children of a process, their children included."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return [child for child in found[1:] if is_alive(child)]


if __name__ == "__main__":
    *same, socket_fd = sys.argv[1:]
    serve(int(socket_fd), lambda: functools.partial(_ignoring_arguments, *same) if same else act)
