"""Projected dual ascent: one step by hand, its limits, and the measured tolerance.

Also what a broken batch does.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm import dual


def run(
    multiplier,
    values,
    *,
    tolerance=0.25,
    dual_learning_rate=1.0,
    multiplier_min=0.0,
    multiplier_max=1.0,
):
    """The multiplier after each value."""
    multipliers = []
    for value in values:
        multiplier = dual.dual_update(
            multiplier,
            value,
            tolerance=tolerance,
            dual_learning_rate=dual_learning_rate,
            multiplier_min=multiplier_min,
            multiplier_max=multiplier_max,
        )
        multipliers.append(float(multiplier))
    return multipliers


def test_steps_by_hand():
    # 0.5 + 2 (0.375 - 0.25) = 0.75, then 0.75 + 2 (0.125 - 0.25) = 0.5. Descent would give 0.25
    # first.
    assert run(0.5, [0.375, 0.125], dual_learning_rate=2.0) == [0.75, 0.5]


def test_paper_setting_moves_by_the_violation():
    # Section 6.1: lambda_0 0.1, c 0.0037, eta 1; a discrepancy of 0.0050 raises lambda by 0.0013.
    assert run(0.1, [0.0050], tolerance=0.0037) == [pytest.approx(0.1013, rel=1e-5)]


def test_without_discrepancy_the_multiplier_falls_to_its_floor_and_with_a_large_one_rises_to_its_cap():
    # By 0.25 a step: 0.35, 0.125. By 0.5: 0.9, 1, 1, and one step under tolerance leaves the cap at
    # once: no wind-up.
    assert run(0.6, [0.0] * 4, multiplier_min=0.125) == [pytest.approx(0.35), 0.125, 0.125, 0.125]
    assert run(0.4, [0.75] * 3 + [0.0]) == [pytest.approx(0.9), 1.0, 1.0, 0.75]


def test_broken_mean_leaves_the_multiplier_as_it_was():
    assert run(0.5, [np.nan, np.inf, -np.inf]) == [0.5] * 3


def test_jitted_has_one_trace():
    traced = []

    @jax.jit
    def step(multiplier, value):
        traced.append(value)
        return dual.dual_update(multiplier, value, tolerance=0.25, dual_learning_rate=0.5)

    values = (0.3, np.nan, 0.1, 0.9)
    multiplier = dual.dual_init(0.1, tolerance=0.25).multiplier
    for value, eager in zip(values, run(0.1, values, dual_learning_rate=0.5), strict=True):
        multiplier = step(multiplier, value)
        np.testing.assert_allclose(multiplier, eager, rtol=1e-6)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("multiplier", "tolerance", "message"),
    [
        (-0.1, 0.1, r"multiplier=-0.1; must be a finite number in \[0, inf\)"),
        (float("nan"), 0.1, r"multiplier=nan"),
        (0.1, -1.0, r"tolerance=-1.0; must be a finite number in \[0, inf\)"),
    ],
)
def test_init_refuses(multiplier, tolerance, message):
    with pytest.raises(ValueError, match=message):
        dual.dual_init(multiplier, tolerance=tolerance)


def test_the_range_of_lambda_may_be_arrays_that_jit_traces():
    update = functools.partial(dual.dual_update, 0.1, 0.05, tolerance=0.25)
    with pytest.raises(ValueError, match=r"multiplier_max=0.2; must be a finite number in \[0.5"):
        update(multiplier_min=jnp.float32(0.5), multiplier_max=0.2)
    assert float(jax.jit(update)(multiplier_min=0.5)) == 0.5


@pytest.mark.parametrize(
    "changes", [{"tolerance": -1.0}, {"dual_learning_rate": float("inf")}, {"multiplier_max": -1.0}]
)
def test_update_refuses(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}="):
        run(0.1, [0.0], **changes)
    for mean in ("x", None):
        with pytest.raises(ValueError, match=f"mean_discrepancy={mean!r}; must be a number"):
            dual.dual_update(0.1, mean, tolerance=0.1)


def test_tolerance_is_the_median_of_the_first_steps_above_their_noise_floors():
    """The tolerance is a median above the floors, without NaN.

    Of 0.25, 0.75, a NaN and 0.5 with floors 0, 0, 9 and 0.625: the median of (0.25, 0.625, 0.75)
    is 0.625.
    """
    measure = functools.partial(
        dual.measured_tolerance, np.float32([0.25, 0.75, np.nan, 0.5]), np.float32([0, 0, 9, 0.625])
    )
    assert measure() == 0.625 and measure(factor=2.0) == 1.25
    assert dual.measured_tolerance(np.float32([np.nan]), np.float32([1.0])) == 0.0
    with pytest.raises(ValueError, match="shapes differ"):
        dual.measured_tolerance([0.5, 0.5], [0.0])
