"""Projected dual ascent: one step by hand, its limits, the measured tolerance, and what a broken batch does."""

import functools

import jax
import numpy as np
import pytest

from dcmdp_jax.algorithm import dual

BOUNDS = {"minimum": 0.0, "maximum": 1.0}


def run(state, values, **settings):
    settings = {"tolerance": 0.25, "learning_rate": 1.0, **BOUNDS, **settings}
    multipliers = []
    for value in values:
        state = dual.next_dual_state(state, value, **settings)
        multipliers.append(float(state.multiplier))
    return state, multipliers


def test_steps_by_hand():
    # 0.5 + 2 (0.375 - 0.25) = 0.75, then 0.75 + 2 (0.125 - 0.25) = 0.5. Descent would give 0.25 first.
    _, multipliers = run(dual.dual_init(0.5, **BOUNDS), [0.375, 0.125], learning_rate=2.0)
    assert multipliers == [0.75, 0.5]


def test_the_papers_constants():
    # lambda_0 = 0.1, c = 0.0037, eta = 1; a batch mean of 0.0050: 0.1013.
    _, multipliers = run(dual.dual_init(0.1, **BOUNDS), [0.0050], tolerance=0.0037)
    assert multipliers[0] == pytest.approx(0.1013, rel=1e-6)


def test_without_discrepancy_it_falls_to_its_floor_and_stays():
    # from 0.6 by 0.25 a step: 0.35, 0.125 (the floor, not 0.1), 0.125
    state = dual.dual_init(0.6, minimum=0.125, maximum=1.0)
    _, multipliers = run(state, [0.0] * 4, minimum=0.125)
    assert multipliers == [pytest.approx(0.35), 0.125, 0.125, 0.125]


def test_with_a_large_one_it_rises_to_its_cap_and_stays():
    # by 0.5 a step: 0.9, 1, 1, and one step under tolerance leaves the cap at once: no wind-up.
    state, multipliers = run(dual.dual_init(0.4, **BOUNDS), [0.75, 0.75, 0.75])
    assert multipliers == [pytest.approx(0.9), 1.0, 1.0]
    assert run(state, [0.0])[1] == [0.75]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_broken_mean_leaves_the_state_as_it_was(broken):
    before, _ = run(dual.dual_init(0.5, **BOUNDS, measured_steps=1), [0.3])
    after, _ = run(before, [broken])
    for old, new in zip(before, after, strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


def test_jitted_carries_the_same_state_through():
    traced = []

    @jax.jit
    def step(state, value):
        traced.append(value)
        return dual.next_dual_state(state, value, tolerance=0.25, learning_rate=0.5, **BOUNDS)

    state = dual.dual_init(0.1, **BOUNDS, measured_steps=1)
    structure = jax.tree.map(lambda x: (x.shape, x.dtype.name), state)
    eager = state
    for value in (0.3, np.nan, 0.1, 0.9):
        state = step(state, value)
        eager, _ = run(eager, [value], learning_rate=0.5)
        assert jax.tree.map(lambda x: (x.shape, x.dtype.name), state) == structure
        np.testing.assert_allclose(state.multiplier, eager.multiplier, rtol=1e-6)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multiplier": 1.5}, r"multiplier=1.5; must be a finite number in \[0.0, 1.0\]"),
        ({"multiplier": float("nan")}, r"multiplier=nan"),
        ({"minimum": -0.1}, r"minimum=-0.1"),
        ({"minimum": 0.5, "maximum": 0.25}, r"maximum=0.25; must be a finite number in \[0.5, inf\)"),
        ({"maximum": float("inf")}, r"maximum=inf"),
        ({"measured_steps": -1}, r"measured_steps=-1; must be an integer of at least 0"),
        ({"measured_steps": 2.0}, r"measured_steps=2.0"),
    ],
)
def test_init_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        dual.dual_init(**{"multiplier": 0.1, **BOUNDS, **changes})


@pytest.mark.parametrize("changes", [{"tolerance": -1.0}, {"learning_rate": float("inf")}, {"maximum": -1.0}])
def test_update_refuses(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}="):
        run(dual.dual_init(0.1, **BOUNDS), [0.0], **changes)


def test_tolerance_is_measured_on_the_first_steps_and_then_stays():
    # Three steps of 0.25, 0.75, 0.5 and a NaN among them; quantile 0.75 of (0.25, 0.5, 0.75) is 0.625. Lambda waits at
    # 0.5, then 0.5 + (1.0 - 0.625) = 0.875, then 0.875 + (0.5 - 0.625) = 0.75.
    options = {"steps": 3, "quantile": 0.75}
    update = jax.jit(functools.partial(dual.calibrated_update, **options, learning_rate=1.0, **BOUNDS))
    state = dual.dual_init(0.5, **BOUNDS, measured_steps=3)
    seen = []
    for value in (0.25, np.nan, 0.75, 0.5, 1.0, np.nan, 0.5):
        state = update(state, value)
        c = dual.calibrated_tolerance(state, 9.0, **options)
        seen.append((float(c), float(state.multiplier)))
    waits, done = (9.0, 0.5), 0.625
    assert seen == [waits, waits, waits, (done, 0.5), (done, 0.875), (done, 0.875), (done, 0.75)]
