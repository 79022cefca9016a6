"""An engine against itself: the same completions sampled once more, each alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from dcmdp_jax.data.episode import Episode, collect
from dcmdp_jax.engines.protocol import Engine, SamplingParams


def sample_alone(
    engine: Engine, episodes: Mapping[int, Episode], sampling: SamplingParams, *, seed: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of completions as they were sampled among others, and of the same tokens sampled alone.

    Sampling is a function of (seed, step, row), so the same tokens come again but for what rounding tips over; each
    completion is compared up to there. What differs is the batch that the engine computed them in. Scoring them again
    in one pass shows less: vLLM's CPU kernels compute a whole row bit for bit as a large batch of single tokens.

    Args:
        engine: the engine that sampled, with the same weights.
        episodes: row, counted over the completions of the call that sampled them -> what it gave.
        sampling: as it was asked, but for a limit of completion tokens that may be lower.
        seed, step: as it was asked.

    Returns:
        Both [N] float32 nats; N is 0 if not one first token came again.

    Raises:
        EngineError: if the engine breaks.
    """
    alone = dataclasses.replace(sampling, group_size=1)
    together, again = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
    for row, episode in episodes.items():
        [other] = collect(engine.generate([episode.prompt_ids], alone, seed=seed, step=step, first_prompt=row))
        length = min(len(episode.completion_ids), len(other.completion_ids))
        same = np.cumprod(episode.completion_ids[:length] == other.completion_ids[:length]).astype(bool)
        same &= episode.sampled_mask[episode.prompt_length :][:length]
        together.append(episode.rollout_logprobs[episode.prompt_length :][:length][same])
        again.append(other.rollout_logprobs[other.prompt_length :][:length][same])
    return np.concatenate(together), np.concatenate(again)
