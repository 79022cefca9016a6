"""The held-out tasks of a run: their names, their problems, K of each, and what is recorded with avg@K."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dcmdp_jax.data.mixtures import is_weighted, location_names, split_locations
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.errors import ArgumentError, shorten
from dcmdp_jax.evaluation.average import EvaluationResult
from dcmdp_jax.evaluation.table import paper_samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAMPLES = 10
"""Held-out completions that are kept of each evaluation, for people."""


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
        samples: K of each task, or one for all; empty for the paper's of its benchmarks and 8 of others.

    Raises:
        UserError: for an empty location, two tasks of one name, or numbers that don't fit the tasks.
    """
    locations = split_locations(task)
    if not all(locations):
        raise ArgumentError("task", f"got {shorten(task)}, an empty name is no task")
    if weighted := [location for location in locations if is_weighted(location)]:
        raise ArgumentError(
            "task", f"got {shorten(weighted[0])}; weights are for training, K of each task is in `samples`"
        )
    if len(samples) not in (0, 1, len(locations)):
        raise ArgumentError(
            "samples", f"got {len(samples)} numbers for {len(locations)} tasks; give one for all, one for each, or none"
        )
    names = location_names(locations)
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ArgumentError("task", f"two tasks are called {shorten(repeated[0])}; rename one")
    each = samples if len(samples) == len(locations) else samples * len(locations)
    each = each or tuple(paper_samples(name) for name in names)
    return [HeldOutTask(*one) for one in zip(names, locations, each, strict=True)]


def held_out_metrics(result: EvaluationResult) -> dict[str, float]:
    """Metrics of a task: avg@K, pass@K, interval, mean of each reward where there are several, what was logged."""
    interval = result.interval(seed=0) if len(result.scores) > 1 else ()
    task = result.task.removeprefix("eval/")
    valued = {name: values[np.isfinite(values)] for name, values in result.values.items()}
    means = {name: float(values.mean(dtype=np.float64)) for name, values in valued.items() if values.size}
    return {
        f"eval/{task}/avg@{result.samples}": result.average,
        f"eval/{task}/pass@{result.samples}": float(result.pass_at[-1]),
        **{f"eval_reward/{task}/{name}": mean for name, mean in means.items()},
        **{f"eval_logged/{task}/{name}": total / count for name, (total, count) in result.logged.items()},
        **{f"eval_interval/{task}/{name}": bound for name, bound in zip(("low", "high"), interval, strict=False)},
    }


def held_out_samples(
    result: EvaluationResult, prompts: EncodedPrompts, tokenizer: PreTrainedTokenizerBase
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
