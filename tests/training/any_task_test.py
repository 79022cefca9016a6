"""Whole runs on tasks without a mathematical answer.

TRL's examples, verl's code and search rows, a mixture.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.environments import planted_environments
from tests.rewards import trl_examples
from tests.support.chat_rows import CODE, SEARCH
from tests.support.processes import finished
from tests.support.run_invariants import contradictions
from tests.support.runs import read_digests

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = trl_examples.__file__
_SMALL = (
    "--config=configs/demo.py:debug",
    "--config.warmup.steps=0",
    "--config.mesh.cpu_devices=1",
    "--config.observe.samples_every_steps=1",
)
_NO_EVALUATION = "--config.evaluation.every_steps=0"

_VERL = """
def code(data_source, solution_str, ground_truth, extra_info):
    print("tests", ground_truth["inputs"], ground_truth["outputs"])
    return {"score": float(ground_truth["outputs"][0] in solution_str), "row": extra_info["index"]}

def search(completions, reward_model, **columns):
    targets = [model["ground_truth"]["target"] for model in reward_model]
    return [float(any(t in c[0]["content"] for t in ts)) - len(c[0]["content"]) / 100
            for c, ts in zip(completions, targets)]
"""


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _run(environment, run_dir, settings):
    finished("-m", "bin.train", *_SMALL, f"--config.run_dir={run_dir}", *settings, env=environment)
    assert contradictions(run_dir) == []
    return _lines(run_dir / "metrics.jsonl")


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_documented_examples_of_trl_train_on_chats_and_are_the_held_out_score(
    run_environment, tmp_path
):
    def row(number):
        chat = [
            {"role": "system", "content": "Think."},
            {"role": "user", "content": f"{number}+1=?"},
        ]
        return {"prompt": chat, "task": ("math", "coding")[number % 2], "solution": str(number + 1)}

    chats = _write(tmp_path / "chats.jsonl", map(row, range(6)))
    other = _write(tmp_path / "other.jsonl", map(row, (7, 8)))
    names = """
        format_reward_func think_format_reward accuracy_reward math_reward_func coding_reward_func
        async_reward_func scheduled_reward
    """.split()
    weights = (1, 1, 2, 1, 1, 0.01, 1)
    records = _run(
        run_environment,
        tmp_path / "run",
        [
            f"--config.task.train={chats}",
            f"--config.rewards.functions={','.join(f'{_EXAMPLES}:{name}' for name in names)}",
            f"--config.rewards.weights={','.join(map(str, weights))}",
            f"--config.evaluation.task={chats},{other}",
            "--config.evaluation.samples=2,3",
            "--config.evaluation.every_steps=2",
        ],
    )
    trained = [record for record in records if "reward/mean" in record]
    assert [record["step"] for record in trained] == [1, 2]
    # No step is finished at the first, half of the two at the second.
    assert [record["reward/scheduled_reward/mean"] for record in trained] == [0.0, 0.5]
    for record in trained:
        assert record["logged/accuracy"] == pytest.approx(record["reward/accuracy_reward/mean"])
        assert record["reward/without_value"] == 0 and "reward/no_answer_fraction" not in record
    first, last = (record for record in records if "eval/chats/avg@2" in record)
    # The held-out score is the weighted sum: with this untrained model, the length and the
    # schedule.
    for record, share in ((first, 0.0), (last, 1.0)):
        assert record["eval_reward/chats/scheduled_reward"] == share
        means = [
            record[f"eval_reward/chats/{name}"]
            for name in """
            format_reward_func think_format_reward accuracy_reward async_reward_func scheduled_reward
        """.split()
        ]
        some = [
            record[f"eval_reward/chats/{name}"]
            for name in ("math_reward_func", "coding_reward_func")
        ]
        total = (
            np.dot(means, [1, 1, 2, 0.01, 1]) + sum(some) / 2
        )  # each has a value on half of the rows
        assert record["eval/chats/avg@2"] == pytest.approx(total, abs=1e-5)
        assert record["eval_logged/chats/accuracy"] == pytest.approx(
            record["eval_reward/chats/accuracy_reward"]
        )
        assert "eval/other/avg@3" in record
    for sample in _lines(tmp_path / "run" / "samples.jsonl"):
        assert sample["answer"] == sample["extra"]["solution"] if sample["answer"] else True
        assert sample["extra"]["extracted_answer"] == sample["completion"][:5]
    report = (tmp_path / "run" / "report.html").read_text()
    assert (
        "what reward functions logged under this name" in report
        and "task.chat_template_kwargs" in report
    )


@pytest.mark.long
def test_a_prompt_alone_and_a_reward_of_lengths_train(run_environment, tmp_path):
    prompts = _write(tmp_path / "prompts.jsonl", [{"prompt": f"{number}?"} for number in range(4)])
    names = f"{_EXAMPLES}:reward_ids,{_EXAMPLES}:reward_text"
    records = _run(
        run_environment,
        tmp_path / "run",
        [
            f"--config.task.train={prompts}",
            f"--config.rewards.functions={names}",
            "--config.rewards.weights=1,0",
            _NO_EVALUATION,
        ],
    )
    for record in records:
        assert record["reward/mean"] == pytest.approx(record["completion/length_mean"], abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("row", "function"), [(CODE, "code"), (SEARCH, "search")])
def test_rows_of_verl_train_with_a_reward_of_the_user(run_environment, tmp_path, row, function):
    (tmp_path / "own.py").write_text(_VERL)
    rows = [row | {"extra_info": {"index": number}} for number in range(4)]
    location = _write(tmp_path / "rows.jsonl", rows)
    records = _run(
        run_environment,
        tmp_path / "run",
        [
            f"--config.task.train={location}",
            _NO_EVALUATION,
            f"--config.rewards.functions={tmp_path}/own.py:{function}",
        ],
    )
    assert [record["step"] for record in records] == [1, 2]
    log = (tmp_path / "run" / "rewards.log").read_text()
    if function == "code":
        assert log == "tests ['1 2'] ['3']\n" * 32  # 16 completions, two steps
        samples = _lines(tmp_path / "run" / "samples.jsonl")
        assert {sample["extra"]["row"] for sample in samples} <= {0, 1, 2, 3}
    else:
        assert log == "" and all(record["reward/std"] > 0 for record in records)


def test_a_mixture_of_three_trains_with_curves_of_each(run_environment, tmp_path):
    (tmp_path / "own.py").write_text(_VERL)
    search = _write(
        tmp_path / "search.jsonl", [SEARCH | {"extra_info": {"index": n}} for n in range(3)]
    )
    sums = _write(
        tmp_path / "sums.jsonl", [{"prompt": f"{n}+1=?", "answer": str(n + 1)} for n in range(5)]
    )
    (tmp_path / "own.py").write_text(
        "def own(source, completions, **columns):\n    return [float(len(c[0]['content'])) if s "
        "== 'nq' else None for s, c in zip(source, completions)]\n"
    )
    records = _run(
        run_environment,
        tmp_path / "run",
        [
            f"--config.task.train={search}@2,{sums}@1,arithmetic:difficulty=1,count=8@1",
            _NO_EVALUATION,
            f"--config.rewards.functions=math,{tmp_path}/own.py:own",
            "--config.task.max_prompt_tokens=64",
        ],
    )
    for record in records:
        # 4 prompts a step: two of the first, one of each other.
        sources = {name.split("/")[2] for name in record if name.startswith("reward/source/")}
        assert sources == {"nq", "sums", "arithmetic"}
        assert record["reward/source/nq/mean"] == pytest.approx(record["reward/own/mean"], abs=1e-5)
        assert record["reward/source/sums/mean"] == 0.0 == record["reward/math/mean"]
        parts = [2, 1, 1]
        for metric, whole in (
            ("completion/source/{}/length_mean", "completion/length_mean"),
            ("reward/source/{}/mean", "reward/mean"),
        ):
            means = [record[metric.format(source)] for source in ("nq", "sums", "arithmetic")]
            assert record[whole] == pytest.approx(np.dot(means, parts) / 4, abs=1e-5)
        assert all(record[f"discrepancy/source/{source}/mean"] > 0 for source in sources)
    samples = _lines(tmp_path / "run" / "samples.jsonl")
    assert sorted(sample["source"] for sample in samples if sample["step"] == 1) == [
        "arithmetic",
        "nq",
        "nq",
        "sums",
    ]


@pytest.mark.long
def test_the_calculator_trains_in_turns(run_environment, tmp_path):
    task = "examples/plugins/calculator.py:calculator"
    settings = f"""
        --config=examples/plugins/calculator.py:debug --config.mesh.cpu_devices=1 --config.training.row_lengths=(112,)
        --config.task.train={task},difficulty=1,count=16 --config.rollout.max_completion_tokens=48
        --config.warmup.steps=60 --config.training.micro_batch_tokens=2048 --config.evaluation.samples=2
        --config.warmup.task={task},difficulty=1,count=64,worked=true
        --config.evaluation.task={task},difficulty=1,count=8,split=heldout
    """.split()
    records = _run(run_environment, tmp_path / "run", settings)
    trained = [record for record in records if "reward/mean" in record]
    assert [record["step"] for record in trained] == [1, 2]
    for record in trained:
        assert (
            record["reward/environment/mean"] == record["reward/mean"]
            and record["reward/environment/failed"] == 0
        )
        assert (
            1.0 <= record["environment/turns_mean"] <= 3.0
            and 0.0 <= record["environment/done_fraction"] <= 1.0
        )
        # Sampled tokens alone: at most 16 in each of three turns.
        assert record["completion/length_max"] <= 48
    assert [record["step"] for record in records if "eval/calculator/avg@2" in record] == [0, 2]
    assert any(
        "environment/turns_mean" in name
        for record in records
        for name in record
        if name.startswith("eval_")
    )


@pytest.mark.long
def test_tools_train_and_a_resumed_run_repeats_their_bits(run_environment, tmp_path):
    task = "examples/plugins/calculator.py:calculator"
    settings = f"""
        --config=examples/plugins/calculator.py:debug,tools --config.mesh.cpu_devices=1
        --config.training.row_lengths=(224,) --config.training.micro_batch_tokens=4096 {_NO_EVALUATION}
        --config.task.train={task},difficulty=1,count=16 --config.rollout.max_completion_tokens=160
        --config.warmup.steps=200 --config.warmup.task={task},difficulty=1,count=64,worked=true,tools=true
    """.split()
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    records = [
        record for record in _run(run_environment, whole, settings) if "reward/mean" in record
    ]
    _run(run_environment, broken, [*settings, "--config.training.steps=1"])
    _run(run_environment, broken, settings)
    assert read_digests(broken, 2) == read_digests(whole, 2)
    samples = _lines(whole / "samples.jsonl")
    assert _lines(broken / "samples.jsonl") == samples
    assert max(record["environment/turns_mean"] for record in records) > 1.0
    called = [sample["completion"] for sample in samples if "</tool_call>" in sample["completion"]]
    assert called and all("tool\n" in text for text in called)


def test_an_environment_that_breaks_saves_and_stops_the_run_with_one_line(
    run_environment, tmp_path
):
    prompts = _write(tmp_path / "prompts.jsonl", [{"prompt": f"{number}?"} for number in range(4)])
    name = f"{planted_environments.__file__}:NoText"
    # An untrained policy ends few of its turns: those that it ends are answered.
    done = finished(
        "-m",
        "bin.train",
        *_SMALL,
        f"--config.run_dir={tmp_path / 'run'}",
        _NO_EVALUATION,
        "--config.rewards.functions=environment",
        f"--config.task.train={prompts}",
        f"--config.task.environment={name}",
        "--config.task.max_turns=1",
        env=run_environment,
        code=2,
    )
    line = done.stderr.splitlines()[-1]
    assert line.startswith(
        f"error: config.rewards.functions: environment {name}: step returned the int 3 as "
        "observation"
    )
    assert "; saved after step " in line and (tmp_path / "run" / "checkpoints" / "0").is_dir()
