"""Scores of a policy in the layout of the paper's result tables, and as records for JSON."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    """The tables' Avg: the mean of the tasks' avg@K, each counted once whatever its size."""
    return math.fsum(result.average for result in results) / len(results)


def format_table(method: str, results: Sequence[EvaluationResult], *, seed: int = 0) -> str:
    """The paper's table as text: a row of avg@K in percent, and beneath what it rests on.

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
    ordered = sorted(results, key=lambda result: _position(result.task))
    most_samples = max(result.samples for result in ordered)
    powers = [2**power for power in range(1, 12) if 2**power < most_samples]
    columns = []
    for result in ordered:
        low, high = result.interval(seed=seed)
        column = {
            "K": str(result.samples),
            "standard error": shown_score(result, result.standard_error),
            "95% from": shown_score(result, low),
            "95% to": shown_score(result, high),
        }
        for k in powers:
            column[f"pass@{k}"] = _percent(result.pass_at[k - 1]) if k <= result.samples else "-"
        column |= {
            "pass@K": _percent(result.pass_at[-1]),
            "truncated %": _percent(result.truncated.mean()),
            "no answer %": _percent(result.unparsed.mean()),
            "mean length": f"{result.length_mean:.1f}",
        }
        for name, count in result.unjudged.items():
            column[name.replace("_", " ")] = str(count)
        columns.append(column)

    scores = (shown_score(result, result.average) for result in ordered)
    rows = [
        ["Method", *(column_name(result.task) for result in ordered), "Avg"],
        [method, *scores, _shown(plain_average(ordered), all(map(_is_share, ordered)))],
    ]
    for name in columns[0]:
        rows.append([name, *(column[name] for column in columns), ""])
    return _align(rows, rules_after=(0, 1))


def to_record(result: EvaluationResult, *, seed: int = 0) -> dict[str, Any]:
    """One task's scores with JSON types.

    A standard error or interval that one problem can't give is None. `pass_at` holds unbiased
    pass@k for k = 1 .. K, `problem_averages` each problem's own avg@K, in the order the problems
    were asked. `seed` is the bootstrap's.
    """
    standard_error = result.standard_error
    if not math.isfinite(standard_error):
        standard_error = None
    low, high = result.interval(seed=seed)
    interval = [low, high]
    if math.isnan(low):
        interval = None
    return {
        "column": column_name(result.task),
        "problems": len(result.scores),
        "samples": result.samples,
        "average": result.average,
        "standard_error": standard_error,
        "interval": interval,
        "pass_at_k": result.pass_at[-1],
        "pass_at": result.pass_at.tolist(),
        "truncated": int(result.truncated.sum()),
        "unparsed": int(result.unparsed.sum()),
        "truncated_fraction": result.truncated.mean(),
        "unparsed_fraction": result.unparsed.mean(),
        "length_mean": result.length_mean,
        **result.unjudged,
        "problem_averages": result.problem_averages.tolist(),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of one evaluation for a table over runs.

    Attributes:
        file: where they were read, for errors.
        method: label of the row.
        averages: task name -> avg@K.
        samples: task name -> K.
    """

    file: Path
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
        return Scores(
            file=path,
            method=str(record["method"]),
            averages={name: float(task["average"]) for name, task in tasks.items()},
            samples={name: int(task["samples"]) for name, task in tasks.items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: no evaluation that dcmdp evaluate wrote ({error!r})") from None


def format_comparison(runs: Sequence[Scores]) -> str:
    """One table over methods and runs: avg@K in percent, the best of each column with a star.

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
                f"{first.file} and {run.file}: one table needs the same tasks and K of each, got "
                f"{first.samples} and {run.samples}; evaluate again with the same evaluation.task "
                "and evaluation.samples"
            )

    tasks = sorted(first.averages, key=_position)
    scores_of: dict[str, list[list[float]]] = {}
    for run in runs:
        scores = [run.averages[task] for task in tasks]
        average = math.fsum(scores) / len(scores)
        scores_of.setdefault(run.method, []).append([*scores, average])
    all_scores = np.concatenate(list(scores_of.values()))
    is_share = ((all_scores >= 0) & (all_scores <= 1)).all(axis=0)
    means = {method: np.mean(scores, axis=0) for method, scores in scores_of.items()}
    best = np.max(list(means.values()), axis=0)

    rows = [["Method", *map(column_name, tasks), "Avg"]]
    for method, scores in scores_of.items():
        count = len(scores)
        label = method
        if count > 1:
            label += f" ({count} runs)"
        cells = [label]
        for column, mean in enumerate(means[method]):
            cell = _shown(mean, is_share[column])
            if count > 1:
                column_scores = [run_scores[column] for run_scores in scores]
                cell += f" ±{_shown(t_half_width(column_scores), is_share[column])}"
            if len(scores_of) > 1 and mean == best[column]:
                cell += "*"
            cells.append(cell)
        rows.append(cells)
    rows.append(["K", *(str(first.samples[task]) for task in tasks), ""])
    return _align(rows, rules_after=(0, len(scores_of)))


def _position(task: str) -> int:
    """Place in the paper's order; others come after its benchmarks."""
    name = task.lower()
    names = [*_BENCHMARKS, name]
    return names.index(name)


def column_name(task: str) -> str:
    """Heading of a task's column."""
    return _BENCHMARKS.get(task.lower(), (task, 8))[0]


def _align(rows: Sequence[Sequence[str]], *, rules_after: Sequence[int]) -> str:
    lines = text_table(rows, " | ")
    rule = "-+-".join("-" * max(map(len, column)) for column in zip(*rows, strict=True))
    for row in sorted(rules_after, reverse=True):
        lines.insert(row + 1, rule)
    return "\n".join(lines)


def _is_share(result: EvaluationResult) -> bool:
    return bool(((result.scores >= 0) & (result.scores <= 1)).all())


def shown_score(result: EvaluationResult, value: float) -> str:
    """An average of a task's scores: in percent if each is in [0, 1], else as the number it is."""
    return _shown(value, _is_share(result))


def _shown(value: float, is_share: bool) -> str:
    return _percent(value) if is_share else number(value)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}"
