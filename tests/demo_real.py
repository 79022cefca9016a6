"""What a few steps of the demo on a published model show on any processor, from the run's files.

    make demo-real ARGS="--config.training.steps=5 --config.run_dir=DIR"
    python -m tests.demo_real DIR

The exit code is 1 if one of them is not so, which is printed.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np

from dcmdp_jax.number_format import labelled
from dcmdp_jax.observe.metrics_io import read_metrics
from dcmdp_jax.observe.report import read_run, verdict


def contradictions(run_dir):
    """What is not so, a line each."""
    run_dir = Path(run_dir)
    series = read_metrics(run_dir)
    steps = json.loads((run_dir / "config.json").read_text())["training"]["steps"]

    def values(name):
        return series[name][1] if name in series else np.zeros(0)

    if series["reward/mean"][0].tolist() != list(range(1, steps + 1)):
        yield f"not every one of {steps} steps is recorded"
    # INT8 weights and activations of a trained network: far above a float32 engine's 1e-5, far
    # below noise.
    for step, delta in zip(*series["discrepancy/mean"], strict=True):
        if not 1e-3 < delta < 0.2:
            yield f"discrepancy {delta} at step {step}, an INT8 engine's is between 0.001 and 0.2"
    # It knows some sums, and not all: at random a number below 59 is right once in 58 times.
    if not 0.05 < values("reward/mean")[0] < 0.9:
        yield (
            f"training reward {values('reward/mean')[0]} at step 1, the published model's is "
            "0.2 to 0.4"
        )
    if not (np.abs(values("mismatch/probe")) < 0.2).all():
        yield (
            f"log-probs of the engine are {values('mismatch/probe').max()} nats from the "
            "trainer's: other weights"
        )
    for name in ("optimizer/skipped_updates", "rollout/dropped_completions", "alarm/weight_sync"):
        if values(name).any():
            yield f"{name} is {values(name).max()}"
    if series["eval/arithmetic/avg@1"][0].tolist()[:: len(values("eval/arithmetic/avg@1")) - 1] != [
        0,
        steps,
    ]:
        yield "no held-out score before and after"
    low, high = (values(f"eval_interval/arithmetic/{bound}") for bound in ("low", "high"))
    score = values("eval/arithmetic/avg@1")
    if not ((low <= score) & (score <= high)).all():
        yield f"held-out scores {score} outside their intervals {low} to {high}"
    parts = sum(
        values(f"time/{name}")
        for name in ("weight_sync", "generate", "verify", "noise_floor", "pack", "step")
    )
    if not (parts >= 0.8 * values("time/total")).all():
        yield f"the named phases take {parts} of {values('time/total')} s"
    written = [
        json.loads(line) for line in (run_dir / "held_out_samples.jsonl").read_text().splitlines()
    ]
    for step in (0, steps):
        shown = [record for record in written if record["step"] == step]
        if len(shown) != 10 or not all(record["prompt"].endswith(" =") for record in shown):
            yield (
                f"{len(shown)} held-out completions of step {step}, 10 prompts that end within "
                "the assistant's turn"
            )
    said = verdict(read_run(run_dir))
    if (
        f"{steps} training steps of " not in said["trained"]
        or "95% interval" not in said["score"]
        or "lambda" not in said
    ):
        yield f"the report begins: {said}"
    if "before training" not in (run_dir / "report.html").read_text():
        yield "the report has no completions before and after"


def gained(run_dir):
    """Percentage points of the held-out score from first to last."""
    score = read_metrics(run_dir)["eval/arithmetic/avg@1"][1]
    return 100 * float(score[-1] - score[0]) if len(score) else math.nan


def main(run_dir):
    """Check a run; the exit code."""
    found = list(contradictions(run_dir))
    print(
        f"{run_dir}: {gained(run_dir):+.1f} points held out\n{labelled(verdict(read_run(run_dir)))}"
    )
    for line in found:
        print(f"{run_dir}: {line}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
