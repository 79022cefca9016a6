"""Records and metrics of a step's completions: texts for people, tokens with their log-probs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dcmdp_jax.data.episode import TOP_IDS, TOP_LOGPROBS, Episode, identical_metrics
from dcmdp_jax.data.lengths import QUANTILES
from dcmdp_jax.data.problems import Problem
from dcmdp_jax.observe.legs import legs_of
from dcmdp_jax.observe.metrics_io import MetricsWriter, NoWriter
from dcmdp_jax.record import packed_top
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.rewards.scoring import reward_metrics
from dcmdp_jax.run.task import Task
from dcmdp_jax.training.batches import StepBatch
from dcmdp_jax.training.rollout_sampler import StepRollout
from dcmdp_jax.training.step_metrics import RecordedTokens
from dcmdp_jax.types import Rows


class CompletionRecords:
    """What a run records of each step's completions: metrics, samples for people, tokens.

    They are read before the step's metrics are written, and written once the step is finished.
    """

    def __init__(self, task: Task, writer: MetricsWriter | NoWriter, *, exact: bool) -> None:
        """Record nothing yet.

        Args:
            task: the settings and the problems.
            writer: gets samples and tokens.
            exact: the rollout log-probs were replaced by the training stack's own.
        """
        self._task = task
        self._writer = writer
        self._exact = exact
        self._refills = task.config.algorithm.refill_rounds > 0
        self._samples: list[dict[str, Any]] = []
        self._tokens: list[dict[str, Any]] | None = None

    def read(
        self,
        step: int,
        step_batch: StepBatch,
        discrepancy: np.ndarray,
        recorded: RecordedTokens,
    ) -> dict[str, float]:
        """Read a step's completions; returns their metrics.

        Args:
            step: finished steps.
            step_batch: the batch.
            discrepancy: [B * G] mean of each completion of the batch.
            recorded: what the step returned of its tokens, on the devices.
        """
        task = self._task
        rollout = step_batch.rollout
        metrics = rollout_metrics(rollout, discrepancy, refills=self._refills)
        self._samples = shown_samples(task, step, rollout, discrepancy)
        self._tokens = None
        if self._writer.records(step):
            self._tokens = recorded_completions(
                rollout,
                task.train.problems,
                step_batch.rows,
                jax.device_get(recorded),
                exact=self._exact,
            )
            metrics |= leg_metrics(self._tokens, rollout.rows, step_batch.scored)
        return metrics

    def write(self, step: int) -> None:
        """Write what `read` found."""
        if self._samples:
            self._writer.write_samples(step, self._samples)
        if self._tokens is not None:
            self._writer.write_rollouts(step, self._tokens)


def shown_samples(
    task: Task,
    step: int,
    rollout: StepRollout,
    discrepancy: np.ndarray,
) -> list[dict[str, Any]]:
    """A few completions of a finished step for people, if they are due.

    The first of each of the first prompts: several completions of one prompt would say less.

    Args:
        task: the settings and the problems.
        step: finished steps.
        rollout: the step's completions and rewards.
        discrepancy: [B * G] mean of each completion of the batch.
    """
    settings = task.config.observe
    size = task.sampling.group_size
    if not settings.samples or (step - 1) % settings.samples_every_steps:
        return []
    samples = []
    for position, group in enumerate(rollout.groups[: settings.samples]):
        row = group * size
        problem = task.train.problems[rollout.problems[group]]
        sample = {
            "prompt": task.tokenizer.decode(rollout.episodes[row].prompt_ids),
            "completion": rollout.texts[row],
            "answer": problem.answer,
            "reward": float(rollout.scores.totals[row]),
            "rewards": rollout.scores.of_completion(row),
            "source": problem.source,
        }
        extra = rollout.scores.extra_of(row)
        if extra:
            sample["extra"] = extra
        sample["discrepancy_mean"] = float(discrepancy[position * size])
        samples.append(sample)
    return samples


def recorded_completions(
    rollout: StepRollout,
    problems: Sequence[Problem],
    rows: Sequence[Rows],
    recorded: RecordedTokens,
    *,
    exact: bool,
) -> list[dict[str, Any]]:
    """The completions of a batch, one dict each; completions without a used token are left out.

    Args:
        rollout: the step's completions and rewards.
        problems: the training problems.
        rows: the packed batch, [M, A, R, L] for each bucket.
        recorded: what the step returned of its tokens, on the host.
        exact: the rollout log-probs were replaced by the training stack's own.

    Returns:
        Columns as in `observe.rollouts`, without `step`.
    """
    size = len(rollout.episodes) // len(rollout.problems)
    count = len(rollout.rows)
    train_logprobs = _by_completion(rows, recorded.train_logprobs, count)
    if recorded.start_logprobs is not None:
        start_logprobs = _by_completion(rows, recorded.start_logprobs, count)
    if recorded.top_logprobs is not None:
        top_logprobs = _by_completion(rows, recorded.top_logprobs, count)

    completions = []
    for number, row in enumerate(rollout.rows.tolist()):
        if not len(train_logprobs[number]):
            continue
        episode = rollout.episodes[row]
        problem = int(rollout.problems[row // size])
        after = slice(episode.prompt_length, None)
        mask = episode.sampled_mask[after]
        train = _spread(train_logprobs[number], mask)
        completion = {
            "completion": number,
            "prompt_id": problem,
            "source": problems[problem].source,
            "prompt_token_ids": episode.prompt_ids,
            "token_ids": episode.token_ids[after],
            "mask": mask,
            "train_logprobs": train,
            "rollout_logprobs": train,
            "policy_versions": np.where(mask, episode.policy_versions[after], -1),
            "reward": float(rollout.scores.totals[row]),
            "advantage": float(recorded.advantages[number]),
        }
        if not exact:
            rollout_logprobs = np.where(mask, episode.rollout_logprobs[after], np.float32(0))
            completion["rollout_logprobs"] = rollout_logprobs
        if recorded.start_logprobs is not None:
            completion["start_logprobs"] = _spread(start_logprobs[number], mask)
        if recorded.top_logprobs is not None:
            completion["top"] = _packed(episode, top_logprobs[number], exact=exact)
        completions.append(completion)
    return completions


def _spread(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Values of the sampled tokens in the places of all, 0 elsewhere."""
    spread = np.zeros((len(mask), *values.shape[1:]), np.float32)
    spread[mask] = values
    return spread


def _packed(episode: Episode, train_logprobs: np.ndarray, *, exact: bool) -> str:
    """The engine's top-k tokens after the prompt, by `packed_top`; -1 where not sampled."""
    after = slice(episode.prompt_length, None)
    mask = episode.sampled_mask[after]
    ids = np.where(mask[:, None], episode.columns[TOP_IDS][after], -1)
    train = _spread(train_logprobs, mask)
    rollout = train if exact else episode.columns[TOP_LOGPROBS][after]
    return json.dumps(packed_top(ids, train, rollout))


def _by_completion(
    rows: Sequence[Rows], values: Sequence[np.ndarray], completions: int
) -> list[np.ndarray]:
    """The sampled tokens' values of each of M * N completions, each of which lies in one row."""
    numbers = []
    sampled = []
    mini_batches = len(rows[0].completion_mask)
    first = np.arange(mini_batches)[:, None, None, None] * (completions // mini_batches)
    for bucket, value in zip(rows, values, strict=True):
        mask = np.asarray(bucket.completion_mask)
        numbers.append((np.asarray(bucket.completion_index) + first)[mask])
        sampled.append(np.asarray(value)[mask])
    number = np.concatenate(numbers)
    order = np.argsort(number, kind="stable")
    bounds = np.searchsorted(number[order], np.arange(1, completions))
    return np.split(np.concatenate(sampled)[order], bounds)


def rollout_metrics(
    rollout: StepRollout, discrepancy: np.ndarray, *, refills: bool
) -> dict[str, float]:
    """Rewards, lengths, truncations, what could not be judged, and differences between sources.

    Args:
        rollout: the step's completions and rewards.
        discrepancy: [B * G] mean of each completion of the batch.
        refills: add the cost of dynamic sampling, and rewards over all that was sampled: over the
            batch they would be selected.
    """
    metrics = length_metrics(rollout.episodes, rollout.scores.grades)
    metrics |= reward_metrics(rollout.scores)
    metrics |= identical_metrics(rollout.episodes)

    usable = ~rollout.dropped
    if rollout.scores.sources is not None:
        sources = np.array(rollout.scores.sources)[rollout.rows]
        lengths = np.array([rollout.episodes[row].num_sampled for row in rollout.rows])
        in_batch = usable[rollout.rows]
        for source in sorted(set(sources[in_batch].tolist())):
            selected = in_batch & (sources == source)
            mean = discrepancy[selected].mean(dtype=np.float64)
            metrics[f"discrepancy/source/{source}/mean"] = float(mean)
            metrics[f"completion/source/{source}/length_mean"] = float(lengths[selected].mean())

    if refills:
        rewards = rollout.scores.totals.astype(np.float64)[usable]
        differing = rollout.differing
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


def length_metrics(episodes: Sequence[Episode], grades: Grades | None) -> dict[str, float]:
    """Lengths, truncations, and what the verifier could not read if it was asked."""
    metrics = {}
    if grades is not None:
        metrics = {
            "reward/verifier_timeouts": grades.timeouts,
            "reward/verifier_errors": grades.errors,
            "reward/verifier_over_budget": grades.over_budget,
            "reward/no_answer_fraction": grades.unparsed / max(1, grades.rewards.size),
        }

    lengths = [episode.num_sampled for episode in episodes]
    truncated = [episode.finish_reason == "length" for episode in episodes]
    p10, p25, p50, p75, p90 = np.percentile(lengths, QUANTILES).tolist()
    return metrics | {
        "completion/length_mean": float(np.mean(lengths)),
        "completion/length_min": min(lengths),
        "completion/length_p10": p10,
        "completion/length_p25": p25,
        "completion/length_p50": p50,
        "completion/length_p75": p75,
        "completion/length_p90": p90,
        "completion/length_max": max(lengths),
        "completion/truncated_fraction": float(np.mean(truncated)),
    }


def leg_metrics(
    completions: Sequence[Mapping[str, Any]], rows: np.ndarray, scored: Mapping[int, np.ndarray]
) -> dict[str, float]:
    """The legs (`observe.legs`) of the gap of completions that the engine scored in one pass.

    Args:
        completions: those of `recorded_completions`.
        rows: number of each completion of the batch among all that were sampled.
        scored: number of a completion -> the log-probs of its tokens, [T] float32 nats.

    Returns:
        Metrics; none if none of the completions was scored.
    """
    logprobs = []
    for completion in completions:
        row = int(rows[completion["completion"]])
        if row in scored:
            rollout = completion["rollout_logprobs"]
            train = completion["train_logprobs"]
            logprobs.append(np.stack([rollout, scored[row], train])[:, completion["mask"]])
    if not logprobs:
        return {}
    decoding, one_pass = legs_of(*np.concatenate(logprobs, axis=1))
    return {
        "mismatch/leg_decoding": decoding.mean,
        "mismatch/leg_one_pass": one_pass.mean,
        "mismatch/leg_decoding_share": decoding.share,
    }
