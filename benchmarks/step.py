"""What the method costs: one training step of DC-GRPO against GRPO, with one and with four mini-batches.

    python -m benchmarks.step --sizes 0.6M,9M --repeats 7

16 prompts x 8 completions, 16-token prompts, 64 completion tokens, float32, the whole compiled step: forward, backward,
AdamW, dual update and metrics. Four mini-batches recompute p^Train first, for GRPO as well: its ratio needs it.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.timing import interleave, machine, median_and_spread, ratio
from benchmarks.workload import SIZES, batch_of, model, rollout, stepper
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.rollout.packing import make_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.6M,9M", help="of " + ", ".join(SIZES))
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print(machine() + "\n")
    print("| size | mini-batches | GRPO, s | DC-GRPO, s | DC-GRPO / GRPO |\n|---|---|---|---|---|")
    for size in arguments.sizes.split(","):
        config = model(size)
        sampled = rollout(config, 16, np.full(128, 64), 8)
        for mini_batches in (1, 4):
            plan = make_plan(
                row_lengths=(80,), micro_batch_tokens=128 * 80, mini_batches=mini_batches,
                completions=128 // mini_batches, segments_per_row=1, row_shards=1,
            )  # fmt: skip
            batch, _ = batch_of(sampled, plan)
            compute = Compute(one_segment=True, scan_unroll=config.num_layers, logprob_chunk=2048)
            calls = {method: stepper(config, method, compute, batch) for method in ("grpo", "dc_grpo")}
            times = interleave(calls, arguments.repeats)
            print(
                f"| {size} | {mini_batches} | {median_and_spread(times['grpo'])} | "
                f"{median_and_spread(times['dc_grpo'])} | {ratio(times['dc_grpo'], times['grpo'])} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
