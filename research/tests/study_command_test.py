"""`python -m bin.sweep`: a small study stopped and continued, every study file, and what is
refused.
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dcmdp_jax.config.load import to_saved
from dcmdp_jax.config.settings import to_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.observe.metrics_io import read_metrics
from research.studies import study_runs, sweep
from research.studies.results import (
    MEASURES,
    measure_arms,
    paired_differences,
    read_kept_metrics,
)
from research.studies.sweep import main
from tests.support.commands import failed_command
from tests.support.each import check_each
from tests.support.waiting import HANGS_S

_ROOT = Path(__file__).resolve().parents[2]
_STUDIES = sorted(
    path.stem for path in (_ROOT / "configs" / "studies").glob("[!_]*.py") if path.stem != "base"
)
_SIZE = {
    "training.prompts_per_step": 4,
    "training.prompts_per_mini_batch": 2,
    "optimizer.learning_rate": 1e-4,
}
_GRPO = _SIZE | {"algorithm.method": "grpo"}
_DEMO = {
    "training.prompts_per_step": 48,
    "training.prompts_per_mini_batch": 24,
    "optimizer.learning_rate": 1e-4,
}
_DEMO |= {"algorithm.dual_learning_rate": 50.0, "algorithm.tolerance_steps": 4}
"""What arms of the demo, plain and with :debug, have to say."""
_HEAD = (
    f"from research.studies.study import Arm, Study\nGRPO, DEMO = {_GRPO}, "
    f"{_DEMO}\n\n\ndef get_study(arg=''):\n"
)
_OF_THE_PAGE = (
    "evidence",
    "dose_response",
    "mismatch_map",
    "lag",
    "long_completions",
    "smollm2",
    "paper_regime",
    "doses",
)
"""Studies behind docs/evidence.md, which have no size of the paper's."""
_TINY = """    small = {
        "warmup.steps": 0, "model.architecture.hidden_size": 16, "model.architecture.intermediate_size": 16,
        "model.architecture.num_layers": 1, "model.architecture.num_heads": 1, "mesh.cpu_devices": 1,
        "evaluation.every_steps": 0, "algorithm.tolerance_steps": 0,
    }
    dc = {"algorithm.method": "dc_grpo", "algorithm.tolerance": 0.0012, "algorithm.dual_learning_rate": 50.0}
    arms = {"grpo": Arm("configs/demo.py:debug", GRPO | small), "dc": Arm("configs/demo.py:debug", GRPO | small | dc)}
    return Study("Tiny", arms, "grpo", (3,))
"""


def _task(path):
    path.write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    return str(path)


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch, run_environment):
    """Config files are named from there. XLA's eight devices are for this process, not for the
    runs.
    """
    monkeypatch.chdir(_ROOT)
    for name in run_environment.keys() - os.environ.keys() | {"XLA_FLAGS"}:
        monkeypatch.setenv(name, run_environment[name])


_fails = functools.partial(failed_command, main, "sweep")


@pytest.mark.long
def test_a_stopped_study_continues_and_compares(tmp_path):
    study = tmp_path / "tiny.py"
    out = tmp_path / "out"
    study.write_text(_HEAD + _TINY)
    words = [f"--study={study}", f"--out={out}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bin.sweep", *words], cwd=_ROOT, stdout=subprocess.PIPE, text=True
    )
    # The second run begins once the first is finished.
    assert "grpo, seed 3: finished" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped; the same command continues" in rest and "Not finished: 1 of 2 runs." in rest
    before = (out / "grpo" / "seed3" / "finished.json").stat().st_mtime_ns
    assert main(["sweep", *words]) == 0
    assert (out / "grpo" / "seed3" / "finished.json").stat().st_mtime_ns == before
    for arm in ("grpo", "dc"):
        assert read_metrics(out / arm / "seed3")["reward/mean"][0].tolist() == [1, 2]
    runs = read_kept_metrics(out / "metrics.jsonl.gz", None)
    for name, metric in (("discrepancy", "discrepancy/mean"), ("multiplier", "dual/multiplier")):
        values = {arm: read_metrics(out / arm / "seed3")[metric][1][-1] for arm in ("grpo", "dc")}
        found = measure_arms(runs, MEASURES[name])
        assert {arm: found[arm].values[3] for arm in values} == pytest.approx(values)
        assert paired_differences(found, "grpo")["dc"].mean == pytest.approx(
            values["dc"] - values["grpo"]
        )
    assert {path.stem for path in (out / "figures").glob("*.png")} == {
        "reward",
        "discrepancy",
        "multiplier",
        "entropy",
        "difference_discrepancy",
    }
    # What was kept gives the same results, without the runs.
    kept = out / "metrics.jsonl.gz"
    again = tmp_path / "again"
    assert main(["sweep", f"--study={study}", f"--out={again}", f"--redraw={kept}"]) == 0
    assert (again / "results.md").read_text() == (out / "results.md").read_text()
    assert {path.name for path in (again / "figures").iterdir()} == {
        path.name for path in (out / "figures").iterdir()
    }
    # The seed is the run's.
    assert json.loads((out / "dc" / "seed3" / "config.json").read_text())["training"]["seed"] == 3


def test_a_run_that_fails_is_named_and_the_others_are_evaluated(tmp_path, capsys, monkeypatch):
    called = []

    def call(words, log):
        directory = log.with_suffix("")
        arm = directory.parent.name
        seed = int(directory.name.removeprefix("seed"))
        called.append((f"{arm}, seed {seed}", words[0]))
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        if arm == "a":
            return 1
        if words[0] == "train":
            directory.mkdir(parents=True)
            (directory / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
            return 0
        out = directory / "evaluation.json"
        assert words[1:] == [str(directory), *evaluation, "--method", "b", "--out", str(out)]
        score = {0: 0.25, 1: 0.75}[seed]
        out.write_text(
            json.dumps({"method": "b", "tasks": {"x": {"average": score, "samples": 8}}})
        )
        return 0

    monkeypatch.setattr(study_runs, "run_command", call)
    evaluation = (
        f"--config.evaluation.task={_task(tmp_path / 'x.jsonl')}",
        "--config.rollout.max_completion_tokens=16",
    )
    study = tmp_path / "s.py"
    study.write_text(
        _HEAD
        + "    arms = {'a': Arm('configs/demo.py', DEMO), 'b': Arm('configs/demo.py', DEMO | {'training.steps': 9})}\n"
        f"    return Study('S', arms, 'a', (0, 1), {evaluation})\n"
    )
    assert main(["sweep", f"--study={study}", f"--out={tmp_path}/out"]) == 1
    text = capsys.readouterr().out
    assert "Failed: a, seed 0, a, seed 1." in text and "| b | 2 | 0.5 ± 0 |" in text
    assert "b (2 runs) | 50.0 ±317.7 | 50.0 ±317.7" in text  # sd 35.36, t(1) = 12.706, over sqrt(2)
    assert called == [
        ("a, seed 0", "train"),
        ("b, seed 0", "train"),
        ("b, seed 0", "evaluate"),
        ("a, seed 1", "train"),
        ("b, seed 1", "train"),
        ("b, seed 1", "evaluate"),
    ]
    # Nothing that is done is done again; what failed is tried again.
    called.clear()
    main(["sweep", f"--study={study}", f"--out={tmp_path}/out"])
    assert called == [("a, seed 0", "train"), ("a, seed 1", "train")]


def test_every_study_file_has_runs_that_can_be_made(tmp_path, capsys):
    def check(name, argument):
        study = f"configs/studies/{name}.py{argument}"
        try:
            main(["sweep", f"--study={study}", f"--out={tmp_path}", "--dry-run"])
            evaluated = False
        except UserError as error:  # once all runs are listed: the paper's models are not here
            assert re.match(
                "study: evaluation of .*, seed 0: config.model.path: no directory ", str(error)
            )
            evaluated = True
        assert evaluated == (argument == ":paper" and bool(sweep.load_study(study).evaluation))
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) >= (3 if argument else 15) or name == "main_results"
        assert not any(tmp_path.iterdir())

    files = [
        (name, argument)
        for name in _STUDIES
        for argument in ("", ":paper")
        if name not in _OF_THE_PAGE or not argument
    ]
    files += [
        ("evidence", ":int4"),
        ("evidence", ":vllm"),
        ("dose_response", ":vllm"),
        ("dose_response", ":one"),
        ("lag", ":local"),
        ("paper_regime", ":readings"),
        ("paper_regime", ":calm"),
        ("doses", ":pilots"),
    ]
    check_each(files, check)


@pytest.mark.parametrize("argument", ["", ":vllm", ":paper"])
def test_the_study_of_remedies_has_each_remedy_and_a_control_without_mismatch(argument):
    study = sweep.load_study(f"configs/studies/remedies.py{argument}")
    runs, configs = sweep.resolve(study, Path("runs/none"))
    configs = {run.arm: config for run, config in zip(runs, configs, strict=True) if run.seed == 0}
    assert {arm: config.algorithm.method for arm, config in configs.items()} == {
        **{method: method for method in ("grpo", "dual_grpo", "threshold_grpo", "dc_grpo")},
        **dict.fromkeys(("tis", "icepop", "dppo", "matched", "exact"), "grpo"),
    }
    # Parameters that have their default are left out; config.json has them.
    assert to_saved(configs["tis"])["algorithm"]["corrections"] == "tis(low=0.0,high=2.0)"
    assert to_saved(configs["icepop"])["algorithm"]["corrections"] == "icepop(low=0.5,high=5.0)"
    assert (
        configs["dppo"].algorithm.trust_region,
        configs["dppo"].algorithm.ratio_denominator,
    ) == (
        "dppo_tv",
        "rollout",
    )
    matched = configs["matched"]
    expected = {
        "": ("local", "fp8", "fp8", "full"),
        ":vllm": ("vllm", "bfloat16", "full", "fp8"),
        ":paper": ("vllm", "fp8_per_block", "fp8_per_block", "full"),
    }
    model = matched.model
    rollout = matched.rollout
    found = rollout.engine, rollout.precision, model.forward_precision, model.forward_cache
    assert found == expected[argument]
    assert configs["exact"].rollout.precision == "exact"
    assert {
        arm for arm, config in configs.items() if config.rollout != configs["grpo"].rollout
    } == {"exact"}


def _varied(study, name):
    """Values of one setting over a study file's arms."""
    found = sweep.load_study(study)
    configs = sweep.resolve(found, Path("runs/none"))[1]
    section, _, field = name.partition(".")
    return sorted({to_dict(config)[section][field] for config in configs})


@pytest.mark.parametrize(
    ("study", "setting", "values"),
    [  # section 6.3 of the paper, and its section 3
        ("ablation_multiplier", "algorithm.multiplier", [0.05, 0.1, 0.2]),
        ("ablation_dual_learning_rate", "algorithm.dual_learning_rate", [0.5, 1.0, 1.5]),
        ("ablation_tolerance", "algorithm.tolerance", [0.0030, 0.0035, 0.0037, 0.0040]),
        ("temperatures", "rollout.temperature", [0.3, 0.7, 1.0]),
        ("penalties", "algorithm.measure", ["diff", "log", "ratio"]),
        ("granularity", "algorithm.level", ["sequence", "token"]),
        ("main_results", "algorithm.method", ["dc_grpo", "grpo"]),
    ],
)
def test_the_papers_grids(study, setting, values):
    assert _varied(f"configs/studies/{study}.py:paper", setting) == values


_TASK = "--config.evaluation.task="


def _evaluated(*evaluation):
    return (
        f"    return Study('S', {{'a': Arm('configs/demo.py', DEMO)}}, 'a', (0, 1), {evaluation})\n"
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "    c = 'configs/demo.py'\n    return Study('S', {'a': Arm(c, DEMO), 'b': Arm(c, "
            "DEMO)}, 'a', (0,))\n",
            "study: 'a, seed 0' and 'b, seed 0' are one config",
        ),
        (
            "    return Study('S', {'a': Arm('configs/demo.py')}, 'a', (0,))\n",
            "study: arm 'a' inherits algorithm.tolerance_steps=4 from configs/demo.py; say it in "
            "the arm",
        ),
        (
            "    more = {'algorithm.multiplier': 0.5}\n"
            "    return Study('S', {'a': Arm('configs/demo.py:debug', GRPO | more)}, 'a', (0,))\n",
            "study: arm 'a' names algorithm.multiplier, which its other settings override; leave "
            "it out",
        ),
        (
            "    return Study('S', {'dc_grpo': Arm('configs/demo.py', DEMO)}, 'dc_grpo', (0,))\n",
            "study: arm 'dc_grpo' has the paper's name and algorithm.tolerance=0.0012, the "
            "paper's is 0.0037",
        ),
        (
            "    return Study('S', {'a': Arm('configs/demo.py', {'algorithm.eta': 3})}, 'a', "
            "(0,))\n",
            "study: a, seed 0: config.algorithm.eta: no such setting",
        ),
        (
            "    return Study('S', {'a': Arm('configs/none.py')}, 'a', (0,))\n",
            "study: a, seed 0: --config: no file",
        ),
        ("    return 3\n", "--study: {file}: get_study returned int, must be a Study"),
        ("    return 1 / 0\n", "--study: {file}: ZeroDivisionError: division by zero (line 6)"),
        # Not that there is no get_study.
        ("    return {}['arms']\n", "--study: {file}: KeyError: 'arms' (line 6)"),
        (
            "    import sys; sys.exit(3)\n",
            "--study: {file}: it called exit(3); let get_study return",
        ),
        ("    pass\n\n\nexit()\n", "--study: {file}: it called exit(None); let get_study return"),
        (
            "    return Study('S', {3: Arm('c')}, 3, (0,))\n",
            "--study: {file}: an arm's label is 3, must be text, which names a directory",
        ),
        (
            "    return Study('S', {'a': 'c'}, 'a', (0,))\n",
            "--study: {file}: arm 'a' is 'c', must be an Arm (line 6)",
        ),
        (
            "    return Study('S', {'a': Arm('c', [1])}, 'a', (0,))\n",
            "--study: {file}: an arm's settings are [1], must",
        ),
        (
            _evaluated("--stp=1"),
            "study: evaluation of a, seed 0: --stp=1: no such argument; did you mean --step?",
        ),
        (
            _evaluated("--seed=1"),
            "study: evaluation of a, seed 0: --seed: no such argument; settings are given as "
            "--config.training.seed=",
        ),
        (
            _evaluated("--step=999"),
            "study: evaluation of a, seed 0: --step: got 999, the run has training.steps=40",
        ),
        (
            _evaluated("--config.rollout.precision=fp4"),
            "study: evaluation of a, seed 0: config.rollout.precision: got",
        ),
        (
            _evaluated(f"{_TASK}none.jsonl"),
            f"study: evaluation of a, seed 0: {_TASK[2:-1]}: data none.jsonl: no such",
        ),
        (
            _evaluated(f"{_TASK}{{bad}}"),
            f"study: evaluation of a, seed 0: {_TASK[2:-1]}: {{bad}}:2: no answer in any",
        ),
        (
            _evaluated(f"{_TASK}{{good}}", "--overlap=drop", "--config.task.train=none.jsonl"),
            "study: evaluation of a, seed 0: config.task.train: data none.jsonl: no such file",
        ),
        # The debug model has room for its own completions.
        (
            _evaluated(f"{_TASK}{{good}}", "--config.rollout.max_completion_tokens=32768"),
            "study: evaluation of a, seed 0: config.rollout.max_completion_tokens: got 32768, "
            "with the",
        ),
        (
            _evaluated(f"{_TASK}{{good}}", "--out=x"),
            "--study: {file}: evaluation has --out=x, which the study gives",
        ),
    ],
)
def test_a_study_that_is_wrong_is_one_line_and_starts_nothing(
    body, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(study_runs, "run_command", lambda *_: pytest.fail("a run was started"))
    file, bad, good = (tmp_path / name for name in ("s.py", "bad.jsonl", "good.jsonl"))
    bad.write_text('{"prompt": "1+1=?", "answer": "2"}\n{"prompt": "1+2=?"}\n')
    places = {"{file}": file, "{bad}": bad, "{good}": _task(good)}
    for name, path in places.items():
        body = body.replace(name, str(path))
        message = message.replace(name, str(path))
    file.write_text(_HEAD + body)
    for arguments in ((), ("--dry-run",)):
        assert _fails(capsys, f"--study={file}", f"--out={tmp_path}/out", *arguments).startswith(
            message
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "--study is missing"),
        (
            ("--study=configs/studies/none.py",),
            "--study: no file configs/studies/none.py; did you mean configs/studies/",
        ),
        (("--study=configs/demo.py",), "--study: configs/demo.py: it has no function get_study"),
        (
            ("--study=configs/studies/methods.py:big",),
            "--study: configs/studies/methods.py: study argument 'big'",
        ),
        (
            ("--study=configs/studies/methods.py", "--seeds=1,1"),
            "argument --seeds: got '1,1', every seed must be",
        ),
        (
            ("--study=configs/studies/methods.py", "--config.training.seed=1"),
            "--config.training.seed=1: the study sets",
        ),
        (
            ("--study=configs/studies/methods.py", "--redraw=none.gz"),
            "none.gz: can't be read as gzipped JSON lines",
        ),
        (
            ("--study=configs/studies/methods.py", "--redraw=none.gz", "--seeds=1"),
            "--redraw: the metrics are kept",
        ),
        (
            ("--study=configs/studies/methods.py", "--arms=grpo,dc"),
            "--arms: got 'dc', which is none of the study's: ",
        ),
        (
            ("--study=configs/studies/methods.py", "--config.training.steps"),
            "--config.training.steps: its value is",
        ),
        (
            ("--study=configs/studies/methods.py", "--config.algorithm.method=grpo"),
            "study: arm 'threshold_grpo' names algorithm.tolerance, which its other settings "
            "override",
        ),
        (
            ("--study=configs/studies/temperatures.py", "--config.rollout.temperature=1"),
            "study: 't=0.3, seed 0' and",
        ),
    ],
)
def test_bad_arguments_are_one_line(argv, message, tmp_path, capsys):
    assert _fails(capsys, *argv, f"--out={tmp_path}").startswith(message)


def test_a_dry_run_shows_what_each_arm_resolves_to(capsys, tmp_path):
    study = "--study=configs/studies/ablation_dual_learning_rate.py"
    main(
        [
            "sweep",
            study,
            "--arms=0.5",
            f"--out={tmp_path}",
            "--dry-run",
            "--config.algorithm.multiplier=0.25",
        ]
    )
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 3 and rows[2].startswith(
        "| `0.5` | dc_grpo | 0.25 | 0.0012 | 25 | 1 | diff | token |"
    )


def test_a_directory_that_holds_another_run_is_refused(tmp_path, capsys):
    file = tmp_path / "s.py"
    out = tmp_path / "out"
    file.write_text(
        _HEAD + "    return Study('S', {'a': Arm('configs/demo.py', DEMO)}, 'a', (0,))\n"
    )
    config = sweep.resolve(sweep.load_study(str(file)), out, ["--config.algorithm.tolerance=0.5"])[
        1
    ][0]
    (out / "a" / "seed0").mkdir(parents=True)
    (out / "a" / "seed0" / "config.json").write_text(json.dumps(to_dict(config)))
    got = _fails(capsys, f"--study={file}", f"--out={out}")
    assert "holds a run with algorithm.tolerance=0.5, this config has 0.0012" in got


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("method", "--study: no file method; did you mean methods?"),
        ("demo", "--study: no file demo; there are ablation_dual_learning_rate, "),
    ],
)
def test_a_wrong_study_is_one_line(given, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        sweep.load_study(given)
    assert str(refused.value).startswith(line)


def test_a_study_by_name_lists_its_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "--study=methods", "--seeds=0", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "grpo, seed 0: dcmdp train --config=demo --config.algorithm.tolerance_steps=0 "
        "--config.optimizer.learning_rate=0.0001 --config.training.prompts_per_step=48 "
        "--config.training.prompts_per_mini_batch=24 --config.algorithm.method=grpo "
        "--config.training.seed=0 --config.run_dir=runs/studies/methods/grpo/seed0"
    )
