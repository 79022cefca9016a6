"""Optimal policies against hand-solved states, the closed forms, and scipy's SLSQP on random
states.
"""

import numpy as np
import pytest

from research.tests.slsqp import disagreement, solve_penalized, solve_within_budget
from research.theory.budget import policy_for_budget
from research.theory.log_measure import candidates
from research.theory.policy import MEASURES, SIDES, largest_mismatch, mismatch, optimal_policy

_EVERY = [(measure, sided) for measure in MEASURES for sided in SIDES]


def _random_state(rng):
    """2 to 7 actions, rare ones among them, no two advantages equal."""
    size = int(rng.integers(2, 8))
    q = np.maximum(rng.dirichlet(np.full(size, rng.choice([0.5, 1.0, 5.0]))), 0.01)
    return rng.normal(size=size), q / q.sum()


def test_the_three_measures_by_hand():
    pi = np.array([0.5, 0.5])
    q = np.array([0.8, 0.2])
    # diff: .8 * .09 + .2 * .09; ratio: .09 / .8 + .09 / .2; log: .8 log(.625)^2 + .2 log(2.5)^2.
    # One-sided: a2 alone.
    assert mismatch(pi, q, measure="diff") == pytest.approx(0.09, abs=1e-15)
    assert mismatch(pi, q, measure="ratio") == pytest.approx(0.1125 + 0.45, abs=1e-15)
    assert mismatch(pi, q, measure="log") == pytest.approx(
        0.8 * 0.2209032 + 0.2 * 0.8395888, abs=1e-6
    )
    assert mismatch(pi, q, measure="diff", sided="one") == pytest.approx(0.018, abs=1e-15)
    assert mismatch(pi, q, measure="ratio", sided="one") == pytest.approx(0.45, abs=1e-15)
    assert mismatch(pi, q, measure="log", sided="one") == pytest.approx(0.2 * 0.8395888, abs=1e-6)


def test_the_largest_mismatch_is_not_exceeded():
    rng = np.random.default_rng(0)
    q = np.array([0.3, 0.3, 0.15, 0.15, 0.05, 0.05])
    assert largest_mismatch(q, measure="ratio") == pytest.approx(
        0.95**2 / 0.05 + 0.95
    )  # all on a5 or a6
    for measure, sided in _EVERY:
        largest = largest_mismatch(q, measure=measure, sided=sided)
        sampled = [
            mismatch(pi, q, measure=measure, sided=sided)
            for pi in rng.dirichlet(np.full(6, 0.2), 500)
        ]
        assert max(sampled) <= largest


def test_two_actions_by_hand():
    # q = (1/2, 1/2), A = (1, -1): nu = 0 by symmetry. diff: pi_1 = 1/2 + 1 / (2 lambda / 2) = 1/2 +
    # 1/lambda.
    # ratio: pi_1 = 1/2 + (1/2) / (2 lambda) = 1/2 + 1 / (4 lambda).
    a = np.array([1.0, -1.0])
    q = np.array([0.5, 0.5])
    diff = optimal_policy(a, q, multiplier=10.0, measure="diff")
    np.testing.assert_allclose(diff.policy, [0.6, 0.4], atol=1e-15)
    assert diff.normalizer == pytest.approx(0, abs=1e-14) and diff.advantage == pytest.approx(0.2)
    assert diff.mismatch == pytest.approx(0.01)  # (.01 + .01) / 2
    np.testing.assert_allclose(
        optimal_policy(a, q, multiplier=2.5, measure="ratio").policy, [0.6, 0.4], atol=1e-15
    )
    # One-sided: only the rise to 1/2 + 1/lambda' is penalized, and the fall of a2 is free: nu = -1
    # = A_2, so pi_1 = q + (A_1 - nu) / (2 lambda q) = 1/2 + 2 / lambda, and a2 takes what is left,
    # a share no closed form has.
    one = optimal_policy(a, q, multiplier=20.0, measure="diff", sided="one")
    np.testing.assert_allclose(one.policy, [0.6, 0.4], atol=1e-15)
    assert one.normalizer == -1.0


def test_projection_leaves_out_what_would_be_negative():
    # lambda = 1: the closed form over both gives pi_2 = 1/2 - 1 < 0, so a1 has everything.
    a = np.array([1.0, -1.0])
    q = np.array([0.5, 0.5])
    np.testing.assert_array_equal(
        optimal_policy(a, q, multiplier=1.0, measure="diff").policy, [1.0, 0.0]
    )


@pytest.mark.parametrize(("measure", "sided"), _EVERY)
def test_the_theorems_closed_forms_hold_where_actions_are_penalized(measure, sided):
    from scipy.special import lambertw

    rng = np.random.default_rng(3)
    for _ in range(20):
        a, q = _random_state(rng)
        multiplier = 10 ** rng.uniform(-0.5, 1.5)
        found = optimal_policy(a, q, multiplier=multiplier, measure=measure, sided=sided)
        slope = (a - found.normalizer) / (2 * multiplier)
        if measure == "log":
            branches = np.array([q * np.exp(-lambertw(-slope + 0j, k).real) for k in (0, -1)])
            form = branches[np.argmin(np.abs(branches - found.policy), axis=0), np.arange(len(q))]
        else:
            form = q + (slope / q if measure == "diff" else slope * q)
        penalized = found.policy > (q * (1 + 1e-9) if sided == "one" else 1e-9)
        np.testing.assert_allclose(found.policy[penalized], form[penalized], rtol=1e-6, atol=1e-8)
        assert abs(found.policy.sum() - 1) < 1e-12 and found.policy.min() >= 0
        if sided == "one":
            idle = ~penalized  # KKT: 0 below nu, any share up to q at nu
            assert np.all(
                (found.policy[idle] == 0) | np.isclose(a[idle], found.normalizer, atol=1e-9)
            )


@pytest.mark.parametrize(("measure", "sided"), _EVERY)
def test_random_budgets_agree_with_slsqp(measure, sided):
    rng = np.random.default_rng(4)
    seen = set()
    for _ in range(25):
        a, q = _random_state(rng)
        largest = min(largest_mismatch(q, measure=measure, sided=sided), 0.54 * 10)
        budget = largest * 10 ** rng.uniform(-3, -0.1)
        result = policy_for_budget(a, q, budget=budget, measure=measure, sided=sided)
        assert disagreement(a, q, result, measure=measure, sided=sided) < 1e-6, (
            a,
            q,
            budget,
            result.status,
        )
        if result.status == "met":
            assert result.optimum.mismatch == pytest.approx(budget, rel=1e-9)
        seen.add(result.status)
    assert "met" in seen


@pytest.mark.parametrize(("measure", "sided"), _EVERY)
def test_random_multipliers_agree_with_slsqp(measure, sided):
    rng = np.random.default_rng(5)
    for _ in range(15):
        a, q = _random_state(rng)
        multiplier = 10 ** rng.uniform(-0.7, 1.5)
        ours = optimal_policy(a, q, multiplier=multiplier, measure=measure, sided=sided)
        theirs = solve_penalized(a, q, multiplier=multiplier, measure=measure, sided=sided)
        value = theirs @ a - multiplier * mismatch(theirs, q, measure=measure, sided=sided)
        assert ours.advantage - multiplier * ours.mismatch >= value - 1e-9
        np.testing.assert_allclose(ours.policy, theirs, atol=1e-6)


def test_both_branches_of_lamberts_function_are_needed():
    a = np.array([-0.1, 0.1, -0.5, 0.5, -1.0, 1.0])
    q = np.array([0.3, 0.3, 0.15, 0.15, 0.05, 0.05])
    low = policy_for_budget(a, q, budget=0.05, measure="log").optimum
    high = policy_for_budget(a, q, budget=0.1, measure="log").optimum
    assert low.policy[5] / q[5] < np.e < high.policy[5] / q[5]
    # W_0 alone misses it: at that multiplier the principal branch sums to less than 1 for every nu
    # it is real for.
    concave = [
        pi for pi, _ in candidates(a, q, high.multiplier, sided="two") if np.all(pi / q <= np.e)
    ]
    assert concave == []
    theirs = solve_within_budget(a, q, budget=0.1, measure="log")
    np.testing.assert_allclose(high.policy, theirs, atol=1e-6)


def test_equal_advantages_share_and_slack_ties_have_the_least_mismatch():
    # Both best actions share 1 so that sum q (pi - q)^2 is least: pi = q + d / q with d (1/.2 +
    # 1/.3) = 1/2, d = .06.
    a = np.array([1.0, 1.0, 0.0])
    q = np.array([0.2, 0.3, 0.5])
    found = optimal_policy(a, q, multiplier=0.0, measure="diff")
    np.testing.assert_allclose(found.policy, [0.5, 0.5, 0.0], atol=1e-12)
    # All advantages equal: nothing to gain, the inference policy at every multiplier.
    for measure, sided in _EVERY:
        for multiplier in (0.0, 0.3, 5.0):
            same = optimal_policy(
                np.ones(3), q, multiplier=multiplier, measure=measure, sided=sided
            )
            np.testing.assert_allclose(same.policy, q, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multiplier": -1.0}, "multiplier = -1.0: must be at least 0"),
        ({"multiplier": float("nan")}, "multiplier = nan"),
        ({"measure": "kl"}, "measure = 'kl': allowed are diff, ratio, log"),
        ({"sided": "both"}, "sided = 'both': allowed are two, one"),
        ({"inference_policy": [0.5, 0.6]}, "sums to 1.1, must be above 0"),
        ({"inference_policy": [1.0, 0.0]}, "must be above 0"),
        ({"inference_policy": [1.0]}, "must be two vectors of one length"),
        ({"advantages": [np.inf, 0.0]}, "advantages: must be finite"),
        ({"multiplier": 0.0, "measure": "log"}, "no policy is optimal"),
    ],
)
def test_bad_arguments_are_named(change, message):
    given = {
        "advantages": [1.0, 0.0],
        "inference_policy": [0.5, 0.5],
        "multiplier": 1.0,
        "measure": "diff",
        **change,
    }
    with pytest.raises(ValueError, match=message):
        optimal_policy(given.pop("advantages"), given.pop("inference_policy"), **given)
