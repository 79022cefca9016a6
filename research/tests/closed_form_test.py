"""The oracle on a one-layer softmax, whose gradients are known in closed form.

V actions of reward r, log-probs log softmax(theta), an engine that samples from q, groups of two,
no division by the standard deviation. For a group (a, b) the advantages are +-(r_a - r_b) / 2 and
the gradient of the loss is

    g(a, b) = -1/4 (r_a - r_b) (w_a s_a - w_b s_b) + 1/2 (penalty_a s_a + penalty_b s_b),
        # s_a = e_a - p

so that E g = -1/2 (E_q[r w s] - E_q[r] E_q[w s]) + E_q[penalty s]. q has multiples of 1/8: all 64
groups, equally likely, are every batch that there is.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.types import Rows
from research.oracle.gradients import (
    SKETCH,
    ZERO,
    Gradients,
    JudgedBatch,
    Moments,
    half_width,
    leave_one_out,
    moments,
    quality,
    sketch,
    token_slopes,
)

P = np.array([2, 3, 2, 1]) / 8.0
Q = np.array([1, 5, 1, 1]) / 8.0
REWARDS = np.array([1.0, 0.0, 0.5, 2.0])
PLAIN = AlgorithmSettings(
    method="grpo",
    normalize_std=False,
    multiplier=0.4,
    tolerance=0.05,
    correction_denominator="all",
    aggregation="token_mean",
)
S = np.eye(4) - P  # s_a
RATIO = P / Q
DELTA = np.abs(P - Q)
LOG_RATIO = np.log(RATIO)


def _logprobs(params, rows):
    return jnp.where(rows.completion_mask, jax.nn.log_softmax(params["theta"])[rows.input_ids], 0.0)


def _listed(params, rows):
    """The same with the log-probs of all four actions behind."""
    every = jax.nn.log_softmax(params["theta"])[rows.columns["top_ids"]]
    every = jnp.where(rows.completion_mask[..., None], every, 0.0)
    return jnp.concatenate([_logprobs(params, rows)[..., None], every], axis=-1)


def _group(a, b, engine):
    """A batch of two completions of one token each, after a prompt token and with padding."""
    ids = np.array([[0, a, 0], [0, b, 0]], np.int32)
    mask = np.array([[False, True, False]] * 2)
    rollout = np.where(mask, np.log(engine)[ids], 0.0).astype(np.float32)
    index = np.repeat(np.arange(2, dtype=np.int32)[:, None], 3, axis=1)
    rows = Rows(
        ids,
        np.tile(np.arange(3, dtype=np.int32), (2, 1)),
        mask.astype(np.int32),
        mask,
        index,
        {
            "rollout_logprobs": rollout,
            "top_ids": np.broadcast_to(np.arange(4, dtype=np.int32), (2, 3, 4)),
            "top_logprobs": np.where(mask[..., None], np.log(engine), 0.0).astype(np.float32),
        },
    )
    return JudgedBatch(rows, REWARDS[[a, b]].astype(np.float32), np.zeros(2, np.int32))


def _gradients(settings, engine, logprobs=_logprobs):
    """The gradient of every batch, [64, 4]."""
    params = {
        "theta": jnp.asarray(np.log(P) + 0.7, jnp.float32)
    }  # a constant on top changes nothing
    gradients = Gradients(logprobs, params, rows=2)
    remedies = settings.remedies()
    slopes = jax.jit(lambda sampled, train: token_slopes(settings, remedies, sampled, train, 1))
    every = np.repeat(np.arange(4), np.round(8 * engine).astype(int))
    found = []
    for a, b in itertools.product(every, every):
        sampled = _group(a, b, engine)
        train = gradients.score(sampled.rows)
        found.append(gradients.of(sampled.rows, {"one": slopes(sampled, train)})["one"])
    return np.stack(found)


def _by_formula(weights, penalty, engine=Q, scores=S, added=0.0):
    """E g and E |g - E g|^2 over the groups; `weights` may be a function of the advantages'
    sign.
    """
    at = weights if callable(weights) else lambda sign: weights
    mean = np.zeros(4)
    square = 0.0
    for a, b in itertools.product(range(4), range(4)):
        difference = REWARDS[a] - REWARDS[b]
        sign = np.sign(difference)
        one = (
            -(difference * (at(sign)[a] * scores[a] - at(-sign)[b] * scores[b])) / 4
            + (penalty[a] * scores[a] + penalty[b] * scores[b]) / 2
            + added
        )
        mean = mean + engine[a] * engine[b] * one
        square = square + engine[a] * engine[b] * (one @ one)
    return mean, square - mean @ mean


def _dppo(sign):
    return np.where((sign > 0) & (P - Q > 0.1) | (sign < 0) & (Q - P > 0.1), 0.0, RATIO)


CASES = {
    "none": ({}, np.ones(4), np.zeros(4)),
    "dc_grpo": ({"method": "dc_grpo"}, np.ones(4), 0.4 * DELTA),
    "dual_grpo": ({"method": "dual_grpo"}, np.ones(4), DELTA),
    "threshold_grpo": (
        {"method": "threshold_grpo", "tolerance": 0.2},
        np.ones(4),
        np.array([0, 0.25, 0, 0]),
    ),
    "tis": ({"corrections": "tis(high=1.5)"}, np.minimum(RATIO, 1.5), np.zeros(4)),
    "unbounded tis": ({"corrections": "tis(high=100)"}, RATIO, np.zeros(4)),
    "icepop": (
        {"corrections": "icepop(low=0.5,high=1.8)"},
        np.where(RATIO < 1.8, RATIO, 0),
        np.zeros(4),
    ),
    "veto": ({"corrections": "veto(floor=0.7)"}, (RATIO >= 0.7).astype(float), np.zeros(4)),
    "kl_rejection": (
        {"corrections": "kl_rejection(estimator=k1,over=token,high=0.6)"},
        (np.abs(LOG_RATIO) <= 0.6).astype(float),
        np.zeros(4),
    ),
    "dppo_tv": (
        {"trust_region": "dppo_tv(low=0.1,high=0.1)", "ratio_denominator": "rollout"},
        _dppo,
        np.zeros(4),
    ),
}


@pytest.fixture(scope="module")
def control():
    return _gradients(PLAIN, P)


def test_the_control_is_the_policy_gradient(control):
    # -1/2 (E_p[r s] - E_p[r] E_p[s]), and E_p[s] = 0.
    expected = -0.5 * ((P * REWARDS) @ S)
    np.testing.assert_allclose(control.mean(axis=0), expected, atol=1e-6)
    mean, _ = _by_formula(np.ones(4), np.zeros(4), engine=P)
    np.testing.assert_allclose(mean, expected, atol=1e-12)  # the formula of groups says the same


@pytest.mark.parametrize("name", CASES)
def test_error_bias_angle_length_and_variance_are_those_of_the_formula(name, control):
    changes, weights, penalty = CASES[name]
    gradients = _gradients(dataclasses.replace(PLAIN, **changes), Q)
    mean, variance = _by_formula(weights, penalty)
    np.testing.assert_allclose(gradients.mean(axis=0), mean, atol=1e-6)
    truth = -0.5 * ((P * REWARDS) @ S)
    squared = truth @ truth
    found = quality(moments(gradients, control, whole=True))
    cosine = mean @ truth / math.sqrt((mean @ mean) * squared)
    assert found.angle == pytest.approx(math.degrees(math.acos(min(cosine, 1.0))), abs=2e-3)
    assert found.length == pytest.approx(math.sqrt(mean @ mean / squared), abs=1e-5)
    assert found.squared_bias == pytest.approx((mean - truth) @ (mean - truth) / squared, abs=1e-5)
    assert found.variance == pytest.approx(variance / squared, rel=1e-5)
    # The least over scalings, by looking at many of them.
    left = [
        np.mean(np.sum((s * gradients - truth) ** 2, axis=1)) / squared
        for s in np.linspace(0, 3, 3001)
    ]
    assert found.error == pytest.approx(min(left), abs=1e-5)
    assert left[0] == ZERO.error and left[1000] == pytest.approx(
        found.squared_bias + found.variance, rel=1e-4
    )


APART = np.array([1, 4, 1, 2]) / 8.0  # no action's probability is equal under both
WEIGHTS = np.minimum(P / APART, 1.5)[:, None]


@pytest.mark.parametrize(
    ("changes", "scores", "added"),
    [
        ({"corrections": "score_centering"}, S - APART @ S, 0),
        ({"corrections": "tis(high=1.5),score_centering"}, WEIGHTS * S - APART @ (WEIGHTS * S), 0),
        ({"method": "state_tv"}, S, 0.4 * (np.sign(P - APART) / 2 * P) @ S),
        ({"method": "state_kl"}, S, -0.4 * APART @ S),
        ({"method": "state_delta"}, S, 0.4 * (APART * np.sign(P - APART) * P) @ S),
    ],
    ids=str,
)
def test_centred_scores_and_penaltys_of_a_state_are_those_of_the_formula(changes, scores, added):
    """With the penalty of the advantage beside it: in one state plain advantages add up to 0, and
    centre themselves.
    """
    settings = dataclasses.replace(PLAIN, **({"method": "dc_grpo"} | changes))
    penalty = np.zeros(4) if np.any(added) else 0.4 * np.abs(P - APART)
    gradients = _gradients(settings, APART, _listed)
    mean, variance = _by_formula(np.ones(4), penalty, APART, scores, added)
    np.testing.assert_allclose(gradients.mean(axis=0), mean, atol=3e-6)
    assert np.mean(np.sum((gradients - mean) ** 2, axis=1)) == pytest.approx(variance, rel=1e-3)


def test_importance_weights_without_a_bound_leave_no_bias(control):
    figures = {
        name: quality(
            moments(
                _gradients(dataclasses.replace(PLAIN, **CASES[name][0]), Q), control, whole=True
            )
        )
        for name in ("none", "unbounded tis", "tis")
    }
    # E_q[w s] = E_p[s] = 0 and E_q[r w s] = E_p[r s]. A cut of 1.5 leaves part of the bias.
    assert figures["unbounded tis"].squared_bias == pytest.approx(0.0, abs=1e-5)
    assert 0.0025 < figures["tis"].squared_bias < figures["none"].squared_bias


def test_a_shorter_gradient_is_not_a_better_one():
    rng = np.random.default_rng(3)
    truth = np.eye(1, 30)[0]
    noisy, control = (truth + 2 * rng.normal(size=(40, 30)) for _ in range(2))
    one = quality(moments(noisy, control))
    short = quality(moments(noisy / 100, control))
    # The scale-free error stays; at the gradient's own length the short one would win, as one of
    # zero does.
    assert short.error == pytest.approx(one.error, rel=1e-12) and one.error < ZERO.error
    assert short.squared_bias + short.variance < 1.01 < one.squared_bias + one.variance
    assert quality(moments(0 * noisy, control))[:3] == pytest.approx(ZERO[:3])
    # No scaling of a gradient of the wrong sign beats none at all.
    assert quality(moments(-noisy, control)).error == 1


def test_products_of_different_batches_are_not_inflated_by_noise():
    # Gradients (1, 0) plus noise of variance 4 in 50 directions, 400 batches: the plug-in |mean|^2
    # has 200 / 400 = 0.5 too much, the estimate nothing on average.
    rng = np.random.default_rng(0)
    truth = np.eye(1, 50)[0]
    noisy, control = (truth + 2 * rng.normal(size=(400, 50)) for _ in range(2))
    found = moments(noisy, control)
    assert found.own == pytest.approx(1.0, abs=0.25) and found.cross == pytest.approx(1.0, abs=0.25)
    assert found.variance == pytest.approx(200.0, rel=0.05)
    assert moments(noisy, control, whole=True).own > 1.3


def test_the_jackknife_knows_the_spread_of_the_squared_bias_where_there_is_none_too():
    rng = np.random.default_rng(1)
    truth = np.eye(1, 10)[0]
    off = np.eye(1, 10, 1)[0]
    for bias in (0.8, 0.0):
        found = []
        said = []
        for _ in range(80):
            mine, control = (
                v + 0.5 * rng.normal(size=(24, 10)) for v in (truth + bias * off, truth)
            )
            found.append(quality(moments(mine, control)).squared_bias)
            said.append(half_width(leave_one_out(mine, control)[:, 1]))
        # Without a bias the estimate is below 0 as often as above: clipped, its mean would be half
        # its spread.
        assert np.mean(found) == pytest.approx(
            bias**2, abs=3.5 * np.std(found) / np.sqrt(80) + 0.01
        )
        inside = np.mean(np.abs(np.array(found) - bias**2) <= said)
        assert min(said) > 0 and 0.85 < inside <= 1
        assert bias or 0.25 < np.mean(np.array(found) < 0) < 0.75


def test_no_direction_is_told_where_noise_hides_the_gradient():
    found = quality(Moments(-0.1, 0.0, 1.0, 3.0))
    assert math.isnan(found.length) and math.isnan(found.angle)
    assert found[:3] == (1.0, pytest.approx(0.9), 3.0)
    assert all(math.isnan(x) for x in quality(Moments(1.0, 0.5, -0.1, 3.0)))
    with pytest.raises(ValueError, match="got 1 batches, needs at least 2"):
        moments(np.ones((1, 3)), np.ones((5, 3)))


def test_a_sketch_keeps_lengths_and_angles():
    rng = np.random.default_rng(2)
    size = 3 * SKETCH + 77
    one, other = (rng.normal(size=size).astype(np.float32) for _ in range(2))
    other = one + 0.5 * other
    trees = [{"a": x[: size // 3], "b": x[size // 3 :].reshape(-1, 1)} for x in (one, other)]
    made = [np.asarray(jax.jit(sketch)(tree), np.float64) for tree in trees]
    assert all(len(x) == SKETCH for x in made)
    for a, b in ((0, 0), (0, 1), (1, 1)):
        exact = float([one, other][a].astype(np.float64) @ [one, other][b])
        assert made[a] @ made[b] == pytest.approx(exact, rel=0.02)
    np.testing.assert_array_equal(sketch({"a": one[:5]}), one[:5])
