"""The tables behind docs/theory.md: the direction of the token's penalty, and two steps with a way
out.
"""

from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit, log_expit, softmax
from scipy.stats import norm

from dcmdp_jax.algorithm.discrepancy import token_discrepancy
from dcmdp_jax.algorithm.dual import dual_update
from research.theory_tables import (
    PENALTIES,
    SURE_START,
    TwoSteps,
    budget_path,
    discrepancy_slope,
    expected_path,
    expected_update,
    falling_share,
    least_multiplier,
    penalty_direction,
    random_states,
    simulated_paths,
    way_out_page,
)

_PAGE = " ".join((Path(__file__).resolve().parents[2] / "docs" / "theory.md").read_text().split())
_START = TwoSteps(theta=-0.4, phi=0.3, shift=1.2, price=0.1)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("group_size", [2, 8])
def test_the_expected_update_is_the_mean_of_the_sampled_ones(penalty, group_size):
    start = TwoSteps(-0.4, 0.3, 1.2, 0.1, group_size)
    rng = np.random.default_rng(0)
    ends = simulated_paths(start, penalty, 3.0, steps=1, size=1.0, runs=200_000, prompts=1, rng=rng)
    sampled = (ends - (start.theta, start.phi)).T
    # 24 intervals in this test: at 99.99% one of them misses in 0.2% of the seeds.
    width = norm.ppf(0.99995)
    for values, expected in zip(sampled, expected_update(start, penalty, 3.0), strict=True):
        assert abs(values.mean() - expected) <= width * values.std() / np.sqrt(len(values)) + 1e-12


def test_the_update_by_hand():
    # theta = phi = 0: x = y = 1/2; d = ln 3: z = 3/4, delta = 1/4. g = 0, lambda = 2, G = 8, b =
    # 7/8.
    start = TwoSteps(shift=np.log(3))
    assert expected_update(start, "token", 2.0) == pytest.approx((0, 0.5 * 0.5 * 0.25 * -0.5))
    assert expected_update(start, "sequence", 2.0) == pytest.approx(
        (0.5 * 0.25 * 0.25, 0.5 * 0.5 * 0.25 * -0.25)
    )
    assert expected_update(start, "reward", 2.0) == pytest.approx((7 / 8 / 32, -7 / 8 * 0.25 / 32))
    assert expected_update(start, "state", 2.0) == (0, 0)


def test_lambda_has_no_scale_inside_a_normalized_reward():
    small, large = (expected_update(TwoSteps(), "reward_std", value)[0] for value in (0.1, 1000.0))
    assert small == pytest.approx(large, rel=1e-3)
    assert expected_update(TwoSteps(), "reward", 1000.0)[0] == pytest.approx(
        10_000 * expected_update(TwoSteps(), "reward", 0.1)[0]
    )


def test_one_state_is_sure_enough_for_any_mean_delta_and_for_no_displacement():
    d = 0.7
    c = 1e-4
    phi = np.log((1 - np.exp(-d)) / c) + np.array([0.0, 1.0, 3.0])
    pairs = [
        [log_expit(s * logit) for s in (1, -1)] for logit in (phi, phi + d)
    ]  # log-probs of both actions
    p, q = (np.float32(x) for x in pairs)
    mean = lambda measure: (np.exp(q) * token_discrepancy(p, q, measure=measure)).sum(axis=0)  # noqa: E731
    assert (np.asarray(mean("diff")) <= c * 1.001).all()
    np.testing.assert_allclose(mean("logit"), d, rtol=2e-3)


def test_only_a_budget_on_the_displacement_changes_it():
    reward, delta, eps, tail = (
        budget_path(SURE_START, measure, budget, c, rate=rate, steps=4000)
        for measure, budget, c, rate in (
            ("diff", "mean", 0.0, 0.0),
            ("diff", "mean", 0.0058, 0.5),
            ("logit", "mean", 0.125, 0.05),
            ("logit", "p95", 0.5, 0.01),
        )
    )
    # x = 1/2 and d = 1: |eps| is 1/4 a token; delta is sigma(3.5) - sigma(2.5) = 0.970688 -
    # 0.924142 on a quarter.
    assert reward[0, 3:] == pytest.approx((0.046546 / 4, 0.25), rel=1e-4)
    assert (
        delta[0, 3] > 0.0058 > 10 * delta[-1, 3] and delta[-1, 0] == 0
    )  # met, and lambda is 0 again
    np.testing.assert_allclose(
        delta[-1, 3:], reward[-1, 3:], rtol=0.02
    )  # as without a budget: |eps| near d / 2
    assert delta[-1, 4] > 0.49
    for path, clean in ((eps, 1 - 2 * 0.125), (tail, 0.9)):
        assert path[2000:, 1].mean() == pytest.approx(clean, abs=0.01)
        assert path[2000:, 0].mean() == pytest.approx(2 * SURE_START.price, rel=0.15)
    # One step by hand from lambda 0: V = 0.45 + 0.970688 / 2 = 0.935344 and d theta = 1/8 (0.9 -
    # 0.970688).
    assert expit(0.125 * (0.9 - 0.970688)) == pytest.approx(eps[1, 1], rel=1e-5)
    assert float(dual_update(0.0, 0.25, tolerance=0.125, dual_learning_rate=0.05)) == pytest.approx(
        eps[1, 0]
    )


@pytest.mark.parametrize("penalty", PENALTIES)
def test_simulated_runs_end_where_the_expected_path_does(penalty):
    options = {"steps": 200, "size": 0.25}
    ends = simulated_paths(
        _START, penalty, 3.0, runs=2000, prompts=16, rng=np.random.default_rng(1), **options
    )
    expected = expected_path(_START, penalty, 3.0, **options)[-1]
    error = ends.std(axis=0, ddof=1) / np.sqrt(len(ends))
    # Five standard errors, and 1% of the largest move for what curvature makes of the noise in a
    # path.
    assert np.all(np.abs(ends.mean(axis=0) - expected) <= 5 * error + 0.01)


def test_the_closed_form_is_the_path_of_small_steps_while_delta_stays():
    # d = 0.001: phi hardly moves, and lambda = 5000 makes up for the small delta. Summed size 100,
    # b = 7/8.
    start = TwoSteps(theta=-1.0, shift=0.001, price=0.05)
    half = 2500 * start.discrepancy
    pushes = {
        "sequence": half - 0.04375,
        "reward": 0.875 * (half - 0.05),
        "token": -0.04375,
        "state": -0.04375,
    }
    for penalty, push in pushes.items():
        end = expected_path(start, penalty, 5000.0, steps=20_000, size=0.005)[-1, 0]
        assert end + np.sinh(end) == pytest.approx(-1 + np.sinh(-1) + push * 100 / 4, abs=4e-3)
        assert bool(end > start.theta) is (penalty in ("sequence", "reward"))


def test_a_policy_takes_the_way_out_above_the_least_multiplier_and_not_below():
    for penalty in PENALTIES:
        least = least_multiplier(_START, penalty)
        if np.isinf(least):
            assert expected_update(_START, penalty, 1e6)[0] < 0
        else:
            assert (
                expected_update(_START, penalty, 0.99 * least)[0]
                < 0
                < expected_update(_START, penalty, 1.01 * least)[0]
            )


def test_an_unknown_penalty_is_an_error():
    with pytest.raises(ValueError, match="penalty = 'seq': allowed are grpo, token"):
        expected_update(_START, "seq", 1.0)


def test_the_theory_of_the_table_is_within_the_intervals():
    for row in (line.strip("| ").split(" | ") for line in way_out_page()[2:]):
        for theory, simulated in ((row[3], row[4]), (row[5], row[6])):
            mean, half = map(float, simulated.split(" ± "))
            # Both are rounded to three digits.
            assert abs(float(theory) - mean) <= half + 0.001


def test_the_direction_is_the_mean_of_the_scores_of_sampled_actions():
    policy, engine = (each[0] for each in random_states(1.0, states=1))
    rng = np.random.default_rng(1)
    drawn = rng.choice(len(policy), size=400_000, p=engine)
    scores = -np.abs(policy - engine)[drawn, None] * (np.eye(len(policy))[drawn] - policy)
    np.testing.assert_allclose(
        scores.mean(axis=0),
        penalty_direction(policy, engine),
        atol=5 * scores.std(axis=0).max() / np.sqrt(len(drawn)),
    )


@pytest.mark.parametrize("follows", [False, True])
def test_the_slope_is_that_of_finite_differences(follows):
    rng = np.random.default_rng(2)
    logits, shift, direction = rng.normal(size=(3, 50, 5))

    def discrepancy(step):
        p = softmax(logits + step * direction, axis=-1)
        q = softmax(logits + shift + step * direction * follows, axis=-1)
        return np.sum(q * np.abs(p - q), axis=-1)

    found = discrepancy_slope(
        softmax(logits, axis=-1), softmax(logits + shift, axis=-1), direction, follows=follows
    )
    np.testing.assert_allclose(found, (discrepancy(1e-6) - discrepancy(-1e-6)) / 2e-6, atol=1e-8)


def test_with_two_actions_and_an_engine_that_stays_the_policy_never_moves_towards_it():
    for noise in (0.1, 1.0, 3.0):
        policy, engine = random_states(noise, states=10_000, actions=2)
        direction = penalty_direction(policy, engine)
        y = policy[:, 0]
        x = engine[:, 0]
        # By hand: 2 |y - x| y (1 - y) times the distance is what p moves away by; D = |y - x| grows
        # by as much.
        expected = 2 * np.abs(y - x) * y * (1 - y) * np.abs(x - y)
        np.testing.assert_allclose(
            discrepancy_slope(policy, engine, direction, follows=False),
            expected,
            rtol=1e-9,
            atol=1e-15,
        )


def test_the_page_has_the_shares_of_its_states():
    def shares(penalties, *, follows, actions=(2, 8)):
        found = [
            falling_share(noise, follows=follows, actions=count, penalty=penalty)
            for penalty in penalties
            for count in actions
            for noise in (0.1, 1.0)
        ]
        return round(100 * min(found)), round(100 * max(found))

    eight = {"penalties": ("token",), "actions": (8,)}
    loss = ("state_delta", "state_tv", "state_kl")
    low, high = shares(**eight, follows=False)
    assert (
        f"With eight actions the penalty lowers D in {low} to {high}% of 4,000 random states"
        in _PAGE
    )
    assert shares(("token",), follows=False, actions=(2,)) == (0, 0)
    low, high = shares(loss, follows=False)
    assert f"each lowers E_q[delta] in {low} to {high}% of the random states" in _PAGE
    low, high = shares(loss, follows=True)
    assert f"in {low} to {high}%, as a step in any direction would" in _PAGE
    low, high = shares(**eight, follows=True)
    assert f"better with eight actions ({low} to {high}%)" in _PAGE


def test_the_shares_are_those_of_other_states_within_chance():
    for noise, stays, follows in ((0.1, 0.44, 0.71), (1.0, 0.13, 0.64)):
        for share, moving in ((stays, False), (follows, True)):
            # 20,000 states: a standard error of 0.35% at most; the figures above are rounded to 1%.
            assert falling_share(noise, follows=moving, states=20_000) == pytest.approx(
                share, abs=0.02
            )


def test_the_gradient_of_the_discrepancy_and_a_signed_penalty_do_lower_it():
    policy, engine = random_states(1.0, states=4000)
    # dD along e_k for every k is the gradient.
    gradient = np.stack(
        [
            discrepancy_slope(policy, engine, unit, follows=False)
            for unit in np.eye(policy.shape[-1])
        ],
        axis=-1,
    )
    assert np.all(discrepancy_slope(policy, engine, -gradient, follows=False) < 0)
    signed = engine * (policy - engine)
    signed = signed.sum(axis=-1, keepdims=True) * policy - signed
    assert np.mean(discrepancy_slope(policy, engine, signed, follows=False) < 0) > 0.97
