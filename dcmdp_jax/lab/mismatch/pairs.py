"""Sampled tokens with two log-probs each, statistics of their disagreement, and the budget c
recommended for it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


def probability_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|exp(a) - exp(b)| of two arrays of log-probs, in float64."""
    return np.abs(np.exp(a.astype(np.float64)) - np.exp(b.astype(np.float64)))


@dataclasses.dataclass(frozen=True)
class TokenPairs:
    """The tokens of N completions, one after another; n tokens in all.

    Attributes:
        token_ids: [n] int32.
        train_logprobs: [n] float32 nats, training stack.
        rollout_logprobs: [n] float32 nats, the engine that sampled.
        lengths: [N] int64, tokens of each completion; none is 0.
        entropies: [n] float32 nats, of the training stack's distribution at each token; None if not
            known.
        lags: [n] int32, how many training steps old the weights were that sampled the token; None
            if not known.
        states: [n, 10] float32, measures of each token's whole state (`measure_states`); None if
            not known.
    """

    token_ids: np.ndarray
    train_logprobs: np.ndarray
    rollout_logprobs: np.ndarray
    lengths: np.ndarray
    entropies: np.ndarray | None = None
    lags: np.ndarray | None = None
    states: np.ndarray | None = None

    def where(self, kept: np.ndarray) -> "TokenPairs":
        """The tokens of `kept`, [n] bool; a completion without any is dropped."""
        lengths = np.add.reduceat(kept, self.starts, dtype=np.int64)
        columns = {
            name: column
            for name, column in vars(self).items()
            if name != "lengths" and column is not None
        }
        return TokenPairs(
            lengths=lengths[lengths > 0], **{name: column[kept] for name, column in columns.items()}
        )

    @property
    def completion(self) -> np.ndarray:
        """[n] int64, the completion that each token belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def position(self) -> np.ndarray:
        """[n] int64, place of each token in its completion, from 0."""
        return np.arange(len(self.token_ids)) - np.repeat(self.starts, self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """[N] int64, index of the first token of each completion."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def log_ratio(self) -> np.ndarray:
        """[n] float64, log p_train - log p_rollout, clamped to [-20, 20] as `algorithm/stats.py`
        clamps it.
        """
        return np.clip(self.train_logprobs.astype(np.float64) - self.rollout_logprobs, -20.0, 20.0)

    @property
    def discrepancy(self) -> np.ndarray:
        """[n] float64, |p_train - p_rollout|."""
        return probability_difference(self.train_logprobs, self.rollout_logprobs)


def make_pairs(
    token_ids: Sequence[np.ndarray],
    train_logprobs: Sequence[np.ndarray],
    rollout_logprobs: Sequence[np.ndarray],
    *,
    entropies: Sequence[np.ndarray] | None = None,
    lags: Sequence[np.ndarray] | None = None,
    states: Sequence[np.ndarray] | None = None,
) -> TokenPairs:
    """Concatenate ragged completions, one array each.

    Raises:
        ValueError: if completions are missing, one is empty, or the lengths of its arrays differ.
    """
    lengths = np.array([len(ids) for ids in token_ids], np.int64)
    if not len(lengths) or not lengths.all():
        raise ValueError("token_ids: no completion, or an empty one")
    given = {"train_logprobs": train_logprobs, "rollout_logprobs": rollout_logprobs}
    optional = {"entropies": entropies, "lags": lags, "states": states}
    given |= {name: value for name, value in optional.items() if value is not None}
    for name, arrays in given.items():
        if [len(array) for array in arrays] != lengths.tolist():
            raise ValueError(f"{name}: lengths differ from token_ids")
    dtypes = {"lags": np.int32}
    flat = {
        name: np.concatenate(arrays).astype(dtypes.get(name, np.float32))
        for name, arrays in given.items()
    }
    return TokenPairs(np.concatenate(token_ids).astype(np.int32), lengths=lengths, **flat)


class Statistics(NamedTuple):
    """Mismatch over all tokens, p = training stack, q = engine, d = log p - log q clamped to [-20,
    20].

    Attributes:
        tokens, completions: how many.
        mean, p50, p99, max: statistics of |p - q|.
        k1: mean of -d: KL(q || p) if the tokens were sampled from q, unbiased, may be negative.
        k3: mean of e^d - 1 - d, the same KL, never negative.
        median_log_ratio: median of |d|, nats.
        pearson: correlation of p and q; 0 where either is constant.
        effective_sample_size: (sum w)^2 / (n sum w^2) with w = p / q, in (0, 1].
        displacement_mean: mean of eps = logit p - logit q. displacement_abs_mean and the quantiles
            are of |eps|. |p - q| is p (1 - p) |eps| to first order, so confidence shrinks it and
            not eps.
        completions_over: share of completions whose own mean |p - q| exceeds `tolerance`; NaN
            without one.
        tolerance: c, or NaN.
    """

    tokens: int
    completions: int
    mean: float
    p50: float
    p99: float
    max: float
    k1: float
    k3: float
    median_log_ratio: float
    pearson: float
    effective_sample_size: float
    displacement_mean: float
    displacement_abs_mean: float
    displacement_abs_p50: float
    displacement_abs_p95: float
    displacement_abs_p99: float
    completions_over: float
    tolerance: float


def mean_of(values: np.ndarray) -> float:
    """The mean; NaN of nothing."""
    return float(values.mean()) if len(values) else np.nan


def means_by_completion(pairs: TokenPairs) -> np.ndarray:
    """[N] float64, each completion's own mean |p - q|."""
    return np.add.reduceat(pairs.discrepancy, pairs.starts) / pairs.lengths


def measure(pairs: TokenPairs, tolerance: float | None = None) -> Statistics:
    """Compute the statistics as `algorithm.discrepancy` defines them (`mismatch_statistics`, ...),
    in float64.

    Args:
        pairs: the tokens.
        tolerance: c in units of |p - q|; a completion's mean of exactly c is within it.
    """
    delta = pairs.discrepancy
    d = pairs.log_ratio
    p50, p99 = np.quantile(delta, (0.5, 0.99))
    eps = _log_odds(pairs.train_logprobs) - _log_odds(pairs.rollout_logprobs)
    eps_p50, eps_p95, eps_p99 = np.quantile(np.abs(eps), (0.5, 0.95, 0.99))
    weights = np.exp(d - d.max())
    over = (
        float(np.mean(means_by_completion(pairs) > tolerance)) if tolerance is not None else np.nan
    )
    return Statistics(
        tokens=len(delta),
        completions=len(pairs.lengths),
        mean=float(delta.mean()),
        p50=float(p50),
        p99=float(p99),
        max=float(delta.max()),
        k1=float(-d.mean()),
        k3=float(np.mean(np.expm1(d) - d)),
        median_log_ratio=float(np.median(np.abs(d))),
        pearson=_pearson(
            *(np.exp(x, dtype=np.float64) for x in (pairs.train_logprobs, pairs.rollout_logprobs))
        ),
        effective_sample_size=float(weights.sum() ** 2 / (len(d) * (weights**2).sum())),
        displacement_mean=float(eps.mean()),
        displacement_abs_mean=float(np.abs(eps).mean()),
        displacement_abs_p50=float(eps_p50),
        displacement_abs_p95=float(eps_p95),
        displacement_abs_p99=float(eps_p99),
        completions_over=over,
        tolerance=np.nan if tolerance is None else tolerance,
    )


def _log_odds(logprobs: np.ndarray) -> np.ndarray:
    """[n] float64, log p - log(1 - p); p is at most 1 - 2^-24, the largest float32 below 1, so it
    stays finite.
    """
    x = np.clip(logprobs.astype(np.float64), -1e4, -(2.0**-24))
    return x - np.log(-np.expm1(x))


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    if x.min() == x.max() or y.min() == y.max():
        return 0.0
    return float(np.clip(np.corrcoef(x, y)[0, 1], -1.0, 1.0))


_FLOORS = 2.0


class Recommendation(NamedTuple):
    """A budget for the mean |p_train - p_rollout|.

    Attributes:
        tolerance: c; NaN if none is recommended.
        reasoning: why, in a sentence or two.
    """

    tolerance: float
    reasoning: str


def recommend(mean: float, floor: float | None, defect: str | None) -> Recommendation:
    """Recommend c from what two engines show today.

        c = max(BUDGET_ROOM mean, 2 floor), rounded up to two digits

    Ours. The paper tunes c and gives no rule. Just above today's mean the multiplier rests while
    the mismatch stays as it is, and rises when it grows by a quarter. A mean within the noise floor
    can't be lowered by any policy.

    Args:
        mean: mean |p - q| of the pair.
        floor: the larger of both engines' noise floors; None if not measured.
        defect: name of a cause that is to be settled first, or None.
    """
    # Pairs are read and measured without JAX, which the algorithm imports.
    from dcmdp_jax.algorithm.dual import BUDGET_ROOM

    if defect is not None:
        return Recommendation(
            math.nan,
            f"No tolerance c is recommended until this is fixed: {defect}. Fix it and measure "
            "again.",
        )
    if mean == 0 and not floor:
        return Recommendation(
            math.nan, "None: the two agree to the last bit, there is nothing to bound."
        )
    wanted = BUDGET_ROOM * mean
    least = _FLOORS * (floor or 0.0)
    value = max(wanted, least)
    scale = 10.0 ** (math.floor(math.log10(value)) - 1)
    value = math.ceil(value / scale - 1e-9) * scale
    said = "not measured" if floor is None else f"{floor:.3g}"
    why = (
        (
            f"{BUDGET_ROOM:g} times the mean of {mean:.3g}: the multiplier rests while the "
            "mismatch stays as it is, and rises when it grows by a quarter"
        )
        if wanted >= least
        else f"{_FLOORS:g} times the noise floor: no policy can go below the floor itself"
    )
    return Recommendation(value, f"c = {value:.2g} is {why}. Noise floor: {said}.")


STATE_MEASURES = {
    "total_variation": "total variation",
    "kl_engine": "KL(q || p), nats",
    "kl_trainer": "KL(p || q), nats",
    "expected_discrepancy": "expected |p - q|",
}
"""Name in `state_measures` without `distribution/` -> title. `TokenPairs.states` has these, each
before its bound.
"""
_ENTRIES = 1 << 16


def measure_states(
    ids: np.ndarray, train_logprobs: np.ndarray, rollout_logprobs: np.ndarray
) -> np.ndarray:
    """`state_measures` of T states, a few at a time in one shape.

    Args:
        ids: [T, k] int32, likeliest first, -1 where the engine has fewer.
        train_logprobs, rollout_logprobs: [T, k] nats.

    Returns:
        [T, 10] float32: each of `STATE_MEASURES` and its bound, the head's mass, and k.
    """
    names = [name for each in STATE_MEASURES for name in (each, f"{each}_bound")] + ["head_mass"]
    size = max(1, _ENTRIES // ids.shape[1])
    found = [np.zeros((0, len(names)), np.float32)]
    for start in range(0, len(ids), size):
        parts = [values[start : start + size] for values in (train_logprobs, rollout_logprobs, ids)]
        train, rollout, part = (np.pad(x, ((0, size - len(x)), (0, 0))) for x in parts)
        values = _program()(train, rollout, part >= 0)
        found.append(
            np.stack([values[f"distribution/{name}"] for name in names], axis=1)[: len(parts[0])]
        )
    return np.pad(np.concatenate(found), ((0, 0), (0, 1)), constant_values=ids.shape[1])


@functools.cache
def _program() -> Callable[..., dict[str, Any]]:
    # Recordings are read without JAX.
    import jax

    from dcmdp_jax.algorithm.distribution import state_measures

    return jax.jit(state_measures)
