"""The direction of the token's charge against the discrepancy's own derivative."""

from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax

from dcmdp_jax.lab.theory.direction import (
    charge_direction,
    discrepancy_slope,
    falling_share,
    random_states,
)


def test_the_direction_is_the_mean_of_the_scores_of_sampled_actions():
    policy, engine = (each[0] for each in random_states(1.0, states=1))
    rng = np.random.default_rng(1)
    drawn = rng.choice(len(policy), size=400_000, p=engine)
    scores = -np.abs(policy - engine)[drawn, None] * (np.eye(len(policy))[drawn] - policy)
    np.testing.assert_allclose(
        scores.mean(axis=0), charge_direction(policy, engine), atol=5 * scores.std(axis=0).max() / np.sqrt(len(drawn))
    )


@pytest.mark.parametrize("follows", [False, True])
def test_the_slope_is_that_of_finite_differences(follows):
    rng = np.random.default_rng(2)
    logits, shift, direction = rng.normal(size=(3, 50, 5))

    def discrepancy(step):
        p = softmax(logits + step * direction, axis=-1)
        q = softmax(logits + shift + step * direction * follows, axis=-1)
        return np.sum(q * np.abs(p - q), axis=-1)

    found = discrepancy_slope(softmax(logits, axis=-1), softmax(logits + shift, axis=-1), direction, follows=follows)
    np.testing.assert_allclose(found, (discrepancy(1e-6) - discrepancy(-1e-6)) / 2e-6, atol=1e-8)


def test_with_two_actions_and_an_engine_that_stays_the_policy_never_moves_towards_it():
    for noise in (0.1, 1.0, 3.0):
        policy, engine = random_states(noise, states=10_000, actions=2)
        direction = charge_direction(policy, engine)
        y, x = policy[:, 0], engine[:, 0]
        # By hand: 2 |y - x| y (1 - y) times the distance is what p moves away by; D = |y - x| grows by as much.
        expected = 2 * np.abs(y - x) * y * (1 - y) * np.abs(x - y)
        np.testing.assert_allclose(
            discrepancy_slope(policy, engine, direction, follows=False), expected, rtol=1e-9, atol=1e-15
        )


def test_the_shares_of_the_page_are_those_of_other_states_within_chance():
    page = (Path(__file__).resolve().parents[3] / "docs" / "theory.md").read_text()
    for actions, noise in ((2, 0.1), (2, 1.0), (8, 0.1), (8, 1.0)):
        shares = [falling_share(noise, follows=follows, actions=actions) for follows in (False, True)]
        assert f"| {actions} | {noise:g} | {shares[0]:.0%} | {shares[1]:.0%} |" in page
    for noise, stays, follows in ((0.1, 0.44, 0.71), (1.0, 0.13, 0.64)):
        for share, moving in ((stays, False), (follows, True)):
            # 20,000 states: a standard error of 0.35% at most; the figures above are rounded to 1%.
            assert falling_share(noise, follows=moving, states=20_000) == pytest.approx(share, abs=0.02)


def test_the_gradient_of_the_discrepancy_and_a_signed_charge_do_lower_it():
    policy, engine = random_states(1.0, states=4000)
    # dD along e_k for every k is the gradient.
    gradient = np.stack(
        [discrepancy_slope(policy, engine, unit, follows=False) for unit in np.eye(policy.shape[-1])], axis=-1
    )
    assert np.all(discrepancy_slope(policy, engine, -gradient, follows=False) < 0)
    signed = engine * (policy - engine)
    signed = signed.sum(axis=-1, keepdims=True) * policy - signed
    assert np.mean(discrepancy_slope(policy, engine, signed, follows=False) < 0) > 0.97
