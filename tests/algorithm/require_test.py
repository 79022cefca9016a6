"""Argument checks: what they refuse, what they let through, and that tracers pass."""

import jax
import numpy as np
import pytest

from dcmdp_jax.algorithm import require


def test_number_range_ends():
    require.require_number("clip", 0.0, minimum=0, maximum=1, open_maximum=True)
    with pytest.raises(ValueError, match=r"^clip=1\.0; must be a finite number in \[0, 1\)$"):
        require.require_number("clip", 1.0, minimum=0, maximum=1, open_maximum=True)
    require.require_number("q", 1.0, minimum=0, maximum=1)
    with pytest.raises(ValueError, match=r"^eta=-0\.1; must be a finite number in \[0, inf\)$"):
        require.require_number("eta", -0.1, minimum=0)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), np.float32("nan"), -1, np.float64(-1)]
)
def test_number_that_is_none(value):
    with pytest.raises(ValueError, match="^eta="):
        require.require_number("eta", value, minimum=0)


def test_traced_number_passes_unchecked():
    def double(value):
        require.require_number("value", value, minimum=0)
        return value * 2

    assert float(jax.jit(double)(-1.0)) == -2.0


@pytest.mark.parametrize("value", [0, True, 1.5, None, "3"])
def test_integer_refuses(value):
    with pytest.raises(ValueError, match=r"window=.*; must be an integer of at least 1"):
        require.require_integer("window", value, minimum=1)


def test_option_lists_the_choices():
    with pytest.raises(ValueError, match=r"^measure='kl'; must be one of 'diff', 'ratio'$"):
        require.require_option("measure", "kl", ("diff", "ratio"))


def test_same_shape_does_not_broadcast():
    with pytest.raises(
        ValueError, match=r"^shapes differ: a \(2, 1\), b \(2, 3\); all must be equal$"
    ):
        require.require_same_shape(a=np.ones((2, 1)), b=np.ones((2, 3)))
