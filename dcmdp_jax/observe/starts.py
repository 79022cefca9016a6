"""Where a run's numbers come from: `starts.jsonl` has a line for each start of the run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from dcmdp_jax.observe import jsonl
from dcmdp_jax.observe.run_files import STARTS_FILE

_GIT_S = 5.0


def record_start(run_dir: Path, step: int) -> None:
    """Append the command, the code, the machine and the date of a start to `starts.jsonl`.

    Args:
        run_dir: of the run.
        step: finished training steps at this start.
    """
    device = jax.devices()[0]
    line = {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": f"{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip(),
        "commit": code_commit(),
        "version": importlib.metadata.version("dcmdp-jax"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "machine": f"{jax.device_count()} x {device.device_kind}, {os.cpu_count()} cores, {platform.machine()}",
    }
    with open(run_dir / STARTS_FILE, "a", encoding="utf-8") as file:
        file.write(jsonl.encode(line))


def code_commit() -> str:
    """The commit of the checkout that this package is run from, with `+changes` if files differ; "" outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        commit = _git(root, "rev-parse", "--short=10", "HEAD")
        return f"{commit}+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return ""


def describe_starts(run_dir: Path) -> list[str]:
    """Sentences about a run's starts for its report; none for a run directory that recorded none."""
    lines: list[dict[str, Any]] = jsonl.read(run_dir / STARTS_FILE)
    if not lines:
        return []
    first, last = lines[0], lines[-1]
    code = f"dcmdp_jax {last.get('version')}" + (f", commit {last['commit']}" if last.get("commit") else "")
    said = [f"{first.get('time')}", f"{last.get('command')}", code, f"{last.get('machine')}, jax {last.get('jax')}"]
    if len(lines) > 1:
        said.append(f"resumed {len(lines) - 1} times, last at step {last.get('step')}")
    return said


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=_GIT_S, check=True)
    return done.stdout.strip()
