"""Completions of a step's problems and their rewards, with dynamic sampling in several rounds; their recording, and the
engine's noise floor on them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dcmdp_jax.activity import activity
from dcmdp_jax.algorithm.discrepancy import token_discrepancy
from dcmdp_jax.config.arguments import EPISODES, REWARDS, as_settings
from dcmdp_jax.data.episode import Episode, in_prompt_order
from dcmdp_jax.data.problems import Problem
from dcmdp_jax.engines.protocol import Engine, EngineError
from dcmdp_jax.engines.validation import broken_tokens, check_routed_experts, sample_alone, unusable_completions
from dcmdp_jax.environments.turns import TurnSampler
from dcmdp_jax.rewards.protocol import TrainerState
from dcmdp_jax.rewards.scoring import BatchScores, BatchScoring, RewardScorer, merge_scores
from dcmdp_jax.run.run import Run
from dcmdp_jax.training.across_hosts import gather_rollout
from dcmdp_jax.training.batch_metrics import PhaseTimer
from dcmdp_jax.types import Rows

logger = logging.getLogger(__name__)

Alone = Callable[[], contextlib.AbstractContextManager[None]]

# The rounds of a step must not repeat each other's draws, nor those of evaluation.
_ROUND_SEED_OFFSET = 7_000_003

# Finished steps after which it is measured, for the policy moves; completions scored in one pass, and completions and
# tokens of each sampled alone.
_STEPS = frozenset({0, *(4**power for power in range(2, 20))})
_SCORED_AGAIN, _SAMPLED_AGAIN, _TOKENS_SAMPLED_AGAIN = 32, 4, 64


@dataclasses.dataclass(frozen=True)
class StepRollout:
    """All that a step sampled, P groups of G completions, and the B groups that it trains on.

    Attributes:
        problems: [P] place of each group's problem among the training problems.
        episodes: P * G, in prompt order; `group` is 0 .. P - 1.
        texts: P * G.
        answers: P * G reference answers, None where a problem has none.
        scores: of all P * G.
        dropped: [P * G] bool, completions that must not be used.
        differing: [P] bool, groups whose usable completions have rewards that differ.
        groups: [B] the groups of the batch, ascending.
        rounds: calls of the engine.
    """

    problems: np.ndarray
    episodes: list[Episode]
    texts: list[str]
    answers: list[str | None]
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

    def source_metrics(self, discrepancy: np.ndarray) -> dict[str, float]:
        """Mean discrepancy and length of the batch's completions by data source, where there are several.

        Args:
            discrepancy: [B * G] mean of each completion of the batch.
        """
        if self.scores.sources is None:
            return {}
        sources = np.array(self.scores.sources)[self.rows]
        lengths = np.array([self.episodes[row].num_sampled for row in self.rows])
        usable = ~self.dropped[self.rows]
        metrics: dict[str, float] = {}
        for source in sorted(set(sources[usable].tolist())):
            mine = usable & (sources == source)
            metrics[f"discrepancy/source/{source}/mean"] = float(discrepancy[mine].mean(dtype=np.float64))
            metrics[f"completion/source/{source}/length_mean"] = float(lengths[mine].mean())
        return metrics

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


@dataclasses.dataclass(frozen=True)
class Share:
    """What this process sampled of one call of the engines, before the processes exchange it.

    Attributes:
        problems: [P] place of each problem of the call among the training problems.
        start: number of this process's first problem in the call.
        episodes, texts, scores: of this process's problems, as in `StepRollout`.
    """

    problems: np.ndarray
    start: int
    episodes: list[Episode]
    texts: list[str]
    scores: BatchScores


def trainer_state(plan: Run, step: int, position: int) -> TrainerState:
    """What reward functions learn about the run: finished steps, and the position in the stream of prompts."""
    return TrainerState(step, plan.config.training.steps, position / sum(plan.stream.sizes))


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
        turns: samples in turns with an environment; None for one turn.
    """

    def __init__(self, plan: Run, engine: Engine, scorer: RewardScorer, turns: TurnSampler | None = None) -> None:
        self._plan, self._engine, self._scorer, self._turns = plan, engine, scorer, turns

    def sample(
        self, step: int, first: int, timer: PhaseTimer, alone: Alone, check_stop: Callable[[], None]
    ) -> StepRollout:
        """Sample and score the problems from position `first` of the stream on: a function of (seed, step, first).

        Collective: each process of a run on several hosts samples its share, and gets all of it.

        Args:
            step: whose batch it is.
            first: position in the stream of prompts; the result has taken `len(problems)` from there.
            timer: gets the time of sampling and of scoring.
            alone: makes a context for what each process does by itself; all leave it together.
            check_stop: called now and then; what it raises ends sampling.

        Raises:
            RewardError: if a reward function failed and the scorer stops then.
            EngineError: if the engine breaks or a log-prob is not finite, unless those completions are dropped.
        """
        config = self._plan.config
        wanted = config.training.prompts_per_step
        parts: list[StepRollout] = []
        differing, count = np.zeros(0, bool), wanted
        for number in range(1 + config.algorithm.refill_rounds):
            share = self._share(step, number, first + len(differing), count, timer, alone, check_stop)
            parts.append(self.exchanged(share))
            differing = np.concatenate([differing, parts[-1].differing])
            missing = wanted - int(differing.sum())
            if missing <= 0:
                break
            count = min(wanted, 1 << (missing - 1).bit_length())
        return parts[0] if len(parts) == 1 else _joined(parts, differing, _batch(differing, wanted))

    def sample_share(
        self, step: int, first: int, timer: PhaseTimer, alone: Alone, check_stop: Callable[[], None]
    ) -> Share:
        """This process's part of `sample`, whose single round it is; `exchanged` makes the same of it. Not collective.

        Args, raises: as `sample`.
        """
        return self._share(step, 0, first, self._plan.config.training.prompts_per_step, timer, alone, check_stop)

    def exchanged(self, share: Share) -> StepRollout:
        """Collective: what all processes sampled in one call, from each one's share.

        Raises:
            EngineError: if a log-prob is not finite, unless those completions are dropped.
        """
        config, group_size = self._plan.config, self._plan.sampling.group_size
        problems = [self._plan.train.problems[i] for i in np.repeat(share.problems, group_size)]
        episodes, texts, scores = gather_rollout(
            self._plan.hosts, share.episodes, share.texts, share.scores, prompts=len(share.texts) // group_size
        )
        with as_settings(EPISODES):
            dropped = unusable_completions(episodes, drop=config.rollout.on_non_finite == "drop")
            if config.rollout.router_replay:
                check_routed_experts(episodes, *self._plan.model.routing)
        differing = _differ(scores.totals.reshape(-1, group_size), ~dropped.reshape(-1, group_size))
        return StepRollout(
            problems=share.problems, episodes=episodes, texts=texts, answers=[problem.answer for problem in problems],
            scores=scores, dropped=dropped, differing=differing,
            groups=_batch(differing, config.training.prompts_per_step), rounds=1,
        )  # fmt: skip

    def _share(
        self, step: int, number: int, position: int, count: int, timer: PhaseTimer, alone: Alone,
        check_stop: Callable[[], None],
    ) -> Share:  # fmt: skip
        """One call of the engine for this process's part of the `count` problems from `position` on."""
        chosen = self._plan.stream.at(seed=self._plan.config.training.seed, first=position, count=count)
        share, group_size = self._plan.hosts.share(count), self._plan.sampling.group_size
        problems = [self._plan.train.problems[i] for i in np.repeat(chosen[share], group_size)]
        state = trainer_state(self._plan, step, position)
        scoring = BatchScoring(self._scorer, self._plan.tokenizer, problems, state)
        with timer.phase("generate"), alone():
            episodes = self._generate(chosen, share, step, number, scoring, check_stop)
        with timer.phase("verify"), alone(), as_settings(REWARDS):
            texts, scores = scoring.finish(check_stop)
        return Share(chosen, share.start, episodes, texts, scores)

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
        numbers = {"seed": seed, "step": step, "first_prompt": share.start}
        if self._turns is None:
            sampled = self._engine.generate(prompts, sampling, **numbers)
        else:
            asked = [self._plan.train.problems[i] for i in chosen[share]]
            sampled = self._turns.generate(prompts, asked, sampling, **numbers, check_stop=check_stop)
        total = len(prompts) * sampling.group_size
        with activity("sampling", total, "completions") as doing, contextlib.closing(sampled) as groups:
            for complete in groups:
                check_stop()
                doing.done += len(complete)
                rows = [episode.group * sampling.group_size + episode.member for episode in complete]
                scoring.begin(rows, [episode.token_ids[episode.sampled_mask] for episode in complete])
                episodes += complete
        if self._turns is not None:
            scoring.add_played(self._turns.played)
        return in_prompt_order(episodes)


def _joined(parts: Sequence[StepRollout], differing: np.ndarray, groups: np.ndarray) -> StepRollout:
    """The rounds of a step as one; the groups of a later one are numbered after those of the earlier ones."""
    before = np.cumsum([0, *(len(part.problems) for part in parts[:-1])])
    return StepRollout(
        problems=np.concatenate([part.problems for part in parts]),
        episodes=[
            dataclasses.replace(episode, group=int(first) + episode.group)
            for first, part in zip(before, parts, strict=True)
            for episode in part.episodes
        ],
        texts=sum((part.texts for part in parts), []),
        answers=sum((part.answers for part in parts), []),
        scores=merge_scores([part.scores for part in parts]),
        dropped=np.concatenate([part.dropped for part in parts]),
        differing=differing,
        groups=groups,
        rounds=len(parts),
    )


def _differ(rewards: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """[P] bool, whether a group's usable rewards differ, from [P, G]: the opposite of `group_statistics`' all_equal."""
    low = np.where(usable, rewards, np.inf).min(axis=1)
    high = np.where(usable, rewards, -np.inf).max(axis=1)
    return low < high


def _batch(differing: Sequence[bool], wanted: int) -> np.ndarray:
    """The first `wanted` groups that differ, and others for what is missing, in the order of the stream."""
    return np.sort(np.argsort(~np.asarray(differing), kind="stable")[:wanted])


def shown_samples(plan: Run, step: int, rollout: StepRollout, discrepancy: np.ndarray) -> list[dict[str, Any]]:
    """A few completions of a finished step for people, if they are due: the first of each of the first prompts.

    Several completions of one prompt would say less.

    Args:
        plan: the checked run.
        step: finished steps.
        rollout: what the step sampled.
        discrepancy: mean of each completion of the batch.
    """
    settings, size = plan.config.observe, plan.sampling.group_size
    if not settings.samples or (step - 1) % settings.samples_every_steps:
        return []
    means = discrepancy.reshape(-1)
    return [
        {
            "prompt": plan.tokenizer.decode(rollout.episodes[group * size].prompt_ids),
            "completion": rollout.texts[group * size],
            "answer": rollout.answers[group * size],
            "reward": float(rollout.scores.totals[group * size]),
            "rewards": rollout.scores.of_completion(group * size),
            "source": plan.train.problems[rollout.problems[group]].source,
            **({"extra": extra} if (extra := rollout.scores.extra_of(group * size)) else {}),
            "discrepancy_mean": float(means[place * size]),
        }
        for place, group in enumerate(rollout.groups[: settings.samples])
    ]


def recorded_completions(
    rollout: StepRollout,
    problems: Sequence[Problem],
    rows: Sequence[Rows],
    train_logprobs: Sequence[np.ndarray],
    start_logprobs: Sequence[np.ndarray] | None,
    advantages: np.ndarray,
    *,
    exact: bool,
) -> list[dict[str, Any]]:
    """The completions of a batch, one dict each; those of which no token was used are left out.

    Args:
        rollout: what the step sampled.
        problems: the training problems.
        rows: the packed batch, [M, A, R, L] for each bucket.
        train_logprobs: log p of its tokens, like `rows`.
        start_logprobs: of a batch that lags, log p of the weights at the start of the step; else None.
        advantages: [M * N] float32.
        exact: the rollout log-probs were replaced by the training stack's own.

    Returns:
        Columns as in `observe.rollouts`, without `step`.
    """
    size = len(rollout.episodes) // len(rollout.problems)
    found = []
    trained = _by_completion(rows, train_logprobs, len(rollout.rows))
    started = None if start_logprobs is None else _by_completion(rows, start_logprobs, len(rollout.rows))
    for place, train in enumerate(trained):
        if not len(train):
            continue
        row = int(rollout.rows[place])
        episode, problem = rollout.episodes[row], int(rollout.problems[row // size])
        after = slice(episode.prompt_length, None)
        mask = episode.sampled_mask[after]
        log_p, log_now = np.zeros((2, len(mask)), np.float32)
        log_p[mask] = train
        if started is not None:
            log_now[mask] = started[place]
        found.append({
            "completion": place,
            "prompt_id": problem,
            "source": problems[problem].source,
            "prompt_token_ids": episode.prompt_ids,
            "token_ids": episode.token_ids[after],
            "mask": mask,
            "train_logprobs": log_p,
            "rollout_logprobs": log_p if exact else np.where(mask, episode.rollout_logprobs[after], np.float32(0)),
            **({} if started is None else {"start_logprobs": log_now}),
            "policy_versions": np.where(mask, episode.policy_versions[after], -1),
            "reward": float(rollout.scores.totals[row]),
            "advantage": float(advantages[place]),
        })  # fmt: skip
    return found


def _by_completion(rows: Sequence[Rows], values: Sequence[np.ndarray], completions: int) -> list[np.ndarray]:
    """The sampled tokens' values of each of M * N completions, in the order of its tokens; it lies in one row."""
    keys, flat = [], []
    mini_batches = len(rows[0].completion_mask)
    first = np.arange(mini_batches)[:, None, None, None] * (completions // mini_batches)
    for bucket, value in zip(rows, values, strict=True):
        mask = np.asarray(bucket.completion_mask)
        keys.append((np.asarray(bucket.completion_index) + first)[mask])
        flat.append(np.asarray(value)[mask])
    key = np.concatenate(keys)
    order = np.argsort(key, kind="stable")
    bounds = np.searchsorted(key[order], np.arange(1, completions))
    return np.split(np.concatenate(flat)[order], bounds)


class NoiseFloor:
    """The engine against itself in another batch shape, on the first completions: no budget below it can be met.

    Args:
        plan: the checked run.
        engine: which still has the weights that sampled.
    """

    def __init__(self, plan: Run, engine: Engine) -> None:
        self._plan, self._engine = plan, engine
        algorithm = plan.config.algorithm
        # Compiled as one: each operation alone would be a program of its own.
        self._discrepancy = jax.jit(
            functools.partial(token_discrepancy, measure=algorithm.measure, sided=algorithm.sided)
        )

    def metrics(self, episodes: Sequence[Episode], step: int, *, wanted: bool, first: int = 0) -> dict[str, float]:
        """`mismatch/noise_floor` where it is due at a step or wanted; nothing elsewhere.

        Scored in one pass, and the first few sampled once more, each alone: the larger mean.

        Args:
            episodes: of a call of the engine, from its first problem on.
            step: whose batch it is.
            wanted: measure it whatever the step.
            first: number of the first of them among the completions of all hosts.
        """
        if not wanted and step not in _STEPS:
            return {}
        floor = self._measure(episodes, step, first)
        return {} if floor is None else {"mismatch/noise_floor": floor}

    def _measure(self, sampled: Sequence[Episode], step: int, first: int) -> float | None:
        rows = (row for row, episode in enumerate(sampled) if not broken_tokens(episode).any())
        usable = {first + row: sampled[row] for row in itertools.islice(rows, _SCORED_AGAIN)}
        if not usable:
            return None
        episodes, sampling = list(usable.values()), self._plan.sampling
        few = {row: usable[row] for row in list(usable)[:_SAMPLED_AGAIN]}
        shorter = dataclasses.replace(
            sampling, max_completion_tokens=min(_TOKENS_SAMPLED_AGAIN, sampling.max_completion_tokens)
        )
        try:
            scored = self._engine.score(
                [episode.prompt_ids for episode in episodes],
                [episode.completion_ids for episode in episodes],
                temperature=sampling.temperature,
            )
            together, alone = sample_alone(self._engine, few, shorter, seed=self._plan.config.training.seed, step=step)
        except EngineError as error:
            # A diagnostic does not end a run that is set to go on without what is broken.
            if self._plan.config.rollout.on_non_finite != "drop":
                raise
            logger.warning("no noise floor: %s", error)
            return None
        masks = [episode.sampled_mask[episode.prompt_length :] for episode in episodes]
        again = np.concatenate([values[mask] for values, mask in zip(scored, masks, strict=True)])
        sampled = np.concatenate([episode.rollout_logprobs[episode.sampled_mask] for episode in episodes])
        differences = [self._discrepancy(again, sampled)]
        if together.size:
            differences.append(self._discrepancy(alone, together))
        return max(float(np.mean(each)) for each in differences)
