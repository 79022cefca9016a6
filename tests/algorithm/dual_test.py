"""Projected dual ascent: one step by hand, its limits, the window, and what a broken batch does."""

import functools

import jax
import numpy as np
import pytest

from dcmdp_jax.algorithm import dual
from dcmdp_jax.types import DualState

BOUNDS = {"minimum": 0.0, "maximum": 1.0}


def run(state, values, **settings):
    settings = {"tolerance": 0.25, "learning_rate": 1.0, **BOUNDS, **settings}
    multipliers = []
    for value in values:
        state = dual.dual_update(state, value, **settings)
        multipliers.append(float(state.multiplier))
    return state, multipliers


def test_steps_by_hand():
    # 0.5 + 2 (0.375 - 0.25) = 0.75, then 0.75 + 2 (0.125 - 0.25) = 0.5. Descent would give 0.25 first.
    state, multipliers = run(dual.dual_init(0.5, **BOUNDS), [0.375, 0.125], learning_rate=2.0)
    assert multipliers == [0.75, 0.5]
    assert float(dual.effective_discrepancy(state)) == 0.125
    assert float(dual.violation(state, 0.25)) == -0.125


def test_the_papers_constants():
    # lambda_0 = 0.1, c = 0.0037, eta = 1; a batch mean of 0.0050: 0.1013.
    state, multipliers = run(dual.dual_init(0.1, **BOUNDS), [0.0050], tolerance=0.0037)
    assert multipliers[0] == pytest.approx(0.1013, rel=1e-6)
    assert float(dual.violation(state, 0.0037)) == pytest.approx(0.0013, rel=1e-4)


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


def test_window_averages_what_is_there():
    # n = 3, c = 0.25: means 1, (1 + 0) / 2, (1 + 0 + 0.5) / 3 = 0.5, (0 + 0.5 + 0.25) / 3 = 0.25, each - c times 0.1.
    # Dividing by n from the start would give 1/3, 1/3 first.
    state = dual.dual_init(0.0, **BOUNDS, window=3)
    assert float(dual.effective_discrepancy(state)) == 0.0
    seen = []
    for value in (1.0, 0.0, 0.5, 0.25):
        state, multipliers = run(state, [value], learning_rate=0.1)
        seen.append((float(dual.effective_discrepancy(state)), multipliers[0]))
    assert seen == [
        (1.0, pytest.approx(0.075)),
        (0.5, pytest.approx(0.1)),
        (0.5, pytest.approx(0.125)),
        (0.25, pytest.approx(0.125)),
    ]
    np.testing.assert_array_equal(state.window, [0.0, 0.5, 0.25])  # oldest first
    assert int(state.filled) == 3


def test_unfilled_window_entries_are_ignored():
    state = DualState(np.float32(0.5), np.array([np.nan, 9.0, 0.5], np.float32), np.int32(1))
    assert float(dual.effective_discrepancy(state)) == 0.5
    after, multipliers = run(state, [1.0])  # 0.5 + ((0.5 + 1) / 2 - 0.25) = 1.0
    assert multipliers == [1.0]
    assert int(after.filled) == 2


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_broken_mean_leaves_the_state_as_it_was(broken):
    before, _ = run(dual.dual_init(0.5, **BOUNDS, window=2), [0.3])
    after, _ = run(before, [broken])
    for old, new in zip(before, after, strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


def test_jitted_carries_the_same_state_through():
    step = jax.jit(dual.dual_update)
    state = dual.dual_init(0.1, **BOUNDS, window=2)
    structure = jax.tree.map(lambda x: (x.shape, x.dtype.name), state)
    eager = state
    for value in (0.3, np.nan, 0.1, 0.9):
        state = step(state, value, tolerance=0.25, learning_rate=0.5, **BOUNDS)
        eager, _ = run(eager, [value], learning_rate=0.5)
        assert jax.tree.map(lambda x: (x.shape, x.dtype.name), state) == structure
        np.testing.assert_allclose(state.multiplier, eager.multiplier, rtol=1e-6)
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multiplier": 1.5}, r"multiplier=1.5; must be a finite number in \[0.0, 1.0\]"),
        ({"multiplier": float("nan")}, r"multiplier=nan"),
        ({"minimum": -0.1}, r"minimum=-0.1"),
        ({"minimum": 0.5, "maximum": 0.25}, r"maximum=0.25; must be a finite number in \[0.5, inf\)"),
        ({"maximum": float("inf")}, r"maximum=inf"),
        ({"window": 0}, r"window=0; must be an integer of at least 1"),
        ({"window": 2.0}, r"window=2.0"),
    ],
)
def test_init_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        dual.dual_init(**{"multiplier": 0.1, **BOUNDS, **changes})


@pytest.mark.parametrize("changes", [{"tolerance": -1.0}, {"learning_rate": float("inf")}, {"maximum": -1.0}])
def test_update_refuses(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}="):
        run(dual.dual_init(0.1, **BOUNDS), [0.0], **changes)


def test_pid_by_hand():
    # c = 0.25, eta = 1, K_P = 2, K_D = 4, means 0.5, 0.375, 0.5:
    #   0.125 + 0.25                                             = 0.375    nothing to compare with
    #   0.375 + 0.125 + 2 (-0.125)                               = 0.25     no second difference yet
    #   0.25 + 0.25 + 2 (0.125) + 4 (0.125 - -0.125)             = 1.75     dual ascent alone: 0.5
    state = dual.dual_init(0.125, minimum=0.0, maximum=2.0, window=3)
    gains = {"average": 1, "proportional": 2.0, "derivative": 4.0, "maximum": 2.0}
    state, multipliers = run(state, [0.5, 0.375, 0.5], **gains)
    assert multipliers == [0.375, 0.25, 1.75]
    assert float(dual.violation(state, 0.25, 1)) == 0.25
    # The cap needs no anti-windup: one fall of d leaves it at once. 1.75 + 0.0 + 2 (-0.25) + 4 (-0.25 - 0.125) = -0.25.
    assert run(state, [0.25], **gains)[1] == [0.0]


def test_pid_without_gains_is_dual_ascent_bit_for_bit():
    values = [0.31, 0.12, 0.57, 0.2]
    _, plain = run(dual.dual_init(0.3, **BOUNDS), values)
    _, longer = run(dual.dual_init(0.3, **BOUNDS, window=3), values, average=1)
    assert plain == longer


def test_pid_needs_its_window():
    with pytest.raises(ValueError, match="window=1; must be an integer of at least 3"):
        run(dual.dual_init(0.1, **BOUNDS), [0.0], proportional=1.0)


def test_tolerance_is_measured_on_the_first_steps_and_then_stays():
    # Three steps of 0.25, 0.75, 0.5 and a NaN among them; quantile 0.75 of (0.25, 0.5, 0.75) is 0.625. Lambda waits at
    # 0.5, then 0.5 + (1.0 - 0.625) = 0.875, then 0.875 + (0.5 - 0.625) = 0.75.
    options = {"steps": 3, "quantile": 0.75}
    update = jax.jit(functools.partial(dual.calibrated_update, **options, learning_rate=1.0, **BOUNDS))
    state = dual.dual_init(0.5, **BOUNDS, window=4)
    seen = []
    for value in (0.25, np.nan, 0.75, 0.5, 1.0, np.nan, 0.5):
        state = update(state, value)
        c = dual.calibrated_tolerance(state, 9.0, **options)
        seen.append((float(c), float(state.multiplier)))
    waits, done = (9.0, 0.5), 0.625
    assert seen == [waits, waits, waits, (done, 0.5), (done, 0.875), (done, 0.875), (done, 0.75)]
    assert float(dual.violation(dual.rolling(state, 3), done)) == -0.125
