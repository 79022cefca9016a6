"""The two parts of the gradient, by hand, and whatever the order and the grouping of rows."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from research.penalty_in_a_real_model import MEANS, add_gradients, by_length, grams, slopes_of


def test_slopes_by_hand():
    """Completions of 1 and 3 tokens, A = (2, -1), delta 0.5 in the first. Divided by 4 tokens, or
    by 2 |o_i|.
    """
    mask = np.array([[True, False, False], [True, True, True]])
    delta = np.where(mask, [[0.5], [0.0]], 0.0)
    lengths = np.array([1, 3])
    advantages = np.array([2.0, -1.0])
    plain, penalty = slopes_of(advantages, delta, mask, lengths, MEANS[0])
    np.testing.assert_allclose(plain, [[-1.0, 0, 0], [1 / 6, 1 / 6, 1 / 6]])
    np.testing.assert_allclose(penalty, [[0.1 * 0.5 / 2, 0, 0], [0, 0, 0]])
    plain, penalty = slopes_of(advantages, delta, mask, lengths, MEANS[1])
    np.testing.assert_allclose(plain, [[-0.5, 0, 0], [0.25, 0.25, 0.25]])
    np.testing.assert_allclose(penalty, [[0.1 * 0.5 / 4, 0, 0], [0, 0, 0]])


def test_rows_of_like_lengths_hold_every_completion_once():
    batch = {
        "prompts": [np.arange(n) for n in (3, 3, 20, 3)],
        "completions": [np.arange(n) for n in (9, 2, 8, 1)],
        "rollout": [np.full(n, -n, np.float32) for n in (9, 2, 8, 1)],
    }
    parts = list(by_length(batch, 2))
    assert [chosen.tolist() for _, chosen, _ in parts] == [[3, 1], [0, 2]]
    assert [rows.input_ids.shape[1] for rows, _, _ in parts] == [16, 32]
    for rows, chosen, rollout in parts:
        for place, each in enumerate(chosen):
            assert (
                rollout[place][rows.completion_mask[place]].tolist()
                == batch["rollout"][each].tolist()
            )


def test_gradients_add_up_over_parts():
    """f = w x: the gradient of sum(s x w) is sum(s x); parts (1, 2) and (3), slopes all 1 and all
    -2.
    """
    total = {"w": np.zeros((2, 1), np.float32)}
    add = functools.partial(add_gradients, lambda params, rows: params["w"] * rows)
    for rows in (jnp.array([1.0, 2.0]), jnp.array([3.0])):
        total = add(
            total,
            {"w": jnp.ones(1)},
            rows,
            jnp.stack([jnp.ones_like(rows), jnp.full_like(rows, -2.0)]),
        )
    assert np.asarray(total["w"]).ravel().tolist() == [6.0, -12.0]
    assert grams(total) == pytest.approx(np.array([[36.0, -72.0], [-72.0, 144.0]]))
