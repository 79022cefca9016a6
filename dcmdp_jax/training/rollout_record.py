"""Records and metrics of a step's completions: a few texts for people, the tokens with their
log-probs.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dcmdp_jax.data.episode import TOP_IDS, TOP_LOGPROBS, Episode, identical_metrics
from dcmdp_jax.data.lengths import QUANTILES
from dcmdp_jax.data.problems import Problem
from dcmdp_jax.observe.legs import legs_of
from dcmdp_jax.record import packed_top
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.rewards.scoring import reward_metrics
from dcmdp_jax.run.task import Task
from dcmdp_jax.training.rollout_sampler import StepRollout
from dcmdp_jax.types import Rows


def shown_samples(
    task: Task, step: int, rollout: StepRollout, discrepancy: np.ndarray
) -> list[dict[str, Any]]:
    """A few completions of a finished step for people, if they are due: the first of each of the
    first prompts.

    Several completions of one prompt would say less.

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
    rollout: StepRollout,
    problems: Sequence[Problem],
    rows: Sequence[Rows],
    recorded: Sequence[Any],
    *,
    exact: bool,
) -> list[dict[str, Any]]:
    """The completions of a batch, one dict each; completions without a used token are left out.

    Args:
        rollout: the step's completions and rewards.
        problems: the training problems.
        rows: the packed batch, [M, A, R, L] for each bucket.
        recorded: the arrays of `loss_terms.RECORDED`, None for one that the step does not return:
            log p of the tokens, like `rows`; that of the weights at the start of the step;
            advantages, [M * N] float32; log p of the engine's likeliest tokens, [M, A, R, L, k] for
            each bucket.
        exact: the rollout log-probs were replaced by the training stack's own.

    Returns:
        Columns as in `observe.rollouts`, without `step`.
    """
    size = len(rollout.episodes) // len(rollout.problems)
    chosen = rollout.rows.tolist()
    train_logprobs, start_logprobs, advantages, top_logprobs = recorded
    trained, started, listed = (
        None if each is None else _by_completion(rows, each, len(chosen))
        for each in (train_logprobs, start_logprobs, top_logprobs)
    )
    found = []
    for place, (row, train) in enumerate(zip(chosen, trained, strict=True)):
        if not len(train):
            continue
        episode = rollout.episodes[row]
        problem = int(rollout.problems[row // size])
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
                "rollout_logprobs": log_p
                if exact
                else np.where(mask, episode.rollout_logprobs[after], np.float32(0)),
                **({} if started is None else {"start_logprobs": log_now}),
                **({} if listed is None else {"top": _packed(episode, listed[place], exact=exact)}),
                "policy_versions": np.where(mask, episode.policy_versions[after], -1),
                "reward": float(rollout.scores.totals[row]),
                "advantage": float(advantages[place]),
            }
        )
    return found


def _packed(episode: Episode, train_logprobs: np.ndarray, *, exact: bool) -> str:
    """The engine's likeliest tokens after the prompt as `record.packed_top` has them, -1 where not
    sampled.
    """
    mask = episode.sampled_mask[episode.prompt_length :]
    ids, rollout = (
        episode.columns[name][episode.prompt_length :] for name in (TOP_IDS, TOP_LOGPROBS)
    )
    train = np.zeros(ids.shape, np.float32)
    train[mask] = train_logprobs
    return json.dumps(
        packed_top(np.where(mask[:, None], ids, -1), train, train if exact else rollout)
    )


def _by_completion(
    rows: Sequence[Rows], values: Sequence[np.ndarray], completions: int
) -> list[np.ndarray]:
    """The sampled tokens' values of each of M * N completions, in the order of its tokens; it lies
    in one row.
    """
    keys = []
    flat = []
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


def rollout_metrics(
    rollout: StepRollout, discrepancy: np.ndarray, *, refills: bool
) -> dict[str, float]:
    """Rewards, lengths, truncations, what the verifier could not read, and what differs between
    data sources.

    Args:
        rollout: the step's completions and rewards.
        discrepancy: [B * G] mean of each completion of the batch.
        refills: add the cost of dynamic sampling, and rewards over all that was sampled: over the
            batch they would be selected.
    """
    metrics = length_metrics(rollout.episodes, rollout.scores.grades) | reward_metrics(
        rollout.scores
    )
    metrics |= identical_metrics(rollout.episodes)
    usable = ~rollout.dropped
    if rollout.scores.sources is not None:
        sources = np.array(rollout.scores.sources)[rollout.rows]
        lengths = np.array([rollout.episodes[row].num_sampled for row in rollout.rows])
        for source in sorted(set(sources[usable[rollout.rows]].tolist())):
            mine = usable[rollout.rows] & (sources == source)
            metrics[f"discrepancy/source/{source}/mean"] = float(
                discrepancy[mine].mean(dtype=np.float64)
            )
            metrics[f"completion/source/{source}/length_mean"] = float(lengths[mine].mean())
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
    """Lengths, truncations, and what the verifier could not read if it was asked, by the names of
    metric_names.py.
    """
    lengths = [episode.num_sampled for episode in episodes]
    p10, p25, p50, p75, p90 = np.percentile(lengths, QUANTILES).tolist()
    judged = (
        {}
        if grades is None
        else {
            "reward/verifier_timeouts": grades.timeouts,
            "reward/verifier_errors": grades.errors,
            "reward/verifier_over_budget": grades.over_budget,
            "reward/no_answer_fraction": grades.unparsed / max(1, grades.rewards.size),
        }
    )
    return judged | {
        "completion/length_mean": float(np.mean(lengths)),
        "completion/length_min": min(lengths),
        "completion/length_p10": p10,
        "completion/length_p25": p25,
        "completion/length_p50": p50,
        "completion/length_p75": p75,
        "completion/length_p90": p90,
        "completion/length_max": max(lengths),
        "completion/truncated_fraction": float(
            np.mean([episode.finish_reason == "length" for episode in episodes])
        ),
    }


def leg_metrics(
    completions: Sequence[Mapping[str, Any]], rows: np.ndarray, scored: Mapping[int, np.ndarray]
) -> dict[str, float]:
    """The legs of the gap of the completions that the engine scored in one pass, see
    `observe.legs`; none without.

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
