"""Completions of a step's problems and their rewards; with dynamic sampling in several rounds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from dcmdp_jax.data.episode import Episode, in_prompt_order
from dcmdp_jax.engines.protocol import Engine
from dcmdp_jax.engines.validation import check_routed_experts, unusable_completions
from dcmdp_jax.rewards.scoring import BatchScores, BatchScoring, RewardScorer, merge_scores
from dcmdp_jax.training.across_hosts import gather_rollout
from dcmdp_jax.training.host_metrics import PhaseTimer
from dcmdp_jax.training.setup import Plan

Alone = Callable[[], contextlib.AbstractContextManager[None]]

# The rounds of a step must not repeat each other's draws, nor those of evaluation.
_ROUND_SEED_OFFSET = 7_000_003


def prompt_order(problems: int, *, seed: int, first: int, count: int) -> np.ndarray:
    """Problems at positions first .. first + count - 1 of the endless shuffled stream.

    Each epoch is a permutation drawn from (seed, epoch), so a position's problem depends on nothing else.
    """
    chosen = []
    for position in range(first, first + count):
        epoch, place = divmod(position, problems)
        if not chosen or place == 0:
            order = np.random.default_rng([seed, epoch]).permutation(problems)
        chosen.append(order[place])
    return np.array(chosen)


@dataclasses.dataclass(frozen=True)
class StepRollout:
    """All that a step sampled, P groups of G completions, and the B groups that it trains on.

    Attributes:
        problems: [P] place of each group's problem among the training problems.
        episodes: P * G, in prompt order; `group` is 0 .. P - 1.
        texts: P * G.
        answers: P * G reference answers.
        scores: of all P * G.
        dropped: [P * G] bool, completions that must not be used.
        differing: [P] bool, groups whose usable completions have rewards that differ.
        groups: [B] the groups of the batch, ascending.
        rounds: calls of the engine.
    """

    problems: np.ndarray
    episodes: list[Episode]
    texts: list[str]
    answers: list[str]
    scores: BatchScores
    dropped: np.ndarray
    differing: np.ndarray
    groups: np.ndarray
    rounds: int

    @property
    def rows(self) -> np.ndarray:
        """[B * G] the completions of the batch."""
        members = len(self.episodes) // len(self.problems)
        return (self.groups[:, None] * members + np.arange(members)).reshape(-1)

    def dynamic_metrics(self) -> dict[str, float]:
        """Cost of dynamic sampling, and rewards over all that was sampled: over the batch they would be selected."""
        rewards = self.scores.totals.astype(np.float64)[~self.dropped]
        usable = ~self.dropped.reshape(len(self.problems), -1).all(axis=1)
        return {
            "reward/mean": float(rewards.mean()) if rewards.size else 0.0,
            "reward/std": float(rewards.std()) if rewards.size else 0.0,
            "reward/all_equal_groups": float((~self.differing[usable]).mean()) if usable.any() else 0.0,
            "rollout/sampled_prompts": len(self.problems),
            "rollout/refill_rounds": self.rounds - 1,
            "rollout/unfilled_groups": int((~self.differing[self.groups]).sum()),
        }


class StepRollouts:
    """Samples and scores the problems of each step.

    With `algorithm.refill_rounds` above 0 this is DAPO's dynamic sampling (Yu et al. 2025, Eq. 11): where groups have
    rewards that are all equal, further prompts are sampled, until B groups differ or the rounds are used up. The
    first B differing groups of the stream are the batch; what is still missing is filled with equal groups, which the
    loss leaves out. A round's number of prompts is a power of two, so that an embedded engine compiles few shapes;
    differing groups above B are discarded.

    Args:
        plan: the checked run.
        engine: has the weights of the step.
        scorer: computes rewards.
    """

    def __init__(self, plan: Plan, engine: Engine, scorer: RewardScorer) -> None:
        self._plan, self._engine, self._scorer = plan, engine, scorer

    def sample(
        self, step: int, first: int, timer: PhaseTimer, alone: Alone, check_stop: Callable[[], None]
    ) -> StepRollout:
        """Sample and score the problems from position `first` of the stream on: a function of (seed, step, first).

        Each process of a run on several hosts samples its share, and gets all of it.

        Args:
            step: of the weights in the engine.
            first: position in the stream of prompts; the result has taken `len(problems)` from there.
            timer: gets the time of sampling and of scoring.
            alone: makes a context for what each process does by itself; all leave it together.
            check_stop: called now and then; what it raises ends sampling.

        Raises:
            RewardError: if a reward function failed and the scorer stops then.
            EngineError: if the engine breaks or a log-prob is not finite, unless those completions are dropped.
        """
        config = self._plan.config
        wanted, group_size = config.training.prompts_per_step, self._plan.sampling.group_size
        parts, differing, count = [], np.zeros(0, bool), wanted
        for number in range(1 + config.algorithm.refill_rounds):
            position = first + len(differing)
            problems = prompt_order(
                len(self._plan.train.problems), seed=config.training.seed, first=position, count=count
            )
            parts.append(self._round(problems, step, number, len(differing), timer, alone, check_stop))
            _, _, _, scores, dropped = parts[-1]
            found = _differ(scores.totals.reshape(count, group_size), ~dropped.reshape(count, group_size))
            differing = np.concatenate([differing, found])
            missing = wanted - int(differing.sum())
            if missing <= 0:
                break
            count = min(wanted, 1 << (missing - 1).bit_length())
        episodes, texts, answers, scores, dropped = zip(*parts, strict=True)
        return StepRollout(
            problems=prompt_order(
                len(self._plan.train.problems), seed=config.training.seed, first=first, count=len(differing)
            ),
            episodes=sum(episodes, []), texts=sum(texts, []), answers=sum(answers, []), scores=merge_scores(scores),
            dropped=np.concatenate(dropped), differing=differing, groups=_batch(differing, wanted), rounds=len(parts),
        )  # fmt: skip

    def _round(
        self, chosen: np.ndarray, step: int, number: int, before: int, timer: PhaseTimer, alone: Alone,
        check_stop: Callable[[], None],
    ) -> tuple[list[Episode], list[str], list[str], BatchScores, np.ndarray]:  # fmt: skip
        """One call of the engine; `before` groups of this step come before its own."""
        problems = [self._plan.train.problems[i] for i in np.repeat(chosen, self._plan.sampling.group_size)]
        share, group_size = self._plan.hosts.share(len(chosen)), self._plan.sampling.group_size
        own = slice(share.start * group_size, share.stop * group_size)
        scoring = BatchScoring(self._scorer, self._plan.tokenizer, problems[own])
        with timer.phase("generate"), alone():
            episodes = self._generate(chosen, share, step, number, scoring, check_stop)
        with timer.phase("verify"), alone():
            texts, scores = scoring.finish(check_stop)
        episodes, texts, scores = gather_rollout(
            self._plan.hosts, episodes, texts, scores, first_prompt=share.start, problems=problems,
            routed_shape=self._plan.model.routing[:2] if self._plan.config.rollout.router_replay else None,
        )  # fmt: skip
        dropped = unusable_completions(episodes, drop=self._plan.config.rollout.on_non_finite == "drop")
        if self._plan.config.rollout.router_replay:
            check_routed_experts(episodes, *self._plan.model.routing)
        if before:
            episodes = [dataclasses.replace(episode, group=before + episode.group) for episode in episodes]
        return episodes, texts, [problem.answer for problem in problems], scores, dropped

    def _generate(
        self,
        chosen: np.ndarray,
        share: slice,
        step: int,
        number: int,
        scoring: BatchScoring,
        check_stop: Callable[[], None],
    ) -> list[Episode]:
        """Sample a share of the chosen problems; start the rewards of each group as it comes. Returns prompt order."""
        prompts, sampling = [self._plan.train.token_ids[i] for i in chosen[share]], self._plan.sampling
        if not prompts:
            return []
        seed = self._plan.config.training.seed + number * _ROUND_SEED_OFFSET
        episodes: list[Episode] = []
        sampled = self._engine.generate(prompts, sampling, seed=seed, step=step, first_prompt=share.start)
        with contextlib.closing(sampled) as groups:
            for complete in groups:
                check_stop()
                rows = [episode.group * sampling.group_size + episode.member for episode in complete]
                scoring.begin(rows, [episode.completion_ids for episode in complete])
                episodes += complete
        return in_prompt_order(episodes)


def _differ(rewards: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """[P] bool, whether a group's usable rewards differ, from [P, G]: the opposite of `group_statistics`' all_equal."""
    low = np.where(usable, rewards, np.inf).min(axis=1)
    high = np.where(usable, rewards, -np.inf).max(axis=1)
    return low < high


def _batch(differing: Sequence[bool], wanted: int) -> np.ndarray:
    """The first `wanted` groups that differ, and others for what is missing, in the order of the stream."""
    return np.sort(np.argsort(~np.asarray(differing), kind="stable")[:wanted])
