"""The recipes of docs/extending.md, and the example of README.md, work as they are written."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bin.flags import parse
from dcmdp_jax.rewards.reward_pool import RewardPool
from tests.waiting import HANGS_S

_ROOT = Path(__file__).resolve().parents[1]
_RECIPES = (_ROOT / "docs" / "extending.md").read_text()


def _commands(text):
    joined = text.replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^ {4}python -m (bin\.train .*rewards.*)$", joined, re.MULTILINE)]


def _rewards(directory, monkeypatch, command, *completion_ids):
    """Rewards that the functions of a command, without math, give completions of a problem."""
    monkeypatch.chdir(directory)
    config = parse(command).config
    functions = [name for name in config.rewards.names if name != "math"]
    with RewardPool(functions, ["answer"], timeout_s=1000) as pool:
        pool.wait_until_loaded()
        texts = ["text"] * len(completion_ids)
        pool.begin(["1+1=?"] * len(texts), texts, completion_ids, {"answer": ["2"] * len(texts)})
        return config.rewards.weighted, pool.collect()


def test_the_recipe_of_a_reward(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(def ends_in_time.*?)```", _RECIPES, re.DOTALL)
    (tmp_path / "my_reward.py").write_text(code)
    (tmp_path / "configs").symlink_to(_ROOT / "configs")
    (command,) = _commands(_RECIPES)
    weighted, rewards = _rewards(tmp_path, monkeypatch, command, [5] * 20, [5] * 21)
    assert weighted == (("math", 1.0), ("my_reward.py:ends_in_time", 0.2))
    assert rewards == {"my_reward.py:ends_in_time": [1.0, 0.0]}


@pytest.mark.parametrize("page", ["README.md", "examples/length_reward.py"])
def test_the_commands_of_the_length_reward(page, monkeypatch):
    commands = _commands((_ROOT / page).read_text())
    assert [parse(command).config.rewards.weighted for command in commands] == [
        (("examples/length_reward.py:score", 1.0),),
        (("math", 1.0), ("examples/length_reward.py:score", 0.2)),
    ]
    # 1 - 9 / 36 = 0.75; never below 0.
    _, rewards = _rewards(_ROOT, monkeypatch, commands[0], [7] * 9, [7] * 36, [7] * 40, [])
    assert rewards == {"examples/length_reward.py:score": [0.75, 0.0, 0.0, 1.0]}


def _applied(diff, text):
    """The text after a diff: hunks between @@, whose context and removed lines stand in it once."""
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        old, new = (
            "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in kinds) for kinds in (" -", " +")
        )
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_all_recipes_of_code_together(tmp_path):
    edits = re.findall(r"```diff\n--- (\S+)\n(.*?)```", _RECIPES, re.DOTALL)
    tests = re.findall(r"```python\n# (\S+_test\.py)\n(.*?)```", _RECIPES, re.DOTALL)
    headings = re.findall(r"^## (?:A|An) (.*)", _RECIPES, re.MULTILINE)
    assert headings == ["reward", "penalty", "correction", "setting", "metric", "model parameter"]
    assert len(edits) == len(tests) == len(headings) - 1
    for package in ("dcmdp_jax", "configs"):
        shutil.copytree(_ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path, diff in edits:
        place = tmp_path / path
        place.write_text(_applied(diff, place.read_text()))
    for path, code in tests:
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "tests"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0 and f"{len(tests) + 1} passed" in done.stdout, done.stdout + done.stderr
