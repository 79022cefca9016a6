"""Attention, training step and embedded engine on this accelerator: speed, memory and what limits each.

    python -m benchmarks.accelerator --json accelerator.json

For one H200, in under 9 minutes; on a CPU it measures a toy model, to test the program. A Qwen3-1.7B of random weights
is made on the device. Parts, in order of importance, each in a process of its own:

    device              the chip, and the rates that a large product and a copy reach
    step_packed         the training step on packed rows of 8,192 tokens
    discrepancy         the engine's and the training stack's probabilities in bfloat16, with float32 as the reference
    attention_packed    errors of each kernel, with float32 as the reference; its time and the plain version's
    engine_bfloat16     the embedded engine's tokens a second
    step_smaller        the step of Qwen3-0.6B
    step_full_remat     the step with remat=full, the default of a run
    attention_one_sequence
    engine_fp8          8-bit weights
    experts             a mixture of experts beside a dense layer
    step_buckets        the same sequences one to a row, in rows that a run chooses: the default of a run on a GPU
    engine_int8

A part that fails, or takes longer than it may, is recorded with its error, and the others go on; the exit code is then
1. Parts that --budget_s leaves no time for are named. The JSON is written after each part.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accelerator_parts import attention, discrepancy, engine, experts, limits, step
from benchmarks.accelerator_parts.sizes import SIZES, Size, Tell, size_name
from benchmarks.accelerator_parts.tables import summary, table
from benchmarks.arguments import at_least_one, names_of
from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.engines.vllm.devices import memory_fraction


class Part(NamedTuple):
    """A measurement.

    Attributes:
        measure: called in a process of its own.
        most_s: seconds after which it is killed.
        least_s: seconds that it needs at least: with less left it is not begun.
    """

    measure: Callable[[Size, Tell], None]
    most_s: float
    least_s: float


PARTS = {
    "device": Part(limits.measure, 60, 5),
    "step_packed": Part(functools.partial(step.measure, packed=True, remat="none"), 180, 40),
    "discrepancy": Part(discrepancy.measure, 90, 30),
    "attention_packed": Part(functools.partial(attention.measure, packed=True), 90, 25),
    "engine_bfloat16": Part(functools.partial(engine.measure, precision="bfloat16"), 150, 40),
    "step_smaller": Part(step.measure_smaller, 120, 30),
    "step_full_remat": Part(functools.partial(step.measure, packed=True, remat="full"), 180, 40),
    "attention_one_sequence": Part(functools.partial(attention.measure, packed=False), 90, 25),
    "engine_fp8": Part(functools.partial(engine.measure, precision="fp8"), 150, 40),
    "experts": Part(experts.measure, 90, 20),
    "step_buckets": Part(functools.partial(step.measure, packed=False, remat="none"), 180, 40),
    "engine_int8": Part(functools.partial(engine.measure, precision="int8"), 150, 40),
}

Run = Callable[[str, float], dict[str, Any]]
"""(name of a part, seconds that it may take) -> what it found, with "error": None or a line."""


def run_parts(names: Sequence[str], run: Run, write: Callable[[dict[str, Any]], None], budget_s: float) -> int:
    """Run parts one after another and write the record after each.

    Args:
        names: of the parts, in order.
        run: runs one.
        write: takes the record so far.
        budget_s: seconds for all.

    Returns:
        The exit code: 1 if a part has an error.
    """
    began = time.monotonic()
    record: dict[str, Any] = {"budget_s": budget_s, "parts": {}, "left_out": []}
    for name in names:
        left = budget_s - (time.monotonic() - began)
        if left < PARTS[name].least_s:
            record["left_out"].append(name)
            continue
        began_part = time.monotonic()
        found = run(name, min(left, PARTS[name].most_s))
        record["parts"][name] = found | {"part_seconds": time.monotonic() - began_part}
        record["seconds"] = time.monotonic() - began
        write(record)
    write(record)
    return int(any(part["error"] is not None for part in record["parts"].values()))


def run_process(command: Sequence[str], record: Path, seconds: float) -> dict[str, Any]:
    """Run a part's process, which writes what it finds to `record`; its own error, or how it ended."""
    error = None
    with subprocess.Popen(command) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            error = f"killed after {seconds:.0f} s"
        finally:
            # Also where this process is told to stop.
            process.kill()
    found = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    if error is None and process.returncode:
        error = found.get("error") or f"ended with exit code {process.returncode}"
    return found | {"error": error}


def measure_here(name: str, size: str, record: Path) -> int:
    """Measure a part in this process, which ends after it."""
    found: dict[str, Any] = {"size": size_name(size), "error": None}

    def tell(so_far: dict[str, Any]) -> None:
        found.update(so_far)
        atomic_write(record, json.dumps(found, indent=1))

    try:
        PARTS[name].measure(SIZES[found["size"]], tell)
    except Exception as error:  # of any part of the program: the others are measured all the same
        traceback.print_exc()
        tell({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("auto", *SIZES), default="auto", help="auto: toy on a CPU, else 1.7B")
    parser.add_argument("--parts", type=names_of(PARTS), default=list(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--budget_s", type=at_least_one, default=540, help="seconds for all parts")
    parser.add_argument("--json", type=Path, default=Path("accelerator.json"), metavar="FILE")
    parser.add_argument("--here", type=Path, metavar="RECORD", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.here is not None:
        return measure_here(given.parts[0], given.size, given.here)
    name, said = memory_fraction()
    os.environ[name] = said or "0.92"
    latest: dict[str, Any] = {}

    def write(record: dict[str, Any]) -> None:
        latest.update(record)
        atomic_write(given.json, json.dumps(record, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as scratch:

        def run(name: str, seconds: float) -> dict[str, Any]:
            print(f"{name}, at most {seconds:.0f} s ...", flush=True)
            record = Path(scratch) / f"{name}.json"
            command = [sys.executable, "-m", "benchmarks.accelerator", "--parts", name, "--size", given.size]
            found = run_process([*command, "--here", str(record)], record, seconds)
            shown = [text for text in (table(found), found["error"]) if text]
            print("\n" + "\n\n".join(shown) + "\n", flush=True)
            return found

        code = run_parts(given.parts, run, write, given.budget_s)
    print(f"{summary(latest)}\n{latest.get('seconds', 0):.0f} s; wrote {given.json}")
    return code


if __name__ == "__main__":
    # `timeout` sends SIGTERM to this process alone: it ends the part that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
