"""Scores of a policy in the layout of the paper's result tables, and as records for JSON."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import EvaluationResult
from dcmdp_jax.evaluation.estimators import t_half_width
from dcmdp_jax.inputs import read_json_object
from dcmdp_jax.number_format import number, text_table

_BENCHMARKS = {
    "aime24": ("AIME24", 32),
    "aime25": ("AIME25", 32),
    "amc23": ("AMC23", 32),
    "math500": ("MATH-500", 4),
    "minerva": ("Minerva", 4),
    "olympiadbench": ("Olympiad", 4),
}
"""Task name -> heading of its column and K of the paper's avg@K (section 6.1), in the order of the
paper's columns.
"""


def paper_samples(task: str) -> int:
    """K of avg@K: the paper's for its benchmarks, 8 for any other task.

    Args:
        task: name, a benchmark's in any case.
    """
    return _BENCHMARKS.get(task.lower(), (task, 8))[1]


def plain_average(results: Sequence[EvaluationResult]) -> float:
    """The tables' Avg: the mean of the avg@K of one task or more, each task counted once whatever
    its size.
    """
    return math.fsum(result.average for result in results) / len(results)


def format_table(method: str, results: Sequence[EvaluationResult], *, seed: int = 0) -> str:
    """The paper's table as text: one row of avg@K in percent, and beneath it what the numbers rest
    on.

    Averages of a sum of rewards that leaves 0 .. 1 are no shares: they are plain numbers.

    The benchmarks stand in the paper's order, other tasks after them under their own names, Avg
    last. Avg is the mean of the columns that are there, unrounded: six benchmarks give the paper's.

    Args:
        method: label of the row.
        results: one for each task, at least one.
        seed: seed of the bootstrap.

    Returns:
        Aligned lines; beneath the scores K, the standard error and the 95% bootstrap interval over
        problems, unbiased pass@k for powers of two and pass@K in percent, the shares of truncated
        completions and of those without an answer in percent, the mean length in tokens, and how
        many answers the verifier gave up on.
    """
    ordered = sorted(results, key=lambda result: _place(result.task))
    average = (_percent if all(map(_is_share, ordered)) else number)(plain_average(ordered))
    rows = [["Method", *(column_name(result.task) for result in ordered), "Avg"]]
    rows.append([method, *(shown_score(result, result.average) for result in ordered), average])
    powers = [
        2**power for power in range(1, 12) if 2**power < max(result.samples for result in ordered)
    ]
    columns = []
    for result in ordered:
        found = {
            "K": str(result.samples),
            "standard error": shown_score(result, result.standard_error),
        }
        found |= zip(
            ("95% from", "95% to"),
            (shown_score(result, x) for x in result.interval(seed=seed)),
            strict=True,
        )
        found |= {
            f"pass@{k}": _percent(result.pass_at[k - 1]) if k <= result.samples else "-"
            for k in powers
        }
        found |= {
            "pass@K": _percent(result.pass_at[-1]),
            "truncated %": _percent(result.truncated.mean()),
        }
        found |= {
            "no answer %": _percent(result.unparsed.mean()),
            "mean length": f"{result.length_mean:.1f}",
        }
        columns.append(
            found | {name.replace("_", " "): str(count) for name, count in result.unjudged.items()}
        )
    rows += [[name, *(column[name] for column in columns), ""] for name in columns[0]]
    return _align(rows, rules_after=(0, 1))


def to_record(result: EvaluationResult, *, seed: int = 0) -> dict[str, Any]:
    """One task's scores with JSON types; a standard error or interval that one problem can't give
    is None.

    `pass_at` holds unbiased pass@k for k = 1 .. K, `problem_averages` each problem's own avg@K, in
    the order the problems were asked. `seed` is the bootstrap's.
    """
    interval = result.interval(seed=seed)
    return {
        "column": column_name(result.task),
        "problems": len(result.scores),
        "samples": result.samples,
        "average": result.average,
        "standard_error": result.standard_error if math.isfinite(result.standard_error) else None,
        "interval": None if math.isnan(interval[0]) else list(interval),
        "pass_at_k": float(result.pass_at[-1]),
        "pass_at": result.pass_at.tolist(),
        "truncated": int(result.truncated.sum()),
        "unparsed": int(result.unparsed.sum()),
        "truncated_fraction": float(result.truncated.mean()),
        "unparsed_fraction": float(result.unparsed.mean()),
        "length_mean": result.length_mean,
        **result.unjudged,
        "problem_averages": result.problem_averages.tolist(),
    }


class Scores(NamedTuple):
    """Scores of one evaluation for a table over runs.

    Attributes:
        method: label of the row.
        averages: task name -> avg@K.
        samples: task name -> K.
    """

    method: str
    averages: dict[str, float]
    samples: dict[str, int]


def read_scores(path: Path) -> Scores:
    """Read what `format_comparison` needs from a JSON file of `dcmdp evaluate`.

    Raises:
        UserError: if the file is no such record.
        OSError: if it can't be read.
    """
    record = read_json_object(path)
    try:
        tasks = dict(record["tasks"])
        averages = {name: float(task["average"]) for name, task in tasks.items()}
        return Scores(
            str(record["method"]),
            averages,
            {name: int(task["samples"]) for name, task in tasks.items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: no evaluation that dcmdp evaluate wrote ({error!r})") from None


def format_comparison(runs: Sequence[Scores]) -> str:
    """One table over methods and runs in the paper's layout: avg@K in percent, the best of each
    column with a star.

    Runs of one method are one row: the mean of their scores, and with several runs half of its 95%
    t interval. Avg is the mean of the columns, run by run.

    Args:
        runs: at least one.

    Raises:
        UserError: if two differ in their tasks or in K.
    """
    first = runs[0]
    for run in runs[1:]:
        if run.samples != first.samples:
            raise UserError(
                f"{first.method} and {run.method}: one table needs the same tasks and K of each, "
                f"got {first.samples} and {run.samples}"
            )
    tasks = sorted(first.averages, key=_place)
    values: dict[str, list[list[float]]] = {}
    for run in runs:
        columns = [run.averages[task] for task in tasks]
        values.setdefault(run.method, []).append([*columns, math.fsum(columns) / len(columns)])
    shares = [
        all(0 <= value <= 1 for value in column)
        for column in zip(*sum(values.values(), []), strict=True)
    ]
    means = {method: np.mean(each, axis=0) for method, each in values.items()}
    best = np.max(list(means.values()), axis=0)
    rows = [["Method", *map(column_name, tasks), "Avg"]]
    for method, each in values.items():
        cells = [f"{method} ({len(each)} runs)" if len(each) > 1 else method]
        for mean, column, top, share in zip(
            means[method], zip(*each, strict=True), best, shares, strict=True
        ):
            show = _percent if share else number
            half = f" ±{show(t_half_width(column))}" if len(column) > 1 else ""
            cells.append(f"{show(mean)}{half}{'*' if len(values) > 1 and mean == top else ''}")
        rows.append(cells)
    rows.append(["K", *(str(first.samples[task]) for task in tasks), ""])
    return _align(rows, rules_after=(0, len(values)))


def _place(task: str) -> int:
    return (
        list(_BENCHMARKS).index(task.lower()) if task.lower() in _BENCHMARKS else len(_BENCHMARKS)
    )


def column_name(task: str) -> str:
    """Heading of a task's column."""
    return _BENCHMARKS.get(task.lower(), (task, 8))[0]


def _align(rows: Sequence[Sequence[str]], *, rules_after: Sequence[int]) -> str:
    lines = text_table(rows, " | ")
    rule = "-+-".join("-" * max(map(len, column)) for column in zip(*rows, strict=True))
    for place in sorted(rules_after, reverse=True):
        lines.insert(place + 1, rule)
    return "\n".join(lines)


def _is_share(result: EvaluationResult) -> bool:
    return bool(((result.scores >= 0) & (result.scores <= 1)).all())


def shown_score(result: EvaluationResult, value: float) -> str:
    """An average of a task's scores: in percent if each is between 0 and 1, else the reward's own
    number.
    """
    return _percent(value) if _is_share(result) else number(value)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}"
