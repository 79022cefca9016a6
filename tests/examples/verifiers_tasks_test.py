"""Single-turn tasks of verifiers by path: asked as chats, scored by the task's own rewards in the
reward's process.
"""

import os
import sys
from pathlib import Path

import pytest

from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.rewards.reward_pool import Returned, RewardPool

_FILE = str(Path(__file__).resolve().parents[2] / "examples" / "plugins" / "verifiers_tasks.py")
_TASKS = f"{_FILE}:tasks"
_TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class AddTask(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace):
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def short(self, trace, task):
        return -len(trace.last_reply) / 100

    @vf.metric
    async def turns(self, trace):
        return trace.num_turns

class Adds(vf.Taskset[AddTask]):
    def load(self):
        for n in range(4):
            yield AddTask(Data(prompt=f"{n}+1=?", system_prompt="Add.", answer=str(n + 1)), self.config.task)

__all__ = ["Adds"]
"""


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    """The name of a taskset that this process and those it starts can import."""
    pytest.importorskip("verifiers")
    (tmp_path / "planted_adds.py").write_text(_TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "planted_adds"


def test_tasks_become_chats_and_score_their_completions(taskset):
    problems = load_problems(f"{_TASKS},taskset={taskset},size=3", keep_columns=True)
    assert [problem.prompt for problem in problems] == ["0+1=?", "1+1=?", "2+1=?"]
    assert problems[0].messages == (
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "0+1=?"},
    )
    assert {problem.source for problem in problems} == {taskset}
    columns = {
        "verifiers": [problems[0].columns["verifiers"], problems[2].columns["verifiers"], None]
    }
    name = f"{_FILE}:task_score"
    with RewardPool([name], ["verifiers"], timeout_s=600.0) as pool:
        completions = [problem.as_completion("1") for problem in problems]
        pool.begin([problem.as_prompt for problem in problems], completions, [[1]] * 3, columns)
        # 2 x 1 - 1/100, 2 x 0 - 1/100.
        extra = [
            {"right": 1.0, "short": -0.01, "turns": 1.0},
            {"right": 0.0, "short": -0.01, "turns": 1.0},
            None,
        ]
        assert pool.collect()[name] == Returned([1.99, -0.01, None], {}, {"verifiers": extra})


def test_what_is_no_taskset_is_told(taskset):
    for location, message in (
        (_TASKS, "name a taskset"),
        (f"{_TASKS},taskset={taskset},sizes=3", "unexpected keyword argument 'sizes'"),
        (f"{_TASKS},taskset={taskset},size=0", "size = 0 must be a whole number from 1 to"),
        (f"{_TASKS},taskset=no_such_taskset_here", "no_such_taskset_here"),
    ):
        with pytest.raises(ValueError) as raised:
            load_problems(location)
        assert message in str(raised.value) and "\n" not in str(raised.value)


def test_without_the_library_its_name_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(
        ValueError, match="the library verifiers is missing: pip install 'verifiers"
    ):
        load_problems(f"{_TASKS},taskset=some_tasks")
