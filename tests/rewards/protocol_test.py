"""Loading reward functions, checking what they return, and adding them up."""

import sys
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.config import checks
from dcmdp_jax.rewards.protocol import (
    BEGINNING,
    BUILT_IN_REWARDS,
    ENVIRONMENT,
    MATH,
    Logged,
    RewardError,
    call_reward,
    load_reward,
    short_names,
    weighted_total,
)
from tests.rewards import planted_rewards

_FILE = Path(planted_rewards.__file__)


def _call(function, completions=("a", "bc"), **columns):
    prompts = ["a"] * len(completions)
    given = prompts, list(completions), [list(range(len(text))) for text in completions], columns
    return call_reward(function, *given, BEGINNING, Logged(len(completions)))


class _OtherFloat(float):
    """What a library's own number may do: isfinite sees 1.0, float() gets NaN."""

    def __float__(self):
        return float("nan")


@pytest.mark.parametrize("place", ["tests.rewards.planted_rewards", str(_FILE)])
def test_a_function_is_loaded_from_a_module_or_a_file(place):
    assert _call(load_reward(f"{place}:length", ["answer"])) == [1.0, 2.0]


def test_a_file_may_import_its_neighbors_and_be_called_like_a_module_of_python(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbor_of_reward.py").write_text("VALUE = 7.0\n")
    (tmp_path / "math.py").write_text(
        "from neighbor_of_reward import VALUE\nimport math\n"
        "def f(completions, **columns):\n    return [VALUE + math.floor(0.5)] * len(completions)\n"
    )
    assert _call(load_reward(f"{tmp_path}/math.py:f", [])) == [7.0, 7.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "no.such.module:f",
            "reward no.such.module:f: can't import no.such.module: ModuleNotFoundError: No module",
        ),
        ("nowhere.py:f", "reward nowhere.py:f: no such file"),
        ("math:length", "reward math:length: math has no function 'length'; it has none"),
        (
            f"{_FILE}:lenght",
            f"{_FILE} has no function 'lenght'; it has length, begins_with_a_multiple_of_eight, ",
        ),
        (f"{_FILE}:not_callable", f"{_FILE} has no function 'not_callable'; it has length"),
        (
            f"{_FILE}:takes_only_completions",
            "takes_only_completions(prompts, completions, completion_ids, trainer_state, "
            "log_metric, log_extra, answer): got an unexpected keyword argument 'prompts'; end "
            "its parameters with **columns",
        ),
        (
            f"{_FILE}:needs_a_rubric",
            "missing a required argument: 'rubric'; end its parameters with **columns, and ",
        ),
    ],
)
def test_a_function_that_can_not_be_called_is_named(function, message):
    with pytest.raises(RewardError) as raised:
        load_reward(function, ["answer"])
    assert message in str(raised.value)


def test_an_import_that_raises_is_named_with_its_line(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\nx.nothing\n")
    with pytest.raises(
        RewardError,
        match=r"AttributeError: 'int' object has no attribute 'nothing' \(broken.py, line 2\)",
    ):
        load_reward(f"{path}:f", [])


def test_an_async_function_is_awaited_and_columns_arrive():
    assert _call(planted_rewards.starts_like_the_prompt) == [1.0, 0.0]
    assert _call(planted_rewards.only_for_algebra, source=["algebra", "code"]) == [1.0, None]


def test_scalars_of_numpy_are_numbers():
    assert _call(lambda completions, **_: np.arange(2, dtype=np.float32)) == [0.0, 1.0]
    assert _call(lambda completions, **_: [True, np.int64(3)]) == [1.0, 3.0]


@pytest.mark.parametrize(
    ("function", "message", "row"),
    [
        (
            planted_rewards.one_too_few,
            "returned 1 rewards for 2 completions, needs one for each",
            None,
        ),
        (planted_rewards.pops, "returned 1 rewards for 2 completions, needs one for each", None),
        (planted_rewards.not_a_number, "returned nan, needs a finite number or None", 1),
        (
            lambda completions, **_: [1.0, _OtherFloat(1.0)],
            "returned 1.0, needs a finite number or None",
            1,
        ),
        (planted_rewards.text, "returned 'good', needs a finite number or None", 0),
        (
            planted_rewards.nothing,
            "returned None, needs a list with one reward per completion",
            None,
        ),
        (
            planted_rewards.enormous,
            "returned 1e+30, needs a number of at most 1e+09: advantages are float32",
            0,
        ),
        (
            lambda completions, **_: np.ones((2, 2)),
            "returned array([1., 1.]), needs a finite number or None",
            0,
        ),
    ],
)
def test_a_bad_reward_is_refused_with_its_row(function, message, row):
    with pytest.raises(RewardError) as raised:
        _call(function)
    assert (str(raised.value), raised.value.row) == (message, row)


def test_the_total_is_the_weighted_sum_of_what_there_is():
    # 2 * 1 + 0.5 * 4 = 4; 2 * 3 alone = 6; nothing = 0. A mean of the weights would give 1.6 for
    # the first.
    assert weighted_total([[1.0, 3.0, None], [4.0, None, None]], [2.0, 0.5]) == [4.0, 6.0, 0.0]


def test_two_functions_of_one_name_keep_their_whole_names():
    assert short_names(["math", "a:f", "b.py:f", "c:g"]) == ["math", "a:f", "b.py:f", "g"]


def test_the_config_knows_the_built_in_rewards_and_each_can_be_loaded():
    assert (MATH, ENVIRONMENT, *BUILT_IN_REWARDS) == checks.BUILT_IN_REWARDS
    for name in BUILT_IN_REWARDS:
        load_reward(name, ["reference_answer"])


def test_plain_math_verify_judges_answers():
    math_verify = load_reward("math_verify", ["reference_answer"])
    texts = [r"so \boxed{\frac{1}{2}}", r"so \boxed{0.5}", r"so \boxed{2}", "no idea"]
    # The second needs the library's own reading of decimals.
    assert _call(math_verify, texts, reference_answer=["1/2"] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert _call(math_verify, texts[:2], reference_answer=["1/2", None]) == [1.0, None]
