"""Whole runs of `dcmdp train` on this device: time to the first step, each phase, the multiplier's
rule, open ports.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.accelerator_parts.sizes import Size, Tell
from dcmdp_jax.observe.metrics_io import CLOCK, read_metrics
from dcmdp_jax.observe.report import read_run
from tests.demo_multiplier import broken_rule

_ROOT = Path(__file__).resolve().parents[2]
_LISTENS = "0A"
_SERIES = (
    "discrepancy/mean",
    "dual/multiplier",
    "dual/tolerance",
    "mismatch/probe",
    "mismatch/noise_floor",
    "reward/mean",
)


def measure_demo(size: Size, tell: Tell) -> None:
    """The demo, whole."""
    measure(tell, "configs/demo.py", dict(size.demo))


def measure_published(
    size: Size, tell: Tell, *, smollm2: str, precision: str, vllm: str = "", steps: int = 4
) -> None:
    """SmolLM2-135M in bfloat16, against the embedded engine or against vLLM."""
    del size
    settings = {"model.path": smollm2, "model.compute_dtype": "bfloat16", "training.steps": steps}
    settings |= {
        "rollout.precision": precision,
        "rollout.compute_dtype": "bfloat16",
        "evaluation.every_steps": steps,
    }
    if vllm:
        settings |= {
            "rollout.vllm.python": vllm,
            "rollout.vllm.engine_args": '{"enforce_eager": true}',
        }
    measure(tell, f"configs/smollm2.py{':vllm' if vllm else ''}", settings)


def measure(tell: Tell, config: str, settings: Mapping[str, object]) -> None:
    """Train in a process of its own, and read its record.

    Raises:
        RuntimeError: if the run fails, or its record breaks the multiplier's rule.
    """
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, "run")
        log = Path(scratch, "log")
        asked = dict(settings) | {"run_dir": directory}
        command = [sys.executable, "-m", "bin.train", f"--config={config}"]
        command += [f"--config.{name}={value}" for name, value in asked.items()]
        # As a user runs it: what this process leaves to others is its own affair.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name != "XLA_PYTHON_CLIENT_PREALLOCATE"
        }
        found: dict[str, Any] = {"kind": "run", "config": config}
        found |= {"settings": {name: str(value) for name, value in settings.items()}, "ports": []}
        began = time.time()
        with (
            log.open("w") as out,
            subprocess.Popen(
                command, cwd=_ROOT, env=environment, stdout=out, stderr=out
            ) as process,
        ):
            while process.poll() is None:
                found["ports"] = sorted({*found["ports"], *listening(process.pid)})
                found |= {"seconds": time.time() - began, "said": log.read_text()[-300:]}
                tell(found)
                time.sleep(1)
        if process.returncode:
            said = [path.read_text()[-1500:] for path in (log, *directory.glob("vllm/**/*.log"))]
            raise RuntimeError("\n".join([f"exit code {process.returncode}", *said]))
        found |= read_record(directory, began)
        tell(found)
    if found["broken_rule"]:
        raise RuntimeError(f"the multiplier's rule is broken: {found['broken_rule'][0]}")


def read_record(directory: Path, began: float) -> dict[str, Any]:
    """Times, discrepancy and multiplier of each step of a run that began at the time `began`."""
    series = read_metrics(directory)
    steps, clock = series[CLOCK]
    evaluated = [
        values for name, (_, values) in series.items() if re.fullmatch(r"eval/[^/]+/avg@\d+", name)
    ]
    return {
        "steps": int(steps[-1]),
        "first_step_seconds": float(clock[list(steps).index(1)]) - began,
        "phases": {
            name: values.tolist()
            for name, (_, values) in series.items()
            if name.startswith("time/") and name != CLOCK
        },
        "held_out": [float(value) for values in evaluated for value in values],
        "series": {name: series[name][1].tolist() for name in _SERIES if name in series},
        "broken_rule": list(broken_rule(series, read_run(directory).config)),
    }


def listening(root: int) -> set[str]:
    """'address:port, command' of the TCP sockets on which a process or its descendants listen;
    addresses in hex.
    """
    parents = {}
    names = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            name, rest = re.fullmatch(
                r"\d+ \((.*)\) \S (\d+) .*", (directory / "stat").read_text().strip()
            ).groups()
            parents[int(directory.name)], names[int(directory.name)] = int(rest), name
        except (OSError, AttributeError):
            continue  # it has ended
    family = {root}
    while more := {process for process, parent in parents.items() if parent in family} - family:
        family |= more
    owners = {}
    for process in family:
        for entry in glob.glob(f"/proc/{process}/fd/*"):
            with contextlib.suppress(OSError):  # closed meanwhile
                owners[os.readlink(entry)] = names.get(process)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and (owner := owners.get(f"socket:[{fields[9]}]")):
                address, port = fields[1].split(":")
                found.add(f"{address}:{int(port, 16)}, {owner}")
    return found
