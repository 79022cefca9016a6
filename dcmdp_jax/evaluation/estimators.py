"""Unbiased pass@k and bootstrap intervals over problems."""

from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

_RESAMPLES = 2000
_LEVEL = 0.95


def pass_at_every_k(correct: np.ndarray, samples: int) -> np.ndarray:
    """Unbiased pass@k of each problem for every k from 1 to n (Chen et al. 2021, Eq. 1).

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{j < k} (n - c - j) / (n - j)

    The product has no large intermediate. pass@1 is the mean, pass@n is 1 where c > 0.

    Args:
        correct: [P] int, c, right answers among the problem's n.
        samples: n.

    Returns:
        [P, n] float64, column k - 1 for k.

    Raises:
        ValueError: if a count is outside 0 to n.
    """
    correct = np.asarray(correct)
    impossible = (correct < 0) | (correct > samples)
    if samples < 1 or np.any(impossible):
        raise ValueError(
            f"correct: got {correct.tolist()}, each must be from 0 to samples = {samples}"
        )
    drawn = np.arange(samples)
    remaining = samples - drawn
    wrong_left = remaining - correct[:, None]
    # Once no wrong answer is left to draw the factor is 0, and so is every later product.
    wrong_left = np.maximum(wrong_left, 0)
    all_wrong = np.cumprod(wrong_left / remaining, axis=1)
    return 1 - all_wrong


def bootstrap_interval(values: np.ndarray, *, seed: int) -> tuple[float, float]:
    """95% percentile interval of the mean over problems, from 2,000 resamples with replacement.

    The interval says how the mean depends on the choice of problems; a problem's own samples are
    not resampled.

    Args:
        values: [P] float64, one for each problem.
        seed: seed of the resamples.

    Returns:
        Lower and upper end; NaN with one problem.
    """
    values = np.asarray(values, np.float64)
    problems = len(values)
    if problems < 2:
        return float("nan"), float("nan")
    random = np.random.default_rng(seed)
    means = []
    for _ in range(_RESAMPLES):
        resample = random.integers(problems, size=problems)
        means.append(values[resample].mean())
    lower = np.quantile(means, (1 - _LEVEL) / 2)
    upper = np.quantile(means, (1 + _LEVEL) / 2)
    return float(lower), float(upper)


def t_quantile(count: int, level: float = _LEVEL) -> float:
    """Half width of an interval of a mean of `count` independent values, in standard errors."""
    freedom = count - 1
    quantile = stdtrit(freedom, (1 + level) / 2)
    return float(quantile)


def t_half_width(values: Sequence[float]) -> float:
    """Half width of the 95% t interval of a mean of independent values; NaN with one."""
    count = len(values)
    if count < 2:
        return float("nan")
    deviation = np.std(values, ddof=1)
    half_width = t_quantile(count) * deviation / np.sqrt(count)
    return float(half_width)
