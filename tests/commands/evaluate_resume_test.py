"""bin.evaluate killed and continued, overlap with training data, one table over several
evaluations.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dcmdp_jax.commands import evaluate
from dcmdp_jax.commands.evaluate import main, part_seed
from dcmdp_jax.run import saved_model
from tests.support.coin_model import (
    ROWS,
    SAMPLES,
    SEED,
    TASK,
    TEMPERATURE,
    TOKENS,
    evaluation_fails,
    save_coin,
)
from tests.support.waiting import HANGS_S

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    """Answers 4 or 7, each with probability 1/2."""
    return save_coin(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Two tasks of 5 and 3 problems."""
    base = tmp_path_factory.mktemp("tasks")
    for name, answers in (("five", "47474"), ("three", "479")):
        rows = [{"problem": f"p{place}", "answer": answer} for place, answer in enumerate(answers)]
        (base / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{base}/five.jsonl,{base}/three.jsonl"


def _words(hf_dir, tasks, out):
    words = [TASK, tasks, SAMPLES, 4, TOKENS, 4, ROWS, 2]
    return [str(word) for word in (hf_dir, *words, "--out", out)]


def _files(out):
    record = json.loads(out.read_text())
    return record, out.with_suffix(".problems.jsonl").read_bytes()


def test_a_killed_evaluation_continues_to_the_same_bytes(hf_dir, tasks, tmp_path):
    """SIGKILL when the second part of the first task has been sampled and not yet written."""
    main(["evaluate", *_words(hf_dir, tasks, tmp_path / "whole.json")])
    killer = (
        "import os, signal, sys\n"
        "from dcmdp_jax.commands import evaluate\n"
        "sample, calls = evaluate.evaluate, []\n"
        "def killed(*arguments, **options):\n"
        "    result = sample(*arguments, **options)\n"
        "    calls.append(1)\n"
        "    if len(calls) == 2:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return result\n"
        "evaluate.evaluate = killed\n"
        "evaluate.main(sys.argv)\n"
    )
    out = tmp_path / "cut.json"
    done = subprocess.run(
        [sys.executable, "-c", killer, *_words(hf_dir, tasks, out)],
        cwd=_ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    lines = out.with_suffix(".problems.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 + 1  # the header, two problems, their part
    main(["evaluate", *_words(hf_dir, tasks, out)])
    assert _files(out) == _files(tmp_path / "whole.json")
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_finished_parts_are_not_sampled_again(hf_dir, tasks, tmp_path, monkeypatch):
    sample = evaluate.evaluate
    calls = []

    def counted(*arguments, task, seed, **options):
        if len(calls) == 3 and not any(call == "stop" for call in calls):
            calls.append("stop")
            raise KeyboardInterrupt
        calls.append((task, seed))
        return sample(*arguments, task=task, seed=seed, **options)

    monkeypatch.setattr(evaluate, "evaluate", counted)
    with pytest.raises(KeyboardInterrupt):
        main(["evaluate", *_words(hf_dir, tasks, tmp_path / "o.json")])
    main(["evaluate", *_words(hf_dir, tasks, tmp_path / "o.json")])
    # 5 problems in parts of 2, 2 and 1, then 3 in parts of 2 and 1; the first part has the seed
    # itself.
    assert [call for call in calls if call != "stop"] == [
        ("five", 0),
        ("five", part_seed(0, 1)),
        ("five", part_seed(0, 2)),
        ("three", 0),
        ("three", part_seed(0, 1)),
    ]
    assert len({part_seed(0, part) for part in range(100)}) == 100


def test_another_setting_does_not_continue_an_unfinished_evaluation(
    hf_dir, tasks, tmp_path, capsys, monkeypatch
):
    sample = evaluate.evaluate
    calls = []

    def stop_at_the_second(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sample(*arguments, **options)

    out = tmp_path / "o.json"
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "evaluate", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            main(["evaluate", *_words(hf_dir, tasks, out)])
    got = evaluation_fails(capsys, *_words(hf_dir, tasks, out), SEED, 1)
    assert got.startswith(
        f"{tmp_path}/o.problems.jsonl: holds an unfinished evaluation with training.seed=0, this "
        "one has 1"
    )


def test_overlap_with_training_data_is_reported_or_left_out(hf_dir, tmp_path, capsys):
    rows = [
        {"problem": f"What is {text}?", "answer": answer}
        for text, answer in (("$2+2$", "4"), ("3+4", "7"))
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "train.jsonl").write_text(
        '{"prompt": "other", "answer": "1"}\n{"prompt": "What is 2+2 ?", "label": "4"}\n'
    )
    words = [hf_dir, TASK, tmp_path / "t.jsonl", SAMPLES, 1, TOKENS, 4, TEMPERATURE, 0]
    words = ["evaluate", *map(str, words), "--config.task.train", str(tmp_path / "train.jsonl")]
    # The model says 4: right on the problem that is in the training data, and on that alone.
    main([*words, "--overlap=report", "--out", str(tmp_path / "a.json")])
    line = f"overlap of t with {tmp_path}/train.jsonl: 1 problems; avg@1 is 50.0, without them 0.0"
    assert line in capsys.readouterr().out.splitlines()
    task = json.loads((tmp_path / "a.json").read_text())["tasks"]["t"]
    assert task["overlap"] == [{"problem": 0, "train_problem": 1, "share": 1.0}]
    main([*words, "--overlap=drop", "--out", str(tmp_path / "b.json")])
    assert "1 problems, left out" in capsys.readouterr().out
    task = json.loads((tmp_path / "b.json").read_text())["tasks"]["t"]
    assert (task["problems"], task["problem_rows"], task["average"]) == (1, [1], 0.0)


def test_one_table_over_finished_evaluations(hf_dir, tasks, tmp_path, capsys):
    for name, method, seed in (("a", "GRPO", 0), ("b", "DC-GRPO", 0), ("c", "DC-GRPO", 1)):
        main(
            [
                "evaluate",
                *_words(hf_dir, tasks, tmp_path / f"{name}.json"),
                "--method",
                method,
                SEED,
                str(seed),
            ]
        )
    capsys.readouterr()
    main(["evaluate", "--table", *(str(tmp_path / f"{name}.json") for name in "abc")])
    cells = [
        [cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()
    ]
    assert cells[0] == ["Method", "five", "three", "Avg"]
    assert [row[0] for row in cells if len(row) > 1] == ["Method", "GRPO", "DC-GRPO (2 runs)", "K"]
    averages = [
        json.loads((tmp_path / f"{name}.json").read_text())["tasks"]["five"]["average"]
        for name in "bc"
    ]
    assert cells[3][1].startswith(f"{100 * sum(averages) / 2:.1f} ±")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ((), "MODEL is missing; name a directory to evaluate, or --table FILE ... and no MODEL"),
        (("{hf}", "--table", "a.json"), "MODEL is missing; name a directory"),
        (("--table", "{tmp}/none.json"), "No such file or directory: {tmp}/none.json"),
        (
            ("{hf}", TASK, "{task}", "--overlap=drop", "--config.task.train", "{tmp}/no.jsonl"),
            "config.task.train: data {tmp}/no.jsonl: no such file",
        ),
        (
            ("{hf}", TASK, "{tmp}/odd.jsonl"),
            "config.evaluation.task: {tmp}/odd.jsonl:2: no prompt in any of the fields prompt, "
            "problem, question; the row has instruction, output",
        ),
        (
            ("{hf}", TASK, "{tmp}/half.jsonl"),
            "config.evaluation.task: {tmp}/half.jsonl:1: no answer in any of the fields "
            "reward_model, final_answer, expected_answer, ground_truth, answer, solution, label; "
            "the row has question, target",
        ),
    ],
)
def test_bad_input_is_one_line(hf_dir, tasks, tmp_path, capsys, monkeypatch, argv, line):
    monkeypatch.setattr(
        saved_model, "load_params", lambda *_, **__: pytest.fail("the weights were read")
    )
    (tmp_path / "odd.jsonl").write_text(
        '{"problem": "p", "answer": "4"}\n{"instruction": "p", "output": "4"}\n'
    )
    (tmp_path / "half.jsonl").write_text('{"question": "p", "target": "4"}\n')
    places = {"tmp": tmp_path, "hf": hf_dir, "task": tasks.split(",")[0]}
    assert evaluation_fails(capsys, *(word.format(**places) for word in argv)).startswith(
        line.format(**places)
    )
