"""Which parts runs of a study share: the step of one kind, the engine of like kinds."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dcmdp_jax.config.settings import Config
from dcmdp_jax.errors import UserError
from dcmdp_jax.observe.metrics_io import read_metrics
from dcmdp_jax.run.services import Services
from research import sweep
from research.studies.results import read_kept_metrics, write_kept_metrics
from research.studies.sweep import load_study
from tests.support.waiting import HANGS_S


@pytest.fixture
def made(monkeypatch):
    """What is made, trained and closed, in order; an engine is its number."""
    events = []

    def start(*_):
        events.append("engine")
        closing = contextlib.ExitStack()
        closing.callback(events.append, "closed")
        return Services(
            engine=len(events),
            scorer=None,
            turns=None,
            tokenizer=None,
            closing=closing,
        )

    def programs(config, *rest):
        events.append("step")
        return f"programs of {config.algorithm.multiplier_max}"

    def train(run, *, start_services, show, programs):
        with start_services() as services:
            events.append((services.engine, programs))

    task = SimpleNamespace(model=None, lora=None)
    run = SimpleNamespace(task=task, placement=SimpleNamespace(engine=None), weights=None)
    monkeypatch.setattr(sweep.Run, "check", lambda config: run)
    monkeypatch.setattr(sweep, "start_services", start)
    monkeypatch.setattr(sweep, "make_step_programs", programs)
    monkeypatch.setattr(sweep, "train", train)
    return events


def _config(section=None, **changes):
    config = Config()
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **changes)}
    )


def test_another_penalty_makes_a_step_and_another_engine_closes_the_last(made):
    with sweep.Shared() as shared:
        for section, changes in (
            ("training", {"seed": 1}),
            ("training", {"seed": 9}),
            ("algorithm", {"multiplier": 0.5}),
            ("algorithm", {"multiplier_max": 7.0}),
            ("rollout", {"max_rows": 8}),
        ):
            shared.train(_config(section, **changes), print)
    first = (2, f"programs of {Config().algorithm.multiplier_max}")
    one = ["step", "engine", first, first, first, "step", (2, "programs of 7.0"), "closed"]
    assert made == [*one, "step", "engine", (10, first[1]), "closed"]


_HEAD = """from research.studies.study import Arm, Study
GRPO = {"training.prompts_per_step": 4, "training.prompts_per_mini_batch": 2, "optimizer.learning_rate": 1e-4}
GRPO |= {"algorithm.method": "grpo"}


def get_study(arg=''):
"""
_LIKE = """    small = {
        "warmup.steps": 0, "model.architecture.hidden_size": 16, "model.architecture.intermediate_size": 16,
        "model.architecture.num_layers": 1, "model.architecture.num_heads": 1, "mesh.cpu_devices": 1,
        "evaluation.every_steps": 2, "evaluation.max_problems": 2,
    }
    dc = {"algorithm.method": "dc_grpo", "algorithm.tolerance": 0.0012, "algorithm.dual_learning_rate": 50.0}
    arms = {
        name: Arm("configs/demo.py:debug", GRPO | {**small, **dc, "algorithm.multiplier": value})
        for name, value in (("low", 0.1), ("high", 0.9))
    }
    words = ("--config.evaluation.task=arithmetic:difficulty=1,count=8", "--config.evaluation.samples=(3,)",
             "--config.rollout.max_completion_tokens=8", "--config.evaluation.temperature=1.0")
    return Study("Like", arms, "low", (3, 4), words)
"""


@pytest.mark.long
def test_runs_in_one_process_are_those_of_processes_and_are_kept_as_they_come(tmp_path):
    """The third line of the program counts how often a step was made: once, for all runs are of one
    kind.
    """
    study = tmp_path / "like.py"
    kept = tmp_path / "kept.jsonl.gz"
    out = tmp_path / "out"
    study.write_text(_HEAD + _LIKE)
    program = (
        "import sys; from dcmdp_jax.training import step_programs\nmade, make = [], "
        "step_programs.jit_step\nstep_programs.jit_step = lambda *parts: made.append(1) or "
        "make(*parts)\nfrom research import sweep; code = sweep.main(sys.argv); print('made', "
        "len(made)); sys.exit(code)"
    )
    words = [f"--study={study}", f"--out={out}", f"--kept={kept}"]

    def run(*more):
        command = [sys.executable, "-c", program, *words, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "made 1" in run("--seeds=3")
    first = read_kept_metrics(kept, ["low", "high"])
    assert [list(seeds) for seeds in first.values()] == [[3], [3]]
    assert not (out / "low" / "seed3").exists()
    # What was kept is not run again, and stays to the bit.
    said = run()
    assert "[1/2] low, seed 4" in said and "made 1" in said
    everything = read_kept_metrics(kept, ["low", "high"])
    np.testing.assert_equal(everything["high"][3], first["high"][3])
    # The second of the runs that share a step against a run of its own.
    alone = tmp_path / "alone"
    arguments = [*load_study(str(study)).arms["high"].arguments(), "--config.training.seed=4"]
    command = [sys.executable, "-m", "bin.train", *arguments, f"--config.run_dir={alone}"]
    assert subprocess.run(command, capture_output=True, timeout=HANGS_S).returncode == 0
    series = read_metrics(alone)
    words = [
        "evaluate",
        str(alone),
        *load_study(str(study)).evaluation,
        "--out",
        str(tmp_path / "scores.json"),
    ]
    assert (
        subprocess.run([sys.executable, "-m", "dcmdp_jax", *words], timeout=HANGS_S).returncode == 0
    )
    score = json.loads((tmp_path / "scores.json").read_text())["tasks"]["arithmetic"]["average"]
    series["evaluation/arithmetic/avg@3"] = (
        np.array([series["reward/mean"][0][-1]]),
        np.array([score]),
    )
    for name, (steps, values) in everything["high"][4].items():
        assert series[name][0].tolist() == steps.tolist()
        np.testing.assert_allclose(series[name][1], values, rtol=1e-8)


def _refused(*words):
    with pytest.raises(UserError) as refused:
        sweep.main(["sweep", *words])
    return str(refused.value)


def test_kept_runs_of_another_arm_are_refused_before_the_first_run(tmp_path, monkeypatch):
    """Runs of eta 50 under the name of an arm of eta 25: it would go on as one arm. And a step that
    is missing.
    """
    monkeypatch.setattr(sweep, "run_in_one_process", lambda *_: pytest.fail("a run began"))
    kept = tmp_path / "kept.jsonl.gz"
    words = "--study=configs/studies/ablation_dual_learning_rate.py"
    steps = np.arange(1, 41)
    delta = np.linspace(0.001, 0.002, 40)
    lambdas = [0.1]
    for each in delta[:-1]:
        lambdas.append(
            float(
                np.clip(np.float32(lambdas[-1]) + np.float32(50) * np.float32(each - 0.0012), 0, 1)
            )
        )
    columns = {
        "dual/multiplier": lambdas,
        "discrepancy/mean": delta,
        "dual/tolerance": np.full(40, 0.0012),
    }
    of_50 = {0: {name: (steps, np.array(values)) for name, values in columns.items()}}
    write_kept_metrics(kept, {"0.5": of_50})
    said = _refused(words, f"--kept={kept}", f"--out={tmp_path}/out")
    assert (
        said.startswith(f"--kept: {kept}: arm '0.5', seed 0: lambda is ") and "rename one" in said
    )
    gap = {
        name: (np.delete(at, 6), np.delete(values, 6)) for name, (at, values) in of_50[0].items()
    }
    write_kept_metrics(kept, {"1.0": {0: gap}})
    said = _refused(words, f"--kept={kept}", f"--out={tmp_path}/out")
    assert (
        said == f"--kept: {kept}: arm '1.0', seed 0: dual/multiplier has no step 7 of 40; a replay "
        "needs every step"
    )
