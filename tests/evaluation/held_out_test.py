"""The held-out tasks of a run: names and K."""

import pytest

from dcmdp_jax.evaluation.held_out import held_out_tasks

_TWO = "data/aime24.jsonl,data/own.jsonl"


@pytest.mark.parametrize(
    ("task", "samples", "expected"),
    [
        # The paper's K of its benchmarks, 8 of another.
        (_TWO, (), [("aime24", 32), ("own", 8)]),
        ("data/math500.jsonl, data/olympiadbench.jsonl", (), [("math500", 4), ("olympiadbench", 4)]),
        (_TWO, (5,), [("aime24", 5), ("own", 5)]),
        (_TWO, (5, 6), [("aime24", 5), ("own", 6)]),
        ("arithmetic:difficulty=1,count=4", (), [("arithmetic", 8)]),
        (
            "arithmetic:difficulty=1,count=4,arithmetic:difficulty=2,count=4",
            (2, 3),
            [("arithmetic_difficulty=1_count=4", 2), ("arithmetic_difficulty=2_count=4", 3)],
        ),
    ],
)
def test_each_task_has_its_name_and_its_samples(task, samples, expected):
    assert [(one.name, one.samples) for one in held_out_tasks(task, samples)] == expected


@pytest.mark.parametrize(
    ("task", "samples", "message"),
    [
        (_TWO, (1, 2, 3), "evaluation.samples: got 3 numbers for 2 tasks; give one for all, one for each, or none"),
        ("a.jsonl,", (), "evaluation.task: got 'a.jsonl,', an empty name is no task"),
        ("x/a.jsonl,y/a.jsonl", (), "evaluation.task: two tasks are called 'a'; rename one"),
    ],
)
def test_what_does_not_fit_is_told(task, samples, message):
    with pytest.raises(ValueError, match=message):
        held_out_tasks(task, samples)
