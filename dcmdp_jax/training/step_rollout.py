"""The completions of a step, and what is recorded of them on the host: time, metrics, samples and tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dcmdp_jax.activity import activity
from dcmdp_jax.data.episode import TOP_IDS, TOP_LOGPROBS, Episode
from dcmdp_jax.data.lengths import QUANTILES
from dcmdp_jax.data.problems import Problem
from dcmdp_jax.observe.legs import legs_of
from dcmdp_jax.observe.metric_names import STEP_PHASES
from dcmdp_jax.process_memory import release_freed_memory
from dcmdp_jax.record import packed_top
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.rewards.scoring import BatchScores, merge_scores, reward_metrics
from dcmdp_jax.run.task import Task
from dcmdp_jax.types import Batch, Rows

PHASES = {
    "push": ("time/push", "time/start_push", "pushing the weights to the engine"),
    "wait": ("time/wait", "time/start_wait", "waiting for the sampler"),
    "generate": ("time/generate", "time/start_generate", "sampling"),
    "verify": ("time/verify", "time/start_verify", "scoring the completions"),
    "noise_floor": ("time/noise_floor", "time/start_noise_floor", "measuring the engine against itself"),
    "pack": ("time/pack", "time/start_pack", "packing tokens into rows"),
    "step": ("time/step", "time/start_step", "training"),
}
"""Phase of a step -> metric of its seconds, metric of its start, and its label on the console."""
KEPT_BYTES = 2**30
"""Freed memory that the process keeps beside a checkpoint, an evaluation, and what compiling leaves."""
_KEPT_BETWEEN_STEPS = 3 * 2**30
"""Freed memory that it keeps from one phase to the next in other steps, which need as much again: to clear the pages of
2.3 GiB took 2 to 3 of the 15 processor seconds of a step of 135M parameters."""


@dataclasses.dataclass(frozen=True)
class StepRollout:
    """Sampled and scored completions: one host's share of a call, one round of a step, or all of a step.

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
        """[P] bool: a group's usable rewards differ, the opposite of `group_statistics`' all_equal."""
        shape = len(self.problems), -1
        usable, rewards = ~self.dropped.reshape(shape), self.scores.totals.reshape(shape)
        return np.where(usable, rewards, np.inf).min(axis=1) < np.where(usable, rewards, -np.inf).max(axis=1)

    @property
    def groups(self) -> np.ndarray:
        """[B] the groups of the batch, ascending: the first that differ, and others for what is missing."""
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


class PhaseTimer:
    """Seconds of each phase of a step, and when it was; on the console, what the step does.

    Args:
        first: the first step of this process, whose programs are compiled.
    """

    def __init__(self, *, first: bool = False) -> None:
        self.first = first
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        """(phase, start, end) by `time.monotonic`."""
        self._began = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; blocks of one name add up."""
        began, (metric, _, label) = time.monotonic(), PHASES[name]
        with activity(label + (" (the first time it compiles)" if self.first else "")):
            yield
        release_freed_memory(above=KEPT_BYTES if self.first else _KEPT_BETWEEN_STEPS)
        ended = time.monotonic()
        self.spans.append((name, began, ended))
        self.seconds[metric] = self.seconds.get(metric, 0.0) + ended - began

    def add(self, sampler: PhaseTimer) -> None:
        """Add the phases in which the step's batch was sampled."""
        self.seconds |= sampler.seconds
        self.spans += sampler.spans

    def metrics(self, episodes: Sequence[Episode], *, lags: bool) -> dict[str, float]:
        """The phases, the total, and tokens per second; with a lag also when each phase began and what overlap won."""
        total = time.monotonic() - self._began
        sampled = sum(episode.num_sampled for episode in episodes)
        tokens = sum(len(episode.token_ids) for episode in episodes)
        metrics = self.seconds | {
            "time/total": total,
            "throughput/tokens_per_second": tokens / total,
            "throughput/sampled_tokens_per_second": sampled / self.seconds["time/generate"],
        }
        if lags:
            offset = time.time() - time.monotonic()
            metrics |= {PHASES[name][1]: began + offset for name, began, _ in reversed(self.spans)}
            metrics["time/overlap"] = sum(self.seconds[PHASES[phase][0]] for phase in STEP_PHASES) - total
        return metrics


def rollout_metrics(rollout: StepRollout, discrepancy: np.ndarray, *, refills: bool) -> dict[str, float]:
    """Rewards, lengths, truncations, what the verifier could not read, and what differs between data sources.

    Args:
        rollout: the step's completions and rewards.
        discrepancy: [B * G] mean of each completion of the batch.
        refills: add the cost of dynamic sampling, and rewards over all that was sampled: over the batch they would be
            selected.
    """
    metrics = length_metrics(rollout.episodes, rollout.scores.grades) | reward_metrics(rollout.scores)
    metrics |= identical_metrics(rollout.episodes)
    usable = ~rollout.dropped
    if rollout.scores.sources is not None:
        sources = np.array(rollout.scores.sources)[rollout.rows]
        lengths = np.array([rollout.episodes[row].num_sampled for row in rollout.rows])
        for source in sorted(set(sources[usable[rollout.rows]].tolist())):
            mine = usable[rollout.rows] & (sources == source)
            metrics[f"discrepancy/source/{source}/mean"] = float(discrepancy[mine].mean(dtype=np.float64))
            metrics[f"completion/source/{source}/length_mean"] = float(lengths[mine].mean())
    if refills:
        rewards, differing = rollout.scores.totals.astype(np.float64)[usable], rollout.differing
        differs = differing[usable.reshape(len(differing), -1).any(axis=1)]
        metrics |= {
            "reward/mean": float(rewards.mean()) if rewards.size else 0.0,
            "reward/std": float(rewards.std()) if rewards.size else 0.0,
            "reward/all_equal_groups": float((~differs).mean()) if differs.size else 0.0,
            "rollout/sampled_prompts": len(differing),
            "rollout/refill_rounds": rollout.rounds - 1,
            "rollout/unfilled_groups": int((~differing[rollout.groups]).sum()),
        }
    return metrics


def identical_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Share of completions that equal another one of the same prompt, and its expectation for independent samples.

    Given a completion of probability q under the engine, one of G - 1 independent others is equal with probability
    1 - (1 - q)^(G - 1), so the means of both have one expectation, whatever the policy.
    """
    texts = [episode.token_ids.tobytes() for episode in episodes]
    prompts = [episode.token_ids[: episode.prompt_length].tobytes() for episode in episodes]
    same, others = Counter(texts), Counter(prompts)
    logs = [float(episode.rollout_logprobs[episode.sampled_mask].sum(dtype=np.float64)) for episode in episodes]
    counts = np.array([others[prompt] for prompt in prompts])
    chances = 1 - (1 - np.minimum(np.exp(logs), 1.0)) ** (counts - 1)
    return {
        "completion/identical_fraction": float(np.mean([same[text] > 1 for text in texts])),
        "completion/identical_chance": float(np.nanmean(chances)) if np.isfinite(chances).any() else 0.0,
    }


def length_metrics(episodes: Sequence[Episode], grades: Grades | None) -> dict[str, float]:
    """Lengths, truncations, and what the verifier could not read if it was asked, by the names of metric_names.py."""
    lengths = [episode.num_sampled for episode in episodes]
    p10, p25, p50, p75, p90 = np.percentile(lengths, QUANTILES).tolist()
    judged = {} if grades is None else {
        "reward/verifier_timeouts": grades.timeouts,
        "reward/verifier_errors": grades.errors,
        "reward/verifier_over_budget": grades.over_budget,
        "reward/no_answer_fraction": grades.unparsed / max(1, grades.rewards.size),
    }  # fmt: skip
    return judged | {
        "completion/length_mean": float(np.mean(lengths)),
        "completion/length_min": min(lengths),
        "completion/length_p10": p10,
        "completion/length_p25": p25,
        "completion/length_p50": p50,
        "completion/length_p75": p75,
        "completion/length_p90": p90,
        "completion/length_max": max(lengths),
        "completion/truncated_fraction": float(np.mean([episode.finish_reason == "length" for episode in episodes])),
    }


def staleness_metrics(batch: Batch, policy_version: int) -> dict[str, float]:
    """Steps between the policy that is trained and those that sampled the batch's tokens; 0 in a synchronous run.

    Args:
        batch: packed, before it goes to the devices.
        policy_version: the training step of the parameters that the batch trains.
    """
    versions = [rows.columns["policy_versions"][rows.completion_mask] for rows in batch.rows]
    lag = policy_version - np.concatenate(versions)
    return {"rollout/staleness_mean": float(lag.mean()), "rollout/staleness_max": float(lag.max())}


def shown_samples(task: Task, step: int, rollout: StepRollout, discrepancy: np.ndarray) -> list[dict[str, Any]]:
    """A few completions of a finished step for people, if they are due: the first of each of the first prompts.

    Several completions of one prompt would say less.

    Args:
        task: the settings and the problems.
        step: finished steps.
        rollout: the step's completions and rewards.
        discrepancy: mean of each completion of the batch.
    """
    settings, size = task.config.observe, task.sampling.group_size
    if not settings.samples or (step - 1) % settings.samples_every_steps:
        return []
    means = discrepancy.reshape(-1)
    return [
        {
            "prompt": task.tokenizer.decode(rollout.episodes[group * size].prompt_ids),
            "completion": rollout.texts[group * size],
            "answer": task.train.problems[rollout.problems[group]].answer,
            "reward": float(rollout.scores.totals[group * size]),
            "rewards": rollout.scores.of_completion(group * size),
            "source": task.train.problems[rollout.problems[group]].source,
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
    top_logprobs: Sequence[np.ndarray] | None = None,
    *,
    exact: bool,
) -> list[dict[str, Any]]:
    """The completions of a batch, one dict each; those of which no token was used are left out.

    Args:
        rollout: the step's completions and rewards.
        problems: the training problems.
        rows: the packed batch, [M, A, R, L] for each bucket.
        train_logprobs: log p of its tokens, like `rows`.
        start_logprobs: where the batch lags, log p of the weights at the start of the step; else None.
        advantages: [M * N] float32.
        top_logprobs: log p of the engine's likeliest tokens, [M, A, R, L, k] for each bucket; None without them.
        exact: the rollout log-probs were replaced by the training stack's own.

    Returns:
        Columns as in `observe.rollouts`, without `step`.
    """
    size, chosen = len(rollout.episodes) // len(rollout.problems), rollout.rows.tolist()
    found = []
    trained = _by_completion(rows, train_logprobs, len(chosen))
    started, listed = (
        None if each is None else _by_completion(rows, each, len(chosen)) for each in (start_logprobs, top_logprobs)
    )
    for place, (row, train) in enumerate(zip(chosen, trained, strict=True)):
        if not len(train):
            continue
        episode, problem = rollout.episodes[row], int(rollout.problems[row // size])
        after = slice(episode.prompt_length, None)
        mask = episode.sampled_mask[after]
        log_p, log_now = np.zeros((2, len(mask)), np.float32)
        log_p[mask] = train
        if started is not None:
            log_now[mask] = started[place]
        found.append(
            {
                "completion": place,
                "prompt_id": problem,
                "source": problems[problem].source,
                "prompt_token_ids": episode.prompt_ids,
                "token_ids": episode.token_ids[after],
                "mask": mask,
                "train_logprobs": log_p,
                "rollout_logprobs": log_p if exact else np.where(mask, episode.rollout_logprobs[after], np.float32(0)),
                **({} if started is None else {"start_logprobs": log_now}),
                **({} if listed is None else {"top": _packed(episode, listed[place], exact=exact)}),
                "policy_versions": np.where(mask, episode.policy_versions[after], -1),
                "reward": float(rollout.scores.totals[row]),
                "advantage": float(advantages[place]),
            }
        )
    return found


def _packed(episode: Episode, train_logprobs: np.ndarray, *, exact: bool) -> str:
    """The engine's likeliest tokens after the prompt as `record.packed_top` has them, -1 where not sampled."""
    mask = episode.sampled_mask[episode.prompt_length :]
    ids, rollout = (episode.columns[name][episode.prompt_length :] for name in (TOP_IDS, TOP_LOGPROBS))
    train = np.zeros(ids.shape, np.float32)
    train[mask] = train_logprobs
    return json.dumps(packed_top(np.where(mask[:, None], ids, -1), train, train if exact else rollout))


def leg_metrics(
    completions: Sequence[Mapping[str, Any]], rows: np.ndarray, scored: Mapping[int, np.ndarray]
) -> dict[str, float]:
    """The legs of the gap of the completions that the engine scored in one pass, see `observe.legs`; none without.

    Args:
        completions: those of `recorded_completions`.
        rows: number of each completion of the batch among all that were sampled.
        scored: number of a completion -> the log-probs of its tokens, [T] float32 nats.
    """
    found = [
        np.stack([each["rollout_logprobs"], scored[row], each["train_logprobs"]])[:, each["mask"]]
        for each in completions
        if (row := int(rows[each["completion"]])) in scored
    ]
    if not found:
        return {}
    decoding, one_pass = legs_of(*np.concatenate(found, axis=1))
    means = {"mismatch/leg_decoding": decoding.mean, "mismatch/leg_one_pass": one_pass.mean}
    return means | {"mismatch/leg_decoding_share": decoding.share}


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
