"""Bias and variance of a gradient estimate against a control, from independent batches of both.

    G = E c,    bias = |E g - G| / |G|,    variance = E |g - E g|^2 / |G|^2

g is the gradient of a batch under a remedy, c that of a batch under the control. Squares of means are estimated from
products of different batches, so that noise adds nothing to the bias.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Moments(NamedTuple):
    """Second moments of gradients g under a remedy and c under the control, G = E c.

    Attributes:
        own: |E g|^2.
        cross: <E g, G>.
        control: |G|^2.
        variance: E |g - E g|^2.
    """

    own: float
    cross: float
    control: float
    variance: float


class Quality(NamedTuple):
    """How a remedy's gradient compares with the control's. NaN where noise hides the length of one of the two.

    Attributes:
        angle: between the mean gradients, degrees.
        length: |E g| / |G|.
        bias: |E g - G| / |G|.
        variance: E |g - E g|^2 / |G|^2, of one batch.
    """

    angle: float
    length: float
    bias: float
    variance: float


def moments(remedy: np.ndarray, control: np.ndarray, *, whole: bool = False) -> Moments:
    """Estimate the moments from batches that are independent of each other.

    Args:
        remedy: [B, K], the gradient of each batch.
        control: [C, K].
        whole: the batches are all that there are, equally likely; else a sample of at least two.

    Raises:
        ValueError: for fewer than two batches of a sample.
    """
    own, count = _gram(remedy), len(remedy)
    controls, count_control = _gram(control), len(control)
    cross = float(np.mean(remedy.astype(np.float64) @ control.astype(np.float64).T))
    if whole:
        return Moments(own.mean(), cross, controls.mean(), np.trace(own) / count - own.mean())
    if min(count, count_control) < 2:
        raise ValueError(f"got {min(count, count_control)} batches, needs at least 2 to tell noise from bias")
    squared, squared_control = _off_diagonal_mean(own), _off_diagonal_mean(controls)
    return Moments(squared, cross, squared_control, np.trace(own) / count - squared)


def quality(found: Moments) -> Quality:
    """The figures of a remedy."""
    own, cross, control, variance = found
    if not (own > 0 and control > 0):
        return Quality(*(math.nan,) * 3, variance / control if control > 0 else math.nan)
    # The sine from bias and lengths: the cosine has no digits left near 1.
    apart = max(own - 2 * cross + control, 0.0)
    across = max(own - cross**2 / control, 0.0)
    return Quality(
        angle=math.degrees(math.atan2(math.sqrt(across), cross / math.sqrt(control))),
        length=math.sqrt(own / control),
        bias=math.sqrt(apart / control),
        variance=variance / control,
    )


def errors(remedy: np.ndarray, control: np.ndarray) -> Quality:
    """Standard errors by the jackknife: batch i of both is left out in turn. As many batches of each, at least 3."""
    count = len(remedy)
    left = np.array([
        quality(moments(np.delete(remedy, i, axis=0), np.delete(control, i, axis=0))) for i in range(count)
    ])  # fmt: skip
    return Quality(*np.sqrt((count - 1) * np.mean((left - left.mean(axis=0)) ** 2, axis=0)))


def _gram(rows: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float64)
    return wide @ wide.T


def _off_diagonal_mean(gram: np.ndarray) -> float:
    count = len(gram)
    return float((gram.sum() - np.trace(gram)) / (count * (count - 1)))
