"""What sampling ahead of training wins: a step's wall time against its two sides, with and without
a lag.

    python -m benchmarks.overlap --steps 12 --rounds 3             # the demo's model
    python -m benchmarks.overlap --size 9M --steps 12 --rounds 3

The demo against stock vLLM in float32, without its warm-up: most completions are of full length.
Real verifier. The trainer has one core and the sidecar, with one thread, another. Runs with each
lag take turns. The wall time of each step after the first few is divided by the larger of its
sides, sampling with rewards and packing on one, weight sync and training on the other, and by their sum. 1
in the first column is a perfect overlap, 1 in the second none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks.arguments import at_least_one
from benchmarks.timing import machine, median_and_spread
from benchmarks.workload import model
from configs import demo_vllm
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.parallel.backend import prepare_jax, usable_cores
from dcmdp_jax.run.run import Run
from dcmdp_jax.training.loop import train

_WARM = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("demo", "9M"), default="demo")
    parser.add_argument("--steps", type=at_least_one, default=12)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument(
        "--lags", type=_lags, default="0,1", metavar="N,N", help="(default: %(default)s)"
    )
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if usable_cores() > 1:
        os.sched_setaffinity(0, cores[:1])
    prepare_jax()
    print(machine() + "\n")
    steps: dict[str, list[dict[str, float]]] = {lag: [] for lag in arguments.lags}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(arguments.rounds):
            for lag in steps:
                config = demo_vllm.get_config("float32")
                if arguments.size != "demo":
                    for name in config.model.architecture:
                        config.model.architecture[name] = getattr(model(arguments.size), name)
                config.warmup.steps = config.evaluation.every_steps = 0
                config.run_dir = f"{scratch}/run_{number}_{lag}"
                config.training.steps, config.checkpoint.every_steps = (
                    arguments.steps + _WARM,
                    10**6,
                )
                config.rollout.lag, config.mesh.cpu_devices = int(lag), 1
                with _sidecars_on(cores[-1]):
                    run = Run.check(from_config_dict(config))
                    train(run, show=lambda line: None)
                lines = (
                    (Path(config.run_dir) / "metrics.jsonl")
                    .read_text(encoding="utf-8")
                    .splitlines()
                )
                records = [record for record in map(json.loads, lines) if "time/step" in record]
                steps[lag] += [record for record in records if record["step"] > _WARM]
    print(
        "| lag | seconds of a step | sampling side | training side | step / larger side | step / "
        "sum |"
    )
    print("|---|---|---|---|---|---|")
    for lag, records in steps.items():
        sides = [
            (_sum(record, "generate", "verify", "pack"), _sum(record, "weight_sync", "step"))
            for record in records
        ]
        walls = [record["time/total"] for record in records]
        larger = [wall / max(side) for wall, side in zip(walls, sides, strict=True)]
        both = [wall / sum(side) for wall, side in zip(walls, sides, strict=True)]
        print(
            f"| {lag} | {median_and_spread(walls)} | "
            f"{statistics.median(side[0] for side in sides):.3f} | "
            f"{statistics.median(side[1] for side in sides):.3f} | "
            f"{median_and_spread(larger, '.2f')} | {median_and_spread(both, '.2f')} |"
        )


def _lags(text: str) -> list[str]:
    lags = text.split(",")
    if not all(lag.isdecimal() for lag in lags):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be like 0,1")
    return lags


def _sum(record: dict[str, float], *phases: str) -> float:
    return sum(record[f"time/{phase}"] for phase in phases)


@contextlib.contextmanager
def _sidecars_on(core: int) -> Iterator[None]:
    """Keep the sidecars of this process, and all their threads, on a core of their own."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and _is_sidecar(entry):
                    for thread in (entry / "task").iterdir():
                        with contextlib.suppress(OSError):
                            os.sched_setaffinity(int(thread.name), {core})

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _is_sidecar(entry: Path) -> bool:
    try:
        parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
        return (
            int(parent) == os.getpid()
            and b"engines/vllm/sidecar.py" in (entry / "cmdline").read_bytes()
        )
    except OSError:
        return False


if __name__ == "__main__":
    main()
