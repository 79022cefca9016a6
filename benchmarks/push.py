"""Time and memory of a push: to the embedded engine on simulated devices of a CPU, or to vLLM beside another checkout.

    python -m benchmarks.push --size 0.6B --devices 1,2,8 --repeats 3
    python -m benchmarks.push --size demo --vllm bfloat16,float32 --beside ../before --repeats 40

Parameters in float32 are split over fsdp, the engine's weights in bfloat16 over tensor, both over all devices. For each
number of devices a process of its own prints a table row:

- seconds of a push: conversion, checksums on both sides, median and spread;
- growth of the process's resident memory at its peak in a push, beside parameters that are there already; the engine's
  weights, which stay, are part of it;
- temporary memory on a device of the largest program of a push, by the compiler, and what of the engine's weights the
  device keeps.

With --vllm the pushes of this checkout and of the other one alternate, each to a sidecar of its own, probe included:
seconds, and processor seconds of trainer and sidecar together, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
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
from configs.base import get_config
from dcmdp_jax.engines.kind import EngineArguments
from dcmdp_jax.engines.local import weights
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.vllm import VllmSettings
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params, logical_axes, num_params, param_shapes
from dcmdp_jax.parallel.mesh import make_mesh, one_device_mesh, sampling_mesh
from dcmdp_jax.parallel.sharding import param_shardings
from dcmdp_jax.process_memory import release_freed_memory
from dcmdp_jax.run.row_logprobs import make_probe

_PRECISION = "bfloat16"
_MIB = 2**20
SIZES = {
    "demo": ModelConfig("qwen3", 104, 96, 256, 3, 3, 1, 32, tie_word_embeddings=True),
    "135M": ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, tie_word_embeddings=True),
    "toy": ModelConfig("qwen3", 256, 64, 128, 2, 8, 8, 8, tie_word_embeddings=True),
    "0.6B": ModelConfig("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, rope_theta=1e6, tie_word_embeddings=True),
}


def _resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def _temporary(config: ModelConfig, params: object, mesh: jax.sharding.Mesh) -> int:
    """The most temporary memory on a device of a program of a push."""
    programs = weights._converters(config, _PRECISION, mesh)
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    lowered = (
        programs.layer.lower(params["layers"], np.int32(0)),
        programs.outside.lower(rest),
        weights._source_checksums.lower(params, config, _PRECISION, mesh.size == 1),
        programs.layer_checksums.lower(jax.eval_shape(programs.layer, params["layers"], np.int32(0))),
    )
    return max(each.compile().memory_analysis().temp_size_in_bytes for each in lowered)


def measure(size: str, repeats: int) -> str:
    """Table row for all devices of this process."""
    config, devices = SIZES[size], jax.device_count()
    training = make_mesh(1, devices, 1, 1)
    mesh = sampling_mesh(training, tensor=devices)
    shapes = param_shapes(config)
    shardings = param_shardings(logical_axes(config), shapes, training)
    # Time and memory do not depend on the values.
    filled = jax.jit(lambda: jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01), shapes), out_shardings=shardings)
    params = jax.block_until_ready(filled())
    engine = LocalEngine(EngineArguments(_PRECISION, model=config, max_total_tokens=64), mesh=mesh)
    times, grown = [], []
    for version in range(repeats + 1):
        engine.close()
        release_freed_memory()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        began = time.perf_counter()
        engine.push_weights(params, version)
        if version:
            times.append(time.perf_counter() - began)
            grown.append((_resident("VmHWM") - before) / _MIB)
    leaves = jax.tree.leaves(engine.weights)
    kept = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    return (
        f"| {size} | {num_params(config):,} | {devices} | {median_and_spread(times, '.2f')} | "
        f"{median_and_spread(grown, ',.0f')} | {_temporary(config, params, mesh) / _MIB:,.0f} | {kept / _MIB:,.0f} |"
    )


def serve(size: str, precision: str) -> None:
    """Push to a sidecar of vLLM once for each line of input; print wall and processor seconds."""
    config = SIZES[size]
    policies = [jax.block_until_ready(init_params(config, jax.random.key(seed))) for seed in (0, 1)]
    settings = VllmSettings(**get_config().rollout.vllm.to_dict())
    with tempfile.TemporaryDirectory() as directory:
        arguments = EngineArguments(
            precision,
            precision if precision in ("float32", "float16") else "bfloat16",
            model=config,
            max_total_tokens=56,
            max_rows=512,
            settings=dataclasses.replace(settings, probe_tolerance=20.0),
            directory=Path(directory),
            probe=lambda: make_probe(config, Compute(), one_device_mesh()),
        )
        engine = VllmEngine(arguments)
        pids = (os.getpid(), engine.replicas[0].supervisor.sidecar.pid)
        for version, _ in enumerate(sys.stdin):
            before, began = sum(map(_processor_seconds, pids)), time.perf_counter()
            engine.push_weights(policies[version % 2], version)
            seconds = time.perf_counter() - began
            print("push", seconds, sum(map(_processor_seconds, pids)) - before, flush=True)
        engine.close()


def _processor_seconds(pid: int) -> float:
    """What a process has used; Linux numbers the clock of another process so."""
    return time.clock_gettime(~pid << 3 | 2)


def side_by_side(size: str, precision: str, beside: str, repeats: int) -> None:
    """Table rows of both checkouts, round by round in turn; the first four pushes learn and compile."""
    checkouts = {"here": str(Path(__file__).resolve().parents[1]), "beside": str(Path(beside).resolve())}
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", precision, "--size", size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        )
        for name, path in checkouts.items()
    }
    times: dict[str, list[list[float]]] = {name: [] for name in processes}
    for number in range(repeats + 4):
        for name, process in processes.items():
            process.stdin.write("\n")
            process.stdin.flush()
            line = next(line for line in process.stdout if line.startswith("push "))
            if number >= 4:
                times[name].append([float(value) for value in line.split()[1:]])
    for name, process in processes.items():
        process.stdin.close()
        process.wait()
        for what, mine, theirs in zip(
            ("seconds", "processor seconds"), zip(*times[name], strict=True), zip(*times["beside"], strict=True),
            strict=True,
        ):  # fmt: skip
            against = ratio(list(mine), list(theirs))
            print(f"| {size} | {precision} | {name} | {what} | {median_and_spread(list(mine), '.4f')} | {against} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--devices", default="1,2,8", help="numbers of devices, each divides 8")
    parser.add_argument("--repeats", type=at_least_one, default=3)
    parser.add_argument("--vllm", metavar="PRECISIONS", help="push to vLLM in these, beside the checkout of --beside")
    parser.add_argument("--beside", help="another checkout of this project")
    parser.add_argument("--serve", metavar="PRECISION", help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (arguments.vllm is None) != (arguments.beside is None):
        parser.error("--vllm and --beside go together")
    if arguments.serve:
        serve(arguments.size, arguments.serve)
        return
    if arguments.vllm:
        print(
            "| size | precision | checkout | what | median (spread) | over beside |\n|---|---|---|---|---|---|",
            flush=True,
        )
        for precision in arguments.vllm.split(","):
            side_by_side(arguments.size, precision, arguments.beside, arguments.repeats)
        return
    if arguments.here:
        print(measure(arguments.size, arguments.repeats), flush=True)
        return
    print("| size | parameters | devices | push, s | peak growth, MiB | temporary a device, MiB | kept a device, MiB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for count in arguments.devices.split(","):
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={int(count)}".strip()
        command = [sys.executable, "-m", "benchmarks.push", "--here", "--size", arguments.size]
        subprocess.run(
            [*command, "--repeats", str(arguments.repeats)],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            check=True,
        )


if __name__ == "__main__":
    main()
