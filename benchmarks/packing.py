"""Layouts of a long-tailed mix of lengths: one completion a row, packed rows, and everything padded to the longest.

    python -m benchmarks.packing --size 0.6M --repeats 5

128 completions, 16-token prompts, lengths drawn log-normally (median 32, longest 240), one update, float32. Rows of 192
tokens and more have the blockwise kernel on a CPU, whose time is that of a row's own segments.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.timing import interleave, machine, median_and_spread, ratio
from benchmarks.workload import SIZES, batch_of, model, rollout, stepper
from dcmdp_jax.data.row_layout import make_row_shapes
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import num_params
from dcmdp_jax.parallel.mesh import training_mesh

_LAYOUTS = {
    "one completion a row": ((), 1),
    "packed": ((), 64),
    "packed, rows of 256": ((256,), 64),
    "padded to 256": ((256,), 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="0.6M")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    config = model(arguments.size)
    lengths = np.exp(np.random.default_rng(0).normal(np.log(32), 0.9, 128)).astype(int).clip(4, 240)
    lengths[0] = 240
    sampled = rollout(config, 16, lengths, 8)
    devices = training_mesh(num_params=num_params(config)).size
    calls, padding = {}, {}
    for name, (row_lengths, segments) in _LAYOUTS.items():
        batch = {"longest": 256, "length_multiple": 8, "micro_batch_tokens": 16384, "completions": 128}
        rows = {"row_lengths": row_lengths, "segments_per_row": segments, "row_shards": devices}
        plan = make_row_shapes(mini_batches=1, **batch, **rows)
        batch, padding[name] = batch_of(sampled, plan, config)
        compute = Compute(one_segment=segments == 1, scan_unroll=config.num_layers, logprob_chunk=2048)
        calls[name] = stepper(config, "dc_grpo", compute, batch)
    times = interleave(calls, arguments.repeats)
    print(
        f"{machine()}\n\nlengths: median {np.median(lengths):.0f}, mean {lengths.mean():.0f}, longest {lengths.max()}\n"
    )
    print("| layout | padding | step, s | against one a row |\n|---|---|---|---|")
    for name, seconds in times.items():
        against = ratio(seconds, times["one completion a row"])
        print(f"| {name} | {padding[name]:.0%} | {median_and_spread(seconds)} | {against} |")


if __name__ == "__main__":
    main()
