"""Does the token's charge descend the discrepancy? One state, every action, exact sums and derivatives in float64.

Logits z, trainer p = softmax(z), engine q, delta_a = |p_a - q_a|. What the discrepancy is, and where it falls fastest:

    D = sum_a q_a delta_a = E_{a~q}[delta_a]

The charge moves z by its expected score-function term over the engine's samples, delta being a constant:

    v = E_{a~q}[-delta_a grad_z log p_a] = -(q delta - (sum_b q_b delta_b) p)
      = -sum_a (q_a / p_a) delta_a grad_z p_a

v is the gradient of -sum_a [q_a delta_a] log p_a with the bracket held, and not that of -D: it leaves out what delta_a
itself does as p moves, and weighs by q / p what the policy does. (Over several tokens it leaves out, too, what a token
does to the discrepancy of those after it; see `way_out`.) Along a direction u of the logits

    dp = p (u - <p, u>),    dq = 0 (the engine stays) or q (u - <q, u>) (its logits stay z + a constant)
    dD = sum_a dq_a delta_a + q_a sign(p_a - q_a) (dp_a - dq_a)

Two actions, the engine stays: delta_1 = delta_2 = |y - x| with y = p_1 and x = q_1, v_1 - v_2 = -2 delta (x - y), and y
moves by y (1 - y) (v_1 - v_2), away from x, whatever x and y: D never falls.
"""

from __future__ import annotations

import numpy as np
from scipy.special import softmax

ACTIONS, SPREAD = 8, 2.0
"""Of a random state: its actions, and the standard deviation of its logits, which leaves it an entropy of 1.2 nats."""


def charge_direction(policy: np.ndarray, engine: np.ndarray) -> np.ndarray:
    """v of the token's charge at lambda 1, [..., K] of p and q [..., K]."""
    charged = engine * np.abs(policy - engine)
    return charged.sum(axis=-1, keepdims=True) * policy - charged


def discrepancy_slope(policy: np.ndarray, engine: np.ndarray, direction: np.ndarray, *, follows: bool) -> np.ndarray:
    """dD along a direction of the trainer's logits, [...]; `follows`: the engine's logits move with them."""

    def moved(p: np.ndarray) -> np.ndarray:
        return p * (direction - np.sum(p * direction, axis=-1, keepdims=True))

    dq = moved(engine) if follows else np.zeros_like(engine)
    apart = policy - engine
    return np.sum(dq * np.abs(apart) + engine * np.sign(apart) * (moved(policy) - dq), axis=-1)


def random_states(noise: float, *, states: int, actions: int = ACTIONS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """p and q [states, actions]: logits SPREAD N(0, 1), the engine's with noise N(0, 1) more on each."""
    rng = np.random.default_rng(seed)
    logits, shift = rng.normal(size=(2, states, actions))
    return softmax(SPREAD * logits, axis=-1), softmax(SPREAD * logits + noise * shift, axis=-1)


def falling_share(noise: float, *, follows: bool, states: int = 4000, actions: int = ACTIONS) -> float:
    """Share of random states in which the token's charge lowers D, to first order."""
    policy, engine = random_states(noise, states=states, actions=actions)
    slope = discrepancy_slope(policy, engine, charge_direction(policy, engine), follows=follows)
    return float(np.mean(slope < 0))
