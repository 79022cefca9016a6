"""The recipes of docs/extending.md and docs/checkpoints.md, and the commands of docs/start.md, work
as written.
"""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.commands.flags import parse
from dcmdp_jax.config.algorithm import check_own_remedies
from dcmdp_jax.engines.engine_kind import EngineKind
from dcmdp_jax.rewards.reward_pool import RewardPool
from tests.support.waiting import HANGS_S

_ROOT = Path(__file__).resolve().parents[1]
_RECIPES = "".join(
    (_ROOT / "docs" / page).read_text() for page in ("extending.md", "checkpoints.md")
)


def _commands(text):
    joined = text.replace("\\\n", " ")
    return [
        shlex.split(line)
        for line in re.findall(r"^ {4}dcmdp (train .*rewards.*)$", joined, re.MULTILINE)
    ]


def _rewards(directory, monkeypatch, command, *completion_ids):
    """Rewards that the functions of a command, without math, give completions of a problem."""
    monkeypatch.chdir(directory)
    config = parse(command).config
    functions = [name for name in config.rewards.names if name != "math"]
    with RewardPool(functions, ["answer"], timeout_s=1000) as pool:
        pool.wait_until_loaded()
        texts = ["text"] * len(completion_ids)
        pool.begin(["1+1=?"] * len(texts), texts, completion_ids, {"answer": ["2"] * len(texts)})
        return config.rewards.weighted, {
            name: found.rewards for name, found in pool.collect().items()
        }


def test_the_recipe_of_a_reward(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(def ends_in_time.*?)```", _RECIPES, re.DOTALL)
    (tmp_path / "my_reward.py").write_text(code)
    (tmp_path / "configs").symlink_to(_ROOT / "configs")
    (command,) = _commands(_RECIPES)
    weighted, rewards = _rewards(tmp_path, monkeypatch, command, [5] * 20, [5] * 21)
    assert weighted == (("math", 1.0), ("my_reward.py:ends_in_time", 0.2))
    assert rewards == {"my_reward.py:ends_in_time": [1.0, 0.0]}


@pytest.mark.parametrize("page", ["docs/start.md", "examples/length_reward.py"])
def test_the_commands_of_the_length_reward(page, monkeypatch):
    commands = _commands((_ROOT / page).read_text())
    assert [parse(command).config.rewards.weighted for command in commands] == [
        (("examples/length_reward.py:score", 1.0),),
        (("math", 1.0), ("examples/length_reward.py:score", 0.2)),
    ]
    # 1 - 9 / 36 = 0.75; never below 0.
    _, rewards = _rewards(_ROOT, monkeypatch, commands[0], [7] * 9, [7] * 36, [7] * 40, [])
    assert rewards == {"examples/length_reward.py:score": [0.75, 0.0, 0.0, 1.0]}


def test_the_command_of_a_remedy(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n# my_remedies.py\n(.*?)```", _RECIPES, re.DOTALL)
    (tmp_path / "my_remedies.py").write_text(code)
    (tmp_path / "configs").symlink_to(_ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^ {4}dcmdp (train .*my_remedies.*)$", _RECIPES, re.MULTILINE)
    algorithm = parse(shlex.split(command)).config.algorithm
    check_own_remedies(algorithm)
    remedies = algorithm.remedies()
    assert (remedies.penalty.name, remedies.corrections[1].parameters) == (
        "squared",
        {"floor": 1e-5},
    )
    one = np.ones((1, 1), np.float32)
    tokens = Tokens(advantages=2 * one, ratio=1.3 * one, completion_mask=one > 0)
    region, statistics = remedies.loss.keywords["trust_region"](tokens)
    # 2 * 0.3 tanh(0.3 / 0.3) = 0.457; its slope at 1 is that of the plain objective.
    assert float(region.objective[0, 0]) == pytest.approx(0.6 * np.tanh(1), rel=1e-6)
    assert list(statistics) == ["remedy/soft/beyond"]


def _applied(diff, text):
    """The text after a diff: hunks between @@, whose context and removed lines stand in it once."""
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        old, new = (
            "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in kinds)
            for kinds in (" -", " +")
        )
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_all_recipes_of_code_together(tmp_path):
    edits = re.findall(r"```diff\n--- (\S+)\n(.*?)```", _RECIPES, re.DOTALL)
    tests = re.findall(r"```python\n# (\S+_test\.py)\n(.*?)```", _RECIPES, re.DOTALL)
    headings = re.findall(r"^## (?:A|An) (.*)", _RECIPES, re.MULTILINE)
    names = [
        "reward",
        "mitigation",
        "setting",
        "metric",
        "model parameter",
        "model family",
        "engine",
        "precision",
        "recording format",
        "cause of the probe",
        "alert",
        "command",
        "field of the state",
    ]
    assert headings == names
    assert (
        len(tests) == len(headings) - 2
    )  # a reward and an engine are files of a user's, tested elsewhere
    files = re.findall(
        r"```python\n# (my_remedies\.py|dcmdp_jax/\S+\.py)\n(.*?)```", _RECIPES, re.DOTALL
    )
    for package in ("dcmdp_jax", "configs"):
        shutil.copytree(
            _ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path, diff in edits:
        place = tmp_path / path
        place.write_text(_applied(diff, place.read_text()))
    for path, code in [*files, *tests]:
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(code)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "tests",
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS_S
    )
    count = sum(code.count("\ndef test_") for _, code in tests)
    assert done.returncode == 0 and f"{count} passed" in done.stdout, done.stdout + done.stderr


def test_the_recipe_of_an_engine():
    """Its file is the one that tests/engines/conformance_test.py trains with; its commands parse."""
    assert "(../tests/engines/stub_engine.py)" in _RECIPES
    [line] = re.findall(r"^ {4}dcmdp train (.*my_engine.*)$", _RECIPES, re.MULTILINE)
    words = shlex.split(line.replace("my_engine.py", "tests/engines/stub_engine.py"))
    rollout = parse(["train", *words]).config.rollout
    assert rollout.engine == "tests/engines/stub_engine.py:ENGINE" and "8000" in rollout.engine_args
    for name, value in vars(EngineKind).items():
        if name.startswith("_"):
            continue
        if isinstance(value, property) or inspect.isfunction(value):
            assert value.__doc__, name
        else:
            assert re.search(rf"\b{name}\b", EngineKind.__doc__), name
