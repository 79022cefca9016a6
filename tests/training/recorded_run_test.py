"""A run directory of version 0.1.0 resumes and evaluates."""

import json
import math
import shutil
from pathlib import Path

import pytest

from dcmdp_jax.config.load import VERSION
from dcmdp_jax.dotted_names import flatten
from dcmdp_jax.run.directory import read_config
from tests.support.processes import finished

_ROOT = Path(__file__).resolve().parents[2]
_RECORDED = _ROOT / "tests" / "recorded" / "run_of_0_1_0"


def _run(environment, command):
    return finished("-m", *command, env=environment | {"PYTHONPATH": str(_ROOT)}).stdout


def _records(run_dir):
    records = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        records.setdefault(record["step"], {}).update(record)
    return records


@pytest.fixture
def run_dir(tmp_path):
    return Path(shutil.copytree(_RECORDED, tmp_path / "run"))


def test_the_recorded_config_is_read_with_every_setting(run_dir):
    saved = json.loads((run_dir / "config.json").read_text())
    assert saved["config_version"] == 7 and "top_p" in saved["rollout"]
    config = read_config(run_dir)
    assert config.model.architecture.hidden_size == 16 and config.rollout.precision == "fp8"
    assert config.algorithm.tolerance == 0.0006 and config.evaluation.samples == (2,)


def test_a_recorded_run_resumes(run_environment, run_dir):
    config = flatten(json.loads((run_dir / "config.json").read_text()))
    changed = """
        model.architecture.hidden_size model.architecture.intermediate_size model.architecture.num_layers
        model.architecture.num_heads model.architecture.head_dim algorithm.tolerance warmup.task
    """.split()
    command = [
        "bin.train",
        "--config=configs/demo.py:debug",
        f"--config.run_dir={run_dir}",
        "--config.training.steps=4",
        "--config.evaluation.every_steps=0",
        "--config.mesh.cpu_devices=1",
        "--config.model.scan_unroll=2",
        *(f"--config.{name}={config[name]}" for name in changed),
    ]
    out = _run(run_environment, command)
    assert f"resuming {run_dir} after step 2" in out and "SFT warm start: " not in out
    before = _records(_RECORDED)
    after = _records(run_dir)
    assert sorted(after) == [0, 1, 2, 3, 4] and all(
        after[step] == before[step] for step in (0, 1, 2)
    )
    # lambda of step 3 is that of step 2 after one dual step of eta = 50: 0.0715 - 50 x 0.000567 =
    # 0.0432.
    moved = before[2]["dual/multiplier"] + 50 * before[2]["dual/violation"]
    assert (
        after[3]["dual/multiplier"]
        == pytest.approx(moved, rel=1e-5)
        == pytest.approx(0.0432, abs=1e-4)
    )
    assert all(math.isfinite(value) for step in (3, 4) for value in after[step].values())
    # From now on it is a run of this version.
    assert json.loads((run_dir / "config.json").read_text())["config_version"] == VERSION


@pytest.mark.long
def test_a_recorded_run_evaluates(run_environment, run_dir):
    command = [
        "bin.evaluate",
        run_dir,
        "--config.evaluation.samples=2",
        "--config.rollout.max_completion_tokens=16",
        "--out",
        run_dir / "scores.json",
    ]
    _run(run_environment, command)
    scores = json.loads((run_dir / "scores.json").read_text())
    assert scores["step"] == 2 and scores["settings"]["rollout.precision"] == "fp8"
    (task,) = scores["tasks"].values()
    assert len(task["problem_rows"]) == 2  # evaluation.task of the run: count=2
    assert 0 <= scores["average"] <= 1


def test_a_recorded_run_is_refused_with_another_setting(run_dir):
    done = finished(
        "-m",
        "bin.train",
        "--config=configs/demo.py:debug",
        f"--config.run_dir={run_dir}",
        "--config.algorithm.tolerance=0.0006",
        code=2,
    )
    assert done.returncode == 2
    assert "holds a run with model.architecture.head_dim=8, this config has 32" in done.stderr
