"""Statistics of the disagreement of two columns of log-probs."""

from __future__ import annotations

import dataclasses

import numpy as np

from dcmdp_jax.lab.mismatch.pairs import TokenPairs


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Mismatch over all tokens, p = training stack, q = engine, d = log p - log q clamped to [-20, 20].

    Attributes:
        tokens, completions: how many.
        mean, p50, p99, max: of |p - q|.
        k1: mean of -d: KL(q || p) if the tokens were sampled from q, unbiased, may be negative.
        k3: mean of e^d - 1 - d, the same KL, never negative.
        median_log_ratio: median of |d|, nats.
        displacement, displacement_abs, displacement_p95: mean of eps = logit p - logit q, mean and 95th percentile of
            |eps|: |p - q| is p (1 - p) |eps| to first order, so confidence shrinks it and not eps.
        pearson: correlation of p and q; 0 where either is constant.
        effective_sample_size: (sum w)^2 / (n sum w^2) with w = p / q, in (0, 1].
        completions_over: share of completions whose own mean |p - q| exceeds `tolerance`; NaN without one.
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
    displacement: float
    displacement_abs: float
    displacement_p95: float
    pearson: float
    effective_sample_size: float
    completions_over: float
    tolerance: float


def means_by_completion(pairs: TokenPairs) -> np.ndarray:
    """[N] float64, each completion's own mean |p - q|."""
    return np.add.reduceat(pairs.discrepancy, pairs.starts) / pairs.lengths


def measure(pairs: TokenPairs, tolerance: float | None = None) -> Statistics:
    """The same definitions as `mismatch_statistics` and `displacement` of `algorithm.discrepancy`, in float64.

    Args:
        pairs: the tokens.
        tolerance: c in units of |p - q|; a completion's mean of exactly c is within it.
    """
    delta, d = pairs.discrepancy, pairs.log_ratio
    p50, p99 = np.quantile(delta, (0.5, 0.99))
    weights = np.exp(d - d.max())
    eps = _log_odds(pairs.train_logprobs) - _log_odds(pairs.rollout_logprobs)
    over = float(np.mean(means_by_completion(pairs) > tolerance)) if tolerance is not None else np.nan
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
        displacement=float(eps.mean()),
        displacement_abs=float(np.abs(eps).mean()),
        displacement_p95=float(np.quantile(np.abs(eps), 0.95)),
        pearson=_pearson(
            np.exp(pairs.train_logprobs, dtype=np.float64), np.exp(pairs.rollout_logprobs, dtype=np.float64)
        ),
        effective_sample_size=float(weights.sum() ** 2 / (len(d) * (weights**2).sum())),
        completions_over=over,
        tolerance=np.nan if tolerance is None else tolerance,
    )


def _log_odds(logprobs: np.ndarray) -> np.ndarray:
    x = np.clip(logprobs.astype(np.float64), -1e4, -(2.0**-24))
    return x - np.log(-np.expm1(x))


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    if x.min() == x.max() or y.min() == y.max():
        return 0.0
    return float(np.clip(np.corrcoef(x, y)[0, 1], -1.0, 1.0))
