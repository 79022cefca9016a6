"""Tokens per second of the embedded engine against model size and precision.

    python -m benchmarks.sampler --sizes 0.6M,9M,60M --precisions float32,bfloat16,int8,fp8 --repeats 7

16 prompts x 8 completions, 16-token prompts, 64 new tokens, no stop token: every row runs to the end. Random Qwen3
weights, tied embeddings, float32 compute, temperature 1. Prints a markdown table: the median over repeats, slowest and
fastest, the time of a weight push and of the first call, which compiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from benchmarks.timing import machine
from benchmarks.workload import SIZES, model
from dcmdp_jax.models.decoder import init_params
from dcmdp_jax.rollout.engine import SamplingParams
from dcmdp_jax.rollout.local.engine import LocalEngine
from dcmdp_jax.rollout.local.weights import PRECISIONS

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 16, 8, 16, 64


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(size: str, precisions: list[str], repeats: int) -> list[str]:
    """One table row for each precision; repeats take turns, so that a busy minute hits all alike."""
    config = model(size)
    params = init_params(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(PROMPTS)]
    sampling = SamplingParams(group_size=GROUP, max_completion_tokens=NEW_TOKENS)
    engines = {
        precision: LocalEngine(config, precision=precision, max_total_tokens=PROMPT_TOKENS + NEW_TOKENS)
        for precision in precisions
    }
    first, push, times = {}, {}, {precision: [] for precision in precisions}
    for precision, engine in engines.items():
        engine.push_weights(params, 0)
        push[precision] = _seconds(lambda engine=engine: engine.push_weights(params, 1))
        first[precision] = _seconds(lambda engine=engine: engine.generate(prompts, sampling, seed=0, step=0))
    for step in range(repeats):
        for precision, engine in engines.items():
            seconds = _seconds(lambda engine=engine, step=step: engine.generate(prompts, sampling, seed=1, step=step))
            times[precision].append(PROMPTS * GROUP * NEW_TOKENS / seconds)
    return [
        f"| {size} | {config.num_params:,} | {precision} | {statistics.median(rates):,.0f} | {min(rates):,.0f} - "
        f"{max(rates):,.0f} | {push[precision] * 1e3:.0f} | {first[precision]:.1f} |"
        for precision, rates in times.items()
    ]


def _names(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"got {unknown[0]!r}, allowed are {', '.join(allowed)}")
        return names

    return parse


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number of at least 1")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=_names(tuple(SIZES)), default=list(SIZES), help="of " + ", ".join(SIZES))
    parser.add_argument(
        "--precisions",
        type=_names(PRECISIONS),
        default=["float32", "bfloat16", "int8", "fp8"],
        help="of " + ", ".join(PRECISIONS),
    )
    parser.add_argument("--repeats", type=_positive, default=7)
    arguments = parser.parse_args()
    print(machine() + "\n")
    print("| size | parameters | precision | tokens/s, median | spread | push, ms | first call, s |")
    print("|---|---|---|---|---|---|---|")
    for size in arguments.sizes:
        for row in measure(size, arguments.precisions, arguments.repeats):
            print(row, flush=True)


if __name__ == "__main__":
    main()
