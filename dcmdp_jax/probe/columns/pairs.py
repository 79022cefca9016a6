"""Sampled tokens with two log-probs each, statistics of their mismatch, and a tolerance c."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Ragged = Sequence[np.ndarray]
"""Token ids or values of tokens: one array for each completion, or prompt."""


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

    def where(self, mask: np.ndarray) -> "TokenPairs":
        """The tokens of `mask`, [n] bool; a completion without any is dropped."""
        lengths = np.add.reduceat(mask, self.starts, dtype=np.int64)
        return TokenPairs(
            token_ids=self.token_ids[mask],
            train_logprobs=self.train_logprobs[mask],
            rollout_logprobs=self.rollout_logprobs[mask],
            lengths=lengths[lengths > 0],
            entropies=None if self.entropies is None else self.entropies[mask],
            lags=None if self.lags is None else self.lags[mask],
            states=None if self.states is None else self.states[mask],
        )

    @property
    def completion(self) -> np.ndarray:
        """[n] int64, the completion that each token belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def position(self) -> np.ndarray:
        """[n] int64, place of each token in its completion, from 0."""
        return np.arange(len(self.token_ids)) - np.repeat(self.starts, self.lengths)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """[N] int64, index of the first token of each completion."""
        return np.cumsum(self.lengths) - self.lengths

    def span(self, row: int) -> slice:
        """The tokens of a completion."""
        return slice(self.starts[row], self.starts[row] + self.lengths[row])

    @property
    def log_ratio(self) -> np.ndarray:
        """[n] float64, log p - log q, clamped to [-20, 20] as in `algorithm/stats.py`."""
        return np.clip(self.train_logprobs.astype(np.float64) - self.rollout_logprobs, -20.0, 20.0)

    @functools.cached_property
    def train_probs(self) -> np.ndarray:
        """[n] float64, p_train."""
        return np.exp(self.train_logprobs, dtype=np.float64)

    @functools.cached_property
    def rollout_probs(self) -> np.ndarray:
        """[n] float64, p_rollout."""
        return np.exp(self.rollout_logprobs, dtype=np.float64)

    @property
    def discrepancy(self) -> np.ndarray:
        """[n] float64, |p_train - p_rollout|."""
        return np.abs(self.train_probs - self.rollout_probs)


def make_pairs(
    token_ids: Ragged,
    train_logprobs: Ragged,
    rollout_logprobs: Ragged,
    *,
    entropies: Ragged | None = None,
    lags: Ragged | None = None,
    states: Ragged | None = None,
) -> TokenPairs:
    """Concatenate ragged completions, one array each.

    Raises:
        ValueError: if completions are missing, one is empty, or the lengths of its arrays differ.
    """
    lengths = np.array([len(ids) for ids in token_ids], np.int64)
    if not len(lengths) or not lengths.all():
        raise ValueError("token_ids: no completion, or an empty one")

    def column(name: str, arrays: Ragged | None, dtype: type = np.float32) -> np.ndarray | None:
        if arrays is None:
            return None
        if [len(array) for array in arrays] != lengths.tolist():
            raise ValueError(f"{name}: lengths differ from token_ids")
        return np.concatenate(arrays).astype(dtype)

    return TokenPairs(
        token_ids=column("token_ids", token_ids, np.int32),
        train_logprobs=column("train_logprobs", train_logprobs),
        rollout_logprobs=column("rollout_logprobs", rollout_logprobs),
        lengths=lengths,
        entropies=column("entropies", entropies),
        lags=column("lags", lags, np.int32),
        states=column("states", states),
    )


# Significance.

CERTAIN = 3.5
"""Standard errors; chance exceeds them once in 4,300 times."""
LEAST_DEVIATION = 0.003
"""Nats, or units of p / q. A mean that is less away from a value counts as equal to it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenMean:
    """A mean over tokens, its standard error clustered by completion; NaN if not measured.

    Attributes:
        mean: the estimate.
        error: sqrt(C / (C - 1) sum_c (sum_t (x - mean))^2) / tokens over C completions.
        completions: C.
    """

    mean: float
    error: float
    completions: int = 1000

    @property
    def margin(self) -> float:
        """3.5 standard errors; for few completions the quantile of Student's t that is as rare."""
        z = CERTAIN
        df = max(self.completions - 1, 1)
        first = (z**2 + 1) / 4
        second = (5 * z**4 + 16 * z**2 + 3) / 96
        third = (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / 384
        correction = 1 + first / df + second / df**2 + third / df**3
        return z * self.error * correction

    def above(self, value: float, by: float = LEAST_DEVIATION) -> bool:
        """Above `value` by `by` and the margin."""
        return self.mean - self.margin > value + by

    def below(self, value: float, by: float = LEAST_DEVIATION) -> bool:
        """Below `value` by `by` and the margin."""
        return self.mean + self.margin < value - by

    def differs(self, value: float, by: float = LEAST_DEVIATION) -> bool:
        """Above or below `value`."""
        return self.above(value, by) or self.below(value, by)

    def __str__(self) -> str:
        return f"{self.mean:.3f} +- {self.error:.3f}"


UNKNOWN = TokenMean(mean=np.nan, error=np.nan)


def pearson(x: np.ndarray, y: np.ndarray, fewest: int = 3) -> float:
    """Pearson's correlation, in float64; 0 for a constant or fewer than `fewest` values."""
    if len(x) >= fewest and x.min() < x.max() and y.min() < y.max():
        return np.corrcoef(x, y)[0, 1]
    return 0.0


def correlation_at(pairs: TokenPairs, tokens: np.ndarray | slice) -> float:
    """Correlation of log p and log q over some tokens."""
    return pearson(pairs.train_logprobs[tokens], pairs.rollout_logprobs[tokens])


def token_mean(values: np.ndarray, rows: np.ndarray) -> TokenMean:
    """Mean over tokens, its error by the sums of each completion.

    Args:
        values: [n] of the tokens.
        rows: [n] int, the completion of each.
    """
    mean = float(values.mean())
    sums = np.bincount(rows, values - mean)
    count = len(np.unique(rows))
    error = np.inf
    if count > 1:
        variance = count / (count - 1) * (sums @ sums)
        error = np.sqrt(variance) / len(values)
    return TokenMean(mean=mean, error=error, completions=count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """Mismatch over all tokens: p the training stack's, q the engine's, d the clamped log-ratio.

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
    if len(values):
        return values.mean()
    return np.nan


def means_by_completion(pairs: TokenPairs) -> np.ndarray:
    """[N] float64, each completion's own mean |p - q|."""
    return np.add.reduceat(pairs.discrepancy, pairs.starts) / pairs.lengths


def measure(pairs: TokenPairs, tolerance: float | None = None) -> Statistics:
    """Compute the statistics in float64, as `algorithm.discrepancy` defines them.

    Args:
        pairs: the tokens.
        tolerance: c in units of |p - q|; a completion's mean of exactly c is within it.
    """
    delta = pairs.discrepancy
    log_ratio = pairs.log_ratio
    weights = np.exp(log_ratio - log_ratio.max())
    sample_size = weights.sum() ** 2 / (len(log_ratio) * (weights**2).sum())
    p50, p99 = np.quantile(delta, (0.5, 0.99))
    displacement = _log_odds(pairs.train_logprobs) - _log_odds(pairs.rollout_logprobs)
    size = np.abs(displacement)
    size_p50, size_p95, size_p99 = np.quantile(size, (0.5, 0.95, 0.99))

    if tolerance is None:
        tolerance = completions_over = np.nan
    else:
        completions_over = np.mean(means_by_completion(pairs) > tolerance)
    return Statistics(
        tokens=len(delta),
        completions=len(pairs.lengths),
        mean=delta.mean(),
        p50=p50,
        p99=p99,
        max=delta.max(),
        k1=-log_ratio.mean(),
        k3=np.mean(np.expm1(log_ratio) - log_ratio),
        median_log_ratio=np.median(np.abs(log_ratio)),
        pearson=pearson(pairs.train_probs, pairs.rollout_probs, fewest=2),
        effective_sample_size=sample_size,
        displacement_mean=displacement.mean(),
        displacement_abs_mean=size.mean(),
        displacement_abs_p50=size_p50,
        displacement_abs_p95=size_p95,
        displacement_abs_p99=size_p99,
        completions_over=completions_over,
        tolerance=tolerance,
    )


def _log_odds(logprobs: np.ndarray) -> np.ndarray:
    """[n] float64, log p - log(1 - p), finite: p is at most 1 - 2^-24, float32's last below 1."""
    x = np.clip(logprobs.astype(np.float64), -1e4, -(2.0**-24))
    return x - np.log(-np.expm1(x))


_FLOORS = 2.0
"""Least c in multiples of the noise floor, below which no policy can go."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A tolerance c for the mean |p_train - p_rollout|.

    Attributes:
        tolerance: c; NaN if none is recommended.
        reasoning: why, in a sentence or two.
    """

    tolerance: float
    reasoning: str


def recommend(mean: float, floor: float | None, defect: str | None) -> Recommendation:
    """Recommend c from what two engines show today.

        c = max(BUDGET_ROOM mean, 2 floor), rounded up to two digits

    Ours. The paper tunes c and gives no rule. Just above today's mean lambda falls to 0 while the
    mismatch stays as it is, and rises when it grows by a quarter. A mean within the noise floor
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
            tolerance=math.nan,
            reasoning=f"No tolerance c is recommended until this is fixed: {defect}. Fix it and "
            "measure again.",
        )
    if mean == 0 and not floor:
        return Recommendation(
            tolerance=math.nan,
            reasoning="No tolerance c is needed: the two agree to the last bit.",
        )

    by_mean = BUDGET_ROOM * mean
    by_floor = _FLOORS * (floor or 0.0)
    if by_mean >= by_floor:
        why = (
            f"{BUDGET_ROOM:g} times the mean of {mean:.3g}: lambda falls to 0 while the mismatch "
            "stays as it is, and rises when it grows by a quarter"
        )
    else:
        why = f"{_FLOORS:g} times the noise floor: no policy can go below the floor itself"

    # `unit` is 1 in the second digit. Without the 1e-9, an error of the division could round a
    # number of two digits up.
    unrounded = max(by_mean, by_floor)
    unit = 10.0 ** (math.floor(math.log10(unrounded)) - 1)
    tolerance = math.ceil(unrounded / unit - 1e-9) * unit
    floor_text = "not measured" if floor is None else f"{floor:.3g}"
    return Recommendation(
        tolerance=tolerance, reasoning=f"c = {tolerance:.2g} is {why}. Noise floor: {floor_text}."
    )


STATE_MEASURES = {
    "total_variation": "total variation",
    "kl_engine": "KL(q || p), nats",
    "kl_trainer": "KL(p || q), nats",
    "expected_discrepancy": "expected |p - q|",
}
"""Name in `state_measures` without `distribution/` -> title; ordered as `TokenPairs.states`."""
_ENTRIES = 1 << 16
"""Listed tokens of the states in one call: 256 KiB for each float32 array."""


def measure_states(
    ids: np.ndarray, train_logprobs: np.ndarray, rollout_logprobs: np.ndarray
) -> np.ndarray:
    """`state_measures` of T states, a few at a time in one shape.

    Args:
        ids: [T, k] int32, most probable first, -1 where the engine has fewer.
        train_logprobs, rollout_logprobs: [T, k] nats.

    Returns:
        [T, 10] float32: each of `STATE_MEASURES` and its bound, the head's mass, and k.
    """
    names = []
    for measure_name in STATE_MEASURES:
        names += [measure_name, f"{measure_name}_bound"]
    names.append("head_mass")

    size = max(1, _ENTRIES // ids.shape[1])
    batches = [np.zeros((0, len(names)), np.float32)]
    for start in range(0, len(ids), size):
        count = min(size, len(ids) - start)
        train, rollout, listed = (
            np.pad(column[start : start + size], ((0, size - count), (0, 0)))
            for column in (train_logprobs, rollout_logprobs, ids)
        )
        values = _program()(train, rollout, listed >= 0)
        columns = [values[f"distribution/{name}"] for name in names]
        batches.append(np.stack(columns, axis=1)[:count])
    return np.pad(np.concatenate(batches), ((0, 0), (0, 1)), constant_values=ids.shape[1])


@functools.cache
def _program() -> Callable[..., dict[str, Any]]:
    # Recordings are read without JAX.
    import jax

    from dcmdp_jax.algorithm.distribution import state_measures

    return jax.jit(state_measures)
