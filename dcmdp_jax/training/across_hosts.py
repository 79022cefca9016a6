"""Data that the processes of a run exchange: the completions of a step with their rewards, and evaluations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dcmdp_jax.data.episode import Episode
from dcmdp_jax.evaluation.average import VERIFIER_COUNTS, EvaluationResult
from dcmdp_jax.parallel.hosts import Hosts
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.rewards.protocol import Problem
from dcmdp_jax.rewards.scoring import BatchScores

_COUNTS = ("errors", "timeouts", "over_budget", "unparsed")
_PER_TOKEN = {"token_ids": np.int32, "sampled_mask": bool, "rollout_logprobs": np.float32, "policy_versions": np.int32}


def gather_rollout(
    hosts: Hosts,
    episodes: list[Episode],
    texts: list[str],
    scores: BatchScores,
    *,
    first_prompt: int,
    problems: Sequence[Problem],
    routed_shape: tuple[int, int] | None = None,
) -> tuple[list[Episode], list[str], BatchScores]:
    """Collective: the episodes, texts and scores of all processes, in prompt order.

    Args:
        hosts: the processes.
        episodes, texts, scores: of this process's prompts.
        first_prompt: number of its first prompt in the step.
        problems: of every completion of the step.
        routed_shape: layers and k of the episodes' routed experts; None if they have none.
    """
    if hosts.count == 1:
        return episodes, texts, scores
    arrays = hosts.gather(
        {
            "episodes": _episode_arrays(episodes, first_prompt, routed_shape),
            "texts": _text_arrays(texts),
            "scores": _score_arrays(scores),
        }
    )
    sources = None if scores.sources is None else tuple(problem.source for problem in problems)
    return _episodes(arrays["episodes"]), _texts(**arrays["texts"]), _scores(arrays["scores"], sources)


def gather_evaluation(hosts: Hosts, result: EvaluationResult) -> EvaluationResult:
    """Collective: one result of all problems, in order, from those of each process's share."""
    if hosts.count == 1:
        return result
    fields = dataclasses.asdict(result)
    counts = {name: np.array([fields[name]]) for name in VERIFIER_COUNTS}
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    found = hosts.gather({"arrays": arrays, "counts": counts})
    summed = {name: int(value.sum()) for name, value in found["counts"].items()}
    return dataclasses.replace(result, **found["arrays"], **summed)


def _episode_arrays(
    episodes: list[Episode], first_prompt: int, routed_shape: tuple[int, int] | None
) -> dict[str, np.ndarray]:
    routed = {}
    if routed_shape is not None:
        experts = [episode.routed_experts for episode in episodes]
        routed["routed_experts"] = np.concatenate([np.zeros((0, *routed_shape), np.int16), *experts])
    return {
        **routed,
        "lengths": np.array([len(episode.token_ids) for episode in episodes], np.int64),
        "groups": np.array([first_prompt + episode.group for episode in episodes], np.int64),
        "members": np.array([episode.member for episode in episodes], np.int64),
        "truncated": np.array([episode.finish_reason == "length" for episode in episodes], bool),
        **{
            # With an empty array first: there may be no episode.
            name: np.concatenate([np.zeros(0, dtype), *(getattr(episode, name) for episode in episodes)])
            for name, dtype in _PER_TOKEN.items()
        },
    }


def _episodes(arrays: dict[str, np.ndarray]) -> list[Episode]:
    ends = np.cumsum(arrays["lengths"])
    return [
        Episode(
            **{name: arrays[name][end - length : end] for name in (*_PER_TOKEN, "routed_experts") if name in arrays},
            group=int(group),
            member=int(member),
            finish_reason="length" if truncated else "stop",
        )
        for end, length, group, member, truncated in zip(
            ends, arrays["lengths"], arrays["groups"], arrays["members"], arrays["truncated"], strict=True
        )
    ]


def _text_arrays(texts: list[str]) -> dict[str, np.ndarray]:
    # A text that was decoded from part of a character may hold a lone surrogate.
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return {
        "lengths": np.array([len(text) for text in encoded], np.int64),
        "characters": np.frombuffer(b"".join(encoded), np.uint8),
    }


def _texts(lengths: np.ndarray, characters: np.ndarray) -> list[str]:
    return [
        characters[end - length : end].tobytes().decode("utf-8", "surrogatepass")
        for end, length in zip(np.cumsum(lengths), lengths, strict=True)
    ]


def _score_arrays(scores: BatchScores) -> dict[str, Any]:
    grades = None
    if scores.grades is not None:
        counts = [getattr(scores.grades, name) for name in _COUNTS]
        grades = {"rewards": scores.grades.rewards, "counts": np.array([counts])}
    return {
        "totals": scores.totals,
        "values": scores.values,
        "failed": {name: np.array([count]) for name, count in scores.failed.items()},
        "grades": grades,
    }


def _scores(arrays: dict[str, Any], sources: tuple[str, ...] | None) -> BatchScores:
    grades = arrays["grades"]
    if grades is not None:
        counts = dict(zip(_COUNTS, grades["counts"].sum(axis=0).tolist(), strict=True))
        grades = Grades(rewards=grades["rewards"], **counts)
    return BatchScores(
        totals=arrays["totals"],
        values=arrays["values"],
        failed={name: int(counts.sum()) for name, counts in arrays["failed"].items()},
        grades=grades,
        sources=sources,
    )
