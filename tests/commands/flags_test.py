"""The command line of bin.train: what it means, and the one line that a mistake gets."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcmdp_jax.commands.flags import parse
from dcmdp_jax.config.load import OTHER_NAMES
from dcmdp_jax.config.settings import setting_names
from dcmdp_jax.errors import UserError
from tests.support.commands import failed_command

_ROOT = Path(__file__).resolve().parents[2]
_DEMO = "--config=configs/demo.py"


@pytest.fixture(autouse=True)
def root(monkeypatch):
    """Config files are named from the repository's root."""
    monkeypatch.chdir(_ROOT)


def run(*arguments):
    return parse(["train", *arguments]).config


def error(*arguments):
    """The one line that arguments are refused with."""
    with pytest.raises(ValueError) as raised:
        run(*arguments)
    assert "\n" not in str(raised.value) and "Traceback" not in str(raised.value)
    return str(raised.value)


def test_a_file_its_argument_and_overrides():
    given = """
        --config=configs/demo.py:grpo,debug --config.rollout.precision=int8 --config.algorithm.multiplier=0
        --config.training.row_lengths=(96,128) --config.algorithm.normalize_std=False
        --config.optimizer.weight_decay=1e-2 --config.run_dir=runs/x -config.training.seed 9
    """
    config = run(*given.split())
    assert config.algorithm.method == "grpo" and config.training.steps == 2
    assert config.rollout.precision == "int8" and config.algorithm.multiplier == 0.0
    assert config.training.row_lengths == (96, 128) and config.algorithm.normalize_std is False
    assert (
        config.optimizer.weight_decay == 0.01
        and config.run_dir == "runs/x"
        and config.training.seed == 9
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((_DEMO,), "runs/demo"),
        ((_DEMO + ":grpo",), "runs/demo_grpo"),
        ((_DEMO, "--config.rollout.precision=exact"), "runs/demo-precision=exact"),
        ((_DEMO, "--config.algorithm.tolerance=0.001"), "runs/demo-tolerance=0.001"),
        (
            (_DEMO, "--config.algorithm.tolerance=1e-3"),
            "runs/demo-tolerance=0.001",
        ),  # the same setting, the same run
        ((_DEMO, "--config.rewards.weights=(2,)"), "runs/demo-weights=2.0"),
        ((_DEMO, "--config.algorithm.normalize_std=false"), "runs/demo-normalize_std=False"),
        # Two settings are called learning_rate.
        (
            (_DEMO, "--config.optimizer.learning_rate=1e-5"),
            "runs/demo-optimizer.learning_rate=1e-05",
        ),
        ((_DEMO, "--config.warmup.learning_rate=1e-5"), "runs/demo-warmup.learning_rate=1e-05"),
        # The length of a run is what it learns only where the learning rate ends with it.
        ((_DEMO, "--config.training.seed", "3", "--config.training.steps=99"), "runs/demo-seed=3"),
        (
            (_DEMO, "--config.optimizer.schedule=linear", "--config.training.steps=99"),
            "runs/demo-schedule=linear-training.steps=99",
        ),
        ((_DEMO, "--config.rollout.precision=exact", "--config.run_dir=runs/x"), "runs/x"),
    ],
)
def test_overrides_name_the_run_directory(arguments, expected):
    assert run(*arguments).run_dir == expected


def test_a_value_that_a_name_can_not_hold_shows_its_end_and_a_digest():
    name = run(_DEMO, "--config.training.seed=3", "--config.model.tokenizer=a/b c").run_dir
    assert re.fullmatch(r"runs/demo-tokenizer=b_c-seed=3-[0-9a-f]{12}", name)


# What a run learns from, in types of all kinds; the values are allowed in configs/demo.py.
_TEXT = st.text(st.sampled_from("ab1A=-_. /,é\u8def"), min_size=1, max_size=60)
_LEARNED = {
    "task.train": _TEXT,
    "task.prompt_suffix": _TEXT,
    "warmup.task": _TEXT,
    "model.tokenizer": _TEXT,
    "optimizer.learning_rate": st.sampled_from(["0.1", "0.01", "1e-05"]),
    "warmup.learning_rate": st.sampled_from(["0.1", "0.01", "1e-05"]),
    "training.seed": st.integers(0, 12).map(str),
    "rewards.weights": st.sampled_from(["(56,)", "(57,)", "(156,)"]),
    "algorithm.normalize_std": st.sampled_from(["true", "false"]),
    "rollout.precision": st.sampled_from(["fp8", "int8", "exact"]),
}
_OVERRIDES = st.sets(st.sampled_from(sorted(_LEARNED))).flatmap(
    lambda names: st.fixed_dictionaries({name: _LEARNED[name] for name in sorted(names)})
)


def _directory(overrides):
    return run(_DEMO, *(f"--config.{name}={value}" for name, value in overrides.items())).run_dir


@given(_OVERRIDES, _OVERRIDES)
@example({"optimizer.learning_rate": "0.1"}, {"warmup.learning_rate": "0.1"})
@example({"task.train": "a/rows.jsonl"}, {"task.train": "b/rows.jsonl"})
@example({"task.train": "a b"}, {"task.train": "a_b"})
@example({"task.train": "a" * 200 + "b"}, {"task.train": "a" * 200 + "c"})
@example({"task.train": "a-precision=fp8"}, {"task.train": "a", "rollout.precision": "fp8"})
@example({"task.train": "A"}, {"task.train": "a"})
@example({"task.train": "é"}, {"task.train": "\u8def"})
@settings(max_examples=60, deadline=None)
def test_two_different_sets_of_overrides_name_two_directories(first, second):
    assert (_directory(first) == _directory(second)) == (first == second)
    for overrides in (first, second):
        # As one name on any file system, whether it tells capitals apart or not.
        name = _directory(overrides).removeprefix("runs/")
        assert re.fullmatch(r"[A-Za-z0-9_.=-]{1,120}", name)
        if first != second:
            assert _directory(first).lower() != _directory(second).lower()


def test_without_overrides_the_config_is_the_files():
    config = run("--config=configs/qwen3_8b.py")
    assert (config.rollout.precision, config.algorithm.tolerance) == ("bfloat16", 0.0037)


def test_config_may_be_two_words():
    assert run("--config", "configs/demo.py:debug").training.steps == 2


def test_a_value_of_a_thousand_pages_is_not_quoted_whole():
    assert error(_DEMO, f"--config.training.steps={'9' * 10**6}x").startswith(
        "config.training.steps: got '999"
    )
    assert len(error(_DEMO, f"--config.training.steps={'9' * 10**6}x")) < 250


def test_an_override_without_its_value_is_named():
    assert error(_DEMO, "--config.training.steps").startswith(
        "--config.training.steps: its value is missing"
    )


@pytest.mark.parametrize("words", ["true", "True", "1", "yes", "t"])
def test_the_words_for_true(words):
    assert run(_DEMO, f"--config.algorithm.mask_truncated={words}").algorithm.mask_truncated is True


def test_the_last_of_two_values_counts():
    assert run(_DEMO, "--config.training.seed=3", "--config.training.seed=4").training.seed == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "def get_config(arg=''):\n    return missing_name\n",
            "NameError: name 'missing_name' is not defined",
        ),
        ("def get_config(:\n", "SyntaxError: "),
        ("", "it has no function get_config"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def get_config():\n    raise ValueError('not\\ntoday')\n", "not today"),
        ("def get_config():\n    return 3\n", "get_config returned int, must be a ConfigDict"),
        ("exit()\n", "it called exit(None); let get_config return"),
        (
            "import sys\n\ndef get_config():\n    sys.exit(0)\n",
            "it called exit(0); let get_config return",
        ),
    ],
)
def test_a_config_file_that_breaks_is_named_with_its_reason(tmp_path, text, reason):
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert error(f"--config={path}").startswith(f"--config: {path}: {reason}")


def test_a_config_file_is_executed_once(tmp_path):
    log = tmp_path / "log"
    path = tmp_path / "counted.py"
    path.write_text(
        "from configs import base\n\n\ndef get_config(arg=''):\n"
        f"    open({str(log)!r}, 'a').write('called ')\n    return base.get_config('debug')\n"
    )
    run(f"--config={path}", "--config.training.seed=3")
    assert log.read_text() == "called "


def test_a_config_file_that_leaves_the_process_ends_the_command_with_code_2(tmp_path, capsys):
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)\n")
    said = failed_command(parse, "train", capsys, f"--config={tmp_path}/leaving.py")
    assert said == f"--config: {tmp_path}/leaving.py: it called exit(0); let get_config return"


@pytest.mark.parametrize("flag", ["dry-run", "print-config"])
def test_dry_run_and_print_config_are_flags(flag):
    name = flag.replace("-", "_")
    assert getattr(parse(["train", _DEMO, f"--{flag}"]), name)
    assert not getattr(parse(["train", _DEMO]), name)
    with pytest.raises(UserError) as refused:
        parse(["train", _DEMO, f"--{name}"])
    assert str(refused.value) == f"--{name}: no such argument; did you mean --{flag}?"


_SETTINGS = {
    "x.yaml": """
run_dir: runs/mine
task: {train: "arithmetic:count=64"}
optimizer: {learning_rate: 1e-5}
rewards: {weights: [2.0]}
training:
  steps: 7
""",
    "x.toml": """
run_dir = "runs/mine"
task.train = "arithmetic:count=64"
optimizer.learning_rate = 1e-5
rewards.weights = [2.0]
[training]
steps = 7
""",
}


@pytest.mark.parametrize("name", _SETTINGS)
def test_a_config_from_yaml_or_toml_has_the_same_checks(name, tmp_path):
    path = tmp_path / name
    path.write_text(_SETTINGS[name])
    config = run(f"--config={path}", "--config.training.seed=3", "--config.run_dir=runs/x")
    # YAML 1.1 takes 1e-5, without a point, for text.
    assert config.optimizer.learning_rate == 1e-5 and config.rewards.weights == (2.0,)
    assert (config.training.steps, config.training.seed, config.run_dir) == (7, 3, "runs/x")
    path.write_text(path.read_text().replace("steps", "stepz"))
    assert error(f"--config={path}").startswith(
        "config.training.stepz: no such setting; did you mean 'training.steps'"
    )
    path.write_text(path.read_text().replace("stepz", "steps").replace("7", "-7"))
    assert error(f"--config={path}").startswith("config.training.steps: got -7, must be")
    path.write_text("a: [" if path.suffix == ".yaml" else "a = [")
    assert error(f"--config={path}").startswith(f"--config: {path}: ")
    assert error(f"--config={tmp_path}/none{path.suffix}").startswith(
        f"--config: no file {tmp_path}/none"
    )


def test_a_yaml_file_takes_no_argument(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(_SETTINGS["x.yaml"])
    assert error(f"--config={path}:debug") == (
        f"--config: {path}:debug: {path} takes no argument; change its settings, as by "
        "--config.algorithm.method=grpo"
    )


def test_a_list_in_yaml_is_no_config(tmp_path):
    (tmp_path / "x.yml").write_text("- 1\n")
    assert error(f"--config={tmp_path}/x.yml").endswith("holds [1], must hold settings by section")


@pytest.mark.parametrize(
    ("argument", "line"),
    {
        "--seed=2": "--seed: no such argument; settings are given as --config.training.seed=VALUE",
        "--mesh.fsdp=2": "--mesh.fsdp: no such argument; settings are given as "
        "--config.mesh.fsdp=VALUE",
        "--config.lr=1e-5": "config.lr: no such setting; did you mean 'optimizer.learning_rate'?",
        "--config.optimizer.lr=1e-5": "config.optimizer.lr: no such setting; did you mean "
        "'optimizer.learning_rate'?",
        "--config.num_generations=4": "config.num_generations: no such setting; did you mean "
        "'rollout.group_size'?",
    }.items(),
)
def test_what_is_tried_first_is_told_the_setting(argument, line):
    assert error(_DEMO, argument) == line


def test_other_names_lead_to_settings_that_are_there():
    assert set(OTHER_NAMES.values()) <= set(setting_names()) and not set(OTHER_NAMES) & set(
        setting_names()
    )
