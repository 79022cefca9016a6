"""The held-out tasks of a run: names, problems, K of each, what is recorded with avg@K, and
overlaps with training.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
# Words of a run, and the share of a problem's runs that is an overlap.
_RUN = 8
_SHARE = 0.5
_WORD = re.compile(r"[^\W_]+")
_SKIPPED = re.compile(r"[\s$]+")


class HeldOutTask(NamedTuple):
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
    if weighted := [location for location in locations if is_weighted(location)]:
        raise ArgumentError(
            "task",
            f"got {shorten(weighted[0])}; weights are for training, K of each task is in `samples`",
        )
    if len(samples) not in (0, 1, len(locations)):
        raise ArgumentError(
            "samples",
            f"got {len(samples)} numbers for {len(locations)} tasks; give one for all, one for "
            "each, or none",
        )
    names = location_names(locations)
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ArgumentError("task", f"two tasks are called {shorten(repeated[0])}; rename one")
    each = samples if len(samples) == len(locations) else samples * len(locations)
    each = each or tuple(paper_samples(name) for name in names)
    return [HeldOutTask(*one) for one in zip(names, locations, each, strict=True)]


def held_out_metrics(result: EvaluationResult) -> dict[str, float]:
    """Metrics of a task: avg@K, pass@K, interval, mean of each reward where there are several, what
    was logged.
    """
    interval = result.interval(seed=0) if len(result.scores) > 1 else ()
    task = result.task.removeprefix("eval/")
    valued = {name: values[np.isfinite(values)] for name, values in result.values.items()}
    means = {
        name: float(values.mean(dtype=np.float64)) for name, values in valued.items() if values.size
    }
    return {
        f"eval/{task}/avg@{result.samples}": result.average,
        f"eval/{task}/pass@{result.samples}": float(result.pass_at[-1]),
        **{f"eval_reward/{task}/{name}": mean for name, mean in means.items()},
        **{
            f"eval_logged/{task}/{name}": total / count
            for name, (total, count) in result.logged.items()
        },
        **{
            f"eval_interval/{task}/{name}": bound
            for name, bound in zip(("low", "high"), interval, strict=False)
        },
    }


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
            "place": place,
            "prompt": tokenizer.decode(prompts.token_ids[place]),
            "completion": result.texts[place, 0],
            "answer": prompts.problems[place].answer,
            "reward": float(result.scores[place, 0]),
        }
        for place in range(min(_SAMPLES, len(result.scores)))
    ]


class Overlap(NamedTuple):
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
    places = defaultdict(list)
    for index, prompt in enumerate(prompts):
        for piece in (*runs[index], _SKIPPED.sub("", prompt)):
            places[piece].append(index)
    found = []
    for train_index, prompt in enumerate(train_prompts):
        same = places.get(text := _SKIPPED.sub("", prompt), ())
        shared = Counter(
            index for piece in (*_runs(prompt), text) for index in places.get(piece, ())
        )
        shares = {
            index: 1.0 if index in same else count / len(runs[index])
            for index, count in shared.items()
        }
        found += [
            Overlap(index, train_index, share) for index, share in shares.items() if share >= _SHARE
        ]
    return sorted(found)


def training_overlaps(held_out: HeldOut, train: str) -> dict[str, list[Overlap]]:
    """Problems of each task that training had, by the task's name; `train_problem` is the row in
    its file.

    Args:
        held_out: the tasks.
        train: the setting `task.train`, the problems that the policy was trained on.

    Raises:
        UserError: in one line, for training problems that can't be read.
    """
    with naming("config.task.train"):
        parts = parse_mixture(train)
        problems = [
            each
            for part in parts
            for each in load_problems(part.location, on_bad_row="skip", answers="unused")
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
        places = sorted(
            set(range(len(prompts.problems))) - {overlap.problem for overlap in overlaps[task.name]}
        )
        if not places:
            raise UserError(
                f"--overlap=drop: every problem of {task.name} is in config.task.train, nothing "
                "is left to evaluate"
            )
        kept.append((task, prompts.select(places)))
    return tuple(kept)


def describe_overlaps(
    results: Sequence[EvaluationResult],
    overlaps: Mapping[str, Sequence[Overlap]],
    train: str,
    *,
    dropped: bool,
) -> Iterator[str]:
    """A line for each task that shares problems with training: how many, and its score without
    them.

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
        alone = shown_score(result, float(result.scores[rest].mean())) if rest else "no problem"
        scores = (
            f"; avg@{result.samples} is {shown_score(result, result.average)}, without them {alone}"
        )
        yield (
            f"overlap of {result.task} with {train}: {len(shared)} "
            f"problems{', left out' if dropped else scores}"
        )


def _runs(prompt: str) -> set[tuple[str, ...]]:
    words = _WORD.findall(prompt.lower())
    return {tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1)}
