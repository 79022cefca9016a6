"""Interpretations of the paper that are visible in the pure functions, by hand.

They are listed in docs/algorithm.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm import discrepancy, losses, masked, penalties
from dcmdp_jax.algorithm.remedies import Tokens

TOLERANCE = 0.0037
MULTIPLIER = 0.1
ONE = np.ones((1, 1), bool)


def _loss_and_slope(ratio, advantage):
    """Loss of one token of weight 1 at an importance ratio, and its derivative in log pi_theta."""
    old = jnp.full((1, 1), np.log(0.01), jnp.float32)

    def loss(train):
        tokens = Tokens(
            train_logprobs=train,
            anchor_logprobs=old,
            advantages=np.full((1, 1), advantage),
            completion_mask=ONE,
        )
        summed, _ = losses.policy_loss(tokens, np.ones((1, 1)))
        return summed.total

    value, slope = jax.value_and_grad(loss)(old + np.float32(np.log(ratio)))
    return float(value), float(slope[0, 0])


def _delta(train, rollout, measure="diff"):
    return discrepancy.token_discrepancy(np.log([[train]]), np.log([[rollout]]), measure=measure)


def test_token_below_the_tolerance_is_penalized_while_the_multiplier_is_positive():
    # delta = |0.502 - 0.5| = 0.002, below c = 0.0037. Eq. 8: 1 - 0.1 * 0.002 = 0.9998. The prose
    # would give 1.
    delta = _delta(0.502, 0.5)
    advantage = np.ones((1, 1))
    tokens = Tokens(
        advantages=advantage, discrepancy=delta, multiplier=MULTIPLIER, tolerance=TOLERANCE
    )
    penalized = penalties.dc_grpo(tokens)
    assert float(penalized[0, 0]) == pytest.approx(0.9998, abs=1e-7)
    # Only threshold_grpo, the study of section 5, penalizes nothing inside the tolerance region.
    assert float(penalties.threshold_grpo(tokens)[0, 0]) == 1.0


def test_discrepancy_is_a_difference_of_probabilities_not_of_log_probabilities():
    # Eq. 3: |0.25 - 0.5| = 0.25. The text's "log-probability discrepancy" would be log 2 = 0.693.
    assert float(_delta(0.25, 0.5)[0, 0]) == pytest.approx(0.25, rel=1e-6)
    assert float(_delta(0.25, 0.5, measure="log")[0, 0]) == pytest.approx(np.log(2), rel=1e-6)


def test_negative_advantage_has_no_dual_clip():
    # A = -1, ratio 10: -min(10 * -1, 1.24 * -1) = 10 with slope 10. A dual clip at 3 gives 3 with
    # slope 0.
    assert _loss_and_slope(10.0, -1.0) == pytest.approx((10.0, 10.0), rel=1e-5)


def test_engine_probability_moves_the_advantage_and_not_the_importance_ratio():
    # New 0.5 over old 0.25, both of the training stack: ratio 2, whatever the engine says. With the
    # engine's 0.4 in the denominator it would be 1.25. delta = 0.15, A = -1 - 0.1 * 0.15 = -1.015,
    # loss 2 * 1.015 = 2.03.
    penalized = penalties.dc_grpo(
        Tokens(advantages=-np.ones((1, 1)), discrepancy=_delta(0.25, 0.4), multiplier=MULTIPLIER)
    )
    tokens = Tokens(
        train_logprobs=np.log([[0.5]]),
        anchor_logprobs=np.log([[0.25]]),
        rollout_logprobs=np.log([[0.4]]),
        advantages=penalized,
        completion_mask=ONE,
    )
    summed, clipped = losses.policy_loss(tokens, np.ones((1, 1)))
    assert float(clipped["policy/ratio_mean"].value()) == pytest.approx(2.0, rel=1e-6)
    assert float(summed.total) == pytest.approx(2.03, rel=1e-6)


def test_mean_discrepancy_is_over_tokens_of_every_group_the_all_equal_one_included():
    # Completions of 1 and 3 tokens; the second one's group has no reward signal. (0.4 + 3 * 0) / 4
    # = 0.1, not the mean of completion means 0.2, and not 0.4, the mean over groups with a signal.
    mask = np.array([[True, False, False], [True, True, True]])
    delta = np.array([[0.4, 9.0, 9.0], [0.0, 0.0, 0.0]])
    assert float(masked.masked_sum(delta, mask).value()) == pytest.approx(0.1, rel=1e-6)
