"""Time of a training step outside the model: the loop of bin/train.py, phase by phase.

    python -m benchmarks.loop --size 9M --steps 24

16 prompts x 8 completions of 64 tokens, one update, DC-GRPO, the embedded engine in float32, real verifier, metrics and
samples written, a checkpoint after every fourth step. Model time is sampling and the compiled step; the rest of the
seconds from one push of weights to the next is the loop's own. What an asynchronous save costs is seen in the steps
that end with its beginning, and in those after them, while it is written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.peers.inputs import WORKLOADS, make_inputs
from benchmarks.peers.ours import run_config, stepped
from benchmarks.timing import machine, median_and_spread
from benchmarks.workload import GROUP, NEW_TOKENS, PROMPT_TOKENS, PROMPTS, SIZES, model
from dcmdp_jax.config.settings import from_config_dict
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.run.run import Run
from dcmdp_jax.training.loop import train

_WARM, _EVERY = 3, 4
_PHASES = ("push", "generate", "verify", "pack", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="9M")
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    prepare_jax()
    print(machine() + "\n")
    stamps: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, problems = make_inputs(model(arguments.size), Path(scratch), WORKLOADS["uniform"])
        batch = {"prompts": PROMPTS, "group": GROUP, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
        config = run_config(str(checkpoint), str(problems), scratch, mini_batches=1, **batch)
        config.training.steps = arguments.steps + _WARM + 1
        config.checkpoint.every_steps = _EVERY
        run = stepped(Run(from_config_dict(config)), lambda _: stamps.append(time.monotonic()))
        train(run, show=lambda line: None)
        lines = (Path(config.run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["step"]: record for record in map(json.loads, lines) if "time/step" in record}
    seconds = [after - before for before, after in zip(stamps, stamps[1:], strict=False)]
    print("| steps | seconds | " + " | ".join(_PHASES) + " | else | not model time |")
    print("|---|---|" + "---|" * (len(_PHASES) + 2))
    kinds = {"that begin a checkpoint": (0,), "while it is written": (1,), "others": range(2, _EVERY)}
    for name, places in kinds.items():
        chosen = [step for step in records if _WARM < step <= len(seconds) and step % _EVERY in places]
        shares = {phase: [records[s][f"time/{phase}"] / seconds[s - 1] for s in chosen] for phase in _PHASES}
        own = [1 - sum(parts) for parts in zip(*shares.values(), strict=True)]
        overhead = [1 - a - b for a, b in zip(shares["generate"], shares["step"], strict=True)]
        print(
            f"| {name} | {median_and_spread([seconds[s - 1] for s in chosen])} | "
            + " | ".join(f"{statistics.median(shares[phase]):.1%}" for phase in _PHASES)
            + f" | {statistics.median(own):.1%} | {median_and_spread(overhead, '.1%')} |"
        )


if __name__ == "__main__":
    main()
