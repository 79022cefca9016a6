"""The penalties of the methods by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm.penalties import PENALTIES
from dcmdp_jax.algorithm.remedies import Tokens


def _penalized(advantages, discrepancy, multiplier, tolerance, method):
    return PENALTIES[method](
        Tokens(
            advantages=advantages,
            discrepancy=discrepancy,
            multiplier=multiplier,
            tolerance=tolerance,
        )
    )


ADVANTAGES = np.array([[0.5, 0.5, 0.5], [-1.0, 0.0, 0.0]], np.float32)
DELTA = np.array([[0.25, 0.125, 0.0], [0.5, 0.25, 0.0]], np.float32)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("grpo", [[0.5, 0.5, 0.5], [-1.0, 0.0, 0.0]]),
        ("dual_grpo", [[0.25, 0.375, 0.5], [-1.5, -0.25, 0.0]]),
        # c = 0.25, strict: delta = c is free (>= would give 0.25 at the first token); what exceeds
        # is penalized whole, not delta - c (which would give -1.25).
        ("threshold_grpo", [[0.5, 0.5, 0.5], [-1.5, 0.0, 0.0]]),
        # lambda = 0.5; a plus sign would give 0.625 first
        ("dc_grpo", [[0.375, 0.4375, 0.5], [-1.25, -0.125, 0.0]]),
    ],
)
def test_variants_by_hand(method, expected):
    values = _penalized(ADVANTAGES, DELTA, 0.5, 0.25, method)
    np.testing.assert_array_equal(values, np.array(expected, np.float32))
    traced = jax.jit(_penalized, static_argnames="method")
    np.testing.assert_array_equal(traced(ADVANTAGES, DELTA, 0.5, 0.25, method=method), values)


def test_multiplier_zero_is_grpo_bit_for_bit():
    rng = np.random.default_rng(1)
    advantages = rng.normal(size=(5, 9)).astype(np.float32)
    delta = rng.exponential(size=(5, 9)).astype(np.float32)
    delta[0, 0] = np.float32(np.exp(20) - 1)  # the largest a measure gives
    plain = _penalized(advantages, delta, 0.3, 0.1, method="grpo")
    zero = _penalized(advantages, delta, jnp.float32(0), 0.1, method="dc_grpo")
    assert np.asarray(plain).tobytes() == np.asarray(zero).tobytes() == advantages.tobytes()


def test_all_equal_group_still_pays_the_penalty():
    advantages = np.zeros((1, 2), np.float32)
    values = _penalized(advantages, np.array([[0.5, 0.0]]), 0.5, 0.1, method="dc_grpo")
    np.testing.assert_array_equal(values, [[-0.25, 0.0]])
