"""The engine's noise floor: the discrepancy of the engine with itself."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Sequence

import jax
import numpy as np

from dcmdp_jax.algorithm.discrepancy import token_discrepancy
from dcmdp_jax.algorithm.dual import QUANTILES
from dcmdp_jax.data.episode import Episode
from dcmdp_jax.engines.protocol import Engine, EngineError
from dcmdp_jax.engines.validation import broken_tokens, sample_alone
from dcmdp_jax.run.task import Task

logger = logging.getLogger(__name__)

NOISE_FLOOR_STEPS = frozenset({0, *(4**power for power in range(2, 20))})
"""Finished steps after which the noise floor is measured: once, and then rarely, for the policy moves."""
# Completions scored in one pass, and completions and tokens of each sampled alone.
_SCORED_AGAIN, _SAMPLED_AGAIN, _TOKENS_SAMPLED_AGAIN = 32, 4, 64

_Scored = dict[int, np.ndarray]


class NoiseFloor:
    """Measures the engine's noise floor: its log-probs re-scored in another batch shape. No budget below it can be met.

    Args:
        engine: still has the weights that sampled.
        task: the settings, and the distribution that was sampled from.
    """

    def __init__(self, engine: Engine, task: Task) -> None:
        self._engine, self._task, algorithm = engine, task, task.config.algorithm
        # Compiled as one: each operation alone would be a program of its own.
        self._discrepancy = jax.jit(
            functools.partial(token_discrepancy, measure=algorithm.measure, sided=algorithm.sided)
        )

    def measure(self, episodes: Sequence[Episode], step: int, *, first: int = 0) -> tuple[float | None, _Scored]:
        """Return the noise floor where it is due, None elsewhere; and what it was measured on.

        Completions are scored in one pass, and the first few sampled once more, each alone: the larger mean counts.

        Args:
            episodes: completions of a call of the engine, from its first problem on.
            step: step of the batch.
            first: number of the first of them among the completions of all hosts.

        Returns:
            The floor; and number of a completion -> the log-probs of its tokens in one pass, [T] float32 nats, none
            where the sampled distribution was cut.
        """
        config, sampling = self._task.config, self._task.sampling
        if step not in NOISE_FLOOR_STEPS:
            return None, {}
        rows = (row for row, episode in enumerate(episodes) if not broken_tokens(episode).any())
        usable = {first + row: episodes[row] for row in itertools.islice(rows, _SCORED_AGAIN)}
        if not usable:
            return None, {}
        few = {row: usable[row] for row in list(usable)[:_SAMPLED_AGAIN]}
        shorter = dataclasses.replace(
            sampling, max_completion_tokens=min(_TOKENS_SAMPLED_AGAIN, sampling.max_completion_tokens)
        )
        try:
            scored = self._engine.score(
                [episode.prompt_ids for episode in usable.values()],
                [episode.completion_ids for episode in usable.values()],
                temperature=sampling.temperature,
            )
            together, alone = sample_alone(self._engine, few, shorter, seed=config.training.seed, step=step)
        except EngineError as error:
            # A diagnostic does not end a run that is set to go on without what is broken.
            if config.rollout.on_non_finite != "drop":
                raise
            logger.warning("no noise floor: %s", error)
            return None, {}
        masks = [episode.sampled_mask[episode.prompt_length :] for episode in usable.values()]
        again = np.concatenate([values[mask] for values, mask in zip(scored, masks, strict=True)])
        sampled = np.concatenate([episode.rollout_logprobs[episode.sampled_mask] for episode in usable.values()])
        # An engine scores with its whole distribution.
        differences = [] if sampling.cuts else [self._discrepancy(again, sampled)]
        if together.size:
            differences.append(self._discrepancy(alone, together))
        share = QUANTILES.get(config.algorithm.budget)
        values = (float(np.mean(each) if share is None else np.quantile(each, share)) for each in differences)
        return max(values, default=None), {} if sampling.cuts else dict(zip(usable, scored, strict=True))
