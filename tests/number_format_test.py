"""Numbers as text."""

import math

import numpy as np
import pytest

from dcmdp_jax.number_format import duration, labelled, number, percent


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (3.0, "", "3"),
        (-0.00037, "", "-0.00037"),
        (12345.678, "", "1.235e+04"),
        (1e9, "", "1e+09"),
        (math.nan, "", "-"),
        (-math.inf, "", "-inf"),
        (math.nan, ".3f", "-"),
        (1234.5, ",.0f", "1,234"),
    ],
)
def test_number(value, form, text):
    assert number(value, form) == text


def test_percent():
    assert (percent(0.125), percent(math.nan)) == ("12.5%", "-")
    # NumPy's own `round` gives 0.6.
    assert percent(np.float64(0.0065)) == percent(0.0065) == "0.7%"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (math.nan, "-"), (math.inf, "-")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_labelled_lines_are_wrapped_at_the_terminal_s_width_under_their_label(monkeypatch):
    texts = {"model": "one two three four five", "lag": "", "memory": "first\n  second"}
    monkeypatch.setenv("COLUMNS", "30")  # 13 for the label, 17 for the text
    assert labelled(texts).splitlines() == [
        "model        one two three",
        "             four five",
        "memory       first",
        "               second",
    ]
    monkeypatch.delenv("COLUMNS")
    assert labelled(texts).splitlines()[0] == "model        one two three four five"
