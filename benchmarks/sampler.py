"""Tokens per second of the embedded engine against model size and precision.

    python -m benchmarks.sampler --sizes 0.6M,9M,60M --precisions float32,bfloat16,int8,fp8 \
        --repeats 7

16 prompts x 8 completions, 16-token prompts, 64 new tokens, no stop token: every row runs to the
end. Random Qwen3 weights, tied embeddings, float32 compute, temperature 1. Prints a markdown table:
the median over repeats, slowest and fastest, the time of a weight sync and of the first call, which
compiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.arguments import at_least_one, names_of
from benchmarks.timing import machine
from benchmarks.workload import GROUP, NEW_TOKENS, PROMPT_TOKENS, PROMPTS, SIZES, model
from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.engines.registry import ENGINES
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params, num_params
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.parallel.mesh import one_device_mesh, sampling_mesh


def _mesh(config: ModelConfig) -> Mesh:
    """Where a run on one device of an accelerator, or on the CPU, samples."""
    return sampling_mesh(one_device_mesh(), num_params=num_params(config))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(size: str, precisions: list[str], repeats: int) -> list[str]:
    """One table row for each precision; repeats take turns, so that a busy minute hits all
    alike.
    """
    config = model(size)
    params = init_params(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(0, config.vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(PROMPTS)
    ]
    sampling = SamplingParams(group_size=GROUP, max_completion_tokens=NEW_TOKENS)
    engines = {
        precision: LocalEngine(
            EngineArguments(
                precision, model=config, max_total_tokens=PROMPT_TOKENS + NEW_TOKENS, min_rows=32
            ),
            mesh=_mesh(config),
        )
        for precision in precisions
    }
    first = {}
    sync_seconds = {}
    times = {precision: [] for precision in precisions}
    for precision, engine in engines.items():
        engine.sync_weights(params, 0)
        sync_seconds[precision] = _seconds(lambda engine=engine: engine.sync_weights(params, 1))
        first[precision] = _seconds(
            lambda engine=engine: collect(engine.generate(prompts, sampling, seed=0, step=0))
        )
    for step in range(repeats):
        for precision, engine in engines.items():
            seconds = _seconds(
                lambda engine=engine, step=step: collect(
                    engine.generate(prompts, sampling, seed=1, step=step)
                )
            )
            times[precision].append(PROMPTS * GROUP * NEW_TOKENS / seconds)
    return [
        f"| {size} | {num_params(config):,} | {precision} | {statistics.median(rates):,.0f} | "
        f"{min(rates):,.0f} - {max(rates):,.0f} | {sync_seconds[precision] * 1e3:.0f} | "
        f"{first[precision]:.1f} |"
        for precision, rates in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=names_of(SIZES), default=list(SIZES), help="of " + ", ".join(SIZES)
    )
    parser.add_argument(
        "--precisions",
        type=names_of(ENGINES["local"].precisions),
        default=["float32", "bfloat16", "int8", "fp8"],
        help="of " + ", ".join(ENGINES["local"].precisions),
    )
    parser.add_argument("--repeats", type=at_least_one, default=7)
    arguments = parser.parse_args()
    prepare_jax()
    print(machine() + "\n")
    print(
        "| size | parameters | precision | tokens/s, median | spread | weight sync, ms | first call, s |"
    )
    print("|---|---|---|---|---|---|---|")
    for size in arguments.sizes:
        for row in measure(size, arguments.precisions, arguments.repeats):
            print(row, flush=True)


if __name__ == "__main__":
    main()
