"""Sampling of a step: completions and rewards of its problems, exchanged between hosts."""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from dcmdp_jax.config.checks import EPISODES, REWARDS, as_settings
from dcmdp_jax.data.episode import Episode, in_prompt_order
from dcmdp_jax.engines.protocol import (
    check_routed_experts,
    check_top_logprobs,
    unusable_completions,
)
from dcmdp_jax.environments.episode_sampler import SampleKey, sampled_episodes
from dcmdp_jax.parallel.hosts import Hosts
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.rewards.protocol import TrainerState
from dcmdp_jax.rewards.scoring import BatchScores, BatchScoring, merge_scores
from dcmdp_jax.run.services import Services
from dcmdp_jax.run.task import Task
from dcmdp_jax.training import exit, phase_timer, teacher

logger = logging.getLogger(__name__)

# The rounds of a step must not repeat each other's draws, nor those of evaluation.
_ROUND_SEED_OFFSET = 7_000_003


@dataclasses.dataclass(frozen=True)
class StepRollout:
    """Sampled and scored completions: one host's share of a call, a round, or all of a step.

    P groups of G completions, of which the first B that can teach are the batch.

    Attributes:
        problems: [P] place of each group's problem among the training problems.
        episodes: P * G, in prompt order; `group` is 0 .. P - 1.
        texts: P * G.
        scores: scores of all P * G.
        dropped: [P * G] bool, completions that must not be used; none before the exchange.
        batch_groups: B.
        prompts_taken: number of prompts of the stream that all hosts' calls took.
        rounds: calls of the engine.
    """

    problems: np.ndarray
    episodes: list[Episode]
    texts: list[str]
    scores: BatchScores
    dropped: np.ndarray
    batch_groups: int
    prompts_taken: int
    rounds: int = 1

    @property
    def differing(self) -> np.ndarray:
        """[P] bool: a group's usable rewards differ, not `group_statistics`' all_equal."""
        shape = len(self.problems), -1
        usable = ~self.dropped.reshape(shape)
        rewards = self.scores.totals.reshape(shape)
        lowest = np.where(usable, rewards, np.inf).min(axis=1)
        return lowest < np.where(usable, rewards, -np.inf).max(axis=1)

    @property
    def groups(self) -> np.ndarray:
        """[B] the groups of the batch, ascending: the first that differ, then others."""
        differing_first = np.argsort(~self.differing, kind="stable")
        return np.sort(differing_first[: self.batch_groups])

    @property
    def rows(self) -> np.ndarray:
        """[B * G] the completions of the batch."""
        members = len(self.episodes) // len(self.problems)
        return (self.groups[:, None] * members + np.arange(members)).reshape(-1)


def join(rollouts: Sequence[StepRollout]) -> StepRollout:
    """Join rounds, or the shares of all hosts, in order; groups are numbered on."""
    if len(rollouts) == 1:
        return rollouts[0]
    episodes = []
    texts = []
    groups = 0
    for rollout in rollouts:
        for episode in rollout.episodes:
            episodes.append(dataclasses.replace(episode, group=groups + episode.group))
        texts += rollout.texts
        groups += len(rollout.problems)
    return dataclasses.replace(
        rollouts[0],
        problems=np.concatenate([rollout.problems for rollout in rollouts]),
        episodes=episodes,
        texts=texts,
        scores=merge_scores([rollout.scores for rollout in rollouts]),
        dropped=np.concatenate([rollout.dropped for rollout in rollouts]),
    )


def trainer_state(task: Task, step: int, position: int) -> TrainerState:
    """State of the run for reward functions: finished steps, and epochs of the prompts."""
    return TrainerState(step, task.config.training.steps, position / sum(task.stream.sizes))


@dataclasses.dataclass(eq=False)
class StepRollouts:
    """Samples and scores the problems of each step.

    With `algorithm.refill_rounds` above 0 this is DAPO's dynamic sampling (Yu et al. 2025, Eq. 11):
    where groups have rewards that are all equal, further prompts are sampled, until B groups differ
    or the rounds are used up. The first B differing groups of the stream are the batch; what is
    still missing is filled with equal groups, which the loss leaves out. A round's number of
    prompts is a power of two, so that an embedded engine compiles few shapes; differing groups
    above B are discarded.

    Attributes:
        services: engine, scorer and turns; the engine gets the weights of the step before `sample`.
        task: the problems, and the distribution that they are sampled from.
        hosts: the processes of the run.
        leave: ends the work of this process with that of the others.
        collective: whether `sample` gathers over hosts. Otherwise its result is this host's share
            of its single round, which `exchange` makes into all hosts' rollout.
    """

    services: Services
    task: Task
    hosts: Hosts
    leave: exit.CollectiveExit | exit.ThreadExit
    collective: bool = True

    def __post_init__(self) -> None:
        config = self.task.config
        self._rollout = config.rollout
        self._seed = config.training.seed
        self._groups = config.training.prompts_per_step
        self._refill_rounds = config.algorithm.refill_rounds

    def sample(self, step: int, first: int, timer: phase_timer.PhaseTimer) -> StepRollout:
        """Sample and score the problems from `first` on: a function of (seed, step, first).

        Collective by default: each process samples its share, and gets all of it.

        Args:
            step: step of the batch.
            first: position in the stream of prompts; the result has taken `prompts_taken` from
                there.
            timer: gets the time of sampling and of scoring.

        Raises:
            RewardError: if a reward function failed and the scorer stops then.
            EngineError: if the engine breaks or a log-prob is not finite, unless those completions
                are dropped.
        """
        count = self._groups
        share = self._share(step, 0, first, count, timer)
        if not self.collective:
            return share
        rounds = [self.exchange(share)]
        position = first + count
        while len(rounds) <= self._refill_rounds:
            missing = count - sum(int(rollout.differing.sum()) for rollout in rounds)
            if missing <= 0:
                break
            refill = min(count, 1 << (missing - 1).bit_length())
            share = self._share(step, len(rounds), position, refill, timer)
            rounds.append(self.exchange(share))
            position += refill
        return dataclasses.replace(join(rounds), prompts_taken=position - first, rounds=len(rounds))

    def _share(
        self,
        step: int,
        number: int,
        position: int,
        count: int,
        timer: phase_timer.PhaseTimer,
    ) -> StepRollout:
        """This process's share of a round: `count` problems from `position` on, in one call."""
        task = self.task
        share = self.hosts.share(count)
        rows = task.stream.at(seed=self._seed, first=position, count=count)[share]
        problems = [task.train.problems[row] for row in np.repeat(rows, task.sampling.group_size)]
        state = trainer_state(task, step, position)
        scoring = BatchScoring(self.services.scorer, task.tokenizer, problems, state)

        episodes = []
        with timer.phase("generate"), self.leave.scope():
            self.leave.check()
            if len(rows):
                sample_key = SampleKey(
                    seed=self._seed + number * _ROUND_SEED_OFFSET,
                    step=step,
                    first_prompt=share.start,
                )
                episodes = self._generate(rows, sample_key, scoring)
        with timer.phase("verify"), self.leave.scope(), as_settings(REWARDS):
            texts, scores = scoring.finish(self.leave.check)
        return StepRollout(
            problems=rows,
            episodes=episodes,
            texts=texts,
            scores=scores,
            dropped=np.zeros(len(texts), bool),
            batch_groups=self._groups,
            prompts_taken=count,
        )

    def _generate(
        self,
        rows: np.ndarray,
        sample_key: SampleKey,
        scoring: BatchScoring,
    ) -> list[Episode]:
        """Sample problems, start their rewards, ask the teacher's server; return prompt order."""
        sampled = sampled_episodes(
            self.services.engine,
            self.services.turns,
            scoring,
            self.task.train.select(rows),
            self.task.sampling,
            sample_key,
            doing="sampling",
            check_stop=self.leave.check,
        )
        episodes = in_prompt_order(sampled)
        if self.services.teacher is None:
            return episodes
        return teacher.score_episodes(self.services.teacher, episodes)

    def exchange(self, share: StepRollout) -> StepRollout:
        """Collective: join the shares of all hosts' calls; find completions that can't be used.

        Raises:
            EngineError: if a log-prob is not finite, unless those completions are dropped.
        """
        task = self.task
        rollout = self._rollout
        joined = join(self.hosts.gather(share, StepRollout, Episode, BatchScores, Grades))
        with as_settings(EPISODES):
            dropped = unusable_completions(joined.episodes, drop=rollout.on_non_finite == "drop")
            if rollout.router_replay:
                check_routed_experts(joined.episodes, *task.model.routing)
            if rollout.top_logprobs:
                check_top_logprobs(
                    joined.episodes,
                    rollout.top_logprobs,
                    task.model.vocab_size,
                    complete=rollout.cuts,
                )
        return dataclasses.replace(joined, dropped=dropped)
