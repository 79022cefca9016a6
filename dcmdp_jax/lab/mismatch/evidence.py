"""Evidence for why two columns of log-probs differ, measured without any model.

p is the training stack's probability of a sampled token, q the engine's, d = log p - log q.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from dcmdp_jax.lab.mismatch.pairs import TokenPairs

LARGE_LOG_RATIO = 0.3
"""Nats. Rounding and 8-bit quantization leave the median |d| of any stretch of tokens far below it."""
_NOTICEABLE = 0.01
_UNCERTAIN, _FEWEST_UNCERTAIN = 0.9, 16
_SHORTEST_PART = 4
_START_TOKENS, _SETTLED_FROM = 4, 16


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The tokens scored again by the training stack with one thing changed.

    Attributes:
        name: what was changed.
        cause: of `causes.CAUSES`.
        share: 1 - sum |q - h| / sum |q - p|, h the probability after the change: 1 reproduces the engine, 0 is no
            nearer to it than the training stack, below 0 is farther.
    """

    name: str
    cause: str
    share: float


@dataclasses.dataclass(frozen=True)
class Lifted:
    """The tokens scored again by the engine itself, without one of its settings.

    Attributes:
        engine: what it is then.
        cause: of `causes.CAUSES`, the price of the setting.
        share: 1 - sum |h - p| / sum |q - p|, h the probability without the setting: 1 if nothing of the mismatch is
            left, 0 if all of it is.
    """

    engine: str
    cause: str
    share: float


@dataclasses.dataclass(frozen=True)
class TokenMean:
    """A mean over tokens and its standard error; NaN if it was not measured."""

    mean: float
    error: float

    def above(self, value: float) -> bool:
        """Above `value` by four standard errors and 0.3%."""
        return self.mean - 4 * self.error > value + 0.003

    def below(self, value: float) -> bool:
        """Below `value` by four standard errors and 0.3%."""
        return self.mean + 4 * self.error < value - 0.003


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Measurements from which `causes.diagnose` names the cause.

    Attributes:
        mean: of |p - q|.
        median_log_ratio: median |d|, nats, of the tokens with p or q below 0.9; of all if those are fewer than 16. Near
            1 the log-ratio of a token is small whatever differs.
        ratio: mean of p / q. If the tokens were sampled from q and q covers p's support, its expectation is
            sum_y q(y) p(y) / q(y) = 1. Where q is cut to a set S and renormalized, it is p(S) < 1.
        inverse_ratio: mean of q / p; its expectation is 1 if the tokens were sampled from p.
        surprise: mean of -log p - H(p). Its expectation is 0 if the tokens were sampled from p; below 0, from a
            sharper distribution. NaN without entropies.
        positive: share of d > 0 among the tokens with |d| > 0.01.
        smallest_ratio: 0.1% quantile of p / q.
        spread: standard deviation of log q over that of log p; above 1 where q is the sharper one.
        correlation: of log p and log q.
        broken: share of the completions that agree up to a token and disagree from there on.
        broken_share: share of sum |p - q| that is theirs.
        unbroken_mean: mean |p - q| of the other completions; NaN if there are none.
        start: mean |d| of the first 4 tokens of a completion; `settled` from the 17th on, NaN if there are none.
        lag_means: age of the weights in steps -> mean |p - q|; empty if not known.
        floor: the larger of both engines' noise floors; None if not measured.
        rounding: mean |p - h| of the training stack itself computed in the engine's dtype; None if not measured.
        explanations: controlled re-scorings; empty without a model.
        settings: cause -> setting of the engine that has it as its price; empty for a recording.
        lifted: what is left without each of these settings; empty if not measured.
    """

    mean: float
    median_log_ratio: float
    ratio: TokenMean
    inverse_ratio: TokenMean
    surprise: TokenMean
    positive: float
    smallest_ratio: float
    spread: float
    correlation: float
    broken: float
    broken_share: float
    unbroken_mean: float
    start: float
    settled: float
    lag_means: Mapping[int, float]
    floor: float | None = None
    rounding: float | None = None
    explanations: Sequence[Explanation] = ()
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lifted: Sequence[Lifted] = ()


def collect(
    pairs: TokenPairs,
    *,
    floor: float | None = None,
    rounding: float | None = None,
    explanations: Sequence[Explanation] = (),
    settings: Mapping[str, str] | None = None,
    lifted: Sequence[Lifted] = (),
) -> Evidence:
    """Measure everything that the columns alone show, and add what only engines can."""
    d, delta = pairs.log_ratio, pairs.discrepancy
    log_p, log_q = pairs.train_logprobs.astype(np.float64), pairs.rollout_logprobs.astype(np.float64)
    noticeable = np.abs(d) > _NOTICEABLE
    spreads = log_p.std(), log_q.std()
    position = pairs.position
    surprise = TokenMean(np.nan, np.nan) if pairs.entropies is None else _estimate(-log_p - pairs.entropies)
    lags = {} if pairs.lags is None else {int(lag): float(delta[pairs.lags == lag].mean()) for lag in set(pairs.lags)}
    return Evidence(
        mean=float(delta.mean()),
        median_log_ratio=_median_log_ratio(pairs),
        ratio=_estimate(np.exp(d)),
        inverse_ratio=_estimate(np.exp(-d)),
        surprise=surprise,
        positive=float(np.mean(d[noticeable] > 0)) if noticeable.any() else 0.5,
        smallest_ratio=float(np.exp(np.quantile(d, 0.001))),
        spread=float(spreads[1] / spreads[0]) if min(spreads) > 0 else 1.0,
        correlation=float(np.corrcoef(log_p, log_q)[0, 1]) if min(spreads) > 0 else 0.0,
        **_breaks(pairs),
        start=float(np.abs(d[position < _START_TOKENS]).mean()),
        settled=_mean(np.abs(d[position >= _SETTLED_FROM])),
        lag_means=lags,
        floor=floor,
        rounding=rounding,
        explanations=tuple(explanations),
        settings=settings or {},
        lifted=tuple(lifted),
    )


def break_at(log_ratio: np.ndarray) -> int | None:
    """Where a completion's engines part: the first token of its wild part, or None.

    The split that fits log |d| best by two levels, at least 4 tokens each. It counts if the median |d| after it is
    above 0.3 nats and ten times that before it.

    Args:
        log_ratio: [T] float, d of one completion.
    """
    size = np.maximum(np.abs(log_ratio), 1e-6)
    n = len(size)
    if n < 2 * _SHORTEST_PART:
        return None
    levels = np.cumsum(np.log(size))
    splits = np.arange(_SHORTEST_PART, n - _SHORTEST_PART + 1)
    before, after = levels[splits - 1] / splits, (levels[-1] - levels[splits - 1]) / (n - splits)
    best = int(splits[np.argmax(splits * (n - splits) * (after - before) ** 2)])
    low, high = np.median(size[:best]), np.median(size[best:])
    return best if high > LARGE_LOG_RATIO and high > 10 * low else None


def _breaks(pairs: TokenPairs) -> dict[str, float]:
    d, delta = pairs.log_ratio, pairs.discrepancy
    bounds = pairs.starts[1:]
    broken = np.array([break_at(part) is not None for part in np.split(d, bounds)])
    sums = np.add.reduceat(delta, pairs.starts)
    total, whole = sums.sum(), pairs.lengths[~broken].sum()
    return {
        "broken": float(broken.mean()),
        "broken_share": float(sums[broken].sum() / total) if total else 0.0,
        "unbroken_mean": float(sums[~broken].sum() / whole) if whole else np.nan,
    }


def _median_log_ratio(pairs: TokenPairs) -> float:
    uncertain = np.minimum(pairs.train_logprobs, pairs.rollout_logprobs) < np.log(_UNCERTAIN)
    size = np.abs(pairs.log_ratio)
    return float(np.median(size[uncertain] if uncertain.sum() >= _FEWEST_UNCERTAIN else size))


def _estimate(values: np.ndarray) -> TokenMean:
    return TokenMean(float(values.mean()), float(values.std() / np.sqrt(len(values))))


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else np.nan
