"""Cost of the method: one training step of DC-GRPO against GRPO, with one and with four
mini-batches.

    python -m benchmarks.step --sizes 0.6M,9M --repeats 7

16 prompts x 8 completions, 16-token prompts, 64 completion tokens, float32, the whole compiled
step: forward, backward, AdamW, dual update and metrics. Four mini-batches recompute p^Train first,
for GRPO as well: its ratio needs it.
"""

from __future__ import annotations

import argparse

from benchmarks.timing import interleave, machine, median_and_spread, ratio
from benchmarks.workload import SIZES, model, step_inputs, stepper


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="0.6M,9M", help="of " + ", ".join(SIZES))
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print(machine() + "\n")
    print("| size | mini-batches | GRPO, s | DC-GRPO, s | DC-GRPO / GRPO |\n|---|---|---|---|---|")
    for size in arguments.sizes.split(","):
        config = model(size)
        for mini_batches in (1, 4):
            compute, batch = step_inputs(config, mini_batches)
            calls = {
                method: stepper(config, method, compute, batch) for method in ("grpo", "dc_grpo")
            }
            times = interleave(calls, arguments.repeats)
            print(
                f"| {size} | {mini_batches} | {median_and_spread(times['grpo'])} | "
                f"{median_and_spread(times['dc_grpo'])} | "
                f"{ratio(times['dc_grpo'], times['grpo'])} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
