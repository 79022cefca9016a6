"""The noise floor of an engine: its discrepancy with itself in another batch shape."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence

import numpy as np

from dcmdp_jax.data.episode import Episode
from dcmdp_jax.engines.protocol import (
    Engine,
    EngineError,
    SamplingParams,
    broken_tokens,
    sample_alone,
)

logger = logging.getLogger(__name__)

# Finished steps after which the noise floor is measured: once, and then rarely, for the policy
# moves.
NOISE_FLOOR_STEPS = frozenset({0, *(4**power for power in range(2, 20))})
SCORED_AGAIN = 32
"""Completions scored in one pass."""
# Completions, and tokens of each, sampled alone.
_SAMPLED_AGAIN = 4
_TOKENS_SAMPLED_AGAIN = 64


def sampled_again(sampling: SamplingParams) -> SamplingParams:
    """The distribution of the completions that are sampled alone, for that of a step."""
    limit = min(_TOKENS_SAMPLED_AGAIN, sampling.max_completion_tokens)
    return dataclasses.replace(sampling, group_size=1, max_completion_tokens=limit)


def noise_floor(
    engine: Engine,
    episodes: Sequence[Episode],
    sampling: SamplingParams,
    distance: Callable[[np.ndarray, np.ndarray], float],
    *,
    seed: int,
    step: int,
    first: int = 0,
    drop: bool = False,
) -> tuple[float | None, dict[int, np.ndarray]]:
    """Measure the distance of an engine's log-probs from its own in another batch shape.

    No budget below it can be met.

    Completions are scored in one pass, and the first few sampled once more, each alone: the larger
    distance counts.

    Args:
        engine: still has the weights that sampled.
        episodes: completions of a call of the engine, from its first problem on.
        sampling: the distribution of that call.
        distance: of two arrays of log-probs, [n] nats each.
        seed, step: numbers of that call.
        first: number of the first completion among those of all hosts.
        drop: log an error of the engine: a diagnostic does not end a run that goes on without what
            is broken.

    Returns:
        The floor, None where it is not due or no completion is usable; and number of a completion
        -> the log-probs of its tokens in one pass, [T] float32 nats, none where the sampled
        distribution was cut.

    Raises:
        EngineError: if the engine breaks, unless `drop`.
    """
    if step not in NOISE_FLOOR_STEPS:
        return None, {}
    rows = (row for row, episode in enumerate(episodes) if not broken_tokens(episode).any())
    usable = {first + row: episodes[row] for row in itertools.islice(rows, SCORED_AGAIN)}
    if not usable:
        return None, {}

    resampled = dict(itertools.islice(usable.items(), _SAMPLED_AGAIN))
    try:
        scored = engine.score(
            [episode.prompt_ids for episode in usable.values()],
            [episode.completion_ids for episode in usable.values()],
            temperature=sampling.temperature,
        )
        together, alone = sample_alone(
            engine,
            resampled,
            sampled_again(sampling),
            seed=seed,
            step=step,
        )
    except EngineError as error:
        if not drop:
            raise
        logger.warning("no noise floor: %s", error)
        return None, {}

    distances = []
    scores = {}
    # An engine scores with its whole distribution.
    if not sampling.cuts:
        scores = dict(zip(usable, scored, strict=True))
        again = []
        sampled = []
        for episode, logprobs in zip(usable.values(), scored, strict=True):
            again.append(logprobs[episode.sampled_mask[episode.prompt_length :]])
            sampled.append(episode.rollout_logprobs[episode.sampled_mask])
        distances.append(distance(np.concatenate(again), np.concatenate(sampled)))
    if together.size:
        distances.append(distance(alone, together))
    return max(distances, default=None), scores
