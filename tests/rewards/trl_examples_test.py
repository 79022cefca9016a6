"""TRL's documented reward functions give here what its documentation says.

They run in the process that calls them.
"""

import asyncio

import pytest

from dcmdp_jax.rewards.protocol import (
    BEGINNING,
    Logged,
    RewardError,
    TrainerState,
    call_reward,
    load_reward,
)
from dcmdp_jax.rewards.reward_pool import Returned, RewardPool
from tests.rewards import trl_examples

_LONG_S = 1000.0


def _chat(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def _call(function, completions, prompts=None, ids=None, state=None, **columns):
    name = f"{trl_examples.__file__}:{function}"
    count = len(completions)
    with RewardPool([name], list(columns), timeout_s=_LONG_S) as pool:
        ids = ids or [[1]] * count
        pool.begin(prompts or ["p"] * count, completions, ids, columns, state or TrainerState())
        return pool.collect()[name]


@pytest.mark.parametrize(
    ("function", "completions", "settings", "rewards"),
    [
        # TRL's own examples and what its pages print for them.
        ("reward_ids", ["a", "b"], {"ids": [[1, 2, 3], [4]]}, [3.0, 1.0]),
        ("reward_text", ["The sky is blue.", "The sun is in the sky."], {}, [16.0, 22.0]),
        (
            "format_reward_func",
            _chat(
                "<think>2+2=4</think><answer>4</answer>", "4", "<think></think><answer>4</answer>."
            ),
            {},
            [1.0, 0.0, 0.0],
        ),
        (
            "think_format_reward",
            _chat(
                "<think>\nThis is my reasoning.\n</think>\nThis is my answer.",
                "<think>\nThis is my reasoning.",
            ),
            {},
            [1.0, 0.0],
        ),
        (
            "reference_reward",
            [r"The answer is \boxed{2}.", r"\boxed{3}", "2"],
            {"ground_truth": ["2", "4", "2"]},
            [1.0, 0.0, 0.0],
        ),
        (
            "math_reward_func",
            _chat("4", "def f"),
            {
                "task": ["math", "coding"],
                "prompts": [[{"role": "user", "content": "2+2 is 4"}]] * 2,
            },
            [1.0, None],
        ),
        ("coding_reward_func", _chat("4", "def f"), {"task": ["math", "coding"]}, [None, 1.0]),
        ("async_reward_func", _chat("1", "123"), {}, [1.0, 3.0]),
        ("scheduled_reward", _chat("1", "2"), {"state": TrainerState(3, 4, 0.5)}, [0.75, 0.75]),
    ],
)
def test_documented_examples(function, completions, settings, rewards):
    assert _call(function, completions, **settings) == Returned(rewards)


def test_what_a_function_logs_comes_back():
    found = _call("accuracy_reward", _chat("so 4", "so 5", "x"), solution=["4", "4", None])
    extra = {"solution": ["4", "4", None], "extracted_answer": ["so 4", "so 5", "x"]}
    assert found == Returned([1.0, 0.0, None], {"accuracy": [0.5]}, extra)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "log_metric('a', 'high')",
            "raised TypeError: log_metric('a', 'high'): the value must be a number (own.py, ",
        ),
        (
            "log_metric(3, 1)",
            "raised TypeError: log_metric(3, ...): the name must be text of at most 200 characters",
        ),
        (
            "log_extra('a', [1])",
            "raised ValueError: log_extra('a', ...): got 1 values for 2 completions, must be one "
            "for each (own.py, ",
        ),
    ],
)
def test_a_wrong_log_is_named_with_its_line(tmp_path, body, problem):
    path = tmp_path / "own.py"
    path.write_text(
        f"def f(completions, log_metric, log_extra, **columns):\n    {body}\n    return [0.0, "
        "0.0]\n"
    )
    with RewardPool([f"{path}:f"], [], timeout_s=_LONG_S) as pool:
        pool.begin(["p"] * 2, ["c"] * 2, [[1]] * 2, {})
        [failure] = pool.collect().values()
    assert isinstance(failure, RewardError) and problem in str(failure)


def test_numbers_of_numpy_are_logged_as_numbers_and_other_objects_as_text(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import numpy as np, datetime\ndef f(completions, log_metric, log_extra, **columns):\n    "
        "log_metric('m', np.float32(0.5)); log_metric('m', 1)\n    log_extra('x', np.array([1.5, "
        "2.5])); log_extra('d', [datetime.date(2026, 11, 24), {'a': [None]}])\n    return [0.0, "
        "0.0]\n"
    )
    with RewardPool([f"{path}:f"], [], timeout_s=_LONG_S) as pool:
        pool.begin(["p"] * 2, ["c"] * 2, [[1]] * 2, {})
        [found] = pool.collect().values()
    assert found == Returned(
        [0.0, 0.0], {"m": [0.5, 1.0]}, {"x": [1.5, 2.5], "d": ["2026-11-24", {"a": [None]}]}
    )


def test_what_a_function_prints_goes_to_its_file_at_once(tmp_path):
    path = tmp_path / "own.py"
    log = tmp_path / "rewards.log"
    path.write_text(
        "import os, sys, time\nprint('imported')\ndef f(completions, **columns):\n    "
        "print('called', *completions); print('to stderr', file=sys.stderr); os.system('echo from "
        "a program')\n    time.sleep(10_000)\n"
    )
    with RewardPool([f"{path}:f"], [], timeout_s=5.0, output=log) as pool:
        pool.begin(["p"], ["c"], [[1]], {})
        [failure] = pool.collect().values()
    assert (
        str(failure) == f"reward {path}:f: no result in 5 s"
    )  # killed, and what it printed is there
    assert log.read_text() == "imported\ncalled c\nto stderr\nfrom a program\n"


def _compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str in ground_truth["target"]
    return (
        {"score": float(right), "acc": right, "from": data_source} if extra_info else float(right)
    )


def test_functions_of_verl_are_called_once_for_each_completion():
    name = f"{__file__}:_compute_score"
    columns = {
        "data_source": ["nq", "hotpot", "nq"],
        "reward_model": [{"ground_truth": {"target": ["Goethe"]}}] * 3,
        "extra_info": [{"index": 0}, {"index": 1}, None],
        "ability": ["fact"] * 3,
    }
    with RewardPool([name], list(columns), timeout_s=_LONG_S) as pool:
        pool.begin(["p"] * 3, [*_chat("Goethe", "Schiller"), "Goethe"], [[1]] * 3, columns)
        extra = {"acc": [True, False, None], "from": ["nq", "hotpot", None]}
        assert pool.collect() == {name: Returned([1.0, 0.0, 1.0], {}, extra)}


def _overall(data_source, solution_str, ground_truth, extra_info=None):
    return {"overall": 1.0, "accuracy": 1.0}  # EasyR1's


def _forgets(data_source, solution_str, ground_truth, extra_info=None):
    float(solution_str in ground_truth)  # no return


_STARTED = []


async def _waits(data_source, solution_str, ground_truth, extra_info=None):
    _STARTED.append(solution_str)
    await asyncio.sleep(0.01)
    return {"score": float(solution_str in ground_truth), "started": len(_STARTED)}


@pytest.mark.parametrize(
    ("name", "given"),
    [("_overall", "the dict {'overall': 1.0, 'accuracy': 1.0}"), ("_forgets", "None")],
)
def test_a_function_of_verl_without_a_score_is_refused_not_taken_for_no_value(name, given):
    reward = load_reward(f"{__file__}:{name}", [])
    with pytest.raises(RewardError) as raised:
        call_reward(reward, ["p"], ["c"], [[1]], {"ground_truth": ["c"]}, BEGINNING, Logged(1))
    assert (
        str(raised.value) == f"returned {given}, needs a number, or a dict with one under 'score'"
    )
    assert raised.value.row == 0


def test_an_async_function_of_verl_is_awaited_for_all_completions_at_once():
    logged = Logged(4)
    reward = load_reward(f"{__file__}:_waits", [])
    given = ["p"] * 4, ["a", "b", "c", "a"], [[1]] * 4, {"ground_truth": ["a"] * 4}
    found = call_reward(reward, *given, BEGINNING, logged)
    # One after the other, they would find 1, 2, 3 and 4 started.
    assert (found, logged.extra) == ([1.0, 0.0, 0.0, 1.0], {"started": [4, 4, 4, 4]})
