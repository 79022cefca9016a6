"""The command line of bin.train: what it means, and the one line that a mistake gets."""

import sys
from pathlib import Path

import pytest
from absl import flags

from bin.flags import parse

_ROOT = Path(__file__).resolve().parents[2]
_DEMO = "--config=configs/demo.py"


@pytest.fixture
def run(monkeypatch):
    """`parse` as a fresh process has it: ml_collections reads sys.argv, and leaves its flags behind."""
    monkeypatch.chdir(_ROOT)
    before = set(flags.FLAGS)

    def parsed(*arguments):
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        return parse(sys.argv)

    yield parsed
    flags.FLAGS.unparse_flags()
    flags.FLAGS["config"].unparse()
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)


@pytest.fixture
def error(run):
    """The one line that arguments are refused with."""

    def line(*arguments):
        with pytest.raises(ValueError) as raised:
            run(*arguments)
        assert "\n" not in str(raised.value) and "Traceback" not in str(raised.value)
        return str(raised.value)

    return line


def test_a_file_its_argument_and_overrides(run):
    config = run(
        "--config=configs/demo.py:grpo,debug", "--config.rollout.precision=int8", "--config.algorithm.clip_low=0",
        "--config.training.row_lengths=(96,128)", "--config.algorithm.normalize_std=False",
        "--config.model.architecture.rope_theta=1e6", "--config.run_dir=runs/x", "-config.training.seed", "9",
    )  # fmt: skip
    assert config.algorithm.method == "grpo" and config.training.steps == 2
    assert config.rollout.precision == "int8" and config.algorithm.clip_low == 0.0
    assert config.training.row_lengths == (96, 128) and config.algorithm.normalize_std is False
    assert config.model.architecture.rope_theta == 1e6 and config.run_dir == "runs/x" and config.training.seed == 9


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((_DEMO,), "runs/demo"),
        ((_DEMO + ":grpo",), "runs/demo_grpo"),
        ((_DEMO, "--config.rollout.precision=exact"), "runs/demo-precision=exact"),
        # By name, the last piece of a path; how long and where a run goes on is not what it learns.
        (
            (_DEMO, "--config.training.seed", "3", "--config.model.tokenizer=a/b c", "--config.training.steps=99"),
            "runs/demo-tokenizer=b_c-seed=3",
        ),
        ((_DEMO, "--config.rollout.precision=exact", "--config.run_dir=runs/x"), "runs/x"),
    ],
)
def test_what_is_changed_names_the_run_directory(run, arguments, expected):
    assert run(*arguments).run_dir == expected


def test_without_overrides_the_file_speaks_alone(run):
    config = run("--config=configs/qwen3_8b.py")
    assert (config.rollout.precision, config.algorithm.tolerance) == ("bfloat16", 0.0037)


def test_the_file_may_be_a_word_of_its_own(run):
    assert run("--config", "configs/demo.py:debug").training.steps == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "--config is missing; for example --config=configs/demo.py"),
        (("--config=configs/dmo.py",), "--config: no file configs/dmo.py; did you mean configs/demo.py?"),
        (("--config", "configs/dmo.py:grpo"), "--config: no file configs/dmo.py; did you mean configs/demo.py?"),
        (
            ("--config=zzz",),
            "--config: no file zzz; there are configs/demo.py, configs/demo_vllm.py, configs/qwen3_8b.py",
        ),
        (("--confg=configs/demo.py",), "Unknown command line flag 'confg'. Did you mean: config ?"),
        (
            (_DEMO, "--config.algorithm.multplier=0.1"),
            "config.algorithm.multplier: no such setting; did you mean 'algorithm.multiplier'?",
        ),
        (
            (_DEMO, "--config.algorithm.multplier", "0.1"),
            "config.algorithm.multplier: no such setting; did you mean 'algorithm.multiplier'?",
        ),
        (
            ("--config.algorithms.multiplier=0.1", _DEMO),
            "config.algorithms.multiplier: no such setting; did you mean 'algorithm.multiplier'?",
        ),
        (
            (_DEMO, "--config.group_size=4"),
            "config.group_size: no such setting; did you mean 'rollout.group_size'?",
        ),
        (
            (_DEMO, "--config.run_dir.name=4"),
            "config.run_dir.name: no such setting; did you mean 'run_dir'?",
        ),
        (
            ("--config=configs/demo.py:gpro",),
            "--config: configs/demo.py: config argument 'gpro': allowed are grpo, debug",
        ),
        ((_DEMO, "extra"), "argument 'extra' belongs to no flag; settings are given as --config.section.name=value"),
        ((_DEMO, "--config.rollout.group_size=1"), "config.rollout.group_size: got 1, must be at least 2"),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_right_word(error, arguments, line):
    assert error(*arguments).startswith(line)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("config.training.steps", "many"),
        ("config.training.steps", "1.5"),
        ("config.algorithm.tolerance", "small"),
        ("config.algorithm.normalize_std", "perhaps"),
        ("config.training.row_lengths", "(64,x)"),
        ("config.rollout", "3"),
    ],
)
def test_an_ill_typed_override_names_setting_and_value(error, override, value):
    line = error(_DEMO, f"--{override}={value}")
    assert override in line and value in line


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def get_config(arg=''):\n    return missing_name\n", "NameError: name 'missing_name' is not defined"),
        ("def get_config(:\n", "SyntaxError: "),
        ("", "it has no function get_config"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def get_config():\n    raise ValueError('not\\ntoday')\n", "not today"),
    ],
)
def test_a_config_file_that_breaks_is_named_with_its_reason(error, tmp_path, text, reason):
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert error(f"--config={path}").startswith(f"--config: {path}: {reason}")
