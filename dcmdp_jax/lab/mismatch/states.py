"""How far two engines are apart in whole states, and how noisily the sampled tokens say so; see `state_measures`.

The engine's k likeliest tokens give the exact value of a state, within its bound. Everybody's metric has the sampled
token alone, whose term has that value as its mean under q:

    total variation        |r - 1| / 2        r = p / q of the sampled token
    KL(q || p)             -log r             (k1)
    KL(p || q)             r log r
    expected |p - q|       |p - q|
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dcmdp_jax.number_format import number, text_table

if TYPE_CHECKING:
    from dcmdp_jax.lab.mismatch.pairs import TokenPairs

MEASURES = {
    "total_variation": "total variation",
    "kl_engine": "KL(q || p), nats",
    "kl_trainer": "KL(p || q), nats",
    "expected_discrepancy": "expected |p - q|",
}
"""Name in `state_measures` without `distribution/` -> title. `TokenPairs.states` has these, each before its bound."""
_ENTRIES = 1 << 16


class StateMeasure(NamedTuple):
    """A measure of whole states and its estimate from sampled tokens; of the head's mass the exact value alone.

    Attributes:
        title: for people.
        exact: mean over the states.
        bound: how much larger the true mean can be.
        sampled: mean of the sampled tokens' terms.
        noise: standard error of `sampled` for the states given, sqrt(sum (term - exact)^2) / n.
    """

    title: str
    exact: float
    bound: float
    sampled: float
    noise: float


def measure_states(ids: np.ndarray, train_logprobs: np.ndarray, rollout_logprobs: np.ndarray) -> np.ndarray:
    """`state_measures` of T states, a few at a time in one shape.

    Args:
        ids: [T, k] int32, likeliest first, -1 where the engine has fewer.
        train_logprobs, rollout_logprobs: [T, k] nats.

    Returns:
        [T, 10] float32: each of `MEASURES` and its bound, the head's mass, and k.
    """
    names = [name for each in MEASURES for name in (each, f"{each}_bound")] + ["head_mass"]
    size, found = max(1, _ENTRIES // ids.shape[1]), [np.zeros((0, len(names)), np.float32)]
    for start in range(0, len(ids), size):
        parts = [values[start : start + size] for values in (train_logprobs, rollout_logprobs, ids)]
        train, rollout, part = (np.pad(x, ((0, size - len(x)), (0, 0))) for x in parts)
        values = _program()(train, rollout, part >= 0)
        found.append(np.stack([values[f"distribution/{name}"] for name in names], axis=1)[: len(parts[0])])
    return np.pad(np.concatenate(found), ((0, 0), (0, 1)), constant_values=ids.shape[1])


@functools.cache
def _program() -> Callable[..., dict[str, Any]]:
    # Recordings are read without JAX.
    import jax

    from dcmdp_jax.algorithm.distribution import state_measures

    return jax.jit(state_measures)


def compare_states(pairs: TokenPairs) -> tuple[StateMeasure, ...]:
    """Each measure over the states of sampled tokens, with its estimate; empty without likeliest tokens."""
    if pairs.states is None:
        return ()
    log_ratio, states = pairs.log_ratio, pairs.states.astype(np.float64)
    ratio = np.exp(log_ratio)
    terms = np.abs(ratio - 1) / 2, -log_ratio, ratio * log_ratio, pairs.discrepancy
    found = []
    for place, (title, term) in enumerate(zip(MEASURES.values(), terms, strict=True)):
        exact, bound = states[:, 2 * place], states[:, 2 * place + 1]
        noise = float(np.sqrt(np.sum((term - exact) ** 2)) / len(term))
        found.append(StateMeasure(title, float(exact.mean()), float(bound.mean()), float(term.mean()), noise))
    mass, count = states[:, -2:].mean(axis=0)
    return (*found, StateMeasure(f"mass of the engine's {count:g} likeliest", float(mass), *(math.nan,) * 3))


def state_lines(states: Sequence[StateMeasure]) -> list[str]:
    """A table for a terminal; no line without states."""
    if not states:
        return []
    rows = [[title, *(number(x, ".4g") for x in values)] for title, *values in states]
    return text_table([["  whole states", "exact", "at most more", "sampled tokens say", "+-"], *rows])
