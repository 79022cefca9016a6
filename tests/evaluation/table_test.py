"""The paper's own rows, printed by our table, and the records that go to JSON."""

import json
import math

import numpy as np
import pytest

from dcmdp_jax.evaluation.average import EvaluationResult
from dcmdp_jax.evaluation.table import format_table, paper_samples, plain_average, to_record


def _result(task, average, *, samples=4, scores=None, standard_error=0.0125):
    return EvaluationResult(
        task=task,
        samples=samples,
        scores=np.zeros((2, samples), np.float32) if scores is None else np.asarray(scores, np.float32),
        average=average,
        pass_at_k=0.75,
        standard_error=standard_error,
        length_mean=1234.56,
        truncated_fraction=0.0625,
        verifier_timeouts=1,
        verifier_errors=2,
        verifier_over_budget=3,
    )


# Table "BF16, 8B", DC-GRPO row.
_PAPER = {
    "aime24": 0.632, "aime25": 0.525, "amc23": 0.918, "math500": 0.942, "minerva": 0.501, "olympiadbench": 0.744,
}  # fmt: skip


def _cells(line):
    return [cell.strip() for cell in line.split("|")]


def test_the_papers_row_is_printed_as_the_paper_prints_it():
    shuffled = [_result(task, _PAPER[task]) for task in sorted(_PAPER, reverse=True)]
    lines = format_table("DC-GRPO", shuffled).splitlines()
    assert lines[0] == "Method            | AIME24 | AIME25 |  AMC23 | MATH-500 | Minerva | Olympiad |  Avg"
    assert lines[1] == "------------------+--------+--------+--------+----------+---------+----------+-----"
    assert lines[2] == "DC-GRPO           |   63.2 |   52.5 |   91.8 |     94.2 |    50.1 |     74.4 | 71.0"
    assert lines[3] == lines[1]


@pytest.mark.parametrize(
    ("row", "average"),
    [  # rows of the paper, by hand: 404.0 / 6 = 67.33, 388.1 / 6 = 64.68, 425.7 / 6 = 70.95
        ([58.8, 40.0, 90.4, 93.7, 51.0, 70.1], "67.3"),
        ([53.2, 35.2, 89.5, 92.9, 50.0, 67.4], "64.7"),
        ([63.2, 52.5, 91.8, 94.2, 50.1, 74.4], "71.0"),
    ],
)
def test_avg_is_the_plain_mean_of_the_columns(row, average):
    table = format_table("m", [_result(task, value / 100) for task, value in zip(_PAPER, row, strict=True)])
    assert _cells(table.splitlines()[2])[-1] == average


def test_avg_is_of_the_unrounded_columns():
    # 0.04 % and 0.04 %: rounded to 0.0 each; 10.06 makes the mean 3.38, of the rounded columns 3.37.
    table = format_table("m", [_result("a", 0.0004), _result("b", 0.0004), _result("c", 0.1014)])
    assert _cells(table.splitlines()[2]) == ["m", "0.0", "0.0", "10.1", "3.4"]
    assert plain_average([_result("a", 0.0004), _result("b", 0.0004), _result("c", 0.1014)]) == pytest.approx(
        0.0340667, abs=1e-7
    )


def test_other_tasks_come_after_the_benchmarks_in_the_order_given():
    lines = format_table("m", [_result("zebra", 0.1), _result("AMC23", 0.2), _result("apple", 0.6)]).splitlines()
    assert _cells(lines[0]) == ["Method", "AMC23", "zebra", "apple", "Avg"]
    assert _cells(lines[2]) == ["m", "20.0", "10.0", "60.0", "30.0"]


def test_what_the_numbers_rest_on_stands_beneath():
    one_problem = _result("b", 1.0, samples=32, standard_error=math.nan)
    lines = format_table("m", [_result("a", 0.5), one_problem]).splitlines()
    assert {cells[0]: cells[1:3] for cells in map(_cells, lines[4:])} == {
        "K": ["4", "32"],
        "standard error": ["1.2", "-"],
        "pass@K": ["75.0", "75.0"],
        "truncated %": ["6.2", "6.2"],
        "mean length": ["1234.6", "1234.6"],
        "verifier timeouts": ["1", "1"],
        "verifier errors": ["2", "2"],
        "over budget": ["3", "3"],
    }
    assert _cells(lines[2]) == ["m", "50.0", "100.0", "75.0"]


def test_no_result_is_an_error():
    with pytest.raises(ValueError, match="results: got none"):
        format_table("m", [])


def test_k_is_the_papers_on_its_benchmarks_and_8_elsewhere():
    # Section 6.1: avg@32 for AIME24, AIME25 and AMC23, avg@4 for the other three.
    given = {task: paper_samples(task) for task in [*_PAPER, "AIME24", "gsm8k", "math5000"]}
    assert given == {
        "aime24": 32, "aime25": 32, "amc23": 32, "math500": 4, "minerva": 4, "olympiadbench": 4,
        "AIME24": 32, "gsm8k": 8, "math5000": 8,
    }  # fmt: skip


def test_a_record_is_strict_json_with_every_problems_mean():
    scores = [[1, 0, 1, 1], [0, 0, 0, 1]]
    record = to_record(_result("math500", 0.5, scores=scores, standard_error=math.nan))
    assert json.loads(json.dumps(record, allow_nan=False)) == {
        "column": "MATH-500",
        "problems": 2,
        "samples": 4,
        "average": 0.5,
        "standard_error": None,
        "pass_at_k": 0.75,
        "truncated_fraction": 0.0625,
        "length_mean": 1234.56,
        "verifier_timeouts": 1,
        "verifier_errors": 2,
        "verifier_over_budget": 3,
        "problem_averages": [0.75, 0.25],
    }
