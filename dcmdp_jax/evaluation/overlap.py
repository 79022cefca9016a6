"""Evaluation problems that the policy was trained on."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.errors import UserError

_RUN = 8
_SHARE = 0.5
_WORD = re.compile(r"[^\W_]+")
_SKIPPED = re.compile(r"[\s$]+")


class Overlap(NamedTuple):
    """A pair of an evaluation problem and a training problem.

    Attributes:
        problem: index of the evaluation problem.
        train_problem: index of the training problem.
        same_text: equal but for white space and dollar signs.
        share: share of the evaluation problem's runs of 8 words that the training problem has; 1 for the same text.
    """

    problem: int
    train_problem: int
    same_text: bool
    share: float


def find_overlap(prompts: Sequence[str], train_prompts: Sequence[str]) -> list[Overlap]:
    """Find training problems that are evaluation problems, or contain at least half of one.

    Half counts the runs of 8 consecutive words (letters or digits) of the evaluation problem. A problem of fewer
    than 8 words overlaps with the same text alone. Some near matches ask a changed question.

    Args:
        prompts: texts of the evaluation problems.
        train_prompts: texts of the training problems.

    Returns:
        Pairs by evaluation problem, then training problem.
    """
    texts: dict[str, list[int]] = defaultdict(list)
    runs: dict[tuple[str, ...], list[int]] = defaultdict(list)
    totals = []
    for index, prompt in enumerate(prompts):
        texts[_SKIPPED.sub("", prompt)].append(index)
        own = _runs(prompt)
        totals.append(len(own))
        for run in own:
            runs[run].append(index)
    found = []
    for train_index, prompt in enumerate(train_prompts):
        same = set(texts.get(_SKIPPED.sub("", prompt), ()))
        shared = Counter(index for run in _runs(prompt) for index in runs.get(run, ()))
        found += [Overlap(index, train_index, True, 1.0) for index in same]
        found += [
            Overlap(index, train_index, False, count / totals[index])
            for index, count in shared.items()
            if index not in same and count >= _SHARE * totals[index]
        ]
    return sorted(found)


def leave_out(prompts: EncodedPrompts, overlaps: Sequence[Overlap], *, task: str) -> EncodedPrompts:
    """The problems of a task that are in no overlap.

    Raises:
        UserError: if none is left.
    """
    kept = sorted(set(range(len(prompts.problems))) - {overlap.problem for overlap in overlaps})
    if not kept:
        raise UserError(f"--overlap=drop: every problem of {task} is in config.task.train, nothing is left to evaluate")
    return dataclasses.replace(
        prompts,
        problems=[prompts.problems[place] for place in kept],
        token_ids=[prompts.token_ids[place] for place in kept],
    )


def _runs(prompt: str) -> set[tuple[str, ...]]:
    words = _WORD.findall(prompt.lower())
    return {tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1)}
