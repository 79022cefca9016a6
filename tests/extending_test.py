"""The recipes of docs/extending.md, and the example of README.md, work as they are written."""

import re
import shlex
from pathlib import Path

import pytest

from bin.flags import parse
from dcmdp_jax.rewards.reward_pool import RewardPool

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
