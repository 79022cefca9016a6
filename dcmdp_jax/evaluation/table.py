"""Scores of a policy in the layout of the paper's result tables, and as records for JSON."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import EvaluationResult
from dcmdp_jax.evaluation.estimators import t_half_width
from dcmdp_jax.inputs import read_json_object
from dcmdp_jax.number_format import number, text_table

OTHER_SAMPLES = 8
"""K of a task that is none of the paper's benchmarks."""


class Benchmark(NamedTuple):
    """A column of the paper's tables.

    Attributes:
        column: its heading.
        samples: K of the paper's avg@K (section 6.1).
    """

    column: str
    samples: int


BENCHMARKS: dict[str, Benchmark] = {
    "aime24": Benchmark("AIME24", 32),
    "aime25": Benchmark("AIME25", 32),
    "amc23": Benchmark("AMC23", 32),
    "math500": Benchmark("MATH-500", 4),
    "minerva": Benchmark("Minerva", 4),
    "olympiadbench": Benchmark("Olympiad", 4),
}
"""By task name, in the order of the paper's columns."""


def paper_samples(task: str) -> int:
    """K of avg@K: the paper's for its benchmarks, `OTHER_SAMPLES` for any other task.

    Args:
        task: name, a benchmark's in any case.
    """
    benchmark = BENCHMARKS.get(task.lower())
    return OTHER_SAMPLES if benchmark is None else benchmark.samples


def plain_average(results: Sequence[EvaluationResult]) -> float:
    """The tables' Avg: the mean of the tasks' avg@K, each task counted once whatever its size.

    Raises:
        ValueError: if there is no result.
    """
    if not results:
        raise ValueError("results: got none, a table needs at least one task")
    return math.fsum(result.average for result in results) / len(results)


def format_table(method: str, results: Sequence[EvaluationResult], *, seed: int = 0) -> str:
    """The paper's table as text: one row of avg@K in percent, and beneath it what the numbers rest on.

    Averages of a sum of rewards that leaves 0 .. 1 are no shares: they are plain numbers.

    The benchmarks stand in the paper's order, other tasks after them under their own names, Avg last. Avg is the mean
    of the columns that are there, unrounded: six benchmarks give the paper's.

    Args:
        method: label of the row.
        results: one for each task.
        seed: seed of the bootstrap.

    Returns:
        Aligned lines; beneath the scores K, the standard error and the 95% bootstrap interval over problems, unbiased
        pass@k for powers of two and pass@K in percent, the shares of truncated completions and of those without an
        answer in percent, the mean length in tokens, and how many answers the verifier gave up on.

    Raises:
        ValueError: if there is no result.
    """
    ordered = sorted(results, key=lambda result: _place(result.task))
    rows = [
        ["Method", *(column_name(result.task) for result in ordered), "Avg"],
        [
            method,
            *(shown_score(result, result.average) for result in ordered),
            (_percent if all(map(_is_share, ordered)) else number)(plain_average(ordered)),
        ],
    ]
    intervals = {result.task: result.interval(seed=seed) for result in ordered}
    details: dict[str, Callable[[EvaluationResult], str]] = {
        "K": lambda result: str(result.samples),
        "standard error": lambda result: shown_score(result, result.standard_error),
        "95% from": lambda result: shown_score(result, intervals[result.task][0]),
        "95% to": lambda result: shown_score(result, intervals[result.task][1]),
        **{f"pass@{k}": functools.partial(_pass_at, k) for k in _powers_of_two(max(r.samples for r in ordered))},
        "pass@K": lambda result: _percent(result.pass_at_k),
        "truncated %": lambda result: _percent(result.truncated_fraction),
        "no answer %": lambda result: _percent(result.unparsed_fraction),
        "mean length": lambda result: f"{result.length_mean:.1f}",
        "verifier timeouts": lambda result: str(result.verifier_timeouts),
        "verifier errors": lambda result: str(result.verifier_errors),
        "over budget": lambda result: str(result.verifier_over_budget),
    }
    rows += [[name, *(show(result) for result in ordered), ""] for name, show in details.items()]
    return _align(rows, rules_after=(0, 1))


def to_record(result: EvaluationResult, *, seed: int = 0) -> dict[str, Any]:
    """One task's scores with JSON types; a standard error or interval that one problem can't give is None.

    `pass_at` holds unbiased pass@k for k = 1 .. K, `problem_averages` each problem's own avg@K, in the order the
    problems were asked. `seed` is the bootstrap's.
    """
    interval = result.interval(seed=seed)
    return {
        "column": column_name(result.task),
        "problems": len(result.scores),
        "samples": result.samples,
        "average": result.average,
        "standard_error": result.standard_error if math.isfinite(result.standard_error) else None,
        "interval": None if math.isnan(interval[0]) else list(interval),
        "pass_at_k": result.pass_at_k,
        "pass_at": result.pass_at.tolist(),
        "truncated": int(result.truncated.sum()),
        "unparsed": int(result.unparsed.sum()),
        "truncated_fraction": result.truncated_fraction,
        "unparsed_fraction": result.unparsed_fraction,
        "length_mean": result.length_mean,
        "verifier_timeouts": result.verifier_timeouts,
        "verifier_errors": result.verifier_errors,
        "verifier_over_budget": result.verifier_over_budget,
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
        return Scores(str(record["method"]), averages, {name: int(task["samples"]) for name, task in tasks.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: no evaluation that dcmdp evaluate wrote ({error!r})") from None


def format_comparison(runs: Sequence[Scores]) -> str:
    """One table over methods and runs in the paper's layout: avg@K in percent, the best of each column with a star.

    Runs of one method are one row: the mean of their scores, and with several runs half of its 95% t interval. Avg is
    the mean of the columns, run by run.

    Raises:
        UserError: if there is no run, or two differ in their tasks or in K.
    """
    if not runs:
        raise UserError("no evaluation given, a table needs at least one")
    first = runs[0]
    for run in runs[1:]:
        if run.samples != first.samples:
            raise UserError(
                f"{first.method} and {run.method}: evaluated on {_describe_tasks(first)} and on "
                f"{_describe_tasks(run)}; one table needs the same tasks and K"
            )
    tasks = sorted(first.averages, key=_place)
    values: dict[str, list[list[float]]] = {}
    for run in runs:
        columns = [run.averages[task] for task in tasks]
        values.setdefault(run.method, []).append([*columns, math.fsum(columns) / len(columns)])
    columns = {method: list(zip(*rows, strict=True)) for method, rows in values.items()}
    means = {method: [math.fsum(one) / len(one) for one in each] for method, each in columns.items()}
    best = [max(column) for column in zip(*means.values(), strict=True)]

    def cell(method: str, place: int) -> str:
        mean, column = means[method][place], [row[place] for row in values[method]]
        shares = all(0 <= row[place] <= 1 for rows in values.values() for row in rows)
        show = _percent if shares else number
        half = f" ±{show(t_half_width(column))}" if len(column) > 1 else ""
        star = "*" if len(means) > 1 and mean == best[place] else ""
        return f"{show(mean)}{half}{star}"

    labels = {method: f"{method} ({len(rows)} runs)" if len(rows) > 1 else method for method, rows in values.items()}
    rows = [["Method", *map(column_name, tasks), "Avg"]]
    rows += [[labels[method], *(cell(method, place) for place in range(len(tasks) + 1))] for method in values]
    rows.append(["K", *(str(first.samples[task]) for task in tasks), ""])
    return _align(rows, rules_after=(0, len(values)))


def _describe_tasks(run: Scores) -> str:
    return ", ".join(f"{task} (K={run.samples[task]})" for task in sorted(run.samples, key=_place))


def _place(task: str) -> int:
    return list(BENCHMARKS).index(task.lower()) if task.lower() in BENCHMARKS else len(BENCHMARKS)


def column_name(task: str) -> str:
    """Heading of a task's column."""
    benchmark = BENCHMARKS.get(task.lower())
    return task if benchmark is None else benchmark.column


def _align(rows: Sequence[Sequence[str]], *, rules_after: Sequence[int]) -> str:
    lines = text_table(rows, " | ")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for place in sorted(rules_after, reverse=True):
        lines.insert(place + 1, "-+-".join("-" * width for width in widths))
    return "\n".join(lines)


def _powers_of_two(largest: int) -> list[int]:
    return [2**power for power in range(1, largest.bit_length()) if 2**power < largest]


def _pass_at(k: int, result: EvaluationResult) -> str:
    return _percent(float(result.pass_at[k - 1])) if k <= result.samples else "-"


def _is_share(result: EvaluationResult) -> bool:
    return bool(((result.scores >= 0) & (result.scores <= 1)).all())


def shown_score(result: EvaluationResult, value: float) -> str:
    """An average of a task's scores: in percent if each is between 0 and 1, else the reward's own number."""
    return _percent(value) if _is_share(result) else number(value)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}"
