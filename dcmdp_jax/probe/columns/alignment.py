"""Whether two columns of log-probs are of the same tokens: shifted, exchanged, unrelated, broken.

The thresholds are ours, set as those of `evidence`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from dcmdp_jax.probe.columns.pairs import (
    CERTAIN,
    Ragged,
    TokenPairs,
    correlation_at,
    pearson,
    token_mean,
)

LARGE_LOG_RATIO = 0.3
"""Nats. Rounding and 8-bit quantization leave the median |d| of any tokens far below it."""
RATIO_CAP = 4.0
"""Cap of p / q, so that no few tokens move its mean."""
START_TOKENS = 4
"""Tokens that other prompts make unrelated; later ones follow the completion itself."""

# Relation of the columns, in Pearson's correlation of log p and log q.

RELATED = 0.8
"""Columns of the same tokens are above it; weights of 3 bits leave 0.8 (research/causes.md)."""
_UNRELATED = 0.5
"""Columns below it are not of the same tokens, or of weights with noise of half their size."""
_FEWEST_UNRELATED = 8
"""Tokens: the correlation of fewer is chance."""

# Breaks within completions.

_SHORTEST_PART = 4
"""Tokens on each side of a break: the fewest whose median one outlier doesn't move."""
_TIMES_BEFORE = 5.0
"""Median |d| after a break, in multiples of that before it."""

# Shifted and exchanged columns.

_SHIFTS = (-2, -1, 1, 2)
"""Tokens. Recorders that drop a first or a last token, or both, shift by one or two."""
_FEWEST_LAGGED = 16
"""Tokens that have another one so far away in their completion, for a shift to be tried."""
_FIRST_TOKENS = 8
"""Tokens that choose the completions for a shift; it is tested on the others."""
_LEAST_GAIN = 0.1
"""Mean of (|d| - |shifted d|) / (|d| + |shifted d|) over the others that a shift must exceed."""
_NEARER = 0.7
"""Mean |d| after a shift, in multiples of that before it, at most."""
ALL_SHIFTED = 0.9
"""Share of completions from which on a fault is the recorder's own, and hides all else."""
_COMPARED = 64
"""Tokens of two completions that are correlated: enough for Fisher's z, and quick."""
_MOST_SUSPECTS = 16
"""Completions that are compared with all others, which takes time quadratic in their number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alignment:
    """Correlations of log p with log q of other tokens.

    Attributes:
        correlations: shift s -> correlation of log p of a token with log q of the s-th one after
            it, in the shifted completions; in all where none is.
        shifts: shift -> completions whose log p fits log q so.
        exchanged: completions found whose log p belongs to the log q of another completion.
        unrelated: other completions whose columns have nothing in common and whose tokens q did not
            sample.
    """

    correlations: Mapping[int, float]
    shifts: Mapping[int, int]
    exchanged: int
    unrelated: int


def align(pairs: TokenPairs) -> tuple[np.ndarray, Alignment]:
    """Find how the two columns are aligned.

    Returns:
        [N] bool, completions whose columns are not of the same tokens; and the alignment.
    """
    shifts = _shifts(pairs)
    shifted = shifts != 0
    places, counts = np.unique(shifts[shifted], return_counts=True)
    mask = shifted[pairs.completion]
    if not shifted.any():
        mask[:] = True
    correlations = {}
    for by in (0, *_SHIFTS):
        early = _lagged(pairs, by)
        early = early[mask[early]]
        correlations[by] = pearson(pairs.train_logprobs[early], pairs.rollout_logprobs[early + by])

    exchanged = unrelated = np.zeros_like(shifted)
    if shifted.mean() <= ALL_SHIFTED:
        exchanged = _exchanged(pairs, shifted)
        unrelated = _unrelated(pairs, shifted)
        # A few of many unrelated ones resemble another completion by chance; of exchanged ones most
        # are found.
        if 2 * exchanged.sum() < unrelated.sum():
            exchanged = np.zeros_like(shifted)
        else:
            unrelated = np.zeros_like(shifted)

    alignment = Alignment(
        correlations=correlations,
        shifts=dict(zip(places.tolist(), counts.tolist(), strict=True)),
        exchanged=int(exchanged.sum()),
        unrelated=int(unrelated.sum()),
    )
    return shifted | exchanged | unrelated, alignment


def _lagged(pairs: TokenPairs, by: int) -> np.ndarray:
    """Indices of the tokens that have another one `by` places later in their completions.

    Args:
        pairs: the tokens.
        by: places; negative for earlier ones.
    """
    later = pairs.position + by
    return np.flatnonzero((later >= 0) & (later < pairs.lengths[pairs.completion]))


def _shifts(pairs: TokenPairs) -> np.ndarray:
    """[N] int, the places that log p of a completion is shifted by against its log q; 0 for none.

    A completion is a candidate for a shift that brings its first 8 tokens nearer to each other.
    Over the other tokens of the candidates, which had no part in the choice, the shift must take
    30% of the mean |d|, significantly. A completion that was re-tokenized is shifted too, from its
    break on: at least half of the completions whose later tokens are nearer must be candidates.
    """
    no_gain = np.zeros(len(pairs.lengths))
    gains = [no_gain, *(_shift_gain(pairs, by) for by in _SHIFTS)]
    return np.array((0, *_SHIFTS))[np.argmax(gains, axis=0)]


def _shift_gain(pairs: TokenPairs, by: int) -> np.ndarray:
    """[N] float, what a shift takes from each completion's sum of |d|; 0 if it is no shift."""
    count = len(pairs.lengths)
    none = np.zeros(count)
    early = _lagged(pairs, by)
    if len(early) < _FEWEST_LAGGED:
        return none
    shifted = pairs.train_logprobs[early] - pairs.rollout_logprobs[early + by].astype(np.float64)
    after = np.abs(shifted)
    before = np.abs(pairs.log_ratio[early])
    gain = before - after

    rows = pairs.completion[early]
    position = pairs.position[early] - max(-by, 0)
    first = position < np.minimum(_FIRST_TOKENS, (pairs.lengths[rows] - abs(by)) // 2)
    candidates = np.bincount(rows[first], gain[first], count) > 0
    nearer = np.bincount(rows[~first], gain[~first], count) > 0
    tested = ~first & candidates[rows]
    if candidates.sum() < 2 or not tested.any():
        return none
    if 2 * (candidates & nearer).sum() < nearer.sum():
        return none

    # Tokens as independent: few completions may be shifted, and neighbors' gains hardly depend on
    # each other.
    relative = gain / np.maximum(after + before, 1e-9)
    estimate = token_mean(relative[tested], np.arange(tested.sum()))
    if not estimate.above(0, _LEAST_GAIN):
        return none
    if after[tested].mean() >= _NEARER * before[tested].mean():
        return none
    return np.bincount(rows, gain, count)


def _unrelated(pairs: TokenPairs, shifted: np.ndarray) -> np.ndarray:
    """[N] bool, completions whose columns have nothing in common, and whose tokens q didn't sample.

    Other weights lower the correlation too, but what q samples has a mean min(p / q, 4) of at most
    1. Either all completions that are not shifted are unrelated, or some whose correlation is far
    below that of the others. Those that were re-tokenized agree in their 5th to 8th token: the
    unrelated ones must not.
    """
    rows = pairs.completion
    # Other prompts make the first tokens unrelated too; that is told apart by `Evidence.start`.
    first = (pairs.position >= START_TOKENS) & (pairs.position < _FIRST_TOKENS)
    unrelated = ~shifted
    if correlation_at(pairs, unrelated[rows]) >= _UNRELATED:
        unrelated = _far_below_others(pairs, shifted, first)
    elif correlation_at(pairs, unrelated[rows] & first) >= _UNRELATED:
        unrelated = np.zeros_like(shifted)

    tokens = unrelated[rows]
    ratio = np.exp(pairs.log_ratio[tokens])
    capped = np.minimum(ratio, RATIO_CAP)
    if tokens.any() and token_mean(capped, rows[tokens]).above(1):
        return unrelated
    return np.zeros_like(shifted)


def _far_below_others(pairs: TokenPairs, shifted: np.ndarray, first: np.ndarray) -> np.ndarray:
    """[N] bool, completions that are less related than the others, from their 5th token on."""
    rows = pairs.completion
    none = np.zeros_like(shifted)
    correlations = [correlation_at(pairs, pairs.span(row)) for row in range(len(shifted))]
    error = 1 / np.sqrt(np.maximum(pairs.lengths - 3, 1))
    largest = fisher_z(np.array(correlations)) + CERTAIN * error
    low = largest < np.arctanh(RELATED)
    unrelated = ~shifted & low & (pairs.lengths > _FIRST_TOKENS)
    others = ~(unrelated | shifted)
    if unrelated.sum() < 2 or correlation_at(pairs, others[rows]) < RELATED:
        return none

    size = np.abs(pairs.log_ratio)
    later = pairs.position >= _FIRST_TOKENS
    first_sum = np.bincount(rows[first], size[first], len(low))
    first_mean = first_sum / (_FIRST_TOKENS - START_TOKENS)
    later_sum = np.bincount(rows[later], size[later], len(low))
    later_mean = later_sum / np.maximum(pairs.lengths - _FIRST_TOKENS, 1)
    begins_apart = first_mean > later_mean / 2
    from_the_start = begins_apart[unrelated].mean() >= 0.5
    if not from_the_start or correlation_at(pairs, unrelated[rows]) >= _UNRELATED:
        return none
    return unrelated


def _exchanged(pairs: TokenPairs, shifted: np.ndarray) -> np.ndarray:
    """[N] bool, completions whose log p is related to another one's log q and not to their own.

    The first 64 tokens of up to 16 completions whose columns are unrelated are correlated with all
    that are as long, and so are their probabilities, in which a few very unlikely tokens weigh
    less. The best counts if no chance among so many gives it (Fisher's z).
    """
    log_q = np.split(pairs.rollout_logprobs, pairs.starts[1:])
    means = np.add.reduceat(np.abs(pairs.log_ratio), pairs.starts) / pairs.lengths
    candidates = np.flatnonzero(~shifted & (means > LARGE_LOG_RATIO))
    suspects = [row for row in candidates if correlation_at(pairs, pairs.span(row)) < _UNRELATED]

    exchanged = np.zeros_like(shifted)
    for row in suspects[:_MOST_SUSPECTS]:
        log_p = pairs.train_logprobs[pairs.span(row)][:_COMPARED]
        exchanged[row] = _fits_another(log_p, log_q)
    # Where most are, so are the others.
    exchanged[suspects[_MOST_SUSPECTS:]] = 2 * exchanged.sum() > _MOST_SUSPECTS
    # An exchange takes two.
    if exchanged.sum() < 2:
        return np.zeros_like(shifted)
    return exchanged


def _fits_another(log_p: np.ndarray, log_q: Ragged) -> bool:
    """Whether a completion's log p is related to the beginning of some log q."""
    length = len(log_p)
    best = 0.0
    for column in log_q:
        other = column[:length]
        if len(other) == length and pearson(log_p, other) > RELATED:
            by_probability = pearson(np.exp(log_p), np.exp(other))
            best = max(best, min(pearson(log_p, other), by_probability))
    if best <= RELATED or length <= 3:
        return False
    chance = CERTAIN**2 + 2 * np.log(len(log_q))
    return fisher_z(best) ** 2 * (length - 3) > chance


def break_at(log_ratio: np.ndarray) -> int | None:
    """Where a completion's engines may part: the first token of its wild part, or None.

    The split that fits log |d| best by two levels, at least 4 tokens each. It counts if the median
    |d| after it is above 0.3 nats and five times that before it.

    Args:
        log_ratio: [T] float, d of one completion.
    """
    size = np.maximum(np.abs(log_ratio), 1e-6)
    n = len(size)
    if n < 2 * _SHORTEST_PART:
        return None
    levels = np.cumsum(np.log(size))
    splits = np.arange(_SHORTEST_PART, n - _SHORTEST_PART + 1)
    before = levels[splits - 1] / splits
    after = (levels[-1] - levels[splits - 1]) / (n - splits)
    fit = splits * (n - splits) * (after - before) ** 2
    best = int(splits[np.argmax(fit)])
    low = np.median(size[:best])
    high = np.median(size[best:])
    if high > LARGE_LOG_RATIO and high > _TIMES_BEFORE * low:
        return best
    return None


def fisher_z(correlation: float | np.ndarray) -> float | np.ndarray:
    """Fisher's z; a correlation of 1 counts as 0.999."""
    return np.arctanh(np.clip(correlation, -0.999, 0.999))


def least_unrelated(correlation: float) -> int:
    """Tokens without any correlation that stand out where the others have this one (Fisher's z)."""
    return max(_FEWEST_UNRELATED, 3 + int(np.ceil((CERTAIN / fisher_z(correlation)) ** 2)))


def find_breaks(pairs: TokenPairs, misplaced: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Find completions that are broken: from some token on the engines do not agree.

    A copied beginning followed by free text looks like a break where weights differ: there the
    columns go on to agree about which tokens are likely. After a real break they have nothing to do
    with each other.

    Returns:
        [N] bool, broken completions; and the columns' correlation after their breaks and elsewhere.
    """
    size = np.abs(pairs.log_ratio)
    # A break needs a token above the level; most recordings are done here.
    largest = np.maximum.reduceat(size, pairs.starts)
    wild = (largest > LARGE_LOG_RATIO) & ~misplaced
    wild_rows = np.flatnonzero(wild)

    broken = np.zeros_like(wild)
    after = np.zeros_like(size, bool)
    for row in wild_rows:
        span = pairs.span(row)
        first_wild = break_at(size[span])
        if first_wild is not None:
            broken[row] = True
            after[span][first_wild:] = True

    # Other prompts make first tokens unrelated too; that is told apart by `Evidence.start`.
    before = ~after & (pairs.position >= START_TOKENS) & ~misplaced[pairs.completion]
    low = correlation_at(pairs, after)
    high = correlation_at(pairs, before)
    apart = after.sum() >= _FEWEST_UNRELATED and low < _UNRELATED and high > RELATED
    if not apart or fisher_z(high) - fisher_z(low) <= CERTAIN / np.sqrt(after.sum() - 3):
        return np.zeros_like(broken), (np.nan, correlation_at(pairs, slice(None)))

    # Where one is broken, shorter or noisier breaks than `break_at` sees are too.
    for row in wild_rows:
        span = pairs.span(row)
        tail = slice(span.start + pairs.lengths[row] // 2, span.stop)
        if (
            tail.stop - tail.start >= _SHORTEST_PART
            and np.median(size[tail]) > LARGE_LOG_RATIO
            and correlation_at(pairs, tail) < _UNRELATED
        ):
            broken[row] = True
    return broken, (low, high)
