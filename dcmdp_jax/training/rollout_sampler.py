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
from dcmdp_jax.evaluation.average import sampled_episodes
from dcmdp_jax.parallel.hosts import Hosts
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.rewards.protocol import TrainerState
from dcmdp_jax.rewards.scoring import BatchScores, BatchScoring, merge_scores
from dcmdp_jax.run.services import Services
from dcmdp_jax.run.task import Task
from dcmdp_jax.training import phase_timer, stopping

logger = logging.getLogger(__name__)

# The rounds of a step must not repeat each other's draws, nor those of evaluation.
_ROUND_SEED_OFFSET = 7_000_003


@dataclasses.dataclass(frozen=True)
class StepRollout:
    """Sampled and scored completions: one host's share of a call, one round of a step, or all of a
    step.

    P groups of G completions, of which the first B that can teach are the batch.

    Attributes:
        problems: [P] place of each group's problem among the training problems.
        episodes: P * G, in prompt order; `group` is 0 .. P - 1.
        texts: P * G.
        scores: scores of all P * G.
        dropped: [P * G] bool, completions that must not be used; none before the exchange.
        batch_groups: B.
        taken: positions of the stream of prompts that all hosts' calls took.
        rounds: calls of the engine.
    """

    problems: np.ndarray
    episodes: list[Episode]
    texts: list[str]
    scores: BatchScores
    dropped: np.ndarray
    batch_groups: int
    taken: int
    rounds: int = 1

    @property
    def differing(self) -> np.ndarray:
        """[P] bool: a group's usable rewards differ, the opposite of `group_statistics`'
        all_equal.
        """
        shape = len(self.problems), -1
        usable = ~self.dropped.reshape(shape)
        rewards = self.scores.totals.reshape(shape)
        return np.where(usable, rewards, np.inf).min(axis=1) < np.where(
            usable, rewards, -np.inf
        ).max(axis=1)

    @property
    def groups(self) -> np.ndarray:
        """[B] the groups of the batch, ascending: the first that differ, and others for what is
        missing.
        """
        return np.sort(np.argsort(~self.differing, kind="stable")[: self.batch_groups])

    @property
    def rows(self) -> np.ndarray:
        """[B * G] the completions of the batch."""
        members = len(self.episodes) // len(self.problems)
        return (self.groups[:, None] * members + np.arange(members)).reshape(-1)


def join(parts: Sequence[StepRollout]) -> StepRollout:
    """Join rounds, or the shares of all hosts, in order; groups are numbered on."""
    if len(parts) == 1:
        return parts[0]
    before = np.cumsum([0, *(len(part.problems) for part in parts)])
    return dataclasses.replace(
        parts[0],
        problems=np.concatenate([part.problems for part in parts]),
        episodes=[
            dataclasses.replace(episode, group=int(first) + episode.group)
            for first, part in zip(before, parts, strict=False)
            for episode in part.episodes
        ],
        texts=[text for part in parts for text in part.texts],
        scores=merge_scores([part.scores for part in parts]),
        dropped=np.concatenate([part.dropped for part in parts]),
    )


def trainer_state(task: Task, step: int, position: int) -> TrainerState:
    """State of the run for reward functions: finished steps, and the position in the stream of
    prompts.
    """
    return TrainerState(step, task.config.training.steps, position / sum(task.stream.sizes))


class StepRollouts:
    """Samples and scores the problems of each step.

    With `algorithm.refill_rounds` above 0 this is DAPO's dynamic sampling (Yu et al. 2025, Eq. 11):
    where groups have rewards that are all equal, further prompts are sampled, until B groups differ
    or the rounds are used up. The first B differing groups of the stream are the batch; what is
    still missing is filled with equal groups, which the loss leaves out. A round's number of
    prompts is a power of two, so that an embedded engine compiles few shapes; differing groups
    above B are discarded.

    Args:
        services: engine, scorer and turns; the engine gets the weights of the step before `sample`.
        task: the problems, and the distribution that they are sampled from.
        hosts: the processes of the run.
        leave: ends the work of this process with that of the others.
        collective: whether `sample` gathers over hosts. Otherwise its result is this host's share
            of its single round, which `exchange` makes into all hosts' rollout.
    """

    def __init__(
        self,
        services: Services,
        task: Task,
        hosts: Hosts,
        leave: stopping.CollectiveExit,
        *,
        collective: bool = True,
    ) -> None:
        self._services = services
        self._task = task
        self._hosts = hosts
        self._exit = leave
        self._collective = collective

    def sample(self, step: int, first: int, timer: phase_timer.PhaseTimer) -> StepRollout:
        """Sample and score the problems from position `first` of the stream on: a function of
        (seed, step, first).

        Collective by default: each process samples its share, and gets all of it.

        Args:
            step: step of the batch.
            first: position in the stream of prompts; the result has taken `taken` from there.
            timer: gets the time of sampling and of scoring.

        Raises:
            RewardError: if a reward function failed and the scorer stops then.
            EngineError: if the engine breaks or a log-prob is not finite, unless those completions
                are dropped.
        """
        config = self._task.config
        wanted = config.training.prompts_per_step
        rounds = config.algorithm.refill_rounds
        share = self._share(step, 0, first, wanted, timer)
        if not self._collective:
            return share
        parts = [self.exchange(share)]
        taken = wanted
        while (
            len(parts) <= rounds
            and (missing := wanted - sum(int(part.differing.sum()) for part in parts)) > 0
        ):
            count = min(wanted, 1 << (missing - 1).bit_length())
            parts.append(self.exchange(self._share(step, len(parts), first + taken, count, timer)))
            taken += count
        return dataclasses.replace(join(parts), taken=taken, rounds=len(parts))

    def _share(
        self, step: int, number: int, position: int, count: int, timer: phase_timer.PhaseTimer
    ) -> StepRollout:
        """One call of the engine for this process's part of the `count` problems from `position`
        on.
        """
        task = self._task
        seed = self._task.config.training.seed
        share = self._hosts.share(count)
        group_size = task.sampling.group_size
        chosen = task.stream.at(seed=seed, first=position, count=count)[share]
        problems = [task.train.problems[i] for i in np.repeat(chosen, group_size)]
        state = trainer_state(task, step, position)
        scoring = BatchScoring(self._services.scorer, task.tokenizer, problems, state)
        with timer.phase("generate"), self._exit.scope():
            self._exit.check()
            episodes = (
                self._generate(chosen, share.start, step, number, scoring) if len(chosen) else []
            )
        with timer.phase("verify"), self._exit.scope(), as_settings(REWARDS):
            texts, scores = scoring.finish(self._exit.check)
        dropped = np.zeros(len(texts), bool)
        batch_groups = task.config.training.prompts_per_step
        return StepRollout(chosen, episodes, texts, scores, dropped, batch_groups, taken=count)

    def _generate(
        self, chosen: np.ndarray, first_prompt: int, step: int, number: int, scoring: BatchScoring
    ) -> list[Episode]:
        """Sample the chosen problems, and start their rewards. Returns prompt order."""
        seed = self._task.config.training.seed + number * _ROUND_SEED_OFFSET
        numbers = {"seed": seed, "step": step, "first_prompt": first_prompt}
        asked = self._task.train.select(chosen), self._task.sampling, numbers
        sampled = sampled_episodes(
            self._services, scoring, *asked, doing="sampling", check_stop=self._exit.check
        )
        episodes = in_prompt_order(sampled)
        if (teacher := self._services.teacher) is None:
            return episodes
        given = [each.prompt_ids for each in episodes], [each.completion_ids for each in episodes]
        scored = zip(episodes, teacher.score(*given, temperature=1.0), strict=True)
        return [
            each.with_columns(teacher_logprobs=np.pad(x, (each.prompt_length, 0)))
            for each, x in scored
        ]

    def exchange(self, share: StepRollout) -> StepRollout:
        """Collective: join the shares of all hosts' calls, and find the completions that must not
        be used.

        Raises:
            EngineError: if a log-prob is not finite, unless those completions are dropped.
        """
        task = self._task
        rollout = self._task.config.rollout
        joined = join(self._hosts.gather(share, StepRollout, Episode, BatchScores, Grades))
        with as_settings(EPISODES):
            dropped = unusable_completions(joined.episodes, drop=rollout.on_non_finite == "drop")
            if rollout.router_replay:
                check_routed_experts(joined.episodes, *task.model.routing)
            if count := rollout.top_logprobs:
                check_top_logprobs(
                    joined.episodes, count, task.model.vocab_size, whole=task.sampling.cuts
                )
        return dataclasses.replace(joined, dropped=dropped)
