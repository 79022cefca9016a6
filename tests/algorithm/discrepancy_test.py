"""Discrepancy measures by hand, at their edges, and the statistics of two engines' mismatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm import discrepancy as d
from dcmdp_jax.algorithm.masked import CompletionIndex, masked_mean

LOG = np.log
CAP_RATIO = np.float32(10)


@pytest.mark.parametrize("transform", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("measure", "sided", "expected"),
    [
        # (p, q) = (0.6, 0.4), (0.2, 0.5), (0.3, 0.3)
        ("diff", "two", [0.2, 0.3, 0.0]),
        ("diff", "one", [0.2, 0.0, 0.0]),  # the wrong side penalized would be [0, 0.3, 0]
        ("ratio", "two", [0.5, 0.6, 0.0]),  # q / p instead of p / q would be [0.333, 1.5, 0]
        ("ratio", "one", [0.5, 0.0, 0.0]),
        ("log", "two", [LOG(1.5), LOG(2.5), 0.0]),
        ("log", "one", [LOG(1.5), 0.0, 0.0]),
    ],
)
def test_measures_by_hand(measure, sided, expected, transform):
    function = (
        jax.jit(d.token_discrepancy, static_argnames=("measure", "sided"))
        if transform
        else d.token_discrepancy
    )
    values = function(LOG([0.6, 0.2, 0.3]), LOG([0.4, 0.5, 0.3]), measure=measure, sided=sided)
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(
        values, expected, rtol=2e-6, atol=0
    )  # atol 0: agreement is 0 to the last bit


@pytest.mark.parametrize("sided", ["two", "one"])
@pytest.mark.parametrize(
    ("measure", "expected"),
    [("diff", np.float32(0.25)), ("ratio", CAP_RATIO), ("log", np.float32(20))],
)
def test_rollout_probability_of_zero_is_capped(measure, sided, expected):
    value = d.token_discrepancy(LOG([0.25]), np.array([-np.inf]), measure=measure, sided=sided)
    np.testing.assert_allclose(value, [expected], rtol=1e-6)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [("diff", [0.25, 0.0, 1.0]), ("ratio", [1.0, 0.0, CAP_RATIO]), ("log", [20.0, 0.0, 20.0])],
)
def test_other_overflows_are_finite(measure, expected):
    # train -inf against 0.25; -inf against -inf; a garbage log-prob of +200 against -200.
    train = np.array([-np.inf, -np.inf, 200.0])
    rollout = np.array([LOG(0.25), -np.inf, -200.0])
    values = d.token_discrepancy(train, rollout, measure=measure, sided="two")
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    one_sided = d.token_discrepancy(train, rollout, measure=measure, sided="one")
    np.testing.assert_allclose(one_sided, [0.0, 0.0, expected[2]], rtol=1e-6)


def test_ratio_penalizes_a_token_no_more_than_10():
    # (p, q) = (0.4, 0.2), (0.2, 0.4), (0.4, 0.01), (0.3, 0.3)
    p = LOG([0.4, 0.2, 0.4, 0.3])
    q = LOG([0.2, 0.4, 0.01, 0.3])
    values = d.token_discrepancy(p, q, measure="ratio", sided="two")
    np.testing.assert_allclose(values, [1.0, 0.5, 10.0, 0.0], rtol=3e-6)


@pytest.mark.parametrize("sided", ["two", "one"])
@pytest.mark.parametrize("measure", ["diff", "ratio", "log", "logit"])
def test_a_broken_token_is_not_hidden(measure, sided):
    assert np.isnan(
        d.token_discrepancy(np.array([np.nan]), np.array([-1.0]), measure=measure, sided=sided)[0]
    )


def test_diff_keeps_relative_precision_near_agreement():
    # p = e^-1e-4, q = e^-1.1e-4: p - q = 1e-5. Subtracting float32 probabilities near 1 is good to
    # 6e-8 only, 0.6%.
    train = np.float32([-1e-4])
    rollout = np.float32([-1.1e-4])
    exact = np.exp(train.astype(np.float64)) - np.exp(rollout.astype(np.float64))
    np.testing.assert_allclose(
        d.token_discrepancy(train, rollout, measure="diff", sided="two"), exact, rtol=1e-6
    )


TRAIN = LOG(np.array([[0.5, 0.5, 0.5], [0.9, 0.5, 0.5]]))
ROLLOUT = LOG(np.array([[0.4, 0.7, 0.5], [0.8, 0.5, 0.5]]))
MASK = np.array([[True, True, True], [True, False, False]])
TRAIN[1, 1:], ROLLOUT[1, 1:] = np.nan, -np.inf


def _delta(**options):
    return d.token_discrepancy(TRAIN, ROLLOUT, completion_mask=MASK, **options)


def test_token_and_sequence_levels():
    # delta: (0.1, 0.2, 0.0) and (0.1): means 0.1 and 0.1; padding is NaN and must be 0.
    index = np.indices(MASK.shape)[0]
    token = _delta()
    np.testing.assert_allclose(token, [[0.1, 0.2, 0], [0.1, 0, 0]], atol=1e-7)
    sequence = d.sequence_discrepancy(token, CompletionIndex(MASK, index, 2))
    np.testing.assert_allclose(sequence, [[0.1, 0.1, 0.1], [0.1, 0, 0]], rtol=1e-6, atol=1e-8)
    # Dividing by the row length 3 would give 0.033 in the second row.
    assert float(masked_mean(token, MASK)) == pytest.approx(
        float(masked_mean(sequence, MASK)), rel=1e-6
    )


def test_sequence_level_follows_the_index_across_rows():
    # Row 0 holds completion 1 then 0; completion 0 goes on in row 1: deltas 0: (0.2, 0.0, 0.1), 1:
    # (0.1).
    index = np.array([[1, 0, 0], [0, 0, 0]])
    values = d.sequence_discrepancy(_delta(), CompletionIndex(MASK, index, 2))
    np.testing.assert_allclose(values, [[0.1, 0.1, 0.1], [0.1, 0, 0]], atol=1e-7)
    one = d.sequence_discrepancy(_delta(sided="one"), CompletionIndex(MASK, index, 2))
    # one-sided: 0: (0, 0, 0.1) mean 0.0333; 1: (0.1)
    np.testing.assert_allclose(
        one, [[0.1, 0.1 / 3, 0.1 / 3], [0.1 / 3, 0, 0]], rtol=1e-6, atol=1e-8
    )


def test_discrepancy_is_a_constant():
    def total(train, rollout):
        return jnp.sum(d.token_discrepancy(train, rollout, completion_mask=MASK, measure="ratio"))

    for gradient in jax.grad(total, argnums=(0, 1))(jnp.asarray(TRAIN), jnp.asarray(ROLLOUT)):
        np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


def test_completions_over_tolerance_is_strict_and_counts_completions():
    # means 0.25, 0.5 and a completion without tokens; c = 0.25: one of two. By tokens it would be 2
    # of 4.
    delta = np.array([[0.5, 0.0, 0.25], [0.5, 9.0, 9.0]])
    index = np.indices(delta.shape)[0]
    over = d.completions_over_tolerance(delta, CompletionIndex(MASK, index, 3), tolerance=0.25)
    assert [float(x) for x in over] == [1.0, 2.0]
    over = d.completions_over_tolerance(delta, CompletionIndex(MASK, index, 3), tolerance=0.2)
    assert [float(x) for x in over] == [2.0, 2.0]


def test_mismatch_statistics_by_hand():
    # p / q = 2 and 1/2 at (p, q) = (0.8, 0.4), (0.2, 0.4), and (0.6, 0.6):
    # d = (log 2, -log 2, 0); k1 = 0; k3 = (2 - 1 - log 2 + 0.5 - 1 + log 2 + 0) / 3 = 0.5 / 3.
    # Taken the other way round (q / p) k3 is the same here, so a fourth token p / q = 4, (0.8, 0.2)
    # breaks the symmetry: k1 = -log 4 / 4; k3 = (0.5 + 3 - log 4) / 4; q / p would give (0.5 - 0.75
    # + log 4) / 4 = 0.284. weights (2, 0.5, 1, 4): sum 7.5, squares 4 + 0.25 + 1 + 16 = 21.25;
    # 7.5^2 / (4 * 21.25) = 0.66176.
    p = np.array([0.8, 0.2, 0.6, 0.8, 0.1])
    q = np.array([0.4, 0.4, 0.6, 0.2, 0.9])
    mask = np.array([True, True, True, True, False])
    statistics = d.mismatch_statistics(LOG(p), LOG(q), mask)
    assert float(statistics["mismatch/k1"]) == pytest.approx(-LOG(4) / 4, rel=1e-6)
    assert float(statistics["mismatch/k3"]) == pytest.approx((3.5 - LOG(4)) / 4, rel=1e-6)
    assert float(statistics["mismatch/effective_sample_size"]) == pytest.approx(
        56.25 / 85, rel=1e-6
    )
    assert float(statistics["mismatch/pearson"]) == pytest.approx(
        np.corrcoef(p[:4], q[:4])[0, 1], rel=1e-5
    )


def test_log_odds_by_hand_and_at_their_ends():
    # log(0.5 / 0.5), log(0.2 / 0.8) = -log 4; p of 1 and above is held at 1 - 2^-24: log(2^24 - 1)
    # = 16.64.
    found = d.log_odds(np.log(np.array([0.5, 0.2])))
    np.testing.assert_allclose(found, [0.0, -np.log(4)], atol=1e-6)
    certain = d.log_odds(np.array([0.0, 1e-3, -1e-12], np.float32))
    np.testing.assert_allclose(certain, np.full(3, np.log(2**24 - 1)), rtol=1e-6)
    # exp(x) rounds to 1 - 3 * 2^-24 or 1 - 4 * 2^-24: the definition in float32 is off by tenths,
    # this is not.
    near = np.float32([-2.1e-7])
    np.testing.assert_allclose(
        d.log_odds(near), -np.log(-np.expm1(near.astype(np.float64))), atol=1e-5
    )
    np.testing.assert_array_equal(d.log_odds(np.float32([-np.inf, np.nan])), [-1e4, np.nan])


def test_displacement_stays_while_confidence_shrinks_the_discrepancy():
    """The displacement is eps where |p - q| shrinks with 1 - p.

    eps = 0.02 at p = 0.5, 0.9, 0.99, 0.999: |p - q| is p (1 - p) eps, from 5e-3 to 2e-5.
    """
    p = np.array([0.5, 0.9, 0.99, 0.999])
    eps = 0.02
    q = 1 / (1 + np.exp(-(np.log(p / (1 - p)) - eps)))
    train = np.log(p)
    rollout = np.log(q)
    delta = d.token_discrepancy(train, rollout, measure="diff", sided="two")
    np.testing.assert_allclose(delta, p * (1 - p) * eps, rtol=0.011)  # the next order is eps / 2
    np.testing.assert_allclose(d.displacement(train, rollout), eps, rtol=2e-3)
    np.testing.assert_allclose(d.displacement(rollout, train), -eps, rtol=2e-3)
    assert not np.any(jax.grad(lambda x: d.displacement(x, rollout).sum())(jnp.asarray(train)))


def test_the_logit_measure_by_hand_and_at_its_ends():
    # 0.8 against 0.5: log 4. Certain against 0.5: log(2^24 - 1). Certain, or impossible, on both
    # sides: 0.
    p = np.float32([np.log(0.8), 0.0, 0.0, -np.inf, -np.inf, np.log(0.5)])
    q = np.float32([np.log(0.5), np.log(0.5), -1e-9, -np.inf, np.log(0.5), np.log(0.8)])
    expected = np.array([np.log(4), np.log(2**24 - 1), 0.0, 0.0, 20.0, np.log(4)])
    np.testing.assert_allclose(
        d.token_discrepancy(p, q, measure="logit"), expected, rtol=1e-6, atol=1e-12
    )
    one = d.token_discrepancy(p, q, measure="logit", sided="one")
    np.testing.assert_allclose(one, expected * [1, 1, 1, 1, 0, 0], rtol=1e-6, atol=1e-12)
    assert np.isnan(d.token_discrepancy(np.float32([np.nan]), np.float32([-1.0]), measure="logit"))


def test_displacement_statistics_by_hand():
    # Log-odds 0, 1, 2, 3 against 0, 2, -1, 0: eps = 0, -1, 3, 3, of which the last is masked.
    # Sorted sizes 0, 1, 3.
    p, q = (1 / (1 + np.exp(-np.array(x, np.float64))) for x in ([0, 1, 2, 3], [0, 2, -1, 0]))
    found = d.displacement_statistics(np.log(p), np.log(q), np.array([True, True, True, False]))
    expected = {
        "displacement/mean": 2 / 3,
        "displacement/abs_mean": 4 / 3,
        "displacement/abs_p50": 1.0,
        "displacement/abs_p95": 1 + 0.9 * 2,
        "displacement/abs_p99": 1 + 0.98 * 2,
    }
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        expected, abs=1e-5
    )
    empty = d.displacement_statistics(np.log(p), np.log(q), np.zeros(4, bool))
    assert set(map(float, empty.values())) == {0.0}


def test_mismatch_statistics_estimate_kl_of_rollout_from_train():
    # Over a whole distribution, weighted by repetition: q = (3/4, 1/4) sampled 3:1, p = (1/4, 3/4).
    # KL(q || p) = 3/4 log 3 - 1/4 log 3 = 0.5 log 3; E_q[p / q] = 1, so k1 = k3 exactly; ESS = 1 /
    # E_q[(p/q)^2] = 1 / (3/4 / 9 + 1/4 * 9) = 3/7.
    p = np.array([0.25, 0.25, 0.25, 0.75])
    q = np.array([0.75, 0.75, 0.75, 0.25])
    statistics = jax.jit(d.mismatch_statistics)(LOG(p), LOG(q), np.ones(4, bool))
    for name in ("mismatch/k1", "mismatch/k3"):
        assert float(statistics[name]) == pytest.approx(0.5 * LOG(3), rel=1e-6)
    assert float(statistics["mismatch/effective_sample_size"]) == pytest.approx(3 / 7, rel=1e-6)
    assert float(statistics["mismatch/pearson"]) == pytest.approx(-1.0, rel=1e-6)


def test_mismatch_statistics_on_agreement_are_exact():
    logprobs = -np.random.default_rng(0).exponential(size=(7, 13))
    statistics = d.mismatch_statistics(logprobs, logprobs, np.ones((7, 13), bool))
    assert float(statistics["mismatch/k1"]) == float(statistics["mismatch/k3"]) == 0.0
    assert float(statistics["mismatch/effective_sample_size"]) == 1.0
    assert float(statistics["mismatch/pearson"]) == pytest.approx(1.0, abs=1e-6)


def test_small_mismatch_is_not_rounding_noise():
    # d = +-1e-4: k3 = d^2 / 2 = 5e-9. exp(d) - 1 - d in float32 is a multiple of 6e-8: 0, or ten
    # times too much.
    rollout = np.full(1000, -0.5, np.float32)
    train = (rollout + np.where(np.arange(1000) % 2, 1e-4, -1e-4)).astype(np.float32)
    exact = np.mean(
        np.expm1(train.astype(np.float64) - rollout) - (train.astype(np.float64) - rollout)
    )
    statistics = d.mismatch_statistics(train, rollout, np.ones(1000, bool))
    assert float(statistics["mismatch/k3"]) == pytest.approx(exact, rel=1e-5)


def test_mismatch_statistics_edges():
    nan = np.array([np.nan, np.nan])
    for value in d.mismatch_statistics(nan, nan, np.zeros(2, bool)).values():
        assert float(value) == 0.0
    one = d.mismatch_statistics(
        np.array([LOG(0.5), np.nan]), np.array([LOG(0.25), np.nan]), np.array([True, False])
    )
    assert float(one["mismatch/effective_sample_size"]) == 1.0
    assert (
        float(one["mismatch/pearson"]) == 0.0
    )  # undefined for one token; rounding noise would give +-1
    assert float(one["mismatch/k1"]) == pytest.approx(-LOG(2), rel=1e-6)
    constant = d.mismatch_statistics(
        LOG(np.full(50, 0.3)), LOG(np.linspace(0.1, 0.9, 50)), np.ones(50, bool)
    )
    assert float(constant["mismatch/pearson"]) == 0.0
    # One token the engine thinks impossible: d = 20, weight e^20 against 1: ESS = 1 / 2, k3 = (e^20
    # - 21) / 2.
    overflow = d.mismatch_statistics(
        LOG([0.5, 0.5]), np.array([-np.inf, LOG(0.5)]), np.ones(2, bool)
    )
    assert float(overflow["mismatch/effective_sample_size"]) == pytest.approx(0.5, rel=1e-6)
    assert float(overflow["mismatch/k3"]) == pytest.approx((np.exp(20) - 21) / 2, rel=1e-6)
    # Probabilities near e^-60 whose squares underflow float32 still correlate.
    tiny = -60 + np.arange(10.0) / 10
    found = d.mismatch_statistics(tiny, tiny, np.ones(10, bool))
    assert float(found["mismatch/pearson"]) == pytest.approx(1.0, abs=1e-5)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"measure='kl'; must be one of 'diff', 'ratio', 'log'"):
        d.token_discrepancy(TRAIN, ROLLOUT, measure="kl", sided="two")
    with pytest.raises(ValueError, match=r"sided='both'"):
        d.token_discrepancy(TRAIN, ROLLOUT, measure="diff", sided="both")
    with pytest.raises(ValueError, match=r"rollout_logprobs \(2, 2\)"):
        d.mismatch_statistics(TRAIN, ROLLOUT[:, :2], MASK)
    with pytest.raises(ValueError, match=r"completion_index \(2,\)"):
        d.sequence_discrepancy(TRAIN, CompletionIndex(MASK, np.arange(2), 2))
    with pytest.raises(ValueError, match=r"tolerance=-0.1"):
        d.completions_over_tolerance(
            TRAIN, CompletionIndex(MASK, np.indices(MASK.shape)[0], 2), tolerance=-0.1
        )
