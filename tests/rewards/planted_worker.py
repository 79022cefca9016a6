"""A function of an isolated process that does what a test says, and tools to look at processes.

Every call says what it does, as the arguments of `act`; where `PLANTED_CALL` is "KIND VALUE" each
does that instead.
"""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load() -> Callable[..., Any]:
    """The function."""
    planted = os.environ.get("PLANTED_CALL")
    return (lambda *_: act(*planted.split())) if planted else act


def act(kind: str, value: Any = None) -> Any:
    """Do what a test says."""
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
    if kind == "variable":
        return os.environ.get(value)
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
