"""Evaluation problems that the policy was trained on."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dcmdp_jax.data.mixtures import parse_mixture
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.errors import UserError, naming
from dcmdp_jax.evaluation.average import EvaluationResult
from dcmdp_jax.evaluation.held_out import HeldOut
from dcmdp_jax.evaluation.table import shown_score

_RUN = 8
_SHARE = 0.5
_WORD = re.compile(r"[^\W_]+")
_SKIPPED = re.compile(r"[\s$]+")


class Overlap(NamedTuple):
    """A pair of an evaluation problem and a training problem.

    Attributes:
        problem: index of the evaluation problem.
        train_problem: index of the training problem.
        share: share of the evaluation problem's runs of 8 words that the training problem has; 1 for the same text.
    """

    problem: int
    train_problem: int
    share: float


def find_overlap(prompts: Sequence[str], train_prompts: Sequence[str]) -> list[Overlap]:
    """Find training problems that are evaluation problems, or contain at least half of one.

    Half counts the runs of 8 consecutive words (letters or digits) of the evaluation problem. A problem of fewer
    than 8 words overlaps with the same text alone, but for white space and dollar signs. Some near matches ask a
    changed question.

    Args:
        prompts: texts of the evaluation problems.
        train_prompts: texts of the training problems.

    Returns:
        Pairs by evaluation problem, then training problem.
    """
    runs, places = [_runs(prompt) for prompt in prompts], defaultdict(list)
    for index, prompt in enumerate(prompts):
        for piece in (*runs[index], _SKIPPED.sub("", prompt)):
            places[piece].append(index)
    found = []
    for train_index, prompt in enumerate(train_prompts):
        same = places.get(text := _SKIPPED.sub("", prompt), ())
        shared = Counter(index for piece in (*_runs(prompt), text) for index in places.get(piece, ()))
        shares = {index: 1.0 if index in same else count / len(runs[index]) for index, count in shared.items()}
        found += [Overlap(index, train_index, share) for index, share in shares.items() if share >= _SHARE]
    return sorted(found)


def training_overlaps(held_out: HeldOut, train: str) -> dict[str, list[Overlap]]:
    """Problems of each task that training had, by the task's name; `train_problem` is the row in its file.

    Args:
        held_out: the tasks.
        train: the setting `task.train`, the problems that the policy was trained on.

    Raises:
        UserError: in one line, for training problems that can't be read.
    """
    with naming("config.task.train"):
        parts = parse_mixture(train)
        problems = [
            each for part in parts for each in load_problems(part.location, on_bad_row="skip", answers="unused")
        ]
    texts = [problem.prompt for problem in problems]
    return {
        task.name: [
            overlap._replace(train_problem=problems[overlap.train_problem].index)
            for overlap in find_overlap([problem.prompt for problem in prompts.problems], texts)
        ]
        for task, prompts in held_out
    }


def leave_out(held_out: HeldOut, overlaps: Mapping[str, Sequence[Overlap]]) -> HeldOut:
    """The problems of each task that are in no overlap.

    Raises:
        UserError: if none is left of a task.
    """
    kept = []
    for task, prompts in held_out:
        places = sorted(set(range(len(prompts.problems))) - {overlap.problem for overlap in overlaps[task.name]})
        if not places:
            raise UserError(
                f"--overlap=drop: every problem of {task.name} is in config.task.train, nothing is left to evaluate"
            )
        problems, ids = ([each[place] for place in places] for each in (prompts.problems, prompts.token_ids))
        kept.append((task, prompts._replace(problems=problems, token_ids=ids)))
    return tuple(kept)


def describe_overlaps(
    results: Sequence[EvaluationResult], overlaps: Mapping[str, Sequence[Overlap]], train: str, *, dropped: bool
) -> Iterator[str]:
    """A line for each task that shares problems with training: how many, and its score without them.

    Args:
        results: of each task.
        overlaps: see `training_overlaps`.
        train: the setting `task.train`.
        dropped: the problems were left out.
    """
    for result in results:
        shared = {overlap.problem for overlap in overlaps.get(result.task, ())}
        if not shared:
            continue
        rest = [place for place in range(len(result.scores)) if place not in shared]
        alone = shown_score(result, result.select(rest).average) if rest else "no problem"
        scores = f"; avg@{result.samples} is {shown_score(result, result.average)}, without them {alone}"
        yield f"overlap of {result.task} with {train}: {len(shared)} problems{', left out' if dropped else scores}"


def _runs(prompt: str) -> set[tuple[str, ...]]:
    words = _WORD.findall(prompt.lower())
    return {tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1)}
