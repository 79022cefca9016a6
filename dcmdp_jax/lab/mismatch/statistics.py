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
        pearson: correlation of p and q; 0 where either is constant.
        effective_sample_size: (sum w)^2 / (n sum w^2) with w = p / q, in (0, 1].
        displacement_mean: of eps = logit p - logit q; displacement_abs_mean and the quantiles: of |eps|. |p - q| is
            p (1 - p) |eps| to first order, so confidence shrinks it and not eps.
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
    pearson: float
    effective_sample_size: float
    displacement_mean: float
    displacement_abs_mean: float
    displacement_abs_p50: float
    displacement_abs_p95: float
    displacement_abs_p99: float
    completions_over: float
    tolerance: float


def means_by_completion(pairs: TokenPairs) -> np.ndarray:
    """[N] float64, each completion's own mean |p - q|."""
    return np.add.reduceat(pairs.discrepancy, pairs.starts) / pairs.lengths


def measure(pairs: TokenPairs, tolerance: float | None = None) -> Statistics:
    """The definitions of `algorithm.discrepancy` (`mismatch_statistics`, `displacement_statistics`), in float64.

    Args:
        pairs: the tokens.
        tolerance: c in units of |p - q|; a completion's mean of exactly c is within it.
    """
    delta, d = pairs.discrepancy, pairs.log_ratio
    p50, p99 = np.quantile(delta, (0.5, 0.99))
    eps = _log_odds(pairs.train_logprobs) - _log_odds(pairs.rollout_logprobs)
    eps_p50, eps_p95, eps_p99 = np.quantile(np.abs(eps), (0.5, 0.95, 0.99))
    weights = np.exp(d - d.max())
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
        pearson=_pearson(
            np.exp(pairs.train_logprobs, dtype=np.float64), np.exp(pairs.rollout_logprobs, dtype=np.float64)
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
    """[n] float64, log p - log(1 - p); p is at most 1 - 2^-24, the largest float32 below 1, so it stays finite."""
    x = np.clip(logprobs.astype(np.float64), -1e4, -(2.0**-24))
    return x - np.log(-np.expm1(x))


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    if x.min() == x.max() or y.min() == y.max():
        return 0.0
    return float(np.clip(np.corrcoef(x, y)[0, 1], -1.0, 1.0))
