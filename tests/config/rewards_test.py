"""Settings of the rewards: names and weights are checked before anything is imported."""

import pytest

from dcmdp_jax.config.settings import from_config_dict, parse_value


def _rewards(**changes):
    return from_config_dict({"task": {"train": "train.jsonl"}, "rewards": changes}).rewards


def test_each_function_has_weight_one_by_default():
    assert _rewards().weighted == (("math", 1.0),)
    assert _rewards(functions="math, a.b:f,x/y.py:g").weighted == (("math", 1.0), ("a.b:f", 1.0), ("x/y.py:g", 1.0))


def test_weights_belong_to_the_functions_in_order():
    weights = parse_value("rewards.weights", "1,-0.25")
    assert _rewards(functions="math,a:f", weights=weights).weighted == (("math", 1.0), ("a:f", -0.25))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"functions": "mat"},
            "functions: got 'mat', allowed are math, environment, last_number, math_verify, reasoning_gym, verifiers, "
            "module:function and path.py:function; did you mean 'math'?",
        ),
        ({"functions": "math-verify"}, "functions: got 'math-verify', allowed are .*; did you mean 'math_verify'"),
        ({"functions": "examples/length_reward.py"}, "functions: got 'examples/length_reward.py', allowed are math, "),
        ({"functions": ""}, "functions: got '', allowed are math, "),
        ({"functions": "math,"}, "functions: got '', allowed are math, "),
        ({"functions": "a:not a name"}, "functions: got 'a:not a name', allowed are math, "),
        ({"functions": "a:f,a:f"}, "functions: got 'a:f' twice"),
        ({"weights": [1, 2]}, "weights: got 2 for the 1 functions math, must be one for each, or empty"),
        ({"functions": "math,a:f", "weights": [1]}, "weights: got 1 for the 2 functions math,a:f, must be one for"),
        ({"functions": "math,a:f", "weights": [0, 0]}, "weights: got only 0, nothing would be learned"),
        ({"answer_extraction": "loose"}, "answer_extraction: got 'loose', allowed are strict, flexible"),
        ({"weights": [2e6]}, r"weights: got 2000000.0, must be in \[-1e\+06, 1e\+06\]"),
        ({"weights": [float("nan")]}, "weights: got nan, must be a finite number"),
        ({"on_error": "non"}, "on_error: got 'non', allowed are error, none; did you mean 'none'?"),
        ({"timeout": 0}, "timeout: got 0.0, must be at least 0.01"),
        ({"memory_limit": -1}, "memory_limit: got -1.0, must be at least 0"),
        ({"memory_limit": 0.01}, r"memory_limit: got 0.01 GiB, must be 0 \(no limit\) or at least 0.125 GiB"),
        ({"function": "math"}, "function: no such setting; did you mean 'rewards.functions'"),
    ],
)
def test_a_wrong_setting_is_named(changes, message):
    with pytest.raises(ValueError, match=f"^config.rewards.{message}"):
        _rewards(**changes)
