"""The held-out tasks of a run: names and K."""

import pytest

from dcmdp_jax.config.checks import EVALUATION, as_settings
from dcmdp_jax.evaluation.held_out import held_out_tasks

_TWO = "data/aime24.jsonl,data/own.jsonl"


@pytest.mark.parametrize(
    ("task", "samples", "expected"),
    [
        # The paper's K of its benchmarks, 8 of another.
        (_TWO, (), [("aime24", 32), ("own", 8)]),
        (
            "data/math500.jsonl, data/olympiadbench.jsonl",
            (),
            [("math500", 4), ("olympiadbench", 4)],
        ),
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
        (
            _TWO,
            (1, 2, 3),
            "samples: got 3 numbers for 2 tasks; give one for all, one for each, or none",
        ),
        ("a.jsonl,", (), "task: got 'a.jsonl,', an empty name is no task"),
        (
            "a.jsonl@2,b.jsonl@1",
            (),
            "got 'a.jsonl@2'; weights are for training, K of each task is in `samples`",
        ),
        ("x/a.jsonl,y/a.jsonl", (), "task: two tasks are called 'a'; rename one"),
    ],
)
def test_what_does_not_fit_is_told(task, samples, message):
    with pytest.raises(ValueError, match=message):
        held_out_tasks(task, samples)


def test_a_run_names_its_settings():
    message = r"^config.evaluation.task: .* K of each task is in evaluation.samples$"
    with pytest.raises(ValueError, match=message), as_settings(EVALUATION):
        held_out_tasks("a.jsonl@2", ())
