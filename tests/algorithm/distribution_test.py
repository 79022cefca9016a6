"""Measures of whole distributions against float64 sums over the vocabulary, and their bounds."""

import jax
import numpy as np
import pytest

from dcmdp_jax.algorithm.distribution import state_measures

STATES = 200
VOCAB = 50
_NAMES = (
    "total_variation",
    "kl_engine",
    "kl_trainer",
    "expected_discrepancy",
    "discrepancy_variance",
)


def _distributions(sharpness=3.0):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, sharpness, (STATES, VOCAB))
    other = logits + rng.normal(0, 0.3, logits.shape)
    return tuple(z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (logits, other))


def _exact(log_p, log_q, measure):
    """Sums over the whole vocabulary in float64."""
    p = np.exp(log_p)
    q = np.exp(log_q)
    delta = {"diff": np.abs(p - q), "ratio": np.abs(p / q - 1), "log": np.abs(log_p - log_q)}
    delta["logit"] = np.abs(log_p - np.log1p(-p) - (log_q - np.log1p(-q)))
    delta = delta[measure]
    expected = (q * delta).sum(-1)
    values = (
        np.abs(p - q).sum(-1) / 2,
        (q * (log_q - log_p)).sum(-1),
        (p * (log_p - log_q)).sum(-1),
        expected,
    )
    return dict(zip(_NAMES, (*values, (q * delta**2).sum(-1) - expected**2), strict=True))


def _measured(log_p, log_q, k, measure):
    order = np.argsort(-log_q, axis=-1)[:, :k]
    head = (np.take_along_axis(x, order, axis=-1).astype(np.float32) for x in (log_p, log_q))
    return _short(
        jax.jit(state_measures, static_argnames="measure")(
            *head, np.ones(order.shape, bool), measure=measure
        )
    )


def _short(measures):
    return {
        name.removeprefix("distribution/"): np.asarray(value, np.float64)
        for name, value in measures.items()
    }


@pytest.mark.parametrize("measure", ["diff", "ratio", "log", "logit"])
def test_of_the_whole_vocabulary_they_equal_float64_sums(measure):
    log_p, log_q = _distributions()
    found = _measured(log_p, log_q, VOCAB, measure)
    for name, exact in _exact(log_p, log_q, measure).items():
        np.testing.assert_allclose(found[name], exact, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(found["head_mass"], 1, atol=1e-6)


@pytest.mark.parametrize("measure", ["diff", "ratio", "log", "logit"])
@pytest.mark.parametrize("k", [1, 4, 16, 49])
def test_of_a_head_the_true_value_lies_between_value_and_bound(measure, k):
    log_p, log_q = _distributions()
    found = _measured(log_p, log_q, k, measure)
    for name, exact in list(_exact(log_p, log_q, measure).items())[:4]:
        assert (found[name] <= exact + 1e-6).all(), name
        assert (exact <= found[name] + found[f"{name}_bound"] + 1e-6).all(), name
    if k == 16:
        # What a head of most of the mass leaves out is small, as its bound is: not a bound that
        # anything meets.
        assert found["total_variation_bound"].mean() < 0.03
        assert (
            np.abs(
                found["total_variation"] - _exact(log_p, log_q, measure)["total_variation"]
            ).mean()
            < 2e-3
        )


def test_by_hand_two_tokens_and_a_tail():
    """The tail counts as one token, in which p and q may agree.

    p = (0.5, 0.3, 0.1, 0.1), q = (0.4, 0.4, 0.2, 0), head of two: both tails are 0.2.
    """
    log_p = np.log([[0.5, 0.3]])
    log_q = np.log([[0.4, 0.4]])
    found = _short(state_measures(log_p, log_q, np.ones((1, 2), bool)))
    assert found["total_variation"][0] == pytest.approx(0.1, abs=1e-6)  # truly 0.2
    assert found["total_variation_bound"][0] == pytest.approx(0.2, abs=1e-6)
    assert found["expected_discrepancy"][0] == pytest.approx(
        0.4 * 0.1 + 0.4 * 0.1, abs=1e-6
    )  # truly 0.1
    assert found["expected_discrepancy_bound"][0] == pytest.approx(0.2 * 0.2, abs=1e-6)
    assert found["kl_engine"][0] == pytest.approx(
        0.4 * np.log(0.4 / 0.5) + 0.4 * np.log(0.4 / 0.3), abs=1e-6
    )
    assert found["kl_engine_bound"][0] == pytest.approx(0.2 * 20, abs=1e-4)


def test_absent_entries_count_for_nothing():
    """An engine that samples from two tokens lists two: q has no tail, and p's is 0.2."""
    present = np.array([[True, True, False]])
    found = _short(state_measures(np.log([[0.5, 0.3, 1.0]]), np.log([[0.6, 0.4, 1.0]]), present))
    assert found["head_mass"][0] == pytest.approx(1, abs=1e-6)
    assert found["total_variation"][0] == pytest.approx(0.2, abs=2e-6)
    assert found["total_variation_bound"][0] == pytest.approx(0, abs=2e-6)
