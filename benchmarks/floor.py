"""How near a train step comes to the least that it must compute, by length of the completions and size of the model.

    python -m benchmarks.floor --sizes 0.6M,9M,60M --tokens 128,256,512,1024

One update on 8,192 tokens in sequences of one length, each with a prompt of 16 tokens, in float32, in rows of that
length. The floor: 6 operations for each parameter and token, and causal attention, at the rate of a 1024^3 product, by
processor seconds. The product is measured before each cell.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np

from benchmarks.arguments import at_least_one, names_of
from benchmarks.compare import needed_flop
from benchmarks.peers.inputs import Workload
from benchmarks.timing import machine, matmul_gflop_per_cpu_second, median_and_spread
from benchmarks.workload import GROUP, PROMPT_TOKENS, PROMPTS, SIZES, batch_of, model, rollout, stepper
from configs.base import get_config
from dcmdp_jax.config.settings import from_config_dict
from dcmdp_jax.models.params import num_params
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.parallel.mesh import training_mesh
from dcmdp_jax.run.run import compute_on, packing_on

_TOKENS = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=names_of(SIZES), default=["0.6M", "9M"], help="of " + ", ".join(SIZES))
    parser.add_argument("--tokens", type=names_of(("64", "128", "256", "512", "1024")), default=["128", "1024"])
    parser.add_argument("--repeats", type=at_least_one, default=3)
    arguments = parser.parse_args()
    prepare_jax()
    print(machine() + "\n")
    print("| size | tokens | CPU s of a step | least, GFLOP | product, GFLOP per CPU s | of the floor |")
    print("|---|---|---|---|---|---|")
    for size in arguments.sizes:
        for tokens in map(int, arguments.tokens):
            print(_row(size, tokens, arguments.repeats), flush=True)


def _row(size: str, tokens: int, repeats: int) -> str:
    config, new, count = model(size), tokens - PROMPT_TOKENS, _TOKENS // tokens
    run = get_config()
    run.task.train, run.model.compute_dtype, run.model.remat = "none", "float32", "none"
    run.task.max_prompt_tokens, run.rollout.max_completion_tokens = PROMPT_TOKENS, new
    run.rollout.group_size = GROUP
    run.training.prompts_per_step = run.training.prompts_per_mini_batch = count // GROUP
    # Rows that fit: what the lengths of a mixed batch cost is another measurement.
    run.training.row_lengths = (tokens,)
    settings, mesh = from_config_dict(run), training_mesh(num_params=num_params(config))
    compute = compute_on(settings, mesh)
    shapes = packing_on(settings, mesh, compute)
    batch, _ = batch_of(rollout(config, PROMPT_TOKENS, np.full(count, new), GROUP), shapes, config)
    step = stepper(config, "dc_grpo", compute, batch, max_completion_tokens=new)
    rate = matmul_gflop_per_cpu_second()
    for _ in range(2):
        jax.block_until_ready(step())
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        jax.block_until_ready(step())
        seconds.append(time.process_time() - began)
    workload = Workload("", PROMPT_TOKENS, new, PROMPT_TOKENS, new, 0.0)
    least = needed_flop("train1", config, workload) * count / (PROMPTS * GROUP) / 1e9
    share = least / rate / statistics.median(seconds)
    return f"| {size} | {tokens} | {median_and_spread(seconds)} | {least:.0f} | {rate:.0f} | {share:.0%} |"


if __name__ == "__main__":
    main()
