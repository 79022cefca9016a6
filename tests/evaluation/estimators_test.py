"""pass@k against counting all draws, intervals against formulas."""

import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest

from dcmdp_jax.evaluation.estimators import bootstrap_interval, pass_at_every_k, t_half_width


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer():
    for samples, correct in [(5, 0), (5, 1), (5, 2), (5, 5), (6, 3)]:
        answers = [1] * correct + [0] * (samples - correct)
        got = pass_at_every_k(np.array([correct]), samples)[0]
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(answers, k))
            assert got[k - 1] == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-14)


def test_pass_at_k_is_exact_where_binomials_overflow_floats():
    # C(4096, 2048) has 1,232 digits.
    got = pass_at_every_k(np.array([1, 7, 4095]), 4096)
    for row, correct in zip(got, (1, 7, 4095), strict=True):
        for k in (1, 2, 100, 2048, 4096):
            exact = 1 - Fraction(comb(4096 - correct, k), comb(4096, k))
            assert row[k - 1] == pytest.approx(float(exact), rel=1e-11)
    assert np.all(np.diff(got, axis=1) >= 0)


@pytest.mark.parametrize("correct", [-1, 5])
def test_a_count_that_cannot_be_is_refused(correct):
    with pytest.raises(ValueError, match="each must be from 0 to samples = 4"):
        pass_at_every_k(np.array([correct]), 4)


def test_bootstrap_interval_is_that_of_the_binomial_and_repeats_with_its_seed():
    # A resample's mean of 100 zeros and ones is Binomial(100, 0.3) / 100: quantiles 0.21 and 0.39
    # (from its table).
    values = np.repeat([1.0, 0.0], [30, 70])
    low, high = bootstrap_interval(values, seed=1)
    assert abs(low - 0.21) <= 0.01 and abs(high - 0.39) <= 0.01
    assert bootstrap_interval(values, seed=1) == (low, high)
    assert bootstrap_interval(values, seed=2) != (low, high)
    assert np.isnan(bootstrap_interval(np.array([0.5]), seed=0)).all()


def test_t_half_width_by_hand():
    # 1, 2, 3: sd 1, t(2) = 4.3027, over sqrt(3).
    assert t_half_width([1.0, 2.0, 3.0]) == pytest.approx(4.30265 / 3**0.5, abs=1e-4)
    assert np.isnan(t_half_width([1.0]))
