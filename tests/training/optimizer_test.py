"""AdamW as the paper sets it, clipping and schedules, against numbers worked out by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcmdp_jax.config.settings import OptimizerSettings
from dcmdp_jax.training.optimizer import make_optimizer, make_schedule

# Section 4: lr 1e-6, betas (0.9, 0.95), weight decay 0, eps 1e-15; the gradient norm is clipped at
# 1.
_PAPER = OptimizerSettings(
    learning_rate=1e-6,
    schedule="constant",
    schedule_warmup_steps=0,
    beta1=0.9,
    beta2=0.95,
    epsilon=1e-15,
    weight_decay=0.0,
    max_grad_norm=1.0,
)


def _settings(**changes):
    return dataclasses.replace(_PAPER, **changes)


def _rates(settings, updates, at):
    schedule = make_schedule(settings, updates=updates)
    return [float(schedule(update)) for update in at]


def _run(settings, gradients, start):
    """Parameters after each update."""
    optimizer = make_optimizer(settings, make_schedule(settings, updates=10))
    params = jnp.asarray(start, jnp.float32)
    state = None
    seen = []
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
        seen.append(np.asarray(params))
    return seen


def test_the_first_update_is_the_learning_rate_against_the_sign():
    # Bias correction makes m = g and v = g^2: lr g / (|g| + 1e-15). A gradient of 1e-12 moves as
    # far as one of 0.5; with optax's own eps of 1e-8 it would move a ten-thousandth of that.
    (after,) = _run(_settings(learning_rate=1e-3), [[0.5, -1e-6, 1e-12, 0.0]], [0.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(after[:3], [-1e-3, 1e-3, -1e-3 / 1.001], rtol=1e-5)
    assert after[3] == 0.0


def test_the_second_update_has_the_papers_betas():
    # g = 0.6 then -0.2: m = 0.9 * 0.06 - 0.1 * 0.2 = 0.034, v = 0.95 * 0.018 + 0.05 * 0.04 =
    # 0.0191. Corrected by 1 - 0.9^2 = 0.19 and 1 - 0.95^2 = 0.0975: 0.178947 / sqrt(0.195897) =
    # 0.404307. With beta2 = 0.999 it would be 0.178947 / sqrt(0.2) = 0.40008, with 0.95 for both
    # 0.43.
    first, second = _run(_settings(learning_rate=1e-3), [[0.6], [-0.2]], [0.0])
    step = (0.034 / 0.19) / math.sqrt(0.0191 / 0.0975)
    assert step == pytest.approx(0.404307, abs=1e-6)
    np.testing.assert_allclose(second - first, [-1e-3 * step], rtol=1e-4)


def test_gradients_are_clipped_to_the_global_norm_before_the_moments():
    # (3, 4) has norm 5: the moments see (0.6, 0.8); the next (0.3, -0.4), norm 0.5, passes as it
    # is.
    clipped = _run(_settings(learning_rate=1e-3), [[3.0, 4.0], [0.3, -0.4]], [0.0, 0.0])
    by_hand = _run(
        _settings(learning_rate=1e-3, max_grad_norm=0.0), [[0.6, 0.8], [0.3, -0.4]], [0.0, 0.0]
    )
    unclipped = _run(
        _settings(learning_rate=1e-3, max_grad_norm=0.0), [[3.0, 4.0], [0.3, -0.4]], [0.0, 0.0]
    )
    np.testing.assert_allclose(clipped[1], by_hand[1], rtol=1e-6)
    assert np.abs(clipped[1] - unclipped[1]).max() > 1e-4


def test_the_norm_is_taken_over_all_parameters_together():
    optimizer = make_optimizer(_PAPER, make_schedule(_PAPER, updates=1))
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    _, state = optimizer.update(
        {"a": jnp.array([3.0]), "b": jnp.array([4.0])}, optimizer.init(params), params
    )
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (1,)]
    # m = 0.1 g / 5 and v = 0.05 (g / 5)^2; each clipped by itself would give 0.1 for both.
    np.testing.assert_allclose(np.concatenate(moments), [0.06, 0.08, 0.018, 0.032], rtol=1e-6)


def test_a_norm_that_is_given_is_not_computed_again():
    optimizer = make_optimizer(_PAPER, make_schedule(_PAPER, updates=1))
    params = {"a": jnp.zeros(2)}
    gradient = {"a": jnp.array([3.0, 4.0])}
    _, state = optimizer.update(
        gradient, optimizer.init(params), params, grad_norm=jnp.float32(10.0)
    )
    # Divided by the 10 that was said, not by the norm of 5: m = 0.1 g / 10.
    np.testing.assert_allclose(state[1][0].mu["a"], [0.03, 0.04], rtol=1e-6)


def test_weight_decay_is_decoupled_and_scaled_by_the_learning_rate():
    # No gradient: p (1 - lr * decay). As L2 in the gradient it would be a full step of lr.
    (after,) = _run(_settings(learning_rate=0.1, weight_decay=0.5), [[0.0]], [2.0])
    np.testing.assert_allclose(after, [2.0 * (1 - 0.1 * 0.5)], rtol=1e-6)


def test_constant():
    assert _rates(_PAPER, 100, (0, 50, 99, 10_000)) == pytest.approx([1e-6] * 4, rel=1e-6)


def test_linear_decay_reaches_0_where_the_run_ends():
    rates = _rates(_settings(learning_rate=1.0, schedule="linear"), 10, (0, 1, 5, 9, 10, 20))
    assert rates == pytest.approx([1.0, 0.9, 0.5, 0.1, 0.0, 0.0], abs=1e-6)


def test_cosine_decay_reaches_0_where_the_run_ends():
    rates = _rates(_settings(learning_rate=1.0, schedule="cosine"), 12, (0, 3, 4, 6, 12, 20))
    # (1 + cos(pi t / 12)) / 2 at t = 3, 4, 6: cos(pi / 4), cos(pi / 3), cos(pi / 2).
    assert rates == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.75, 0.5, 0.0, 0.0], abs=1e-6)


def test_the_rise_begins_above_0_and_ends_at_the_peak():
    settings = _settings(learning_rate=1.0, schedule_warmup_steps=4)
    assert _rates(settings, 100, (0, 1, 2, 3, 4, 50)) == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0], abs=1e-6
    )


def test_a_rise_of_one_update_is_none():
    assert _rates(
        _settings(learning_rate=1.0, schedule_warmup_steps=1), 9, (0, 1)
    ) == pytest.approx([1.0, 1.0])


def test_decay_after_a_rise_ends_with_the_run():
    settings = _settings(learning_rate=1.0, schedule="linear", schedule_warmup_steps=2)
    # Two updates of rise, then 8 of decay from the peak.
    assert _rates(settings, 10, (0, 1, 2, 6, 10)) == pytest.approx(
        [0.5, 1.0, 1.0, 0.5, 0.0], abs=1e-6
    )


def test_a_rise_longer_than_the_run_is_still_a_rise():
    settings = _settings(learning_rate=1.0, schedule="cosine", schedule_warmup_steps=8)
    assert _rates(settings, 4, (0, 1, 2, 3)) == pytest.approx([0.125, 0.25, 0.375, 0.5], abs=1e-6)


def test_the_optimizer_follows_its_schedule():
    settings = _settings(learning_rate=1e-3, schedule_warmup_steps=2)
    first, second, third = _run(settings, [[1.0]] * 3, [0.0])
    # Equal gradients: every step is the rate of that update, 0.5e-3, 1e-3, 1e-3.
    np.testing.assert_allclose(
        [first[0], second[0], third[0]], [-0.5e-3, -1.5e-3, -2.5e-3], rtol=1e-5
    )
