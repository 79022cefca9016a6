"""`dcmdp view`: what is on the page of a run and of a recording, and the one line for what it can't
show.
"""

import contextlib
import functools
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.commands.view import main
from dcmdp_jax.observe.metrics_io import MetricsWriter
from dcmdp_jax.record import packed_top
from tests.support.commands import run_command

_RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "frameworks"


_view = functools.partial(run_command, main, "view")


def _rows(page):
    found = re.search(
        r'<script type="application/json" id="completions">(.*?)</script>', page.read_text(), re.S
    )
    return json.loads(found[1])


def test_a_run_without_recorded_tokens_shows_its_samples(tmp_path, capsys):
    with contextlib.closing(MetricsWriter(tmp_path / "run")) as writer:
        writer.write(1, {"reward/mean": 0.5, "discrepancy/mean": 0.25})
        sample = {
            "prompt": "1+1?",
            "completion": "so 2",
            "answer": "2",
            "reward": 1.0,
            "discrepancy_mean": 0.125,
        }
        writer.write_samples(1, [sample, {**sample, "completion": "so 3", "reward": 0.0}])
    code, said, _ = _view(capsys, tmp_path / "run")
    assert code == 0 and said == f"wrote {tmp_path / 'run' / 'view.html'}: 2 completions\n"
    rows = _rows(tmp_path / "run" / "view.html")["rows"]
    assert [(row["text"], row["reward"], row["discrepancy"], row["step"]) for row in rows] == [
        ("so 2", 1.0, 0.125, 1),
        ("so 3", 0.0, 0.125, 1),
    ]


@pytest.mark.parametrize(
    "framework", sorted(path.name for path in _RECORDED.iterdir() if any(path.rglob("*.jsonl")))
)
def test_a_recording_of_another_framework_shows_each_token_with_both_probabilities(
    framework, tmp_path, capsys
):
    code, _, error = _view(
        capsys, _RECORDED / framework, "--out", tmp_path / "page", "--completions", "3"
    )
    assert code == 0, error
    data = _rows(tmp_path / "page" / "view.html")
    assert 1 <= len(data["rows"]) <= 3
    for row in data["rows"]:
        assert row["advantage"] in (-1.0, 1.0)
        p = np.array(row["p"], float) / 1e5
        q = np.array(row["q"], float) / 1e5
        assert len(p) == len(row["tokens"]) and ((p >= 0) & (p <= 1)).all()
        assert row["discrepancy"] == pytest.approx(np.abs(p - q).mean(), rel=1e-3, abs=1e-5)


def test_a_recorded_run_shows_the_prompt_it_was_asked(tmp_path, capsys):
    """Ids as text, without a tokenizer: the prompt 5 6, then 7 with p 0.5 and q 0.25, and an 8 that
    was given.

    Of the seven likeliest of the 7 the engine has six, of which five are shown, with both
    probabilities.
    """
    ids = np.array([[9, 7, 3, 4, 5, 6, -1], [1, 2, 3, 4, 5, 6, 7]])
    q = np.log([[0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 1]] * 2)
    top = json.dumps(
        packed_top(ids, np.log([[0.25, 0.5, 0.125, 0.0625, 0.03125, 0.015625, 1]] * 2), q)
    )
    with contextlib.closing(MetricsWriter(tmp_path / "run", rollouts_every_steps=1)) as writer:
        writer.write(1, {"reward/mean": 0.5})
        half = np.log(np.array([0.5, 1], np.float32))
        tokens = dict(
            prompt_token_ids=[5, 6], token_ids=[7, 8], mask=[True, False], policy_versions=[0, -1]
        )
        tokens |= dict(train_logprobs=half, rollout_logprobs=2 * half, reward=1.0, advantage=0.5)
        writer.write_rollouts(
            1, [dict(completion=0, prompt_id=1098, source="s", top=top, **tokens)]
        )
    code, _, error = _view(capsys, tmp_path / "run", "--out", tmp_path / "page")
    assert code == 0, error
    data = _rows(tmp_path / "page" / "view.html")
    (row,) = data["rows"]
    assert (row["prompt"], row["p"], row["q"], row["advantage"]) == (
        " 5 6",
        [50_000],
        [25_000],
        0.5,
    )
    (listed,) = row["top"]
    assert [data["words"][word] for word, _, _ in listed] == [" 9", " 7", " 3", " 4", " 5"]
    expected = [
        (25_000, 50_000),
        (50_000, 25_000),
        (12_500, 12_500),
        (6_250, 6_250),
        (3_125, 3_125),
    ]
    np.testing.assert_allclose([probabilities for _, *probabilities in listed], expected, rtol=1e-3)


def test_an_evaluation_shows_every_completion_with_what_was_found(tmp_path, capsys):
    path = tmp_path / "evaluation-m.problems.jsonl"
    problem = {"task": "t", "row": 0, "prompt": "1+1?", "answer": "2", "scores": [1, 0]}
    problem |= {"completions": ["so 2", "hm"], "found": ["2", None]}
    path.write_text(
        "".join(
            json.dumps(line) + "\n" for line in ({"model": "m"}, problem, {"task": "t", "part": 0})
        )
    )
    assert _view(capsys, path, "--out", tmp_path / "page")[0] == 0
    rows = _rows(tmp_path / "page" / "view.html")["rows"]
    assert [
        (row["prompt"], row["text"], row["found"], row["answer"], row["reward"]) for row in rows
    ] == [
        ("1+1?", "so 2", "2", "2", 1.0),
        ("1+1?", "hm", "", "2", 0.0),
    ]


def test_the_directory_of_an_evaluation_shows_its_completions(tmp_path, capsys):
    line = {
        "task": "t",
        "prompt": "1+1?",
        "answer": "2",
        "scores": [1],
        "completions": ["so 2"],
        "found": ["2"],
    }
    (tmp_path / "out").mkdir()
    for model in "ab":
        (tmp_path / "out" / f"evaluation-{model}.problems.jsonl").write_text(
            json.dumps(line) + "\n"
        )
    code, _, error = _view(capsys, tmp_path / "out", "--out", tmp_path / "page")
    assert code == 0, error
    assert [row["text"] for row in _rows(tmp_path / "page" / "view.html")["rows"]] == ["so 2"] * 2


def test_a_name_that_is_not_utf_8_is_shown_with_a_question_mark(tmp_path, capsys):
    run = tmp_path / os.fsdecode(b"run\xff")
    with contextlib.closing(MetricsWriter(run, rollouts_every_steps=1)) as writer:
        writer.write(1, {"reward/mean": 0.5})
        tokens = dict(prompt_token_ids=[5], token_ids=[7], mask=[True], policy_versions=[0])
        tokens |= dict(train_logprobs=[-1.0], rollout_logprobs=[-2.0], reward=1.0, advantage=0.5)
        writer.write_rollouts(1, [dict(completion=0, prompt_id=1, source="s", **tokens)])
    code, _, error = _view(capsys, run, "--out", tmp_path / "page")
    assert code == 0, error
    assert "<title>run?</title>" in (tmp_path / "page" / "view.html").read_text()


def test_what_it_cannot_show_is_one_line(tmp_path, capsys):
    code, _, error = _view(capsys, tmp_path / "other.jsonl", "--out", tmp_path / "page.html")
    assert code == 2 and "page.html, a directory is written; name one" in error
    with contextlib.closing(MetricsWriter(tmp_path / "run")) as writer:
        writer.write(1, {"reward/mean": 0.5})
    shutil.copy(tmp_path / "run" / "metrics.jsonl", tmp_path / "other.jsonl")
    code, _, error = _view(capsys, tmp_path / "run", tmp_path / "other.jsonl")
    assert code == 2 and "run directories and recordings in one call" in error
    code, _, error = _view(capsys, tmp_path / "absent.jsonl")
    assert code == 2 and error.count("\n") == 1
    code, _, error = _view(capsys, tmp_path / "run", tmp_path / "run")
    assert code == 2 and f"run directory {tmp_path / 'run'} is given twice" in error


def test_an_evaluation_without_completions_is_one_line(tmp_path, capsys):
    """Without completions, before its first problem, lists that do not fit, absent."""
    scores = {"task": "t", "scores": [1, 0]}
    whole = {**scores, "completions": ["a", "b"], "found": ["1", None]}
    cases = {
        "holds no completions yet": [[scores], [], [{"model": "m"}]],
        "not lists of one length": [
            [whole | {"found": ["1"]}],
            [whole | {"completions": "ab"}],
            [whole | {"found": 1}],
        ],
    }
    for expected, files in cases.items():
        for lines in files:
            path = tmp_path / "evaluation-m.problems.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            code, _, error = _view(capsys, path, "--out", tmp_path / "page")
            assert code == 2 and expected in error and error.count("\n") == 1, error
    code, _, error = _view(capsys, tmp_path / "absent.problems.jsonl", "--out", tmp_path / "page")
    assert code == 2 and "No such file" in error
