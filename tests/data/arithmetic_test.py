"""The built-in arithmetic task: true answers, true steps, disjoint splits, planted errors."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcmdp_jax.data.arithmetic import LEVELS, ArithmeticSpec, arithmetic_problems, arithmetic_rows
from dcmdp_jax.rewards.math.answers import extract_answer

_PROMPT = re.compile(r"\d+(?:[+*-]\d+)+=\?")
_STEP = re.compile(r"(\d+)([+*-])(\d+)=(\d+);")


def _value(expression):
    assert re.fullmatch(r"[\d+*-]+", expression)
    return eval(expression)  # Python's own precedence, the independent reference


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(LEVELS)),
    st.integers(0, 10**6),
    st.sampled_from(["train", "heldout"]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_answers_and_steps_are_right(difficulty, seed, split, error_rate):
    for row in arithmetic_rows(ArithmeticSpec(difficulty, 20, seed, split, error_rate)):  # type: ignore[arg-type]
        content = row["prompt"][0]["content"]
        assert _PROMPT.fullmatch(content)
        assert row["reward_model"]["ground_truth"] == str(_value(content.removesuffix("=?")))
        steps = _STEP.findall(row["solution"])
        wrong = [step for step in steps if _value("".join(step[:3])) != int(step[3])]
        assert len(steps) == LEVELS[difficulty].operations
        assert (
            "".join("{}{}{}={};".format(*step) for step in steps) + rf"\boxed{{{steps[-1][3]}}}"
            == row["solution"]
        )
        assert len(wrong) <= (1 if error_rate else 0)
        if error_rate == 1.0:
            assert len(wrong) == 1
        if not wrong:
            assert extract_answer(row["solution"]) == row["reward_model"]["ground_truth"]


def test_a_known_problem():
    rows = {row["prompt"][0]["content"]: row for row in arithmetic_rows(ArithmeticSpec(4, 4000))}
    with_late_product = next(
        content for content in rows if re.fullmatch(r"\d\+\d\+\d\*\d-\d=\?", content)
    )
    a, b, c, d, e = map(int, re.findall(r"\d+", with_late_product))
    assert rows[with_late_product]["solution"] == (  # the product first, then from the left
        rf"{c}*{d}={c * d};{a}+{b}={a + b};{a + b}+{c * d}={a + b + c * d};"
        rf"{a + b + c * d}-{e}={a + b + c * d - e};\boxed{{{a + b + c * d - e}}}"
    )


def test_splits_are_disjoint_for_all_seeds():
    train = {
        problem.prompt
        for seed in range(3)
        for problem in arithmetic_problems(ArithmeticSpec(1, 1200, seed, "train"))
    }
    held_out = {
        problem.prompt
        for seed in range(3)
        for problem in arithmetic_problems(ArithmeticSpec(1, 150, seed, "heldout"))
    }
    assert not train & held_out
    assert len(train) >= 1200


def test_the_seed_fixes_the_problems_and_a_smaller_count_is_a_beginning():
    spec = ArithmeticSpec(2, 300, seed=7, error_rate=0.5)
    assert arithmetic_rows(spec) == arithmetic_rows(spec)
    assert (
        arithmetic_rows(ArithmeticSpec(2, 50, seed=7, error_rate=0.5)) == arithmetic_rows(spec)[:50]
    )
    assert arithmetic_rows(ArithmeticSpec(2, 50, seed=8)) != arithmetic_rows(
        ArithmeticSpec(2, 50, seed=7)
    )
    assert len({row["prompt"][0]["content"] for row in arithmetic_rows(spec)}) == 300


def test_the_error_rate_is_the_share_of_wrong_boxes():
    problems = arithmetic_problems(ArithmeticSpec(2, 2000, error_rate=0.6))
    wrong = sum(extract_answer(problem.solution) != problem.answer for problem in problems)
    # binomial(2000, 0.6): mean 1200, standard deviation 22
    assert abs(wrong - 1200) < 100
    clean = arithmetic_problems(ArithmeticSpec(2, 2000))
    assert [problem.answer for problem in problems] == [problem.answer for problem in clean]


def test_rows_have_the_schema_of_dapo():
    (row,) = arithmetic_rows(ArithmeticSpec(1, 1, split="heldout"))
    assert set(row) == {
        "data_source",
        "prompt",
        "ability",
        "reward_model",
        "extra_info",
        "solution",
    }
    assert row["prompt"][0]["role"] == "user"
    assert row["extra_info"] == {"index": 0, "split": "heldout"}


def test_parse_spec():
    assert ArithmeticSpec.parse("arithmetic") == ArithmeticSpec()
    assert ArithmeticSpec.parse(
        "arithmetic:split=heldout, count=5,error_rate=0.25"
    ) == ArithmeticSpec(count=5, split="heldout", error_rate=0.25)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("arithmetic:levels=2", "'levels=2' is not key=value"),
        ("arithmetic:count", "'count' is not key=value"),
        ("arithmetic:count=1,count=2", "count is given twice"),
        ("arithmetic:count=many", "count = 'many' is not int"),
        ("arithmetic:difficulty=9", "difficulty = 9: must be one of 1, 2, 3, 4, 5"),
        ("arithmetic:count=0", "count = 0"),
        ("arithmetic:split=test", "split = 'test'"),
        ("arithmetic:error_rate=1.5", "error_rate = 1.5"),
    ],
)
def test_bad_specs(text, reason):
    with pytest.raises(ValueError, match=reason):
        ArithmeticSpec.parse(text)


def test_more_problems_than_there_are():
    with pytest.raises(ValueError, match="no 5000 distinct train problems"):
        arithmetic_rows(ArithmeticSpec(1, 5000))
