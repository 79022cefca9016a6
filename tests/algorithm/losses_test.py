"""The clipped surrogate by hand, the three normalizations and the reference divergence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm import losses, stats
from dcmdp_jax.algorithm.distribution import Head, centering_loss
from dcmdp_jax.algorithm.penalties import penalty_loss
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.algorithm.stats import Mean
from tests.support.surrogate import policy_surrogate

LOG = np.log


surrogate = functools.partial(policy_surrogate, clip_low=0.2, clip_high=0.24)


@jax.jit
def _value_and_grad(train, old, advantages, mask, weights):
    def total(train):
        loss, statistics = surrogate(train, old, advantages, mask, weights)
        return loss.total, (loss, statistics)

    return jax.value_and_grad(total, has_aux=True)(train)


def loss_and_gradient(train, old, advantages, mask=None, weights=None):
    """Everything is an argument of the compiled function.

    XLA on CPU wrongly folds a NaN that it knows at compile time.
    """
    train, old, advantages = (jnp.asarray(x, jnp.float32) for x in (train, old, advantages))
    mask = np.ones(train.shape, bool) if mask is None else mask
    weights = (
        np.ones(train.shape, np.float32) if weights is None else np.asarray(weights, np.float32)
    )
    (_, (loss, statistics)), gradient = _value_and_grad(train, old, advantages, mask, weights)
    return loss, statistics, np.asarray(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside: -r A, gradient -r A
        (1.5, 2.0, -2.48, 0.0),  # above 1.24 with A > 0: clipped; a symmetric 1.2 would give -2.4
        (
            1.5,
            -2.0,
            3.0,
            3.0,
        ),  # above with A < 0: min() keeps r A; a plain clip would give 2.48 and no gradient
        (0.5, 2.0, -1.0, -1.0),  # below with A > 0: kept; a plain clip would give -1.6
        (0.5, -2.0, 1.6, 0.0),  # below 0.8 with A < 0: clipped
        (
            1.0,
            -3.0,
            3.0,
            3.0,
        ),  # on policy, where both arguments of min() tie: the whole gradient, not half
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_one_token_by_hand(ratio, advantage, loss, slope):
    value, _, gradient = loss_and_gradient([[LOG(0.3 * ratio)]], [[LOG(0.3)]], [[advantage]])
    assert float(value.total) == pytest.approx(loss, rel=1e-6, abs=0)
    assert float(gradient[0, 0]) == pytest.approx(slope, rel=1e-6, abs=0)


def _loss_of_one_token(train, old, advantage, clip_low, clip_high):
    loss, _ = policy_surrogate(
        *(jnp.float32([[x]]) for x in (train, old, advantage)),
        np.ones((1, 1), bool),
        np.ones((1, 1), np.float32),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    return loss.total


_slope_of_one_token = jax.grad(_loss_of_one_token)


@pytest.mark.parametrize("clip_low", [0.0, 0.2])
@pytest.mark.parametrize("clip_high", [0.0, 0.2])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_on_policy_gradient_is_the_plain_policy_gradient_for_every_clip(
    clip_low, clip_high, advantage
):
    # gamma = 1: l = -gamma A, dl / dlog pi = -A. A split tie gives -0.75 A with a clip of 0.
    assert float(_loss_of_one_token(-1.5, -1.5, advantage, clip_low, clip_high)) == -advantage
    assert float(_slope_of_one_token(-1.5, -1.5, advantage, clip_low, clip_high)) == -advantage


@pytest.mark.parametrize(
    ("advantage", "clip_low", "clip_high", "below", "above"),
    [
        # gamma A for gamma < 1, the bound beyond it: the gradient at the tie is the one from below
        (2.0, 0.2, 0.0, -2.0, 0.0),
        (2.0, 0.0, 0.0, -2.0, 0.0),
        # and the other way round
        (-2.0, 0.0, 0.2, 0.0, 2.0),
        (-2.0, 0.0, 0.0, 0.0, 2.0),
        # no tie at gamma = 1: both sides agree
        (2.0, 0.0, 0.2, -2.0, -2.0),
        (-2.0, 0.2, 0.0, 2.0, 2.0),
    ],
)
def test_gradient_at_a_tie_is_the_difference_quotient_of_the_unclipped_side(
    advantage, clip_low, clip_high, below, above
):
    h = 2.0**-7  # a power of two: log-probs and their difference are exact
    here, left, right = (
        float(_loss_of_one_token(-1.5 + x, -1.5, advantage, clip_low, clip_high))
        for x in (0.0, -h, h)
    )
    # e^h - 1 = h (1 + h / 2 + ...), so a quotient of slope s is s (1 +- h / 2) to h^2 / 6 = 1e-5
    assert (here - left) / h == pytest.approx(below * (1 - h / 2), rel=5e-5, abs=0)
    assert (right - here) / h == pytest.approx(above * (1 + h / 2), rel=5e-5, abs=0)
    slope = float(_slope_of_one_token(-1.5, -1.5, advantage, clip_low, clip_high))
    assert slope == (below if below else above) == -advantage


@pytest.mark.parametrize(
    ("train", "old", "advantage", "slope", "outward"),
    [
        # The four corners of sign and limit. "outward" is the slope one step beyond the limit.
        (
            -1.0,
            -21.0,
            -2.0,
            2 * np.exp(20),
            0.0,
        ),  # gamma = e^20, A < 0: not clipped. Half of it at a split tie
        (-1.0, -21.0, 2.0, 0.0, 0.0),  # A > 0: clipped at 1 + clip_high long before
        (-21.0, -1.0, 2.0, -2 * np.exp(-20), 0.0),  # gamma = e^-20, A > 0: not clipped
        (-21.0, -1.0, -2.0, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_gradient_at_a_log_ratio_of_twenty_is_the_one_from_inside(
    train, old, advantage, slope, outward, clip
):
    h = 2.0**-7
    inward = -1.0 if train > old else 1.0
    at = [
        float(_loss_of_one_token(train + x * inward, old, advantage, clip, clip))
        for x in (-h, 0.0, h)
    ]
    assert (at[0] - at[1]) / h == outward
    quotient = (at[2] - at[1]) / h * inward
    assert quotient == pytest.approx(slope * (1 + inward * h / 2), rel=5e-5, abs=0)
    assert float(_slope_of_one_token(train, old, advantage, clip, clip)) == pytest.approx(
        slope, rel=1e-6, abs=0
    )
    beyond = float(_slope_of_one_token(train - h * inward, old, advantage, clip, clip))
    assert beyond == outward


@pytest.mark.parametrize(
    ("estimator", "slope"),
    # x = log ref / pi = 20, d/dlog pi = -d/dx: -x for k2, -(e^x - 1) for k3
    [("k2", -20.0), ("k3", 1 - np.exp(20))],
)
def test_reference_kl_at_twenty_nats_has_the_gradient_from_inside(estimator, slope):
    gradient = jax.grad(
        lambda train: losses.reference_kl(train, jnp.float32(-1.0), estimator=estimator)
    )
    assert float(gradient(jnp.float32(-21.0))) == pytest.approx(slope, rel=1e-6)
    assert float(gradient(jnp.float32(-21.5))) == 0.0


def test_sum_is_weighted_and_statistics_count_what_bites():
    # l = (-2.2, -2.48, 3.0, 1.6) with weights (0.5, 0.25, 1, 2): -1.1 - 0.62 + 3 + 3.2 = 4.48,
    # weight 3.75.
    ratios = np.array([[1.1, 1.5, 1.5, 0.5]])
    advantages = np.array([[2.0, 2.0, -2.0, -2.0]])
    weights = np.array([[0.5, 0.25, 1.0, 2.0]])
    loss, statistics, gradient = loss_and_gradient(
        LOG(ratios / 10), LOG([[0.1] * 4]), advantages, weights=weights
    )
    assert float(loss.total) == pytest.approx(4.48, rel=1e-6)
    assert float(loss.weight) == 3.75
    np.testing.assert_allclose(gradient, [[-1.1, 0, 3.0, 0]], rtol=1e-6, atol=0)
    metrics = stats.values(statistics)
    assert (
        float(metrics["clip_high_fraction"]) == 0.25
    )  # two ratios are above 1.24: counting them all would say 0.5
    assert float(metrics["clip_low_fraction"]) == 0.25
    assert float(metrics["ratio_mean"]) == pytest.approx(1.15, rel=1e-6)  # 4.6 / 4, not weighted
    assert float(metrics["ratio_max"]) == pytest.approx(1.5, rel=1e-6)
    assert float(metrics["ratio_min"]) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("train", "old", "advantage", "loss"),
    [
        (-0.5, -np.inf, 1.0, -1.24),  # infinite ratio, A > 0: clipped
        (-0.5, -200.0, 0.0, 0.0),  # inf * 0 would be NaN
        (-0.5, -200.0, -1.0, float(np.exp(np.float64(20)))),  # the cap, finite
        (-np.inf, -0.5, 1.0, -float(np.exp(np.float64(-20)))),
        (-np.inf, -0.5, -1.0, 0.8),
        (-np.inf, -np.inf, 1.0, -1.0),  # -inf - -inf would be NaN
    ],
)
def test_overflowing_ratio_is_finite_and_without_gradient(train, old, advantage, loss):
    value, statistics, gradient = loss_and_gradient([[train]], [[old]], [[advantage]])
    assert float(value.total) == pytest.approx(loss, rel=1e-5, abs=0)
    assert float(gradient[0, 0]) == 0.0
    assert all(np.isfinite(float(x)) for x in stats.values(statistics).values())


def test_large_ratio_inside_the_clamp_keeps_its_gradient():
    # r = e^19 and A = -1: loss e^19, gradient e^19.
    value, _, gradient = loss_and_gradient([[-1.0]], [[-20.0]], [[-1.0]])
    assert float(value.total) == pytest.approx(np.exp(19), rel=1e-5)
    assert float(gradient[0, 0]) == pytest.approx(np.exp(19), rel=1e-5)


@pytest.mark.parametrize("where", ["mask", "weight"])
def test_nan_outside_the_mask_or_without_weight_does_not_leak(where):
    broken = np.array([[-1.0, np.nan, -np.inf]])
    keep = np.array([[True, False, False]])
    mask = keep if where == "mask" else np.ones((1, 3), bool)
    weights = keep.astype(float) if where == "weight" else np.ones((1, 3))
    loss, statistics, gradient = loss_and_gradient(
        broken, broken, np.array([[2.0, np.nan, 1.0]]), mask, weights
    )
    assert [float(x) for x in loss] == [-2.0, 1.0]
    np.testing.assert_array_equal(gradient, [[-2.0, 0.0, 0.0]])
    assert float(statistics["ratio_mean"].weight) == float(statistics["ratio_mean"].total) == 1.0


@pytest.mark.parametrize("width", [1, 33])
@pytest.mark.parametrize("broken", [0, 1, 2], ids=["train", "old", "advantage"])
def test_nan_on_a_token_that_takes_part_is_not_hidden(broken, width):
    arrays = [np.full((1, width), value) for value in (-1.0, -1.0, 1.0)]
    arrays[broken][0, -1] = np.nan
    loss, _, gradient = loss_and_gradient(*arrays)
    assert np.isnan(float(loss.total))
    assert np.isnan(gradient[0, -1])


def test_empty_mask():
    loss, statistics, gradient = loss_and_gradient(
        [[np.nan, -1.0]], [[-1.0, -1.0]], [[1.0, 1.0]], np.zeros((1, 2), bool)
    )
    assert float(loss.value()) == 0.0
    np.testing.assert_array_equal(gradient, np.zeros((1, 2)))
    assert {float(x) for x in stats.values(statistics).values()} == {0.0}


def test_gradient_reaches_train_logprobs_alone():
    arrays = [jnp.full((1, 2), v) for v in (-1.0, -1.1, 0.5, 2.0)]
    mask = np.ones((1, 2), bool)

    def total(train, old, advantages, weights):
        return surrogate(train, old, advantages, mask, weights)[0].total

    train, *others = jax.grad(total, argnums=(0, 1, 2, 3))(*arrays)
    assert np.all(np.asarray(train) != 0)
    for gradient in others:
        np.testing.assert_array_equal(gradient, np.zeros((1, 2)))


def test_clip_statistics_merge():
    rng = np.random.default_rng(2)
    train = -rng.exponential(size=(4, 6))
    old = -rng.exponential(size=(4, 6))
    advantages = rng.normal(size=(4, 6))
    mask = rng.random((4, 6)) < 0.7
    weights = np.ones((4, 6))
    _, whole = surrogate(train, old, advantages, mask, weights)
    parts = stats.empty(whole)
    for rows in (slice(0, 1), slice(1, 4)):
        _, part = surrogate(train[rows], old[rows], advantages[rows], mask[rows], weights[rows])
        parts = stats.merge(parts, part)
    ratio = np.exp(train - old)[mask]
    expected = {
        "clip_low_fraction": np.mean((ratio < 0.8) & (advantages[mask] < 0)),
        "clip_high_fraction": np.mean((ratio > 1.24) & (advantages[mask] > 0)),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ratio_min": ratio.min(),
    }
    for name, value in stats.values(parts).items():
        assert float(value) == pytest.approx(expected[name], rel=1e-5), name
        assert float(value) == pytest.approx(float(stats.values(whole)[name]), rel=1e-6), name


LENGTHS = np.array([4, 1, 0, 5, 2])
IN_LOSS = np.array([True, True, True, False, True])


@pytest.mark.parametrize(
    ("mode", "weights", "total"),
    [
        (
            "seq_mean_token_mean",
            [1 / 4, 1, 0, 0, 1 / 2],
            3,
        ),  # the empty one is not counted: total 3, not 4 or 5
        ("token_mean", [1, 1, 0, 0, 1], 7),
        ("fixed_length", [1 / 8, 1 / 8, 0, 0, 1 / 8], 3),
    ],
)
def test_aggregation_weights_by_hand(mode, weights, total):
    per_completion, weight = losses.aggregation_weights(
        LENGTHS, IN_LOSS, mode=mode, max_completion_tokens=8
    )
    np.testing.assert_array_equal(per_completion, np.array(weights, np.float32))
    assert float(weight) == total
    # l = 1 at the first token of each completion, else 0: sum_i w_i / total
    expected = {"seq_mean_token_mean": 1.75 / 3, "token_mean": 3 / 7, "fixed_length": 1 / 8}[mode]
    assert float(Mean(per_completion.sum(), weight).value()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", ["seq_mean_token_mean", "token_mean", "fixed_length"])
def test_nothing_in_the_loss(mode):
    weights, total = losses.aggregation_weights(
        LENGTHS, np.zeros(5, bool), mode=mode, max_completion_tokens=8
    )
    np.testing.assert_array_equal(weights, np.zeros(5))
    assert float(total) == 0.0
    assert float(Mean(weights.sum(), total).value()) == 0.0


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        # pi = 0.5, ref = 0.25: x = log(1/2); d/dlog pi is minus d/dx
        ("k1", LOG(2), 1.0),
        ("k2", LOG(2) ** 2 / 2, LOG(2)),
        (
            "k3",
            0.5 - 1 + LOG(2),
            0.5,
        ),  # 1 - ref / pi; taken as pi / ref, 2 - 1 - log 2 = 0.307 and slope 1
    ],
)
def test_reference_kl_by_hand(estimator, value, slope):
    function = functools.partial(losses.reference_kl, estimator=estimator)
    train = jnp.float32(LOG(0.5))
    ref = jnp.float32(LOG(0.25))
    assert float(function(train, ref)) == pytest.approx(value, rel=1e-6)
    assert float(jax.grad(function)(train, ref)) == pytest.approx(slope, rel=1e-6)
    assert float(jax.grad(function, argnums=1)(train, ref)) == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_reference_kl_expectations(estimator):
    """Exact expectations over five tokens against KLs that are computed separately.

    Their gradients too.
    """
    logits = jnp.array([0.3, -0.7, 1.1, 0.0, -1.5])
    ref = jax.nn.log_softmax(jnp.array([-0.2, 0.4, 0.5, -1.0, 0.3]))
    reverse = lambda logits: jnp.sum(jax.nn.softmax(logits) * (jax.nn.log_softmax(logits) - ref))  # noqa: E731
    forward = lambda logits: jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(logits)))  # noqa: E731
    sampled_from = jax.lax.stop_gradient(jax.nn.softmax(logits))

    def expected_loss(logits):
        return jnp.sum(
            sampled_from * losses.reference_kl(jax.nn.log_softmax(logits), ref, estimator=estimator)
        )

    if estimator != "k2":  # unbiased as estimates
        assert float(expected_loss(logits)) == pytest.approx(float(reverse(logits)), rel=1e-5)
    gradient_of = {"k1": lambda logits: 0.0 * logits.sum(), "k2": reverse, "k3": forward}[estimator]
    np.testing.assert_allclose(
        jax.grad(expected_loss)(logits), jax.grad(gradient_of)(logits), atol=1e-6
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_reference_kl_overflow_and_mask(estimator):
    train = jnp.array([-np.inf, -0.5, -np.inf, np.nan], jnp.float32)
    ref = jnp.array([-0.5, -np.inf, -np.inf, np.nan], jnp.float32)
    mask = np.array([True, True, True, False])
    function = functools.partial(losses.reference_kl, estimator=estimator, completion_mask=mask)
    expected = {
        "k1": [-20, 20, 0, 0],
        "k2": [200, 200, 0, 0],
        "k3": [np.exp(20) - 21, np.exp(-20) + 19, 0, 0],
    }[estimator]
    np.testing.assert_allclose(function(train, ref), expected, rtol=1e-6)
    gradient = jax.grad(lambda train: function(train, ref).sum())(train)
    np.testing.assert_array_equal(gradient, np.zeros(4))
    unmasked = losses.reference_kl(train, ref, estimator=estimator)
    assert np.isnan(float(unmasked[3]))


def test_bad_arguments_are_refused():
    row = np.zeros((1, 2))
    with pytest.raises(ValueError, match=r"token_weights \(1,\)"):
        jax.jit(surrogate)(row, row, row, row, np.zeros(1))
    with pytest.raises(ValueError, match=r"low=1.0; must be a finite number in \[0, 1\)"):
        policy_surrogate(row, row, row, row, row, clip_low=1.0, clip_high=0.2)
    with pytest.raises(ValueError, match=r"high=-0.2"):
        policy_surrogate(row, row, row, row, row, clip_low=0.2, clip_high=-0.2)
    with pytest.raises(ValueError, match=r"mode='mean'; must be one of 'seq_mean_token_mean'"):
        losses.aggregation_weights(LENGTHS, IN_LOSS, mode="mean")
    with pytest.raises(ValueError, match=r"max_completion_tokens=None"):
        losses.aggregation_weights(LENGTHS, IN_LOSS, mode="fixed_length")
    with pytest.raises(ValueError, match=r"max_completion_tokens=0"):
        losses.aggregation_weights(LENGTHS, IN_LOSS, mode="token_mean", max_completion_tokens=0)
    with pytest.raises(ValueError, match=r"loss_mask \(4,\)"):
        losses.aggregation_weights(LENGTHS, IN_LOSS[:4], mode="token_mean")
    with pytest.raises(ValueError, match=r"estimator='k4'"):
        losses.reference_kl(row, row, estimator="k4")
    with pytest.raises(ValueError, match=r"ref_logprobs \(2,\)"):
        losses.reference_kl(row, row[0], estimator="k1")


_SIDED = "clip", "dppo_tv", "dppo_kl", "drpo"
"""Regions with a low and a high side; the others are in `newer_remedies_test`."""


def _reference_tokens(region, now, old, advantages, low, high, dual_clip=0.0):
    """Objective and slope of each token in float64, from the formulas.

    `now` and `old` are within 20 nats.
    """
    ratio = np.exp(now - old)
    pi = np.exp(now)
    mu = np.exp(old)
    up = advantages > 0
    down = advantages < 0
    if region == "drpo":
        c = np.where(up, high, low)
        objective = ratio * advantages - np.abs(advantages) / (2 * c) * mu * (ratio - 1) ** 2
        slope = ratio * advantages * (1 - np.sign(advantages) * (pi - mu) / c)
    else:
        if region == "clip":
            stopped = (up & (ratio > 1 + high)) | (down & (ratio < 1 - low))
            value = np.where(up, 1 + high, 1 - low) * advantages
        elif region == "dppo_tv":
            stopped = (up & (pi - mu > high)) | (down & (pi - mu < -low))
            value = 0.0
        else:
            kl = mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi))
            stopped = (up & (ratio > 1) & (kl > high)) | (down & (ratio < 1) & (kl > low))
            value = 0.0
        objective = np.where(stopped, value, ratio * advantages)
        slope = np.where(stopped, 0.0, ratio * advantages)
    if dual_clip:
        capped = down & (ratio > dual_clip)
        objective = np.where(capped, dual_clip * advantages, objective)
        slope = np.where(capped, 0.0, slope)
    return objective, slope


@pytest.mark.parametrize(
    ("region", "dual_clip"), [*((region, 0.0) for region in _SIDED), ("clip", 1.5)]
)
def test_trust_region_equals_its_formula(region, dual_clip):
    rng = np.random.default_rng(3)
    old = np.log(rng.uniform(0.01, 0.98, (5, 40))).astype(np.float32)
    now = np.log(np.clip(np.exp(old) + rng.normal(0, 0.2, old.shape), 1e-3, 0.99)).astype(
        np.float32
    )
    advantages = rng.normal(size=old.shape).astype(np.float32)
    mask = rng.random(old.shape) < 0.8
    weights = rng.uniform(0.1, 1, old.shape).astype(np.float32)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(now):
        summed, statistics = policy_surrogate(
            now,
            old,
            advantages,
            mask,
            weights,
            clip_low=0.1,
            clip_high=0.15,
            trust_region=region,
            **({"dual": dual_clip} if dual_clip else {}),
        )
        return summed.total, statistics

    (total, statistics), gradient = loss(now)
    objective, slope = _reference_tokens(
        region, *(x.astype(np.float64) for x in (now, old, advantages)), 0.1, 0.15
    )
    scale = np.where(mask, weights.astype(np.float64), 0.0)
    if dual_clip:
        objective, slope = _reference_tokens(
            region, *(x.astype(np.float64) for x in (now, old, advantages)), 0.1, 0.15, dual_clip
        )
        capped = (advantages < 0) & (np.exp(now - old) > dual_clip)
        assert float(statistics["dual_clip_fraction"].value()) == pytest.approx(capped[mask].mean())
    assert float(total) == pytest.approx(-(scale * objective).sum(), rel=1e-5)
    np.testing.assert_allclose(gradient, -scale * slope, rtol=2e-4, atol=1e-5)
    stopped = float(
        statistics["clip_low_fraction"].value() + statistics["clip_high_fraction"].value()
    )
    assert stopped == 0 if region == "drpo" else 0.05 < stopped < 0.6


@pytest.mark.parametrize("region", _SIDED)
@pytest.mark.parametrize("apart", [50.0, -50.0])
def test_trust_region_far_apart(region, apart):
    # pi and mu are 0.4 and 7.7e-23: the probability shift is 0.4, which a clamped ratio times mu
    # would not give.
    now, old = (
        np.float32([[np.log(0.4), np.log(0.4)]]),
        np.full((1, 2), np.log(0.4) - 50, np.float32),
    )[:: int(apart / 50)]
    advantages = np.float32([[1.0, -1.0]])

    def loss(now):
        ones = np.ones((1, 2), np.float32)
        summed, statistics = policy_surrogate(
            now, old, advantages, ones > 0, ones, clip_low=0.1, clip_high=0.15, trust_region=region
        )
        return summed.total, statistics

    (total, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(now))
    assert np.isfinite(float(total)) and not np.asarray(gradient).any()
    if region != "drpo":
        # Up with A > 0 is stopped, down with A < 0; the other token is not.
        low, high = (
            float(statistics["clip_low_fraction"].total),
            float(statistics["clip_high_fraction"].total),
        )
        assert (low, high) == ((0, 1) if apart > 0 else (1, 0))


def test_drpo_has_no_gradient_where_dppo_begins_to_stop():
    # pi - mu = 0.15 with A > 0: the last point that dppo_tv lets through, and drpo's fixed point.
    old = np.log(np.float32([[0.3]]))
    now = np.log(np.float32([[0.45]]))
    ones = np.ones((1, 1), np.float32)
    slope = jax.grad(
        lambda now: (
            policy_surrogate(
                now, old, ones, ones > 0, ones, clip_low=0.1, clip_high=0.15, trust_region="drpo"
            )[0].total
        )
    )(now)
    assert float(slope[0, 0]) == pytest.approx(0.0, abs=1e-6)


def test_sequence_ratio_is_the_geometric_mean_with_the_tokens_gradient():
    # Completion 0: log-ratios 0.3, -0.1 and a dropped 0.4: mean 0.2. Completion 1: 0.05.
    mask = np.array([[1, 1, 1, 0], [0, 1, 0, 0]], bool)
    index = np.array([[0, 0, 0, 0], [1, 1, 1, 1]], np.int32)
    old = np.full((2, 4), -1.0, np.float32)
    now = old + np.float32([[0.3, -0.1, 0.4, np.nan], [np.nan, 0.05, 9.0, 9.0]])
    advantages = np.float32([[1.0, 0.5, 1.0, 0], [0, -2.0, 0, 0]])
    weights = np.float32([[0.5, 0.5, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])

    def loss(now):
        return policy_surrogate(
            now, old, advantages, mask, weights, clip_low=0.3, clip_high=0.3, sequence=(index, 2)
        )[0].total

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(now))
    s = np.exp([0.2, 0.05])
    expected = [[-0.5 * s[0], -0.25 * s[0], 0, 0], [0, 2 * s[1], 0, 0]]
    assert float(value) == pytest.approx(np.sum(expected), rel=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    # 0.3 above 1 + 0.1 with A > 0: all of completion 0 is stopped by its mean, its second token
    # (ratio 0.9) too.
    clipped = jax.grad(
        lambda now: (
            policy_surrogate(
                now,
                old,
                advantages,
                mask,
                weights,
                clip_low=0.1,
                clip_high=0.1,
                sequence=(index, 2),
            )[0].total
        )
    )(jnp.asarray(now))
    np.testing.assert_allclose(clipped[0], np.zeros(4))
    # GSPO's own gradient, through the mean, of completion 0 with one advantage on all tokens and
    # none dropped.
    same = np.where(index == 0, 1.0, -2.0).astype(np.float32)
    whole = np.where(index == 0, 1 / 3, 1.0).astype(np.float32)
    ours = jax.grad(
        lambda now: (
            policy_surrogate(
                now, old, same, mask, whole, clip_low=0.9, clip_high=9.0, sequence=(index, 2)
            )[0].total
        )
    )(jnp.asarray(now))
    gspo = jax.grad(
        lambda now: -jnp.exp(jnp.mean(now[0, :3] - old[0, :3])) + 2 * jnp.exp(now[1, 1] - old[1, 1])
    )
    np.testing.assert_allclose(
        np.where(mask, ours, 0), np.where(mask, gspo(jnp.asarray(now)), 0), rtol=1e-6
    )


def test_small_dual_clip_is_refused():
    row = np.zeros((1, 2))
    with pytest.raises(ValueError, match=r"dual=1.0; must be a finite number in \(1, inf\)"):
        surrogate(row, row, row, row, row, dual=1.0)


def test_no_loss_takes_float16_where_its_gradient_flows():
    narrow = np.full((1, 2), -1, np.float16)
    wide = np.full((1, 2), -1, np.float32)
    tokens = Tokens(
        train_logprobs=narrow,
        old_logprobs=wide,
        anchor_logprobs=wide,
        rollout_logprobs=wide,
        advantages=wide,
        discrepancy=-wide,
        completion_mask=np.ones((1, 2), bool),
        completion_index=np.zeros((1, 2), np.int32),
        num_completions=1,
        multiplier=0.1,
        tolerance=0.1,
    )
    head = Head(
        np.zeros((1, 2, 1), np.int32),
        wide[..., None],
        narrow[..., None],
        wide[..., None],
        wide[..., None],
    )
    weights = np.ones((1, 2), np.float32)
    with pytest.raises(ValueError, match="^train_logprobs has dtype float16"):
        losses.importance_ratio(narrow, wide)
    with pytest.raises(ValueError, match="^train_logprobs has dtype float16"):
        losses.reference_kl(narrow, wide, estimator="k3")
    with pytest.raises(ValueError, match="^train_logprobs has dtype float16"):
        losses.policy_loss(tokens, weights)
    with pytest.raises(ValueError, match="^train_logprobs has dtype float16"):
        losses.policy_loss(tokens, weights, ratio_level="sequence")
    with pytest.raises(ValueError, match="^train_logprobs has dtype float16"):
        penalty_loss(tokens._replace(train_logprobs=wide), weights, head, "state_tv")
    with pytest.raises(ValueError, match="^train_logprobs has dtype float16"):
        centering_loss(tokens._replace(train_logprobs=wide), weights, head, loss=losses.surrogate)

    tokens = tokens._replace(train_logprobs=wide)
    unknown = {"ratio_level": "tokens"}
    with pytest.raises(ValueError, match="^ratio_level='tokens'; must be one of 'token', 'seq"):
        losses.policy_loss(tokens, weights, **unknown)
    head = head._replace(rollout_logprobs=wide[..., None], train_logprobs=wide[..., None])
    with pytest.raises(ValueError, match="^ratio_level='tokens'; must be one of 'token', 'seq"):
        centering_loss(tokens, weights, head, loss=losses.surrogate, **unknown)
