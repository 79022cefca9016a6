"""Penalties of a state's discrepancy by hand, against torch, and beside the paper's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from dcmdp_jax.algorithm.distribution import Head
from dcmdp_jax.algorithm.penalties import STATE_PENALTIES, penalty_length, penalty_loss
from dcmdp_jax.algorithm.remedies import Tokens
from research.theory_tables import (
    discrepancy_slope,
    penalty_direction,
    random_states,
    state_direction,
)

try:
    import torch
except ImportError:  # the extra `test` has none
    torch = None
_NEEDS_TORCH = pytest.mark.skipif(torch is None, reason="torch is in the development extra")


def _loss(logits, log_q, ids, penalty, multiplier=1.0, weights=None):
    """The penalty of states with logits [S, V] and the engine's head [S, k]."""
    log_p = jax.nn.log_softmax(logits)
    at = lambda table: jnp.take_along_axis(table, ids, -1)[None]  # noqa: E731
    ones = jnp.ones((1, len(logits)))
    head = Head(ids[None], at(log_q), at(log_p), at(log_p), at(log_p))
    tokens = Tokens(completion_mask=ones > 0, multiplier=jnp.float32(multiplier))
    return penalty_loss(tokens, ones if weights is None else weights, head, penalty)


def _whole(policy, engine):
    """Arguments of `_loss`, the head being the vocabulary."""
    ids = jnp.tile(jnp.arange(policy.shape[-1]), (len(policy), 1))
    return jnp.asarray(np.log(policy), jnp.float32), jnp.asarray(np.log(engine), jnp.float32), ids


def test_two_actions_by_hand():
    # p = (0.6, 0.4), q = (0.5, 0.5), lambda = 3. dp_1 / dz_1 = 0.24; KL: p_1 - q_1; 0.5 log(5/6) +
    # 0.5 log(5/4).
    arguments = _whole(np.array([[0.6, 0.4]]), np.array([[0.5, 0.5]]))
    kl = 0.5 * np.log(5 / 6) + 0.5 * np.log(5 / 4)
    for penalty, value, slope in (
        ("state_tv", 0.1, 0.24),
        ("state_kl", kl, 0.1),
        ("state_delta", 0.1, 0.24),
    ):
        found, gradient = jax.value_and_grad(_loss)(*arguments, penalty, 3.0)
        assert float(found) == pytest.approx(3 * value, abs=2e-6), penalty
        np.testing.assert_allclose(gradient, [[3 * slope, -3 * slope]], atol=2e-6)


@pytest.mark.parametrize("absent", [0, 30])
@pytest.mark.parametrize(
    ("penalty", "length"),
    [
        # p = (0.6, 0.3) and a tail of 0.1, q = (0.5, 0.2) and 0.3. The slopes in log p are p sign(p
        # - q) / 2 = (0.3, 0.15, -0.05), together 0.4; less p times that (0.06, 0.03, -0.09).
        ("state_tv", 0.09),
        ("state_kl", 0.2),  # slopes -q; p - q = (0.1, 0.1, -0.2)
        ("state_delta", 0.102),  # slopes p q sign(p - q) = (0.3, 0.06, -0.03)
    ],
)
def test_the_length_of_a_penalty_by_hand_does_not_depend_on_tokens_that_the_engine_lacks(
    penalty, length, absent
):
    def padded(values, filling=0.0):
        return jnp.asarray([[[*values, *[filling] * absent]]])

    train = padded(np.log([0.6, 0.3]))
    rollout = padded(np.log([0.5, 0.2]))
    head = Head(padded([4, 7], -1).astype(int), rollout, train, train, train)
    mask = np.ones((1, 1), bool)
    assert float(penalty_length(head, mask, penalty)[0, 0]) == pytest.approx(length, rel=1e-5)


@_NEEDS_TORCH
@pytest.mark.parametrize("k", [5, 12])
@pytest.mark.parametrize("penalty", STATE_PENALTIES)
def test_value_and_gradient_over_a_head_and_its_tail_are_torchs(penalty, k):
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (30, 12))
    weights = rng.choice([0.0, 0.5, 2.0], (1, 30))
    log_q = np.log(softmax(logits + rng.normal(0, 0.6, logits.shape), axis=-1))
    ids = np.argsort(-log_q, axis=-1)[:, :k]
    float32 = (jnp.asarray(x, jnp.float32) for x in (logits, log_q))
    value, gradient = jax.value_and_grad(_loss)(*float32, jnp.asarray(ids), penalty, 0.7, weights)
    z = torch.tensor(logits, requires_grad=True)
    order = torch.tensor(np.argsort(-log_q, axis=-1))
    p, q = (x.gather(-1, order) for x in (torch.softmax(z, -1), torch.tensor(np.exp(log_q))))
    if k < 12:
        p, q = (torch.cat([x[:, :k], x[:, k:].sum(-1, keepdim=True)], -1) for x in (p, q))
    state = {
        "state_tv": (p - q).abs().sum(-1) / 2,
        "state_kl": (q * (q / p).log()).sum(-1),
        "state_delta": (q * (p - q).abs()).sum(-1),
    }[penalty]
    total = 0.7 * (torch.tensor(weights[0]) * state).sum()
    total.backward()
    assert float(value) == pytest.approx(total.item(), rel=1e-4)
    np.testing.assert_allclose(gradient, z.grad, atol=3e-6)


@pytest.mark.parametrize("penalty", STATE_PENALTIES)
def test_it_falls_where_the_papers_penalty_rises(penalty):
    """The paper's penalty moves D up by 2 y (1 - y) (y - x)^2 and these lower it.

    Two actions; the engine stays.
    """
    policy, engine = random_states(1.0, states=500, actions=2)
    closed = state_direction(policy, engine, penalty)
    ours = -np.asarray(jax.grad(_loss)(*_whole(policy, engine), penalty))
    np.testing.assert_allclose(ours, closed, atol=1e-5)
    y = policy[:, 0]
    x = engine[:, 0]
    own = {"state_kl": np.abs(x - y), "state_tv": y * (1 - y), "state_delta": y * (1 - y)}[penalty]
    slope = discrepancy_slope(policy, engine, closed, follows=False)
    np.testing.assert_allclose(
        slope, -2 * y * (1 - y) * own, rtol=1e-9, atol=1e-15
    )  # z_1 and z_2 move by own each
    assert (slope < 0).all() and (
        discrepancy_slope(policy, engine, penalty_direction(policy, engine), follows=False) > 0
    ).all()
