"""Answers taken from completions, brought to one notation and read as numbers."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcmdp_jax.rewards.math import notation
from dcmdp_jax.rewards.math.answers import (
    MAX_ANSWER_CHARACTERS,
    answer_defect,
    compare_literals,
    extract_answer,
    split_tolerance,
)
from dcmdp_jax.rewards.math.notation import normalize_answer, split_elements
from dcmdp_jax.rewards.math.numbers import parse_number


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{1} is wrong and \boxed{\frac{1}{2}} right", r"\frac{1}{2}"),
        (r"\boxed{\{x_{1}, x_{2}\}}", r"\{x_{1}, x_{2}\}"),
        (r"\boxed{5} and then \boxed{6", None),  # the second was cut off
        (r"\boxed{we get \boxed{7}}", "7"),
        (r"\boxed{7 \boxed{7}", None),  # the outer one is not closed
        (r"so \boxed{3 or \boxed{5} it is", None),
        ("Answer：42", "42"),
        (r"} stray \boxed {3} }", "3"),
        ("Answer: 41 was a guess.\nAnswer: 42", "42"),
        ("**Answer:** $42$", "$42$"),
        ("ANSWER:\n42", "42"),
        ("Answer: 42<|im_end|>", "42"),
        ("Answer: 42\u200b", "42"),
        ("Answer: 1\n\\boxed{2}\nAnswer: 3", "2"),  # a box wins over a line
        ("Answer: \\boxed{4", None),
        ("the answer is 42", None),
        (r"\fbox{42}", None),
        (r"\boxed{}", None),
        ("", None),
        (r"\boxed{" + "1" * (MAX_ANSWER_CHARACTERS + 1) + "}", None),
    ],
)
def test_extract_answer(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("6*7=42\n#### 42", "42"),
        ("#### 41\nno:\n#### $1,042$<|im_end|>", "$1,042$"),
        ("The answer is: 42.", "42"),
        ("So the final answer is **4.5**. I am sure.", "4.5"),
        ("the answer to the question is $x=3$, as said", "$x=3$, as said"),
        ("the answer is 41\nAnswer: 42\nthe answer is 43", "42"),  # what is strict goes before
        (r"the answer is 41, \boxed{42}", "42"),
        (r"the answer is \boxed{42", None),
        ("the answers are 42", None),
        ("42", None),
    ],
)
def test_the_flexible_extraction_reads_what_small_models_write(completion, answer):
    assert extract_answer(completion, "flexible") == answer
    strict = extract_answer(completion)
    assert strict == (answer if "Answer:" in completion or "boxed" in completion else None)


def test_every_rule_of_the_notation_does_what_its_case_says():
    for pattern, replacement, example in notation._RULES:
        case, result = example.split(" => ")
        assert re.sub(pattern, replacement, case) == result != case, pattern


@given(
    st.recursive(
        st.text("ab1\\$ ", max_size=6),
        lambda inner: st.builds("{{{}}}{}".format, inner, inner),
        max_leaves=8,
    )
)
def test_extract_returns_what_was_boxed(content):
    content = content.replace("\\", "\\\\")  # an escape must not swallow a brace
    assert extract_answer(rf"text \boxed{{{content}}} more") == (content.strip() or None)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{" * 20_000, None),
        ("answer" + " " * 200_000, None),
        ("answer:" + "*" * 200_000, None),
        (r"\boxed{1}" + "{" * 200_000, "1"),
    ],
)
def test_degenerate_completions_are_read_in_one_pass(completion, answer):
    # A search that starts again at every brace or space would take hours.
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("025", 25),
        ("-3", -3),
        ("105263157894736842", 105263157894736842),  # a float would make it ...848
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1 000", 1000),
        (".5", Fraction(1, 2)),
        ("7.5e-3", Fraction(3, 400)),
        (r"7.5 \times 10^{-3}", Fraction(3, 400)),
        (r"-10^{2}", -100),
        (r"2\cdot10^3", 2000),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        ("2 1/2", Fraction(5, 2)),
        ("12,34", None),
        ("1e999", None),
        ("1/0", None),
        ("x", None),
        ("", None),
        (".", None),
    ],
)
def test_parse_number(text, value):
    assert parse_number(text) == value


@given(st.fractions())
def test_parse_number_reads_back_every_fraction(value):
    sign = "-" if value < 0 else ""
    assert parse_number(str(value)) == value
    assert parse_number(rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}") == value


@given(st.integers())
def test_digit_groups_and_leading_zeros_are_the_integer(value):
    sign = "-" if value < 0 else ""
    digits = str(abs(value))
    assert compare_literals(f"{value:,}", str(value)) is True
    assert compare_literals(f"{value:,}".replace(",", "{,}"), str(value)) is True
    assert compare_literals(f"{value:,}".replace(",", r",\!"), str(value)) is True
    assert compare_literals(f"{sign}00{digits}", str(value)) is True
    assert compare_literals(str(value + 1), str(value)) is False


@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        ("105263157894736842", "105263157894736848", False),  # equal as floats
        ("25", "025", True),
        ("27.0", "27", True),
        ("26.9999999", "27", False),  # an integer is matched exactly
        ("0.3333333", r"\frac{1}{3}", True),
        ("0.333", r"\frac{1}{3}", False),
        ("1.78e-6", "1.77e-6", False),  # equal when rounded to six places
        (r"8.7 \times 10^{8}", "8.7e8", True),
        ("32348", r"\$32,\!348", True),
        ("25", r"25\%", True),
        ("0.25", r"25\%", True),
        ("2.5", r"25\%", False),
        ("2 1/2", "21/2", False),
        (r"2\frac{1}{2}", "2 1/2", True),
        (r"90^\circ", "90", True),
        (r"15\text{ cm}^2", "15", True),
        ("45 minutes", "45", True),
        ("East", r"\text{east}", True),
        (r"\text{oddd}", "odd", False),
        ("B", r"\text{(B)}", True),
        ("C", r"\text{(B)}", False),
        ("204", "204_5", True),
        ("204_6", "204_5", False),
        ("204_5", "204", False),
        ("2.5 million", "2500000", True),
        ("42 million", "42", False),
        (r"5\text{ km}", r"5\text{ m}", False),
        (r"5\text{ km}", r"5000\text{ m}", True),
        ("42 squared", "42", None),
        ("16", r"16\text{ daps}", True),
        ("(A), (B)", "A", None),
        ("x-y", "xy", None),
        (r"0.\overline{3}", r"\frac{1}{3}", True),
        ("４２", "42", None),  # full-width digits are no number
        ("4.29", r"4.2\tolerance{1e-1}", True),
        ("4.31", r"4.2\tolerance{1e-1}", False),
        ("4", r"5\tolerance{1}", True),
        # In the reference's unit.
        ("0", r"25\%\tolerance{1}", False),
        (r"24.5\%", r"25\%\tolerance{1}", True),
        (r"0\text{ mm}", r"500\text{ mm}\tolerance{1}", False),
        (r"50.05\text{ cm}", r"500\text{ mm}\tolerance{1}", True),
        (r"5.05\text{ km}", r"5\text{ km}\tolerance{0.1}", True),
        # No digit groups: a list, or a decimal comma.
        ("0,123", "123", None),
        ("0 042", "42", None),
        ("x+1", "1+x", None),
        ("", "5", False),
        ("42", "\ufeff42\u200b", True),
        ("4\u200b2", "43", False),
    ],
)
def test_compare_literals(prediction, gold, equal):
    assert compare_literals(prediction, gold) is equal


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("$1$ and $2$ and $3$", "1, 2, 3"),
        (r"The distance is \( 5 \).", "5"),
        (r"11,\! 111,\! 111,\! 100", "11,111,111,100"),
        (
            r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
            r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        ),  # not the command "\ "
        (r"\left(\dfrac{1}{2}, -3\right]", r"(\frac{1}{2}, -3]"),
        ("$221,$8$", "221, 8"),
        (r"\frac{37}{4} m", r"\frac{37}{4} m"),  # m may be a variable
        ("-1./3", "-1/3"),
    ],
)
def test_normalize_answer(answer, normal):
    assert normalize_answer(answer).replace(" ", "") == normal.replace(" ", "")


def test_split_elements_keeps_brackets_and_digit_groups_whole():
    assert split_elements(r"(1,2), 1,000, \frac{1}{2}", ",") == ["(1,2)", "1,000", r"\frac{1}{2}"]
    assert split_elements("5,113", ",", digit_groups=False) == ["5", "113"]


def test_tolerance_is_split_off_and_checked():
    assert split_tolerance(r"4.2\tolerance{1e-1}") == ("4.2", Fraction(1, 10))
    assert split_tolerance("4.2") == ("4.2", None)
    with pytest.raises(ValueError, match="'wide' is not a positive number"):
        split_tolerance(r"4.2\tolerance{wide}")


@pytest.mark.parametrize(
    ("answer", "defect"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("$$", "no letter"),
        (r"\frac{1}{2", "braces"),
        (r"1}{2", "braces"),
        (r"\frac{1}{}", "breaks off"),
        (r"\frac{1}", "breaks off"),
        ("x =", "breaks off"),
        (r"\begin{pmatrix} 1", "begin"),
        (r"1\tolerance{0}", "not a positive"),
        ("1" * (MAX_ANSWER_CHARACTERS + 1), "characters"),
        (r"\pi", None),
        (r"\{1, 2\}", None),
        (r"-\tau \ln \Delta", None),
        ("$221,$8$", None),
        ("(-\\infty, 5]", None),
    ],
)
def test_answer_defect(answer, defect):
    found = answer_defect(answer)
    assert found is None if defect is None else defect in found
