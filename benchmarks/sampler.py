"""Tokens per second of the embedded engine against model size and precision, and what refilling a batch gains.

    python -m benchmarks.sampler --sizes 0.6M,9M,60M --precisions float32,bfloat16,int8,fp8 --repeats 7
    python -m benchmarks.sampler --sizes 0.6M,9M --lengths longtail --repeats 7

16 prompts x 8 completions, 16-token prompts, 64 new tokens, no stop token: every row runs to the end. Random Qwen3
weights, tied embeddings, float32 compute, temperature 1. Prints a markdown table: the median over repeats, slowest and
fastest, the time of a weight push and of the first call, which compiles.

With --lengths longtail: 64 x 8 completions in batches of at most 128, lengths log-normal, median 32, the longest 8
times that; the same completions four ways, in turns: one batch after another, each whole until its longest row ends
("whole"); that with a cache from 128 tokens and batches that shrink to 32 rows ("coarse", all that there was before
refill); with a cache from 32 tokens and batches down to 8 rows ("fine"); and with refill in those sizes. Lengths are
forced by the random words: those of a row's last token draw the end token, earlier ones never do. Nothing else differs
from sampling.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.arguments import at_least_one, names_of
from benchmarks.timing import interleave, machine, median_and_spread, ratio
from benchmarks.workload import GROUP, NEW_TOKENS, PROMPT_TOKENS, PROMPTS, SIZES, model
from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.kind import EngineArguments
from dcmdp_jax.engines.local import decode, sampler
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.local.schedule import Scheduler
from dcmdp_jax.engines.local.weights import ENGINE_PRECISIONS
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params, num_params
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.parallel.mesh import one_device_mesh, sampling_mesh

TAIL_PROMPTS, TAIL_ROWS, MEDIAN, LONGEST = 64, 128, 32, 256
_END = 0
_Schedule = Callable[..., Iterator[None]]


def _mesh(config: ModelConfig) -> Mesh:
    """Where a run on one device of an accelerator, or on the CPU, samples."""
    return sampling_mesh(one_device_mesh(), num_params=num_params(config))


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
        precision: LocalEngine(
            EngineArguments(precision, model=config, max_total_tokens=PROMPT_TOKENS + NEW_TOKENS, min_rows=32),
            mesh=_mesh(config),
        )
        for precision in precisions
    }
    first, push, times = {}, {}, {precision: [] for precision in precisions}
    for precision, engine in engines.items():
        engine.push_weights(params, 0)
        push[precision] = _seconds(lambda engine=engine: engine.push_weights(params, 1))
        first[precision] = _seconds(lambda engine=engine: collect(engine.generate(prompts, sampling, seed=0, step=0)))
    for step in range(repeats):
        for precision, engine in engines.items():
            seconds = _seconds(
                lambda engine=engine, step=step: collect(engine.generate(prompts, sampling, seed=1, step=step))
            )
            times[precision].append(PROMPTS * GROUP * NEW_TOKENS / seconds)
    return [
        f"| {size} | {num_params(config):,} | {precision} | {statistics.median(rates):,.0f} | {min(rates):,.0f} - "
        f"{max(rates):,.0f} | {push[precision] * 1e3:.0f} | {first[precision]:.1f} |"
        for precision, rates in times.items()
    ]


def _forced_words(keys: jax.Array, tokens: jax.Array) -> jax.Array:
    """`sampler.token_words`, but such that a row's length is a log-normal function of its key."""
    uniform = ((keys[:, 0] >> 8).astype(jnp.float32) + 0.5) * 2.0**-24
    # 512 draws of a normal reach 3.04 on average.
    spread = np.log(LONGEST / MEDIAN) / 3.04
    lengths = jnp.clip(MEDIAN * jnp.exp(spread * jax.scipy.special.ndtri(uniform)), 1, LONGEST).astype(jnp.int32)
    # Words of 0 draw the first token, those from 2^30 on never do: it has less than a quarter of the mass.
    words = jnp.maximum(sampler.token_words(keys, tokens), np.uint32(2**30))
    return jnp.where((tokens >= lengths - 1)[:, None], np.uint32(0), words)


def _one_batch_after_another(schedule: _Schedule) -> _Schedule:
    def sample(self: Scheduler) -> Iterator[None]:
        members = list(self._members)
        for start in range(0, len(members), TAIL_ROWS // GROUP):
            self._members.clear()
            self._members.extend(members[start : start + TAIL_ROWS // GROUP])
            yield from schedule(self)

    return sample


def measure_long_tail(size: str, repeats: int) -> str:
    """A table row: seconds one batch after another, three ways, and with refill."""
    config = model(size)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(TAIL_PROMPTS)]
    sampling = SamplingParams(group_size=GROUP, max_completion_tokens=LONGEST, stop_token_ids=(_END,))
    params = init_params(config, jax.random.key(0))

    def made(min_rows: int, cache_block: int | None = None) -> LocalEngine:
        total = PROMPT_TOKENS + LONGEST
        arguments = EngineArguments(
            "float32", model=config, max_total_tokens=total, max_rows=TAIL_ROWS, min_rows=min_rows
        )
        engine = LocalEngine(arguments, mesh=_mesh(config), cache_block=cache_block)
        engine.push_weights(params, 0)
        return engine

    whole, fine = made(cache_block=LONGEST, min_rows=TAIL_ROWS), made(min_rows=8)
    coarse = made(cache_block=128, min_rows=32)
    completions, refilled = {}, Scheduler.sample

    def call(name: str, engine: LocalEngine, sample: _Schedule) -> None:
        Scheduler.sample = sample
        try:
            episodes = collect(engine.generate(prompts, sampling, seed=0, step=0))
            completions[name] = [episode.completion_ids for episode in episodes]
        finally:
            Scheduler.sample = refilled

    batches = _one_batch_after_another(refilled)
    one_by_one = {"whole": whole, "coarse": coarse, "fine": fine}
    calls = {name: (engine, batches) for name, engine in one_by_one.items()} | {"refill": (fine, refilled)}
    decode.token_words = _forced_words
    try:
        times = interleave({name: functools.partial(call, name, *what) for name, what in calls.items()}, repeats)
    finally:
        decode.token_words = sampler.token_words
    for other in one_by_one:
        for pair in zip(completions["refill"], completions[other], strict=True):
            np.testing.assert_array_equal(*pair)
    lengths = np.asarray([ids.size for ids in completions["refill"]])
    return (
        f"| {size} | {np.median(lengths):.0f}, {lengths.mean():.0f}, {lengths.max()} | "
        + " | ".join(median_and_spread(times[name]) for name in calls)
        + " | "
        + " | ".join(ratio(times[name], times["refill"]) for name in one_by_one)
        + " |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=names_of(SIZES), default=list(SIZES), help="of " + ", ".join(SIZES))
    parser.add_argument(
        "--precisions",
        type=names_of(ENGINE_PRECISIONS),
        default=["float32", "bfloat16", "int8", "fp8"],
        help="of " + ", ".join(ENGINE_PRECISIONS),
    )
    parser.add_argument("--lengths", choices=("equal", "longtail"), default="equal")
    parser.add_argument("--repeats", type=at_least_one, default=7)
    arguments = parser.parse_args()
    prepare_jax()
    print(machine() + "\n")
    if arguments.lengths == "longtail":
        print(
            "| size | lengths: median, mean, longest | whole, s | coarse, s | fine, s | refill, s "
            "| whole / refill | coarse / refill | fine / refill |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for size in arguments.sizes:
            print(measure_long_tail(size, arguments.repeats), flush=True)
        return
    print("| size | parameters | precision | tokens/s, median | spread | push, ms | first call, s |")
    print("|---|---|---|---|---|---|---|")
    for size in arguments.sizes:
        for row in measure(size, arguments.precisions, arguments.repeats):
            print(row, flush=True)


if __name__ == "__main__":
    main()
