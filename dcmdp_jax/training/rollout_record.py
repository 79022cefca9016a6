"""Records of a step's completions: a few texts for people, and the tokens with their log-probs."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from dcmdp_jax.data.episode import TOP_IDS, TOP_LOGPROBS, Episode
from dcmdp_jax.data.problems import Problem
from dcmdp_jax.record import packed_top
from dcmdp_jax.run.task import Task
from dcmdp_jax.training.rollout_sampler import StepRollout
from dcmdp_jax.types import Rows


def shown_samples(task: Task, step: int, rollout: StepRollout, discrepancy: np.ndarray) -> list[dict[str, Any]]:
    """A few completions of a finished step for people, if they are due: the first of each of the first prompts.

    Several completions of one prompt would say less.

    Args:
        task: the settings and the problems.
        step: finished steps.
        rollout: the step's completions and rewards.
        discrepancy: [B * G] mean of each completion of the batch.
    """
    settings, size = task.config.observe, task.sampling.group_size
    if not settings.samples or (step - 1) % settings.samples_every_steps:
        return []
    return [
        {
            "prompt": task.tokenizer.decode(rollout.episodes[group * size].prompt_ids),
            "completion": rollout.texts[group * size],
            "answer": task.train.problems[rollout.problems[group]].answer,
            "reward": float(rollout.scores.totals[group * size]),
            "rewards": rollout.scores.of_completion(group * size),
            "source": task.train.problems[rollout.problems[group]].source,
            **({"extra": extra} if (extra := rollout.scores.extra_of(group * size)) else {}),
            "discrepancy_mean": float(discrepancy[place * size]),
        }
        for place, group in enumerate(rollout.groups[: settings.samples])
    ]


def recorded_completions(
    rollout: StepRollout, problems: Sequence[Problem], rows: Sequence[Rows], recorded: Sequence[Any], *, exact: bool
) -> list[dict[str, Any]]:
    """The completions of a batch, one dict each; completions without a used token are left out.

    Args:
        rollout: the step's completions and rewards.
        problems: the training problems.
        rows: the packed batch, [M, A, R, L] for each bucket.
        recorded: the arrays of `step_metrics.RECORDED`, None for one that the step does not return: log p of the
            tokens, like `rows`; that of the weights at the start of the step; advantages, [M * N] float32; log p of
            the engine's likeliest tokens, [M, A, R, L, k] for each bucket.
        exact: the rollout log-probs were replaced by the training stack's own.

    Returns:
        Columns as in `observe.rollouts`, without `step`.
    """
    size, chosen = len(rollout.episodes) // len(rollout.problems), rollout.rows.tolist()
    train_logprobs, start_logprobs, advantages, top_logprobs = recorded
    trained, started, listed = (
        None if each is None else _by_completion(rows, each, len(chosen))
        for each in (train_logprobs, start_logprobs, top_logprobs)
    )
    found = []
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
