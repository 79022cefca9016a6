"""How far a gradient estimate is from a control's, from independent batches of both.

g is the gradient of a batch under a remedy, c that of a batch under the control, and G = E c. A remedy that makes
gradients shorter is not better for it: Adam and the learning rate set the length of an update. So an estimate is judged
by the error that is left at its best length,

    error = min over s >= 0 of E |s g - G|^2 / |G|^2
          = min over s >= 0 of (s^2 E |g|^2 - 2 s <E g, G> + |G|^2) / |G|^2
          = 1 - max(<E g, G>, 0)^2 / (|G|^2 E |g|^2)                          at s = <E g, G> / E |g|^2
          = 1 - (L cos)^2 / (L^2 + V)                                         where the cosine is not negative

with L = |E g| / |G|, V = E |g - E g|^2 / |G|^2 and the cosine that of the angle between E g and G. It is 0 for G
itself, V / (1 + V) for a batch without bias, and 1 for a gradient of zero, which nothing exceeds. At the gradient's own
length, s = 1, the error is bias^2 + V with bias = |E g - G| / |G|: a gradient of zero has 1 there, a noisy one more.

Squares of means are estimated from products of different batches, so that noise adds nothing to them on average, and
are left as they come: noise can make them negative. |G|^2 divides every remedy's numbers alike, so the order by error
does not depend on how well it is known.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dcmdp_jax.evaluation.estimators import t_half_width


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
    """How a remedy's gradient compares with the control's. NaN where noise hides |G|, or for the last two |E g|.

    Attributes:
        error: the least over scalings s of E |s g - G|^2 / |G|^2, of one batch.
        squared_bias: |E g - G|^2 / |G|^2; noise can make it negative.
        variance: E |g - E g|^2 / |G|^2, of one batch.
        length: |E g| / |G|.
        angle: between the mean gradients, degrees; 0 where noise makes the cosine larger than 1.
    """

    error: float
    squared_bias: float
    variance: float
    length: float
    angle: float


ZERO = Quality(error=1.0, squared_bias=1.0, variance=0.0, length=0.0, angle=math.nan)
"""Figures of a gradient of zero, which a remedy has to beat."""


def moments(remedy: np.ndarray, control: np.ndarray, *, whole: bool = False) -> Moments:
    """Estimate the moments from batches that are independent of each other.

    Args:
        remedy: [B, K], the gradient of each batch.
        control: [C, K].
        whole: the batches are all that there are, equally likely; else a sample of at least two.

    Raises:
        ValueError: for fewer than two batches of a sample.
    """
    if not whole and min(len(remedy), len(control)) < 2:
        raise ValueError(f"got {min(len(remedy), len(control))} batches, needs at least 2 to tell noise from bias")
    return _moments(*_grams(remedy, control), whole=whole)


def _grams(remedy: np.ndarray, control: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Products of each batch with each: the remedy's, the remedy's with the control's, the control's."""
    mine, other = remedy.astype(np.float64), control.astype(np.float64)
    return mine @ mine.T, mine @ other.T, other @ other.T


def _moments(own: np.ndarray, cross: np.ndarray, control: np.ndarray, *, whole: bool = False) -> Moments:
    mean = np.mean if whole else _off_diagonal_mean
    squared = float(mean(own))
    return Moments(squared, float(np.mean(cross)), float(mean(control)), float(np.trace(own)) / len(own) - squared)


def quality(found: Moments) -> Quality:
    """The figures of a remedy."""
    own, cross, control, variance = found
    if control <= 0:
        return Quality(*(math.nan,) * 5)
    second = own + variance  # E |g|^2, of each batch with itself: above 0 but for a gradient of zero
    error = 1 - max(cross, 0.0) ** 2 / (control * second) if second > 0 else 1.0
    squared_bias = (own - 2 * cross + control) / control
    if own <= 0:
        return Quality(error, squared_bias, variance / control, math.nan, math.nan)
    # The sine from lengths: the cosine has no digits left near 1.
    across = max(own - cross**2 / control, 0.0)
    angle = math.degrees(math.atan2(math.sqrt(across), cross / math.sqrt(control)))
    return Quality(error, squared_bias, variance / control, math.sqrt(own / control), angle)


def leave_one_out(remedy: np.ndarray, control: np.ndarray) -> np.ndarray:
    """The figures without batch i of both, [B, 5] of B >= 3 batches of each."""
    grams = _grams(remedy, control)
    return np.array(
        [
            quality(_moments(*(np.delete(np.delete(gram, i, axis=0), i, axis=1) for gram in grams)))
            for i in range(len(remedy))
        ]
    )


def half_width(left: np.ndarray) -> float:
    """Half of the 95% t interval of a figure by the jackknife, from its values [B] with each batch left out.

    The standard error is sqrt((B - 1) / B sum (x_i - mean x)^2), that of a mean of x times B - 1.
    """
    return (len(left) - 1) * t_half_width(left)


def _off_diagonal_mean(gram: np.ndarray) -> float:
    count = len(gram)
    return float((gram.sum() - np.trace(gram)) / (count * (count - 1)))
