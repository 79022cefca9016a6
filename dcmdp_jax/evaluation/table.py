"""Scores of a policy in the layout of the paper's result tables, and as records for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dcmdp_jax.evaluation.average import EvaluationResult

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


def format_table(method: str, results: Sequence[EvaluationResult]) -> str:
    """The paper's table as text: one row of avg@K in percent, and beneath it what the numbers rest on.

    The benchmarks stand in the paper's order, other tasks after them under their own names, Avg last. Avg is the mean
    of the columns that are there, unrounded: six benchmarks give the paper's.

    Args:
        method: label of the row.
        results: one for each task.

    Returns:
        Aligned lines; beneath the scores K, the standard error and pass@K in percent, the share of truncated
        completions in percent, the mean length in tokens, and how many answers the verifier gave up on.

    Raises:
        ValueError: if there is no result.
    """
    ordered = _in_paper_order(results)
    rows = [
        ["Method", *(_column(result.task) for result in ordered), "Avg"],
        [method, *(_percent(result.average) for result in ordered), _percent(plain_average(ordered))],
    ]
    details: dict[str, Callable[[EvaluationResult], str]] = {
        "K": lambda result: str(result.samples),
        "standard error": lambda result: _percent(result.standard_error),
        "pass@K": lambda result: _percent(result.pass_at_k),
        "truncated %": lambda result: _percent(result.truncated_fraction),
        "mean length": lambda result: f"{result.length_mean:.1f}",
        "verifier timeouts": lambda result: str(result.verifier_timeouts),
        "verifier errors": lambda result: str(result.verifier_errors),
        "over budget": lambda result: str(result.verifier_over_budget),
    }
    rows += [[name, *(show(result) for result in ordered), ""] for name, show in details.items()]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    rule = "-+-".join("-" * width for width in widths)
    lines = [_line(row, widths) for row in rows]
    return "\n".join([lines[0], rule, lines[1], rule, *lines[2:]])


def to_record(result: EvaluationResult) -> dict[str, Any]:
    """One task's scores with JSON types; a standard error that one problem can't give is None.

    `problem_averages` holds each problem's own avg@K, in the order the problems were asked.
    """
    return {
        "column": _column(result.task),
        "problems": len(result.scores),
        "samples": result.samples,
        "average": result.average,
        "standard_error": result.standard_error if math.isfinite(result.standard_error) else None,
        "pass_at_k": result.pass_at_k,
        "truncated_fraction": result.truncated_fraction,
        "length_mean": result.length_mean,
        "verifier_timeouts": result.verifier_timeouts,
        "verifier_errors": result.verifier_errors,
        "verifier_over_budget": result.verifier_over_budget,
        "problem_averages": result.scores.mean(axis=1, dtype=float).tolist(),
    }


def _in_paper_order(results: Sequence[EvaluationResult]) -> list[EvaluationResult]:
    places = {name: place for place, name in enumerate(BENCHMARKS)}
    return sorted(results, key=lambda result: places.get(result.task.lower(), len(places)))


def _column(task: str) -> str:
    benchmark = BENCHMARKS.get(task.lower())
    return task if benchmark is None else benchmark.column


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]
    return " | ".join(aligned).rstrip()


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}"
