"""The starts of a run: command, code, machine and date, a line of starts.jsonl each."""

import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

import jax

from dcmdp_jax.observe import jsonl
from dcmdp_jax.version import __version__


def record_start(run_dir: Path, step: int, devices: int) -> None:
    """Append the command, the code, the machine and the date of a start to `starts.jsonl`.

    Args:
        run_dir: the run directory.
        step: finished training steps at this start.
        devices: number of training devices.
    """
    device, program = jax.devices()[0], Path(sys.argv[0])
    # `python -m bin.train` of a checkout is `dcmdp train`.
    name = f"dcmdp {program.stem}" if program.parent == Path(__file__).resolve().parents[2] / "bin" else program.name
    line = {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": f"{name} {shlex.join(sys.argv[1:])}".strip(),
        "commit": code_commit(),
        "version": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "machine": f"{devices} x {device.device_kind}, {os.cpu_count()} cores, {platform.machine()}",
    }
    with open(run_dir / jsonl.STARTS_FILE, "a", encoding="utf-8") as file:
        file.write(jsonl.encode(line))


def code_commit() -> str:
    """The commit of the checkout that this package is run from, with `+changes` if files differ; "" outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
