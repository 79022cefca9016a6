"""Score centering against the published formula in float64.

Also its mean under the engine's distribution, and the drift.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm import corrections
from dcmdp_jax.algorithm.distribution import Head, centering_loss
from dcmdp_jax.algorithm.losses import log_ratio_squared, policy_loss, surrogate
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.algorithm.trust_regions import TRUST_REGIONS

STATES = 40
VOCAB = 12


def _log_softmax(z):
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def _problem(seed=0, noise=0.6):
    """Trainer logits, engine log-probs, sampled tokens and advantages of `STATES` states."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (STATES, VOCAB))
    log_q = _log_softmax(logits + rng.normal(0, noise, logits.shape))
    sampled = np.array([rng.choice(VOCAB, p=np.exp(x)) for x in log_q])
    return logits, log_q, sampled, rng.normal(0, 1, STATES)


@functools.partial(jax.jit, static_argnames=("filters", "loss", "anchor", "level"))
def _gradient(logits, old, log_q, ids, sampled, advantages, filters, loss, anchor, level):
    """Gradient of sum_t (f l_t - E_q[f l]) in the logits [S, V]; all states are one completion."""

    def at(table, ids):
        return jnp.take_along_axis(table, ids, -1)[None]

    def objective(logits):
        log_p = jax.nn.log_softmax(logits)
        train, before, rollout = (at(x, sampled[:, None])[..., 0] for x in (log_p, old, log_q))
        tokens = Tokens(
            train_logprobs=train,
            old_logprobs=before,
            start_logprobs=before,
            rollout_logprobs=rollout,
            advantages=advantages[None],
            discrepancy=jnp.zeros(train.shape),
            completion_mask=train <= 0,
            completion_index=jnp.zeros(train.shape, jnp.int32),
            num_completions=1,
            multiplier=jnp.float32(0),
            tolerance=jnp.float32(0),
            anchor_logprobs=before if anchor == "old_logprobs" else rollout,
        )
        head = Head(
            ids=ids[None],
            rollout_logprobs=at(log_q, ids),
            train_logprobs=at(log_p, ids),
            old_logprobs=at(old, ids),
            start_logprobs=at(old, ids),
        )
        ones = jnp.ones(train.shape)
        weights = ones
        if filters:
            corrected = corrections.chain(tokens, filters)[0]
            weights = jnp.where(corrected.keep, corrected.weights, 0.0)
        plain, _ = policy_loss(tokens, weights, loss=loss, ratio_level=level)
        return plain.total - centering_loss(
            tokens,
            ones,
            head,
            anchor=anchor,
            loss=loss,
            corrections=filters,
            ratio_level=level,
        )

    return jax.grad(objective)(logits)


def _ours(
    logits,
    log_q,
    sampled,
    advantages,
    k,
    *,
    filters=(),
    loss=surrogate,
    anchor="old_logprobs",
    old=None,
    level="token",
):
    """`_gradient` with the top-k tokens of q; `old` are the logits of the batch's weights."""
    if old is None:
        old = logits
    gradient = _gradient(
        np.asarray(logits, np.float32),
        np.asarray(_log_softmax(old), np.float32),
        np.asarray(log_q, np.float32),
        np.argsort(-log_q, axis=-1)[:, :k].astype(np.int32),
        np.asarray(sampled, np.int32),
        np.asarray(advantages, np.float32),
        filters=filters,
        loss=loss,
        anchor=anchor,
        level=level,
    )
    return np.asarray(gradient, np.float64)


def _published(logits, log_q, sampled, advantages, k, weight):
    """The centered gradient of arXiv:2609.20807 in float64.

    -A (f(r_y) s_y - sum_H (q f(p / q) - alpha p) s), s = onehot - p.
    """
    p = np.exp(_log_softmax(logits))
    q = np.exp(log_q)
    gradient = np.zeros_like(p)
    for t, (y, a) in enumerate(zip(sampled, advantages, strict=True)):
        head = np.argsort(-q[t])[:k]
        scores = np.eye(VOCAB) - p[t]
        rho = max(1 - q[t, head].sum(), 0) / max(1 - p[t, head].sum(), 1e-6)
        alpha = rho * weight(1 / rho) if rho else 0.0
        mean = sum(
            (q[t, j] * weight(p[t, j] / q[t, j]) - alpha * p[t, j]) * scores[j] for j in head
        )
        gradient[t] = -a * (weight(p[t, y] / q[t, y]) * scores[y] - mean)
    return gradient


_WEIGHTS = {
    "none": ((), lambda r: 1.0),
    "tis": ((functools.partial(corrections.tis, high=1.3),), lambda r: min(r, 1.3)),
    "icepop": (
        (functools.partial(corrections.icepop, low=0.7, high=1.4),),
        lambda r: r if 0.7 <= r <= 1.4 else 0.0,
    ),
}


@pytest.mark.parametrize("name", _WEIGHTS)
@pytest.mark.parametrize("k", [1, 3, 8, VOCAB])
def test_the_gradient_is_that_of_the_published_formula(name, k):
    filters, weight = _WEIGHTS[name]
    problem = _problem()
    np.testing.assert_allclose(
        _ours(*problem, k, filters=filters), _published(*problem, k, weight), atol=1e-5
    )


def test_by_hand_with_two_tokens():
    """Centering by hand: the mean score under q is taken off.

    p = (0.6, 0.4), q = (0.5, 0.5): E_q[s] = q - p = (-0.1, 0.1). Token 0, A = 2: -2 ((0.4, -0.4) -
    (-0.1, 0.1)).
    """
    log_p = np.log([[0.6, 0.4]] * STATES)
    log_q = np.log([[0.5, 0.5]] * STATES)
    found = _ours(log_p, log_q, np.zeros(STATES, int), np.full(STATES, 2.0), 2)
    np.testing.assert_allclose(found, [[-1.0, 1.0]] * STATES, atol=1e-6)


def _mean_under_q(advantages=None, noise=0.6, **options):
    """The expectation over sampled tokens of each state's gradient, with k = V."""
    logits, log_q, _, _ = _problem(noise=noise)
    if advantages is None:
        advantages = np.ones((STATES, VOCAB))
    mean = 0.0
    for y in range(VOCAB):
        sampled = np.full(STATES, y)
        gradient = _ours(logits, log_q, sampled, advantages[:, y], VOCAB, **options)
        mean += np.exp(log_q[:, y])[:, None] * gradient
    return mean


_LOSSES = {
    **{
        name: functools.partial(surrogate, trust_region=region)
        for name, region in TRUST_REGIONS.items()
        if name != "vespo"
    },
    "a square": lambda tokens: (
        (tokens.train_logprobs - tokens.rollout_logprobs) ** 2 * tokens.advantages
    ),
}


@pytest.mark.parametrize("filters", ["none", "icepop"])
@pytest.mark.parametrize("anchor", ["old_logprobs", "rollout_logprobs"])
@pytest.mark.parametrize("loss", _LOSSES)
def test_of_every_loss_the_mean_score_under_the_engine_is_nothing(loss, anchor, filters):
    """Where A does not depend on the token nothing is learned, whatever the loss's weights.

    The old policy is another one, so that trust regions bite.
    """
    old = _problem()[0] + np.random.default_rng(3).normal(0, 0.4, (STATES, VOCAB))
    mean = _mean_under_q(filters=_WEIGHTS[filters][0], loss=_LOSSES[loss], anchor=anchor, old=old)
    assert np.abs(mean).max() < 3e-5


def test_a_term_beside_the_advantage_is_not_centred():
    """What is left of the mean is the gradient of tau (log p / q)^2.

    It is 2 tau sum_y q_y log(p_y / q_y) (e_y - p).
    """
    logits, log_q, _, _ = _problem()
    log_p = _log_softmax(logits)
    slopes = 2 * 0.1 * np.exp(log_q) * (log_p - log_q)
    expected = slopes - slopes.sum(-1, keepdims=True) * np.exp(log_p)
    found = _mean_under_q(loss=functools.partial(log_ratio_squared, tau=0.1))
    np.testing.assert_allclose(found, expected, atol=3e-5)


def test_of_a_completions_ratio_too():
    """Each token's ratio is the completion's but for its gradient; its mean score is taken off."""
    logits, log_q, sampled, advantages = _problem()
    old = logits + np.random.default_rng(3).normal(0, 0.1, logits.shape)
    found = _ours(
        logits, log_q, sampled, advantages, VOCAB, old=old, level="sequence", loss=_LOSSES["drpo"]
    )
    assert np.isfinite(found).all()
    p = np.exp(_log_softmax(logits))
    q = np.exp(log_q)
    change = (_log_softmax(logits) - _log_softmax(old))[np.arange(STATES), sampled]
    loss = functools.partial(
        surrogate, trust_region=lambda tokens: TRUST_REGIONS["clip"](tokens, low=0.99, high=9.0)
    )
    found = _ours(logits, log_q, sampled, advantages, VOCAB, old=old, level="sequence", loss=loss)
    scores = np.eye(VOCAB)[sampled] - p - (q - p)
    np.testing.assert_allclose(
        found, -advantages[:, None] * np.exp(change.mean()) * scores, atol=2e-5
    )


def test_with_equal_engines_the_expected_gradient_is_the_plain_one():
    advantages = np.random.default_rng(4).normal(0, 1, (STATES, VOCAB))
    p = np.exp(_log_softmax(_problem()[0]))
    plain = -p * (advantages - (p * advantages).sum(-1, keepdims=True))
    np.testing.assert_allclose(_mean_under_q(advantages, noise=0.0), plain, atol=1e-5)


def test_without_it_a_policy_drifts_to_its_engines_bias():
    """An engine with biased logits, synced at each step: with A = 1 everywhere nothing is learned.

    Plain: E[dz] = q - p takes part of the bias in each step, the engine takes it over, and it does
    not end. Centred by the whole vocabulary nothing moves; a head of 8 of the 12 tokens leaves what
    the tail's model of q misses.
    """
    rng = np.random.default_rng(0)
    bias = rng.normal(0, 0.3, VOCAB)
    start = rng.normal(0, 1, VOCAB)

    def moved(k):
        logits = start
        for _ in range(400):
            q = np.exp(_log_softmax(logits + bias))
            gradient = np.exp(_log_softmax(logits)) - q
            if k:
                # Row y has sampled y; A weighs it by q.
                rows = np.tile(logits, (VOCAB, 1))
                rows_q = np.tile(np.log(q), (VOCAB, 1))
                gradient = _ours(rows, rows_q, np.arange(VOCAB), q, k).sum(0)
            logits = logits - 0.5 * gradient
        return np.abs(np.exp(_log_softmax(logits)) - np.exp(_log_softmax(start))).sum() / 2

    plain = moved(0)
    head = moved(8)
    whole = moved(VOCAB)
    assert plain > 0.5 and head < 0.5 * plain and whole < 1e-4, (plain, head, whole)
