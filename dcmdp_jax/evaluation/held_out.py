"""The held-out tasks of a run: names, problems, K, metrics, and overlaps with training."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dcmdp_jax.data.mixtures import is_weighted, location_names, parse_mixture, split_locations
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.errors import ArgumentError, UserError, naming, shorten
from dcmdp_jax.evaluation.average import EvaluationResult
from dcmdp_jax.evaluation.table import paper_samples, shown_score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAMPLES = 10
"""Held-out completions that are kept of each evaluation, for people."""
_RUN = 8
"""Words of a run. Ours."""
_SHARE = 0.5
"""Share of a problem's runs that is an overlap. Ours."""
_WORD = re.compile(r"[^\W_]+")
_SKIPPED = re.compile(r"[\s$]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutTask:
    """One of the tasks of `evaluation.task`.

    Attributes:
        name: in the metrics, "aime24" for a file aime24.jsonl.
        location: place of its problems.
        samples: K of avg@K.
    """

    name: str
    location: str
    samples: int


HeldOut = tuple[tuple[HeldOutTask, EncodedPrompts], ...]
"""Tasks to evaluate on, each with its encoded problems."""


def held_out_tasks(task: str, samples: tuple[int, ...]) -> list[HeldOutTask]:
    """The tasks of the settings `evaluation.task` and `evaluation.samples`, in order.

    Args:
        task: locations, joined by commas.
        samples: K of each task, or one for all; empty for the paper's of its benchmarks and 8 of
            others.

    Raises:
        UserError: for an empty location, two tasks of one name, or numbers that don't fit the
            tasks.
    """
    locations = split_locations(task)
    if not all(locations):
        raise ArgumentError("task", f"got {shorten(task)}, an empty name is no task")
    for location in locations:
        if is_weighted(location):
            raise ArgumentError(
                "task",
                f"got {shorten(location)}; weights are for training, K of each task is in "
                "`samples`",
            )
    if len(samples) not in (0, 1, len(locations)):
        raise ArgumentError(
            "samples",
            f"got {len(samples)} numbers for {len(locations)} tasks; give one for all, one for "
            "each, or none",
        )
    names = location_names(locations)
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError("task", f"two tasks are called {shorten(name)}; rename one")

    if not samples:
        samples = tuple(paper_samples(name) for name in names)
    elif len(samples) == 1:
        samples *= len(names)
    return [
        HeldOutTask(name=name, location=location, samples=count)
        for name, location, count in zip(names, locations, samples, strict=True)
    ]


def held_out_metrics(result: EvaluationResult) -> dict[str, float]:
    """Metrics of a task: avg@K, pass@K, interval, means of several rewards, logged values."""
    task = result.task.removeprefix("eval/")
    metrics = {
        f"eval/{task}/avg@{result.samples}": result.average,
        f"eval/{task}/pass@{result.samples}": result.pass_at[-1],
    }
    for name, values in result.values.items():
        finite = values[np.isfinite(values)]
        if finite.size:
            metrics[f"eval_reward/{task}/{name}"] = finite.mean(dtype=np.float64)
    for name, (total, count) in result.logged.items():
        metrics[f"eval_logged/{task}/{name}"] = total / count
    if len(result.scores) > 1:
        low, high = result.interval(seed=0)
        metrics[f"eval_interval/{task}/low"] = low
        metrics[f"eval_interval/{task}/high"] = high
    return metrics


def held_out_samples(
    result: EvaluationResult, prompts: EncodedPrompts, tokenizer: "PreTrainedTokenizerBase"
) -> list[dict[str, Any]]:
    """The first completion of each of a task's first problems, for people.

    Args:
        result: result on all problems of the task.
        prompts: the problems.
        tokenizer: tokenizer of their token ids.
    """
    return [
        {
            "task": result.task.removeprefix("eval/"),
            "place": index,
            "prompt": tokenizer.decode(prompts.token_ids[index]),
            "completion": result.texts[index, 0],
            "answer": prompts.problems[index].answer,
            "reward": float(result.scores[index, 0]),
        }
        for index in range(min(_SAMPLES, len(result.scores)))
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Overlap:
    """A pair of an evaluation problem and a training problem.

    Attributes:
        problem: index of the evaluation problem.
        train_problem: index of the training problem.
        share: share of the evaluation problem's runs of 8 words that the training problem has; 1
            for the same text.
    """

    problem: int
    train_problem: int
    share: float


def find_overlap(prompts: Sequence[str], train_prompts: Sequence[str]) -> list[Overlap]:
    """Find training problems that are evaluation problems, or contain at least half of one.

    Half counts the runs of 8 consecutive words (letters or digits) of the evaluation problem. A
    problem of fewer than 8 words overlaps with the same text alone, but for white space and dollar
    signs. Some near matches ask a changed question.

    Args:
        prompts: texts of the evaluation problems.
        train_prompts: texts of the training problems.

    Returns:
        Pairs by evaluation problem, then training problem.
    """
    runs = [_runs(prompt) for prompt in prompts]
    problems_with = defaultdict(list)
    for index, prompt in enumerate(prompts):
        for piece in (*runs[index], _SKIPPED.sub("", prompt)):
            problems_with[piece].append(index)

    overlaps = []
    for train_index, prompt in enumerate(train_prompts):
        text = _SKIPPED.sub("", prompt)
        same_text = problems_with.get(text, ())
        shared_runs = Counter()
        for piece in (*_runs(prompt), text):
            shared_runs.update(problems_with.get(piece, ()))
        for index, count in shared_runs.items():
            share = 1.0 if index in same_text else count / len(runs[index])
            if share >= _SHARE:
                overlaps.append(Overlap(problem=index, train_problem=train_index, share=share))
    return sorted(overlaps)


def training_overlaps(held_out: HeldOut, train: str) -> dict[str, list[Overlap]]:
    """Problems of each task that training had, by the task's name.

    Their `train_problem` is the row in its file.

    Args:
        held_out: the tasks.
        train: the setting `task.train`, the problems that the policy was trained on.

    Raises:
        UserError: in one line, for training problems that can't be read.
    """
    train_problems = []
    with naming("config.task.train"):
        for component in parse_mixture(train):
            train_problems += load_problems(component.location, on_bad_row="skip", answers="unused")
    train_texts = [problem.prompt for problem in train_problems]

    overlaps = {}
    for task, prompts in held_out:
        texts = [problem.prompt for problem in prompts.problems]
        pairs = []
        for pair in find_overlap(texts, train_texts):
            row = train_problems[pair.train_problem].index
            pairs.append(dataclasses.replace(pair, train_problem=row))
        overlaps[task.name] = pairs
    return overlaps


def leave_out(held_out: HeldOut, overlaps: Mapping[str, Sequence[Overlap]]) -> HeldOut:
    """The problems of each task that are in no overlap.

    Raises:
        UserError: if none is left of a task.
    """
    remaining = []
    for task, prompts in held_out:
        shared = {overlap.problem for overlap in overlaps[task.name]}
        indices = [index for index in range(len(prompts.problems)) if index not in shared]
        if not indices:
            raise UserError(
                f"--overlap=drop: every problem of {task.name} is in config.task.train, nothing "
                "is left to evaluate"
            )
        remaining.append((task, prompts.select(indices)))
    return tuple(remaining)


def describe_overlaps(
    results: Sequence[EvaluationResult],
    overlaps: Mapping[str, Sequence[Overlap]],
    train: str,
    *,
    dropped: bool,
) -> Iterator[str]:
    """A line for each task that shares problems with training: how many, and the score without.

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
        details = ", left out"
        if not dropped:
            others = [index for index in range(len(result.scores)) if index not in shared]
            score = "no problem"
            if others:
                score = shown_score(result, float(result.scores[others].mean()))
            details = (
                f"; avg@{result.samples} is {shown_score(result, result.average)}, without them "
                f"{score}"
            )
        yield f"overlap of {result.task} with {train}: {len(shared)} problems{details}"


def _runs(prompt: str) -> set[tuple[str, ...]]:
    words = _WORD.findall(prompt.lower())
    return {tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1)}
