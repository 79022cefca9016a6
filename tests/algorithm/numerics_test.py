"""Clamped differences and the cancellation-free exp(x) - 1 - x."""

import decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm.stats import clamped_log_ratio, exp_minus_linear


@pytest.mark.parametrize(
    ("numerator", "denominator", "expected", "slope"),
    [
        (-1.0, -1.5, 0.5, 1.0),
        (-1.0, -1.0, 0.0, 1.0),  # on policy: the gradient must not vanish where the two agree
        (-0.5, -np.inf, 20.0, 0.0),
        (-np.inf, -0.5, -20.0, 0.0),
        (-np.inf, -np.inf, 0.0, 0.0),  # NaN if subtracted as they are
        (0.0, -30.0, 20.0, 0.0),
        (
            0.0,
            -20.0,
            20.0,
            1.0,
        ),  # at the limit: the slope from inside; min() and max() would give 0.5
        (-20.0, 0.0, -20.0, 1.0),
        (-1e4, -9990.0, -10.0, 1.0),
    ],
)
def test_clamped_log_ratio(numerator, denominator, expected, slope):
    value, gradient = jax.value_and_grad(clamped_log_ratio)(
        jnp.float32(numerator), jnp.float32(denominator)
    )
    assert (float(value), float(gradient)) == (expected, slope)


def test_nan_stays_nan_in_value_and_gradient():
    value, gradient = jax.value_and_grad(lambda x: clamped_log_ratio(x, jnp.float32(-1.0)) ** 2)(
        jnp.float32(np.nan)
    )
    assert np.isnan(float(value))
    assert np.isnan(float(gradient))


def test_bfloat16_is_subtracted_in_float32():
    # 1.0078125 - 0.001953125: in bfloat16 (8 bits) the difference rounds to 1.0078125.
    difference = clamped_log_ratio(
        jnp.asarray(1.0078125, jnp.bfloat16), jnp.asarray(0.001953125, jnp.bfloat16)
    )
    assert difference.dtype == jnp.float32
    assert float(difference) == 1.005859375


@pytest.mark.parametrize(
    "x", [0.0, 1e-6, -1e-4, 1e-3, 0.1, -0.1, -0.499, 0.499, 0.501, -0.501, 1.0, -5.0, 20.0, -20.0]
)
def test_exp_minus_linear_against_forty_digits(x):
    x = float(np.float32(x))
    with decimal.localcontext(prec=40):
        slope = decimal.Decimal(x).exp() - 1
        exact = slope - decimal.Decimal(x)
    value, gradient = jax.value_and_grad(exp_minus_linear)(jnp.float32(x))
    assert float(value) == pytest.approx(float(exact), rel=3e-6, abs=0)
    assert float(gradient) == pytest.approx(float(slope), rel=1e-5, abs=0)
