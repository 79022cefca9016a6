"""The paper's own rows, printed by our table, and the records that go to JSON."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import EvaluationResult
from dcmdp_jax.evaluation.table import (
    Scores,
    format_comparison,
    format_table,
    paper_samples,
    plain_average,
    read_scores,
    to_record,
)


def _result(task, average, *, samples=4, problems=250):
    """`average` right, the first of each problem's samples before the second.

    1 in 16 truncated, 1 in 8 unparsed.
    """
    scores = np.zeros(problems * samples, np.float32)
    scores[: round(average * problems * samples)] = 1
    every = np.arange(problems * samples).reshape(problems, samples)
    return EvaluationResult(
        task=task,
        scores=scores.reshape(problems, samples),
        lengths=np.where(every % 2 == 0, 1000, 1469).astype(np.int32),
        truncated=every % 16 == 0,
        unparsed=every % 8 == 0,
        texts=np.full((problems, samples), ""),
        answers=np.full((problems, samples), None),
        unjudged={"verifier_timeouts": 1, "verifier_errors": 2, "verifier_over_budget": 3},
    )


# Table "BF16, 8B", DC-GRPO row.
_PAPER = {
    "aime24": 0.632,
    "aime25": 0.525,
    "amc23": 0.918,
    "math500": 0.942,
    "minerva": 0.501,
    "olympiadbench": 0.744,
}


def _cells(line):
    return [cell.strip() for cell in line.split("|")]


def test_the_papers_row_is_printed_as_the_paper_prints_it():
    shuffled = [_result(task, _PAPER[task]) for task in sorted(_PAPER, reverse=True)]
    lines = format_table("DC-GRPO", shuffled).splitlines()
    assert (
        lines[0]
        == "Method               | AIME24 | AIME25 |  AMC23 | MATH-500 | Minerva | Olympiad |  Avg"
    )
    assert (
        lines[1]
        == "---------------------+--------+--------+--------+----------+---------+----------+-----"
    )
    assert (
        lines[2]
        == "DC-GRPO              |   63.2 |   52.5 |   91.8 |     94.2 |    50.1 |     74.4 | 71.0"
    )
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
    table = format_table(
        "m", [_result(task, value / 100) for task, value in zip(_PAPER, row, strict=True)]
    )
    assert _cells(table.splitlines()[2])[-1] == average


def test_a_sum_of_rewards_is_no_percentage():
    """Rewards of 0 and 2.5, half of each, are 1.25 a completion, not 125.0%.

    Shares beside it stay in percent.
    """
    summed = _result("a", 0.5)
    summed = dataclasses.replace(summed, scores=2.5 * summed.scores)
    table = format_table("m", [summed, _result("b", 0.25)]).splitlines()
    # Avg by hand: (1.25 + 0.25) / 2.
    assert _cells(table[2]) == ["m", "1.25", "25.0", "0.75"]
    rows = {cells[0]: cells[1:] for cells in map(_cells, table[3:])}
    # Of 250 problems half have 2.5 each time: 2.5 * 0.5 / sqrt(249) = 0.0792.
    assert rows["standard error"][0] == "0.07922" and rows["pass@K"][0] == "50.0"
    runs = [
        Scores(file=Path("x.json"), method="x", averages={"a": 1.25}, samples={"a": 4}),
        Scores(file=Path("y.json"), method="y", averages={"a": 0.5}, samples={"a": 4}),
    ]
    assert [_cells(line)[1] for line in format_comparison(runs).splitlines()[2:4]] == [
        "1.25*",
        "0.5",
    ]


def test_avg_is_of_the_unrounded_columns():
    # 0.04 % and 0.04 %: rounded to 0.0 each; 10.06 makes the mean 3.38, of the rounded columns
    # 3.37.
    table = format_table(
        "m",
        [
            _result("a", 0.0004, problems=2500),
            _result("b", 0.0004, problems=2500),
            _result("c", 0.1014, problems=2500),
        ],
    )
    assert _cells(table.splitlines()[2]) == ["m", "0.0", "0.0", "10.1", "3.4"]
    assert plain_average(
        [
            _result("a", 0.0004, problems=2500),
            _result("b", 0.0004, problems=2500),
            _result("c", 0.1014, problems=2500),
        ]
    ) == pytest.approx(0.0340667, abs=1e-7)


def test_other_tasks_come_after_the_benchmarks_in_the_order_given():
    lines = format_table(
        "m", [_result("zebra", 0.1), _result("AMC23", 0.2), _result("apple", 0.6)]
    ).splitlines()
    assert _cells(lines[0]) == ["Method", "AMC23", "zebra", "apple", "Avg"]
    assert _cells(lines[2]) == ["m", "20.0", "10.0", "60.0", "30.0"]


def test_what_the_numbers_rest_on_stands_beneath():
    # "a": 2 problems of 4, the first right: means 1 and 0, standard error sqrt(1/2) / sqrt(2) =
    # 1/2, pass@2 1/2 too.
    a = _result("a", 0.5, problems=2)
    b = _result(
        "b", 0.25, problems=1, samples=8
    )  # 2 right of 8: pass@2 = 1 - C(6,2)/C(8,2) = 13/28, pass@4 = 55/70
    lines = format_table("m", [a, b]).splitlines()
    assert {cells[0]: cells[1:3] for cells in map(_cells, lines[4:])} == {
        "K": ["4", "8"],
        "standard error": ["50.0", "-"],
        "95% from": ["0.0", "-"],
        "95% to": ["100.0", "-"],
        "pass@2": ["50.0", "46.4"],
        "pass@4": ["50.0", "78.6"],
        "pass@K": ["50.0", "100.0"],
        "truncated %": ["12.5", "12.5"],
        "no answer %": ["12.5", "12.5"],
        "mean length": ["1234.5", "1234.5"],
        "verifier timeouts": ["1", "1"],
        "verifier errors": ["2", "2"],
        "verifier over budget": ["3", "3"],
    }
    assert _cells(lines[2]) == ["m", "50.0", "25.0", "37.5"]


def test_k_is_the_papers_on_its_benchmarks_and_8_elsewhere():
    # Section 6.1: avg@32 for AIME24, AIME25 and AMC23, avg@4 for the other three.
    given = {task: paper_samples(task) for task in [*_PAPER, "AIME24", "gsm8k", "math5000"]}
    of_samples = {
        32: "aime24 aime25 amc23 AIME24",
        4: "math500 minerva olympiadbench",
        8: "gsm8k math5000",
    }
    assert given == {
        name: samples for samples, names in of_samples.items() for name in names.split()
    }


def test_a_record_is_strict_json_with_every_problems_mean():
    result = _result("math500", 0.5, problems=1)
    assert json.loads(json.dumps(to_record(result), allow_nan=False)) == {
        "column": "MATH-500",
        "problems": 1,
        "samples": 4,
        "average": 0.5,
        "standard_error": None,
        "interval": None,
        "pass_at_k": 1.0,
        "pass_at": [0.5, pytest.approx(5 / 6), 1.0, 1.0],
        "truncated": 1,
        "unparsed": 1,
        "truncated_fraction": 0.25,
        "unparsed_fraction": 0.25,
        "length_mean": 1234.5,
        "verifier_timeouts": 1,
        "verifier_errors": 2,
        "verifier_over_budget": 3,
        "problem_averages": [0.5],
    }
    low, high = to_record(_result("t", 0.5, problems=40), seed=3)["interval"]
    # Half of 40 problems right: standard error 0.079, 95% within about 1.96 of it.
    assert low == pytest.approx(0.5 - 0.155, abs=0.03) and high == pytest.approx(
        0.5 + 0.155, abs=0.03
    )


def _run(method, *averages, samples=4):
    tasks = [*_PAPER][: len(averages)]
    return Scores(
        file=Path(f"{method}.json"),
        method=method,
        averages=dict(zip(tasks, averages, strict=True)),
        samples=dict.fromkeys(tasks, samples),
    )


def test_one_table_over_methods_and_runs():
    # Avg run by run: 45, 55 and 70. Three runs would have t = 4.303; two have 12.706 on sd /
    # sqrt(2).
    # AIME24: 40 and 60, mean 50, sd 14.142, half width 12.706 * 10 = 127.1.
    lines = format_comparison(
        [_run("GRPO", 0.4, 0.5), _run("DC-GRPO", 0.9, 0.5), _run("GRPO", 0.6, 0.5)]
    ).splitlines()
    assert [_cells(line) for line in lines if "-+-" not in line] == [
        ["Method", "AIME24", "AIME25", "Avg"],
        ["GRPO (2 runs)", "50.0 ±127.1", "50.0 ±0.0*", "50.0 ±63.5"],
        ["DC-GRPO", "90.0*", "50.0*", "70.0*"],
        ["K", "4", "4", ""],
    ]


def test_runs_of_other_tasks_or_k_do_not_share_a_table():
    with pytest.raises(
        UserError,
        match=r"^a.json and b.json: one table needs .*, got {'aime24': 4} and {'aime24': 8}; "
        r"evaluate again with the same evaluation.task and evaluation.samples$",
    ):
        format_comparison([_run("a", 0.4), _run("b", 0.5, samples=8)])


@pytest.mark.parametrize(
    "text", ["{}", '{"tasks": {"a": {}}, "method": "m"}', '{"tasks": 3}', "[1]"]
)
def test_a_file_that_is_no_evaluation_is_named(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UserError, match=f"{path}: "):
        read_scores(path)
