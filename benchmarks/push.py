"""Time and memory of a weight sync to the embedded engine on simulated devices of a CPU, and of one
to vLLM beside another's.

    python -m benchmarks.push --size 0.6B --devices 1,2,8 --repeats 3
    python -m benchmarks.push --beside CHECKOUT --repeats 3

Parameters in float32 are split over fsdp, the engine's weights in bfloat16 over tensor, both over
all devices. For each number of devices a process of its own prints a table row:

- seconds of a weight sync: conversion, checksums on both sides, median and spread;
- growth of the process's resident memory at its peak in a weight sync, beside parameters that are
  there already; the engine's weights, which stay, are part of it;
- temporary memory on a device of the largest program of a weight sync, by the compiler, and what of
  the engine's weights the device keeps.

The second command takes turns with another checkout of this project: runs of configs/demo_vllm.py
without its warm-up, of which it reads `time/weight_sync`: conversion, checksums, vLLM's load and
the proof. The first two weight syncs of a run are left out, as vLLM's own reload learns what later
ones repeat.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.arguments import at_least_one
from benchmarks.timing import median_and_spread, ratio
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.local.weights import conversion
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import logical_axes, num_params, param_shapes
from dcmdp_jax.parallel.mesh import make_mesh, sampling_mesh
from dcmdp_jax.parallel.sharding import param_shardings

_PRECISION = "bfloat16"
_MIB = 2**20
SIZES = {
    "toy": ModelConfig("qwen3", 256, 64, 128, 2, 8, 8, 8, tie_word_embeddings=True),
    "0.6B": ModelConfig(
        "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, rope_theta=1e6, tie_word_embeddings=True
    ),
}


def _resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def _temporary(config: ModelConfig, params: object, mesh: jax.sharding.Mesh) -> int:
    """The most temporary memory on a device of a program of a weight sync."""
    programs = conversion(config, _PRECISION, mesh)
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    lowered = (
        programs.layer[""].lower(params["layers"], np.int32(0)),
        programs.outside.lower(rest),
        programs.source_checksums.lower(params, mesh.size == 1),
        programs.layer_checksums.lower(
            jax.eval_shape(programs.layer[""], params["layers"], np.int32(0)), ""
        ),
    )
    return max(each.compile().memory_analysis().temp_size_in_bytes for each in lowered)


def measure(size: str, repeats: int) -> str:
    """Table row for all devices of this process."""
    config = SIZES[size]
    devices = jax.device_count()
    training = make_mesh(1, devices, 1, 1)
    mesh = sampling_mesh(training, tensor=devices)
    shapes = param_shapes(config)
    shardings = param_shardings(logical_axes(config), shapes, training)
    # Time and memory do not depend on the values.
    filled = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01), shapes),
        out_shardings=shardings,
    )
    params = jax.block_until_ready(filled())
    engine = LocalEngine(EngineArguments(_PRECISION, model=config, max_total_tokens=64), mesh=mesh)
    times = []
    grown = []
    for version in range(repeats + 1):
        engine.close()
        release_freed_memory()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        began = time.perf_counter()
        engine.sync_weights(params, version)
        if version:
            times.append(time.perf_counter() - began)
            grown.append((_resident("VmHWM") - before) / _MIB)
    leaves = jax.tree.leaves(engine.weights)
    kept = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )
    return (
        f"| {size} | {num_params(config):,} | {devices} | {median_and_spread(times, '.2f')} | "
        f"{median_and_spread(grown, ',.0f')} | {_temporary(config, params, mesh) / _MIB:,.0f} | "
        f"{kept / _MIB:,.0f} |"
    )


def pushed_in_run(tree: Path) -> float:
    """Median seconds of a weight sync to vLLM in a run of `tree`, a checkout; the program is that
    of this environment.
    """
    with tempfile.TemporaryDirectory() as directory:
        short = (
            "training.steps=22",
            "warmup.steps=1",
            "evaluation.every_steps=0",
            f"run_dir={directory}/run",
        )
        settings = [f"--config.{each}" for each in short]
        command = [sys.executable, "-m", "bin.train", "--config=configs/demo_vllm.py", *settings]
        done = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(
                f"{tree}: the run ended with {done.returncode}: {done.stderr.strip()[-600:]}"
            )
        lines = Path(directory, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    syncs = [
        record["time/weight_sync"]
        for record in map(json.loads, lines)
        if "time/weight_sync" in record
    ]
    return statistics.median(syncs[2:])


def beside(other: Path, repeats: int) -> str:
    """Table of a weight sync to vLLM by this checkout and by another, in turns."""
    trees = {"this checkout": Path(__file__).parents[1], str(other): other.resolve()}
    times: dict[str, list[float]] = {name: [] for name in trees}
    for _ in range(repeats):
        for name, tree in trees.items():
            times[name].append(1e3 * pushed_in_run(tree))
    mine, theirs = times.values()
    rows = [f"| {name} | {median_and_spread(values, '.1f')} |" for name, values in times.items()]
    return "\n".join(
        ["| weight sync to vLLM | ms |", "|---|---|", *rows, f"| ratio | {ratio(mine, theirs)} |"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--devices", default="1,2,8", help="numbers of devices, each divides 8")
    parser.add_argument("--repeats", type=at_least_one, default=3)
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="CHECKOUT",
        help="a weight sync to vLLM by this tree and by that one",
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.beside:
        if not (arguments.beside / "bin" / "train.py").is_file():
            parser.error(
                f"--beside {arguments.beside}: no checkout of this project, it has no bin/train.py"
            )
        print(beside(arguments.beside, arguments.repeats))
        return
    if arguments.here:
        print(measure(arguments.size, arguments.repeats), flush=True)
        return
    print(
        "| size | parameters | devices | weight sync, s | peak growth, MiB | temporary a device, MiB | "
        "kept a device, MiB |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for count in arguments.devices.split(","):
        flags = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={int(count)}"
        ).strip()
        command = [sys.executable, "-m", "benchmarks.push", "--here", "--size", arguments.size]
        subprocess.run(
            [*command, "--repeats", str(arguments.repeats)],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            check=True,
        )


if __name__ == "__main__":
    main()
