"""Sampling of a step: completions and rewards of its problems, exchanged between hosts; the engine's noise floor."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Sequence

import jax
import numpy as np

from dcmdp_jax.activity import activity
from dcmdp_jax.algorithm.discrepancy import token_discrepancy
from dcmdp_jax.algorithm.dual import QUANTILES
from dcmdp_jax.config.arguments import EPISODES, REWARDS, as_settings
from dcmdp_jax.data.episode import Episode, in_prompt_order
from dcmdp_jax.engines.protocol import Engine, EngineError
from dcmdp_jax.engines.validation import (
    broken_tokens,
    check_routed_experts,
    check_top_logprobs,
    sample_alone,
    unusable_completions,
)
from dcmdp_jax.parallel.hosts import Hosts
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.rewards.protocol import TrainerState
from dcmdp_jax.rewards.scoring import BatchScores, BatchScoring
from dcmdp_jax.run.services import Services
from dcmdp_jax.run.task import Task
from dcmdp_jax.training.step_rollout import PhaseTimer, StepRollout, join
from dcmdp_jax.training.stopping import CollectiveExit

logger = logging.getLogger(__name__)

# The rounds of a step must not repeat each other's draws, nor those of evaluation.
_ROUND_SEED_OFFSET = 7_000_003

NOISE_FLOOR_STEPS = frozenset({0, *(4**power for power in range(2, 20))})
"""Finished steps after which the noise floor is measured: once, and then rarely, for the policy moves."""
# Completions scored in one pass, and completions and tokens of each sampled alone.
_SCORED_AGAIN, _SAMPLED_AGAIN, _TOKENS_SAMPLED_AGAIN = 32, 4, 64


def trainer_state(task: Task, step: int, position: int) -> TrainerState:
    """State of the run for reward functions: finished steps, and the position in the stream of prompts."""
    return TrainerState(step, task.config.training.steps, position / sum(task.stream.sizes))


class StepRollouts:
    """Samples and scores the problems of each step.

    With `algorithm.refill_rounds` above 0 this is DAPO's dynamic sampling (Yu et al. 2025, Eq. 11): where groups have
    rewards that are all equal, further prompts are sampled, until B groups differ or the rounds are used up. The
    first B differing groups of the stream are the batch; what is still missing is filled with equal groups, which the
    loss leaves out. A round's number of prompts is a power of two, so that an embedded engine compiles few shapes;
    differing groups above B are discarded.

    Args:
        services: engine, scorer and turns; the engine gets the weights of the step before `sample`.
        task: the problems, and the distribution that they are sampled from.
        hosts: the processes of the run.
        leave: ends the work of this process with that of the others.
        collective: whether `sample` gathers over hosts. Otherwise its result is this host's share of its single round,
            which `exchange` makes into all hosts' rollout.
    """

    def __init__(
        self, services: Services, task: Task, hosts: Hosts, leave: CollectiveExit, *, collective: bool = True
    ) -> None:
        self._services, self._task, self._hosts, self._exit, self._collective = services, task, hosts, leave, collective

    def sample(self, step: int, first: int, timer: PhaseTimer) -> StepRollout:
        """Sample and score the problems from position `first` of the stream on: a function of (seed, step, first).

        Collective by default: each process samples its share, and gets all of it.

        Args:
            step: step of the batch.
            first: position in the stream of prompts; the result has taken `taken` from there.
            timer: gets the time of sampling and of scoring.

        Raises:
            RewardError: if a reward function failed and the scorer stops then.
            EngineError: if the engine breaks or a log-prob is not finite, unless those completions are dropped.
        """
        config = self._task.config
        wanted, rounds = config.training.prompts_per_step, config.algorithm.refill_rounds
        share = self._share(step, 0, first, wanted, timer)
        if not self._collective:
            return share
        parts, taken = [self.exchange(share)], wanted
        while len(parts) <= rounds and (missing := wanted - sum(int(part.differing.sum()) for part in parts)) > 0:
            count = min(wanted, 1 << (missing - 1).bit_length())
            parts.append(self.exchange(self._share(step, len(parts), first + taken, count, timer)))
            taken += count
        return dataclasses.replace(join(parts), taken=taken, rounds=len(parts))

    def _share(self, step: int, number: int, position: int, count: int, timer: PhaseTimer) -> StepRollout:
        """One call of the engine for this process's part of the `count` problems from `position` on."""
        task, seed = self._task, self._task.config.training.seed
        share, group_size = self._hosts.share(count), task.sampling.group_size
        chosen = task.stream.at(seed=seed, first=position, count=count)[share]
        problems = [task.train.problems[i] for i in np.repeat(chosen, group_size)]
        state = trainer_state(task, step, position)
        scoring = BatchScoring(self._services.scorer, task.tokenizer, problems, state)
        with timer.phase("generate"), self._exit.scope():
            self._exit.check()
            episodes = self._generate(chosen, share.start, step, number, scoring) if len(chosen) else []
        with timer.phase("verify"), self._exit.scope(), as_settings(REWARDS):
            texts, scores = scoring.finish(self._exit.check)
        dropped, batch_groups = np.zeros(len(texts), bool), task.config.training.prompts_per_step
        return StepRollout(chosen, episodes, texts, scores, dropped, batch_groups, taken=count)

    def _generate(
        self, chosen: np.ndarray, first_prompt: int, step: int, number: int, scoring: BatchScoring
    ) -> list[Episode]:
        """Sample the chosen problems; start the rewards of each group as it comes. Returns prompt order."""
        task, sampling, turns, check = self._task, self._task.sampling, self._services.turns, self._exit.check
        prompts = [task.train.token_ids[i] for i in chosen]
        seed = task.config.training.seed + number * _ROUND_SEED_OFFSET
        numbers = {"seed": seed, "step": step, "first_prompt": first_prompt}
        if turns is None:
            sampled = self._services.engine.generate(prompts, sampling, **numbers)
        else:
            asked = [task.train.problems[i] for i in chosen]
            sampled = turns.generate(prompts, asked, sampling, **numbers, check_stop=check)
        episodes: list[Episode] = []
        total = len(prompts) * sampling.group_size
        with activity("sampling", total, "completions") as doing, contextlib.closing(sampled) as groups:
            for complete in groups:
                check()
                doing.done += len(complete)
                rows = [episode.group * sampling.group_size + episode.member for episode in complete]
                scoring.begin(rows, [episode.token_ids[episode.sampled_mask] for episode in complete])
                episodes += complete
        if turns is not None:
            scoring.add_played(turns.played)
        return in_prompt_order(episodes)

    def exchange(self, share: StepRollout) -> StepRollout:
        """Collective: join the shares of all hosts' calls, and find the completions that must not be used.

        Raises:
            EngineError: if a log-prob is not finite, unless those completions are dropped.
        """
        task, rollout = self._task, self._task.config.rollout
        joined = join(self._hosts.gather(share, StepRollout, Episode, BatchScores, Grades))
        with as_settings(EPISODES):
            dropped = unusable_completions(joined.episodes, drop=rollout.on_non_finite == "drop")
            if rollout.router_replay:
                check_routed_experts(joined.episodes, *task.model.routing)
            if count := rollout.top_logprobs:
                check_top_logprobs(joined.episodes, count, task.model.vocab_size, whole=task.sampling.cuts)
        return dataclasses.replace(joined, dropped=dropped)


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
