"""The calculator, its problems, worked turns and config."""

import re
from pathlib import Path

import pytest

from dcmdp_jax.commands.flags import load_config
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.user_files import load_object

_FILE = str(Path(__file__).resolve().parents[2] / "examples" / "plugins" / "calculator.py")
_TASK = f"{_FILE}:calculator"


def value_of(expression):
    return load_object(f"{_FILE}:value_of")(expression)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("4*6-7+9", "26"),
        ("2-3*4", "-10"),
        ("7", "7"),
        ("1+", "error"),
        ("2**9", "error"),
        ("(1+2)", "error"),
        ("__import__", "error"),
        ("9" * 7, "error"),
        ("1-2-3", "-4"),
        ("2*3*4+1", "25"),
    ],
)
def test_values(expression, value):
    assert value_of(expression) == value


def test_a_call_is_answered_and_a_box_ends():
    one = load_object(f"{_FILE}:Calculator")()
    one.reset(prompt="2+3*4=?", reference_answer="14")
    assert one.step("calc(2+3*4)") == ("14", 0.0, False)
    assert one.step("calc(2+3*4) is what I want") == ("", 0.0, True)
    assert one.step(r"\boxed{13} no \boxed{14}") == ("", 1.0, True)
    assert one.step(r"\boxed{15}") == ("", 0.0, True)


def test_worked_turns_are_right_but_for_the_share_of_errors():
    plain = load_problems(f"{_TASK},difficulty=2,count=50,seed=3")
    assert [problem.prompt for problem in plain] == [
        problem.prompt for problem in load_problems("arithmetic:difficulty=2,count=50,seed=3")
    ]
    for rate in (0.0, 1.0):
        worked = load_problems(
            f"{_TASK},difficulty=2,count=50,seed=3,error_rate={rate},worked=true"
        )
        assert len(worked) == 100
        for problem, call, answer in zip(plain, worked[::2], worked[1::2], strict=True):
            expression = problem.prompt.removesuffix("=?")
            assert value_of(expression) == problem.answer
            assert (call.solution == f"calc({expression})") == (rate == 0.0)
            assert (answer.solution == rf"\boxed{{{problem.answer}}}") == (rate == 0.0)
            assert [message["content"] for message in answer.messages] == [
                problem.prompt,
                f"calc({expression})",
                problem.answer,
            ]
            # The tokens of a worked second turn are those that the policy sees there.
            assert answer.prompt == problem.answer
            assert (
                re.fullmatch(r"calc\([\d+*-]+\)", call.solution)
                and len(call.solution) == len(expression) + 6
            )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("worked=maybe", "worked = 'maybe' is not true or false"),
        ("count=0", "arithmetic count = 0: must be at least 1"),
        ("counts=2", "unexpected keyword argument 'counts'"),
        ("count", "'count' is not key=value"),
    ],
)
def test_a_wrong_setting_is_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as raised:
        load_problems(f"{_TASK},{settings}")
    assert str(raised.value).startswith(f"task {_TASK},{settings}: ") and "\n" not in str(
        raised.value
    )


def test_its_config_is_checked_and_names_its_own_file():
    config = load_config(_FILE)
    for place in (
        config.task.train,
        config.warmup.task,
        config.evaluation.task,
        config.task.environment,
    ):
        file, _, rest = place.partition(":")
        assert (Path(__file__).resolve().parents[2] / file).samefile(_FILE)
        assert callable(load_object(f"{_FILE}:{rest.partition(',')[0]}"))
    with pytest.raises(
        ValueError, match="config argument 'int9': allowed are grpo, debug, tools, joined by commas"
    ):
        load_config(f"{_FILE}:int9")
