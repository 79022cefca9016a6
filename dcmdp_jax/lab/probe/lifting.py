"""Score an engine's tokens again with the same kind of engine, without one of its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dcmdp_jax.lab.mismatch.evidence import Lifted
from dcmdp_jax.lab.mismatch.pairs import TokenPairs
from dcmdp_jax.lab.probe.engines import Sampled, Scorer
from dcmdp_jax.lab.probe.specs import ProbeSpec

_MOST_COMPLETIONS = 64


def lift(
    spec: ProbeSpec,
    build: Callable[[ProbeSpec], Scorer],
    prompts: Sequence[np.ndarray],
    sampled: Sampled,
    pairs: TokenPairs,
    *,
    temperature: float,
) -> list[Lifted]:
    """Measure the mismatch that is left without each setting that has a price (`ProbeSpec.costs`).

    An emulation tells a quantized cache or weights only where it rounds as the engine does. The engine itself, built
    once more without the setting, needs no emulation: the rest of it, kernels included, stays as it is.

    Args:
        spec: the engine that sampled.
        build: makes an engine with the same weights.
        prompts: token ids, as that engine got them.
        sampled: by it; the first 64 completions are scored again.
        pairs: the same completions with both log-probs.
        temperature: of the sampling.

    Raises:
        UserError, EngineError, MemoryError: if such an engine does not start or score here.
    """
    count = min(_MOST_COMPLETIONS, len(pairs.lengths))
    tokens = int(pairs.lengths[:count].sum())
    p, q = (np.exp(x[:tokens].astype(np.float64)) for x in (pairs.train_logprobs, pairs.rollout_logprobs))
    whole = np.abs(q - p).sum()
    asked = [prompts[index] for index in sampled.prompt_index[:count]], sampled.completion_ids[:count]
    found = []
    for cause in spec.costs:
        other = spec.without(cause)
        engine = build(other)
        try:
            h = np.exp(np.concatenate(engine.score(*asked, temperature=temperature)).astype(np.float64))
        finally:
            engine.close()
        found.append(Lifted(str(other), cause, float(1 - np.abs(h - p).sum() / whole) if whole else 0.0))
    return found
