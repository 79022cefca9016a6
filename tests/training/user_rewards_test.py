"""Rewards of users in whole runs: what is trained on can be computed again.

Every failure is one line.
"""

import json
import signal
import subprocess
import sys
import uuid
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.commands.flags import parse
from dcmdp_jax.errors import UserError
from dcmdp_jax.run import task
from dcmdp_jax.run.run import Run
from tests.support.run_invariants import contradictions
from tests.support.waiting import HANGS_S, wait_until

_ROOT = Path(__file__).resolve().parents[2]
_SMALL = (
    "--config=configs/demo.py:debug",
    "--config.evaluation.every_steps=0",
    "--config.warmup.steps=0",
    "--config.mesh.cpu_devices=1",
    "--config.observe.samples_every_steps=1",
)

# Writes down what it gets. `bonus` and `source` are columns of the data.
_OWN = """
import json, pathlib
LOG = pathlib.Path(__file__).with_name("calls.jsonl")

async def own(prompts, completions, completion_ids, bonus, source, answer, **columns):
    rewards = [b - len(ids) / 8 if s == "first" else None for b, s, ids in zip(bonus, source, completion_ids)]
    call = {"prompts": prompts, "completions": completions, "lengths": [len(ids) for ids in completion_ids],
            "source": source, "answer": answer, "columns": sorted(columns), "rewards": rewards}
    with LOG.open("a") as file:
        file.write(json.dumps(call) + "\\n")
    return rewards
"""

_BAD = """
import pathlib, time

def raises(completions, **columns):
    raise KeyError("planted")

def hangs(completions, **columns):
    pathlib.Path(__file__).with_name("called").touch()
    time.sleep(100_000)

def one_too_few(completions, **columns):
    return [1.0] * (len(completions) - 1)

def nan(completions, **columns):
    return [float("nan") if row == 5 else 0.5 for row in range(len(completions))]

def text(completions, **columns):
    return ["good"] * len(completions)
"""


@pytest.fixture(scope="module")
def environment(run_environment):
    """With a mark that every process of a run inherits."""
    return run_environment | {"DCMDP_TEST_MARK": uuid.uuid4().hex}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """own.py, bad.py, and problems of two sources."""
    directory = tmp_path_factory.mktemp("files")
    (directory / "own.py").write_text(_OWN)
    (directory / "bad.py").write_text(_BAD)
    with (directory / "problems.jsonl").open("w") as lines:
        for row in range(8):
            problem = {"prompt": f"{row}+1=?", "answer": str(row + 1), "bonus": row, "day": None}
            lines.write(
                json.dumps(problem | {"data_source": "first" if row % 2 else "second"}) + "\n"
            )
    return directory


def _start(environment, run_dir, *overrides):
    command = [
        sys.executable,
        "-m",
        "bin.train",
        *_SMALL,
        f"--config.run_dir={run_dir}",
        *overrides,
    ]
    return subprocess.Popen(
        command,
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process, code=0):
    output, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode == code, output + errors
    return errors


def _left_behind(environment):
    """Processes of the runs that are still there."""
    mark = f"DCMDP_TEST_MARK={environment['DCMDP_TEST_MARK']}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes())
        except OSError:
            continue
    return found


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_trained_on_is_the_weighted_sum_of_the_rewards(environment, files, tmp_path):
    run_dir = tmp_path / "run"
    _finish(
        _start(
            environment,
            run_dir,
            f"--config.task.train={files}/problems.jsonl",
            "--config.rewards.weights=2,-0.5",
            f"--config.rewards.functions=math,{files}/own.py:own",
        )
    )
    assert contradictions(run_dir) == [] and _left_behind(environment) == []
    calls = _lines(files / "calls.jsonl")
    records = _lines(run_dir / "metrics.jsonl")
    samples = _lines(run_dir / "samples.jsonl")
    assert len(calls) == 2 and [record["step"] for record in records] == [1, 2]
    for call, record in zip(calls, records, strict=True):
        assert (
            len(call["prompts"]) == 16
        )  # 4 prompts, 4 completions each: the whole batch in one call
        assert call["prompts"][:4] == call["prompts"][:1] * 4 != call["prompts"][4:8]
        assert call["columns"] == [
            "data_source",
            "day",
            "log_extra",
            "log_metric",
            "reference_answer",
            "trainer_state",
        ]
        rows = [int(prompt.partition("+")[0]) for prompt in call["prompts"]]
        assert call["answer"] == [str(row + 1) for row in rows]
        assert call["source"] == ["first" if row % 2 else "second" for row in rows]
        # The completions of this untrained model hold no answer, which the verifier gives 0.
        assert record["reward/no_answer_fraction"] == 1.0 and record["reward/math/mean"] == 0.0
        # 2 x 0 - 0.5 x (bonus - length / 8) for the first source; None counts as 0 for the second.
        own = {at: row - call["lengths"][at] / 8 for at, row in enumerate(rows) if row % 2}
        totals = np.array([-0.5 * own.get(at, 0.0) for at in range(16)])
        assert record["reward/mean"] == pytest.approx(totals.mean(), abs=1e-6)
        assert record["reward/std"] == pytest.approx(totals.std(), abs=1e-5)
        assert record["reward/own/mean"] == pytest.approx(np.mean(list(own.values())), abs=1e-6)
        assert record["reward/own/std"] == pytest.approx(np.std(list(own.values())), abs=1e-6)
        assert (record["reward/own/failed"], record["reward/without_value"]) == (0, 0)
        assert record["reward/source/first/mean"] == pytest.approx(
            totals[list(own)].mean(), abs=1e-6
        )
        assert record.get("reward/source/second/mean", 0.0) == 0.0
        for place, sample in enumerate(one for one in samples if one["step"] == record["step"]):
            at = 4 * place
            assert sample["completion"] == call["completions"][at]
            assert sample["reward"] == pytest.approx(totals[at], abs=1e-6)
            assert sample["rewards"] == {"math": 0.0, "own": call["rewards"][at]}
    report = (run_dir / "report.html").read_text()
    assert "reward/own/mean" in report and "mean of the reward own, before its weight" in report
    assert "data source first" in report and str(files / "own.py") in report


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("raises", "raised KeyError: 'planted' (bad.py, line 5); "),
        ("hangs", "no result in 1 s; "),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ("one_too_few", "returned 15 rewards for 16 completions, needs one for each; "),
                (
                    "nan",
                    "returned nan, needs a finite number or None (completion 5 of the batch, of "
                    "row ",
                ),
                (
                    "text",
                    "returned 'good', needs a finite number or None (completion 0 of the batch, "
                    "of row ",
                ),
            )
        ),
    ],
)
def test_a_reward_that_fails_saves_and_stops_the_run_with_one_line(
    environment, files, tmp_path, function, problem
):
    name = f"{files}/bad.py:{function}"
    run_dir = tmp_path / "run"
    errors = _finish(
        _start(
            environment,
            run_dir,
            f"--config.rewards.functions=math,{name}",
            "--config.rewards.timeout=1",
        ),
        code=2,
    )
    line = errors.splitlines()[-1]
    assert line.startswith(f"error: config.rewards.functions: reward {name}: {problem}")
    assert line.endswith(
        "saved after step 0: fix the function and rerun the same command, or set "
        "rewards.on_error=none to ignore its failures (time limit: rewards.timeout)"
    )
    assert "Traceback" not in errors and not (run_dir / "error.log").exists()
    assert (run_dir / "checkpoints" / "0").is_dir()
    assert _left_behind(environment) == []


@pytest.mark.long
def test_a_run_can_go_on_without_the_values_of_functions_that_fail(environment, files, tmp_path):
    run_dir = tmp_path / "run"
    names = ",".join(f"{files}/bad.py:{name}" for name in ("hangs", "raises", "nan"))
    _finish(
        _start(
            environment,
            run_dir,
            f"--config.rewards.functions={names},examples/length_reward.py:score",
            "--config.rewards.timeout=1",
            "--config.rewards.on_error=none",
        )
    )
    assert contradictions(run_dir) == [] and _left_behind(environment) == []
    records = _lines(run_dir / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert [
            record[f"reward/{name}/failed"] for name in ("hangs", "raises", "nan", "score")
        ] == [16, 16, 16, 0]
        assert not any(f"reward/{name}/mean" in record for name in ("hangs", "raises", "nan"))
        # Without the reward math nothing is judged, and the mean length says what `score` gave.
        assert "reward/no_answer_fraction" not in record
        expected = 1 - record["completion/length_mean"] / 36
        assert record["reward/mean"] == pytest.approx(expected, abs=1e-6)
        assert record["reward/score/mean"] == pytest.approx(expected, abs=1e-6)


def test_a_signal_while_a_function_hangs_saves_and_leaves_at_once(environment, files, tmp_path):
    (files / "called").unlink(missing_ok=True)
    process = _start(
        environment,
        tmp_path / "run",
        f"--config.rewards.functions={files}/bad.py:hangs",
        "--config.rewards.timeout=9999",
    )
    wait_until(
        lambda: (files / "called").exists() or process.poll() is not None,
        "the call of the function",
    )
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "stopped by SIGTERM after step 0, saved; the same command resumes" in output
    assert _left_behind(environment) == []


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("nowhere.py:f", "nowhere.py:f: no such file"),
        ("examples/length_reward.py:scores", "has no function 'scores'; it has score"),
        (
            "json:dumps",
            "json:dumps: can't be called as dumps(prompts, completions, completion_ids, "
            "trainer_state, ",
        ),
    ],
)
def test_a_function_that_can_not_be_called_is_found_before_the_run_starts(
    tmp_path, function, problem
):
    run_dir = tmp_path / "run"
    config = parse(
        [
            "train",
            *_SMALL[:3],
            f"--config.rewards.functions={function}",
            f"--config.run_dir={run_dir}",
        ]
    ).config
    with pytest.raises(ValueError) as raised:
        Run.check(config)
    assert str(raised.value).startswith("config.rewards.functions: reward ") and problem in str(
        raised.value
    )
    assert not run_dir.exists()


@pytest.mark.parametrize("function", ["nowhere.py:f", "examples/length_reward.py:scores"])
def test_a_function_that_is_not_there_is_found_before_the_model_is_read(function, monkeypatch):
    monkeypatch.setattr(task, "read_model", None)
    config = parse(["train", "--config=demo", f"--config.rewards.functions={function}"]).config
    with pytest.raises(UserError, match=f"^config.rewards.functions: reward {function}: "):
        task.read_task(config, datetime(2026, 1, 1))
