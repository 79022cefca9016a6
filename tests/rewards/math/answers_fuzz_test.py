"""Whatever a model writes is read in linear work and raises nothing.

The trainer's process has no time limit.

Work is counted here, in lines of Python that run; `python -m benchmarks.answers` measures the
patterns' seconds.
"""

import sys
from collections.abc import Callable

import pytest

from benchmarks.answers import BASES, FRAGMENTS, GOLDS, LINEAR, fuzzed, grade
from dcmdp_jax.rewards.math import numbers
from dcmdp_jax.rewards.math.answers import (
    MAX_ANSWER_CHARACTERS,
    answer_defect,
    compare_literals,
    extract_answer,
)


def _lines_run(function: Callable[[str], object], text: str) -> int:
    """Lines of Python that run in a call, those of the functions that it calls among them."""
    count = 0

    def count_line(frame, event, argument):
        nonlocal count
        count += event == "line"
        return count_line

    previous = sys.gettrace()
    sys.settrace(count_line)
    try:
        function(text)
    finally:
        sys.settrace(previous)
    return count


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=[repr(fragment) for fragment in FRAGMENTS])
def test_work_grows_linearly_with_a_repeated_fragment(fragment):
    """Four times the text runs four times the lines.

    Quadratic work would run sixteen times as many.
    """
    short, long = (fragment * (size // len(fragment)) for size in (500, 2_000))
    for function in LINEAR:
        lines = _lines_run(function, short), _lines_run(function, long)
        assert lines[1] <= 5 * lines[0] + 100, (function, lines)


def test_quadratic_work_is_seen():
    def pairs(text: str) -> None:
        for _ in text:
            for _ in text:
                pass

    assert _lines_run(pairs, "x" * 200) > 5 * _lines_run(pairs, "x" * 50) + 100


def test_a_looping_unit_is_read():
    """Exponential work would not end."""
    loop = r"\mathrm{cm}" * 40
    assert compare_literals(rf"5{loop}=3", "5") is not True


def test_gigantic_numbers_are_left_unread():
    for text in (
        "9" * 2000,
        "1e999999999",
        "10^{999999999}",
        "1e" + "9" * 1990,
        "1/" + "9" * 1990,
        "0." + "9" * 1990,
    ):
        assert numbers.parse_number(text) is None
        assert compare_literals(text, "5") is not True


def test_no_completion_raises():
    for index, completion in enumerate(fuzzed(3_000, 1, BASES)):
        grade(completion, GOLDS[index % len(GOLDS)])
        answer_defect(completion)
        assert len(extract_answer(completion) or "") <= MAX_ANSWER_CHARACTERS
