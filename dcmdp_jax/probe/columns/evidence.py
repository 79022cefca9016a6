"""Evidence for why two columns of log-probs differ, measured without any model.

p is the training stack's probability of a sampled token, q the engine's, d = log p - log q. H is
the entropy of the training stack's distribution at the token, where it was recorded. Standard
errors take completions, not tokens, as independent.

The thresholds are ours. Where no other reason stands beside one, it was set so that the recordings
of research/causes.md with known causes, real and made, give no false defect.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dcmdp_jax.observe.legs import Leg
from dcmdp_jax.probe.columns.pairs import Ragged, TokenPairs, mean_of

# Sizes of the log-ratio and of the probabilities.

LARGE_LOG_RATIO = 0.3
"""Nats. Rounding and 8-bit quantization leave the median |d| of any tokens far below it."""
INNER_LOG_RATIO = 1.5
"""Nats. Tokens with a larger |d| do not count in `Evidence.inner_ratio`."""
_RATIO_CAP = 4.0
"""Cap of p / q, so that no few tokens move its mean."""
_UNCERTAIN = 0.9
"""Probability. p and q of a token above it can't differ much, whatever is wrong."""
_FEWEST_UNCERTAIN = 16
"""Tokens below it for a median of their own."""
_LOWERED = 0.02
"""Nats, what bfloat16 rounds log-probs by (research/causes.md); see `Evidence.lowered`."""
_LOG_Q_EDGES = (-6.0, -4.0, -3.0, -2.2, -1.5, -1.0, -0.6, -0.3, -0.1, -0.02)
"""Nats. Tokens between two edges are about as likely for the engine, so they can be compared."""

# Significance.

CERTAIN = 3.5
"""Standard errors; chance exceeds them once in 4,300 times."""
LEAST_DEVIATION = 0.003
"""Nats, or units of p / q. A mean that is less away from a value counts as equal to it."""

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

# First tokens of completions, which show different prompts.

_START_TOKENS = 4
"""Tokens that other prompts make unrelated; later ones follow the completion itself."""
_SETTLED_FROM = 16
"""Position of the first token that the prompt's form no longer matters for."""
_START_TIMES = 3.0
"""Mean |d| of the first tokens, in multiples of that of later ones with the same q."""
_FEWEST_ALIKE = 16
"""Later tokens between two of `_LOG_Q_EDGES`, for a mean to compare with."""

# Values that were filled in.

_FAR = 0.7
"""Nats, a factor of 2 in probability: a filled value is farther from the other column's."""
_NEAR = 0.05
"""Relative distance of values that are neighbors of a filled one."""
_FEWEST_FILLED = 8
"""Tokens with one value: fewer may be rounded alike."""
_FEWEST_FILLED_ROWS = 4
"""Completions that these are of: in fewer it may be one token that repeats."""
_TIMES_NEAR = 5
"""Tokens with one value, in multiples of those with its neighbors."""
_CUT_SURPRISE = 0.1
"""Nats. Tokens that a cut leaves alone are less surprising than the entropy by more."""
_CUT_FAR = 0.7
"""Share of unlikely tokens among those that a cut leaves alone, in multiples of all others'."""
_AT_EDGES = 0.9
"""Share of zeros that stand at the ends of completions: more are padding, not a cut."""

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

# Operators of an engine.

_TIMES_MEDIAN = 10.0
"""Relative difference of an operator, in multiples of the median: kernels differ by a few times."""
_LEAST_RELATIVE = 1e-4
"""Relative difference that float32 kernels stay below."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """The tokens scored again by the training stack with one thing changed.

    Attributes:
        name: the change.
        cause: key of `causes.CAUSES`.
        share: 1 - sum |q - h| / sum |q - p|, h the probability after the change: 1 reproduces the
            engine, 0 is as far from it as the training stack, below 0 is farther.
    """

    name: str
    cause: str
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifted:
    """The tokens scored again by the engine itself, without one of its settings.

    Attributes:
        engine: its name without the setting.
        cause: key of `causes.CAUSES`, the price of the setting.
        share: 1 - sum |h - p| / sum |q - p|, h the probability without the setting: 1 if nothing of
            the mismatch is left, 0 if all of it is.
    """

    engine: str
    cause: str
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorDifference:
    """An operator of the engine compared with the training stack's, on the same input.

    Attributes:
        operator: "embedding", "norm", "attention", "cache", "mlp" or "head"; key of
            `causes.CAUSES`.
        layer: number of the layer, 0 is the first; None before the first and after the last.
        relative: ||y - f(x)|| / ||f(x)||; x and y are what the engine's operator read and gave.
    """

    operator: str
    layer: int | None
    relative: float

    def __str__(self) -> str:
        if self.layer is None:
            return self.operator
        return f"{self.operator} of layer {self.layer}"


_FORWARD_ORDER = ("norm", "attention", "cache", "mlp", "head")


def in_order(sizes: Mapping[str, Any], layer: int | None) -> list[OperatorDifference]:
    """Differences of a layer, or of what comes after the last, in the order of the forward pass."""
    return [
        OperatorDifference(operator=name, layer=layer, relative=float(sizes[name]))
        for name in _FORWARD_ORDER
        if name in sizes
    ]


def outliers(operators: Sequence[OperatorDifference]) -> list[OperatorDifference]:
    """Operators that differ far more than the median; none unless they are the smaller half."""
    if not operators:
        return []
    median = float(np.median([operator.relative for operator in operators]))
    threshold = max(_TIMES_MEDIAN * median, _LEAST_RELATIVE)
    far_off = [operator for operator in operators if operator.relative > threshold]
    if 2 * len(far_off) >= len(operators):
        return []
    return far_off


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filled:
    """Log-probs of a column that are one value, where the other column's are elsewhere.

    Attributes:
        column: "engine" or "training stack".
        value: the value, nats.
        tokens: how many.
        last, first: completions that end, and that begin with one.
    """

    column: str
    value: float
    tokens: int
    last: int
    first: int


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
        return z * self.error * (1 + first / df + second / df**2 + third / df**3)

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """What engines and their recorders show of a pair, besides its columns.

    Attributes:
        framework: who recorded the columns; "" for two engines, or if it is not known.
        rounding: mean |p - h| of the training stack itself computed in the engine's dtype; None if
            not measured.
        explanations: controlled re-scorings; empty without a model.
        settings: cause -> setting of the engine that has it as its price; empty for a recording
            without them.
        lifted: re-scorings without each of these settings; empty if not measured.
        recurrent: whether the model has recurrent layers.
        operators: differences of the engine's operators, embedded or vLLM; empty for others.
    """

    framework: str = ""
    rounding: float | None = None
    explanations: Sequence[Explanation] = ()
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lifted: Sequence[Lifted] = ()
    recurrent: bool = False
    operators: Sequence[OperatorDifference] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence(Known):
    """Measurements from which `diagnosis.diagnose` names the cause.

    What is sampled from q has E[p / q] = 1, whatever p is; E[p / q] = p(S) if q is cut to a set S
    of tokens; what is sampled from p has E[q / p] = 1 and E[-log p - H] = 0. If q is a power of p,
    renormalized, q = p^(1 + b) / Z, then log q - log p is b (log p + H) up to terms in b^2, and
    -log p - H is about -b times the variance of log p. Noise of any kind, on either side, makes
    tokens more surprising, never less.

    Attributes:
        tokens, completions: how many.
        mean: mean |p - q|.
        median_log_ratio: median |d|, nats, of the tokens with p or q below 0.9; of all if those are
            fewer than 16. Near 1 a probability can't differ much.
        square: mean of d^2.
        ratio: mean of p / q.
        inner_ratio: 1 + (p / q - 1), the tokens with |d| above 1.5 counted as 0: a few tokens that
            one side finds impossible do not move it.
        capped_ratio: mean of min(p / q, 4): like that of p / q at most 1 for tokens sampled from q,
            but no few tokens move it.
        inverse_ratio: mean of q / p.
        sample_size: effective number of tokens under weights p / q, of `ratio_tokens`.
        surprise: mean of -log p - H; NaN without entropies, as are the next four.
        weighted_surprise: mean of p / q (-log p - H): 0 for tokens sampled from q, whatever p is,
            unless q is cut.
        variance: mean of (log p + H)^2.
        power: b, the slope of log q - log p over log p + H.
        power_margin: two standard errors of b, and what the line leaves unexplained: |b| sqrt(1 -
            alignment^2).
        alignment: their correlation; 1 or -1 for a power, in (-0.7, 0.3) for noise, other weights,
            other prompts.
        spread: log of the standard deviation of log q over that of log p.
        correlation: Pearson's, of log p and log q.
        penalty: mean d of tokens that the completion already had, less that of new ones with the
            same q.
        penalty_share: the part of mean d^2 that this difference is.
        uncertain: tokens with p and q below 0.9, the only ones that show a temperature.
        broken: share of the completions whose columns agree up to a token and are unrelated from
            there on.
        broken_correlation: the same after these tokens; `whole_correlation` over all others.
        start: mean |d| of the first 4 tokens of a completion.
        start_expected: the same for tokens from the 17th on with the same q; NaN if there are too
            few.
        start_excess: mean of |d| less 3 times the expected, over the first 4.
        lowered: share of the tokens that q finds less likely than p by 0.02 nats.
        lag_means: age of the weights in steps -> mean of |p - q|; empty if not known.
        filled: None if no column has such values. Those tokens are left out of all but `mean`.
        columns: whether they are aligned.
        identical: completions that equal another one, by ids and about by log q, both of a
            probability below 1 / (1000 N^2) on both sides: of N independent ones fewer than one in
            1,000 recordings has such a pair.
        course: evidence over the steps that updates do not reach the engine; "" if none.
        floor: the larger of both engines' noise floors; None if not measured.
        legs: the gap's two legs; empty if the engine does not score.

    From `median_log_ratio` to `correlation` all is over the other completions where some are
    broken, and from the 17th token on where the first ones stand apart, so that a second cause
    shows.
    """

    tokens: int
    completions: int
    mean: float
    median_log_ratio: float
    square: float
    ratio: TokenMean
    inner_ratio: TokenMean
    capped_ratio: TokenMean
    inverse_ratio: TokenMean
    sample_size: float
    ratio_tokens: int
    surprise: TokenMean = UNKNOWN
    weighted_surprise: TokenMean = UNKNOWN
    variance: float = np.nan
    power: float = np.nan
    power_margin: float = np.nan
    alignment: float = np.nan
    penalty: TokenMean
    penalty_share: float
    spread: TokenMean
    correlation: float
    uncertain: int
    broken: float
    broken_correlation: float
    whole_correlation: float
    start: float
    start_expected: float
    start_excess: TokenMean
    lag_means: Mapping[int, TokenMean]
    filled: Filled | None
    columns: Alignment
    identical: int
    course: str = ""
    floor: float | None = None
    legs: Sequence[Leg] = ()
    lowered: float = 1.0


def collect(pairs: TokenPairs, **from_engines: Any) -> Evidence:
    """Measure what the columns alone show, and add what only engines can: `floor`, `legs`, ..."""
    tokens = len(pairs.token_ids)
    completions = len(pairs.lengths)
    mean = float(pairs.discrepancy.mean())
    lag_means = _lag_means(pairs)
    identical = _identical(pairs)

    # One fault after another is set aside, so that a second cause shows.
    filled, pairs = _filled(pairs)
    misplaced, alignment = _alignment(pairs)
    broken, correlations = _breaks(pairs, misplaced)
    mask = ~(broken | misplaced)[pairs.completion]
    start = _start(pairs, mask)
    if start["start"] > LARGE_LOG_RATIO and start["start_excess"].above(0):
        mask &= pairs.position >= _SETTLED_FROM
    if not mask.any():
        mask[:] = True

    return Evidence(
        tokens=tokens,
        completions=completions,
        mean=mean,
        **_sampling(pairs, mask),
        broken=float(broken.mean()),
        broken_correlation=correlations[0],
        whole_correlation=correlations[1],
        **start,
        lag_means=lag_means,
        filled=filled,
        columns=alignment,
        identical=identical,
        **from_engines,
    )


def _identical(pairs: TokenPairs) -> int:
    """Completions that equal another one; see `Evidence.identical`.

    A pair of rare ones has a chance of sum_y q_i(y) q_j(y) <= 1 / (1000 N^2).
    """
    log_p = np.add.reduceat(pairs.train_logprobs, pairs.starts, dtype=np.float64)
    log_q = np.add.reduceat(pairs.rollout_logprobs, pairs.starts, dtype=np.float64)
    rare = np.maximum(log_p, log_q) < -np.log(1000.0) - 2 * np.log(len(pairs.lengths))

    twins: dict[bytes, list[np.ndarray]] = {}
    for row in np.flatnonzero(rare):
        span = pairs.span(row)
        twins.setdefault(pairs.token_ids[span].tobytes(), []).append(pairs.rollout_logprobs[span])

    # Equal ids of which the engine's log-probs differ are of other prompts, or were not recorded.
    identical = 0
    for group in twins.values():
        gaps = [np.median(np.abs(logprobs - group[0])) for logprobs in group]
        alike = sum(gap < LARGE_LOG_RATIO for gap in gaps)
        if alike > 1:
            identical += alike
    return int(identical)


def _lag_means(pairs: TokenPairs) -> dict[int, TokenMean]:
    if pairs.lags is None:
        return {}
    means = {}
    for lag in np.unique(pairs.lags):
        mask = pairs.lags == lag
        means[int(lag)] = _estimate(pairs.discrepancy[mask], pairs.completion[mask])
    return means


def _sampling(pairs: TokenPairs, mask: np.ndarray) -> dict[str, Any]:
    """Measure which distribution the tokens of `mask`, [n] bool, were sampled from."""
    rows = pairs.completion[mask]
    log_p = pairs.train_logprobs[mask].astype(np.float64)
    log_q = pairs.rollout_logprobs[mask].astype(np.float64)
    log_ratio = pairs.log_ratio[mask]
    ratio = np.exp(log_ratio)
    square = float(np.mean(log_ratio**2))

    distance = np.abs(log_ratio)
    inner_excess = np.where(distance <= INNER_LOG_RATIO, ratio - 1, 0)
    one_is_uncertain = np.minimum(log_p, log_q) < np.log(_UNCERTAIN)
    both_are_uncertain = np.maximum(log_p, log_q) < np.log(_UNCERTAIN)
    if one_is_uncertain.sum() >= _FEWEST_UNCERTAIN:
        distance = distance[one_is_uncertain]

    repeated = _less_group_means(_had_before(pairs)[mask].astype(np.float64), log_q)
    penalty = _slope(repeated, _less_group_means(log_ratio, log_q), rows)
    penalty_share = penalty.mean**2 * np.mean(repeated**2) / max(square, 1e-300)

    measurements = {
        "median_log_ratio": float(np.median(distance)),
        "square": square,
        "ratio": _estimate(ratio, rows),
        "inner_ratio": _estimate(1 + inner_excess, rows),
        "capped_ratio": _estimate(np.minimum(ratio, _RATIO_CAP), rows),
        "inverse_ratio": _estimate(np.exp(-log_ratio), rows),
        "sample_size": float(ratio.sum() ** 2 / np.sum(ratio**2)),
        "ratio_tokens": len(log_ratio),
        "spread": _spread(log_p, log_q, rows),
        "correlation": _correlation(log_p, log_q),
        "lowered": float(np.mean(log_ratio > _LOWERED)),
        "uncertain": int(np.sum(both_are_uncertain)),
        "penalty": penalty,
        "penalty_share": float(penalty_share),
    }
    if pairs.entropies is not None:
        measurements |= _surprise(log_p + pairs.entropies[mask], log_ratio, rows)
    return measurements


def _surprise(deviation: np.ndarray, log_ratio: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    """Fields of `Evidence` that need entropies; `deviation` is log p + H of each token."""
    slope = _slope(deviation, -log_ratio, rows)
    alignment = _correlation(-log_ratio, deviation)
    unexplained = abs(slope.mean) * np.sqrt(max(1 - alignment**2, 0.0))
    return {
        "surprise": _estimate(-deviation, rows),
        "weighted_surprise": _estimate(-deviation * np.exp(log_ratio), rows),
        "variance": float(np.mean(deviation**2)),
        "power": slope.mean,
        "power_margin": 2 * slope.error + unexplained,
        "alignment": alignment,
    }


def _spread(log_p: np.ndarray, log_q: np.ndarray, rows: np.ndarray) -> TokenMean:
    """Estimate the log of the standard deviation of log q over that of log p.

    Its error is exact to first order.
    """
    if not (log_p.std() and log_q.std()):
        return TokenMean(mean=0.0, error=np.inf)
    change_q = (((log_q - log_q.mean()) / log_q.std()) ** 2 - 1) / 2
    change_p = (((log_p - log_p.mean()) / log_p.std()) ** 2 - 1) / 2
    mean = float(np.log(log_q.std() / log_p.std()))
    return dataclasses.replace(_estimate(change_q - change_p, rows), mean=mean)


def _slope(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> TokenMean:
    """Least-squares slope of y over x, its error clustered by completion.

    0 with an infinite error for a constant x.
    """
    x = x - x.mean()
    y = y - y.mean()
    square = float(np.mean(x**2))
    if not square:
        return TokenMean(mean=0.0, error=np.inf)
    slope = float(np.mean(x * y)) / square
    return dataclasses.replace(_estimate(x * (y - slope * x) / square, rows), mean=slope)


def _had_before(pairs: TokenPairs) -> np.ndarray:
    """[n] bool, tokens whose id occurs earlier in their completion."""
    _, first_index = np.unique(pairs.completion * 2**31 + pairs.token_ids, return_index=True)
    had = np.ones(len(pairs.token_ids), bool)
    had[first_index] = False
    return had


def _less_group_means(values: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Values less the mean of the tokens that the engine finds as likely."""
    group = np.digitize(log_q, _LOG_Q_EDGES)
    return values - (np.bincount(group, values) / np.maximum(np.bincount(group), 1))[group]


def _filled(pairs: TokenPairs) -> tuple[Filled | None, TokenPairs]:
    """Find values that are not measured, such as 0 or -9999 at the end of completions.

    Where a column is far from the other one, its values are spread out; even rounded ones have
    neighbors as frequent. A value that 8 tokens of 4 completions there share, five times as many as
    there are within 5% of it, was filled in. Near temperature 0 most values are zeros; where a cut
    leaves one token, so is that token's, see `_left_by_a_cut`.

    Returns:
        The filled values, None without any; all other tokens.
    """
    far = np.abs(pairs.train_logprobs - pairs.rollout_logprobs) > _FAR
    if not far.any():
        return None, pairs

    columns = {"engine": pairs.rollout_logprobs, "training stack": pairs.train_logprobs}
    for name, column in columns.items():
        values, counts = np.unique(column[far], return_counts=True)
        value = values[counts.argmax()]
        same = column == value
        exact = far & same
        near = far & ~same & (np.abs(column - value) < _NEAR * (abs(value) + 1))

        rows = len(np.unique(pairs.completion[exact]))
        if rows < _FEWEST_FILLED_ROWS or same.mean() > 0.5:
            continue
        if exact.sum() < max(_FEWEST_FILLED, _TIMES_NEAR * near.sum()):
            continue
        if value == 0 and _left_by_a_cut(pairs, same, column):
            continue

        filled = Filled(
            column=name,
            value=float(value),
            tokens=int(exact.sum()),
            last=int(exact[pairs.starts + pairs.lengths - 1].sum()),
            first=int(exact[pairs.starts].sum()),
        )
        return filled, pairs.where(~exact)
    return None, pairs


def _left_by_a_cut(pairs: TokenPairs, zeros: np.ndarray, column: np.ndarray) -> bool:
    """Whether log-probs of exactly 0 are of tokens that a cut (min-p, top-k of 1) leaves alone.

    The engine was all but sure of such a token, so the other column finds it likelier than the
    average token: by its entropy, or without entropies by the share of tokens below one half. What
    was filled in stands on any token, or in a row at the beginning or the end of completions.
    """
    if pairs.entropies is not None:
        surprise = -(pairs.train_logprobs + pairs.entropies)[zeros]
        return _estimate(surprise, pairs.completion[zeros]).below(0, _CUT_SURPRISE)

    at_edges = 0
    for row in np.split(zeros, pairs.starts[1:]):
        if not row.all():
            at_edges += int(np.argmin(row)) + int(np.argmin(row[::-1]))
    if at_edges >= _AT_EDGES * zeros.sum():
        return False

    other = pairs.train_logprobs if column is pairs.rollout_logprobs else pairs.rollout_logprobs
    far = other < -_FAR
    return mean_of(far[zeros]) < _CUT_FAR * mean_of(far[~zeros])


def _alignment(pairs: TokenPairs) -> tuple[np.ndarray, Alignment]:
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
        early, late = _lagged(pairs, mask, by)
        correlations[by] = _correlation(pairs.train_logprobs[early], pairs.rollout_logprobs[late])

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


def _lagged(pairs: TokenPairs, mask: np.ndarray, by: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of masked tokens, and of the tokens `by` places later in the same completions.

    A token without a later one in its completion is left out.

    Args:
        pairs: the tokens.
        mask: [n] bool.
        by: places; negative for earlier ones.
    """
    later = pairs.position + by
    early = np.flatnonzero(mask & (later >= 0) & (later < pairs.lengths[pairs.completion]))
    return early, early + by


def _shifts(pairs: TokenPairs) -> np.ndarray:
    """[N] int, the places that log p of a completion is shifted by against its log q; 0 for none.

    A completion is a candidate for a shift that brings its first 8 tokens nearer to each other.
    Over the other tokens of the candidates, which had no part in the choice, the shift must take
    30% of the mean |d|, significantly. A completion that was re-tokenized is shifted too, from its
    break on: at least half of the completions whose later tokens are nearer must be candidates.
    """
    shifts = np.zeros(len(pairs.lengths), np.int64)
    best_gain = np.zeros(len(pairs.lengths))
    for by in _SHIFTS:
        gain = _shift_gain(pairs, by)
        better = gain > best_gain
        shifts[better] = by
        best_gain[better] = gain[better]
    return shifts


def _shift_gain(pairs: TokenPairs, by: int) -> np.ndarray:
    """[N] float, what a shift takes from each completion's sum of |d|; 0 if it is no shift."""
    count = len(pairs.lengths)
    none = np.zeros(count)
    early, late = _lagged(pairs, np.ones(len(pairs.token_ids), bool), by)
    if len(early) < _FEWEST_LAGGED:
        return none
    shifted = pairs.train_logprobs[early] - pairs.rollout_logprobs[late].astype(np.float64)
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
    estimate = _estimate(relative[tested], np.arange(tested.sum()))
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
    # Other prompts make the first tokens unrelated too; that is told apart by `_start`.
    first = (pairs.position >= _START_TOKENS) & (pairs.position < _FIRST_TOKENS)
    unrelated = ~shifted
    if _related(pairs, unrelated[rows]):
        unrelated = _far_below_others(pairs, shifted, first)
    elif _related(pairs, unrelated[rows] & first):
        unrelated = np.zeros_like(shifted)

    tokens = unrelated[rows]
    capped = np.minimum(np.exp(pairs.log_ratio[tokens]), _RATIO_CAP)
    if tokens.any() and _estimate(capped, rows[tokens]).above(1):
        return unrelated
    return np.zeros_like(shifted)


def _related(pairs: TokenPairs, mask: np.ndarray, least: float = _UNRELATED) -> bool:
    return _correlation_at(pairs, mask) >= least


def _far_below_others(pairs: TokenPairs, shifted: np.ndarray, first: np.ndarray) -> np.ndarray:
    """[N] bool, completions that are less related than the others, from their 5th token on."""
    rows = pairs.completion
    none = np.zeros_like(shifted)
    correlations = [_correlation_at(pairs, pairs.span(row)) for row in range(len(shifted))]
    error = 1 / np.sqrt(np.maximum(pairs.lengths - 3, 1))
    low = fisher_z(np.array(correlations)) + CERTAIN * error < np.arctanh(RELATED)
    unrelated = ~shifted & low & (pairs.lengths > _FIRST_TOKENS)
    if unrelated.sum() < 2 or not _related(pairs, ~(unrelated | shifted)[rows], RELATED):
        return none

    size = np.abs(pairs.log_ratio)
    later = pairs.position >= _FIRST_TOKENS
    first_mean = np.bincount(rows[first], size[first], len(low)) / (_FIRST_TOKENS - _START_TOKENS)
    later_sum = np.bincount(rows[later], size[later], len(low))
    later_mean = later_sum / np.maximum(pairs.lengths - _FIRST_TOKENS, 1)
    from_the_start = (first_mean > later_mean / 2)[unrelated].mean() >= 0.5
    if not from_the_start or _related(pairs, unrelated[rows]):
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
    suspects = [row for row in candidates if _correlation_at(pairs, pairs.span(row)) < _UNRELATED]

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
        if len(other) == length and _correlation(log_p, other) > RELATED:
            by_probability = _correlation(np.exp(log_p), np.exp(other))
            best = max(best, min(_correlation(log_p, other), by_probability))
    chance = CERTAIN**2 + 2 * np.log(len(log_q))
    return best > RELATED and length > 3 and fisher_z(best) ** 2 * (length - 3) > chance


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
    best = int(splits[np.argmax(splits * (n - splits) * (after - before) ** 2)])
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


def _breaks(pairs: TokenPairs, misplaced: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Find completions that are broken: from some token on the engines do not agree.

    A copied beginning followed by free text looks like a break where weights differ: there the
    columns go on to agree about which tokens are likely. After a real break they have nothing to do
    with each other.

    Returns:
        [N] bool, broken completions; and the columns' correlation after their breaks and elsewhere.
    """
    size = np.abs(pairs.log_ratio)
    # A break needs a token above the level; most recordings are done here.
    wild = (np.maximum.reduceat(size, pairs.starts) > LARGE_LOG_RATIO) & ~misplaced
    wild_rows = np.flatnonzero(wild)

    broken = np.zeros(len(wild), bool)
    after = np.zeros(len(size), bool)
    for row in wild_rows:
        span = pairs.span(row)
        first_wild = break_at(size[span])
        if first_wild is not None:
            broken[row] = True
            after[span][first_wild:] = True

    # Other prompts make first tokens unrelated too; that is told apart by `_start`.
    before = ~after & (pairs.position >= _START_TOKENS) & ~misplaced[pairs.completion]
    low = _correlation_at(pairs, after)
    high = _correlation_at(pairs, before)
    apart = after.sum() >= _FEWEST_UNRELATED and low < _UNRELATED and high > RELATED
    if not apart or fisher_z(high) - fisher_z(low) <= CERTAIN / np.sqrt(after.sum() - 3):
        return np.zeros_like(broken), (np.nan, _correlation_at(pairs, slice(None)))

    # Where one is broken, shorter or noisier breaks than `break_at` sees are too.
    for row in wild_rows:
        span = pairs.span(row)
        tail = slice(span.start + pairs.lengths[row] // 2, span.stop)
        if (
            tail.stop - tail.start >= _SHORTEST_PART
            and np.median(size[tail]) > LARGE_LOG_RATIO
            and _correlation_at(pairs, tail) < _UNRELATED
        ):
            broken[row] = True
    return broken, (low, high)


def _start(pairs: TokenPairs, mask: np.ndarray) -> dict[str, Any]:
    """Compare the first tokens with later ones of the same q: uncertain tokens differ more."""
    size = np.abs(pairs.log_ratio)
    group = np.digitize(pairs.rollout_logprobs, _LOG_Q_EDGES)
    groups = len(_LOG_Q_EDGES) + 1
    first = mask & (pairs.position < _START_TOKENS)
    later = mask & (pairs.position >= _SETTLED_FROM)
    counts = np.bincount(group[later], minlength=groups)
    usual = np.bincount(group[later], size[later], groups) / np.maximum(counts, 1)

    comparable = first & (counts[group] >= _FEWEST_ALIKE)
    if not comparable.any():
        return {"start": mean_of(size[first]), "start_expected": np.nan, "start_excess": UNKNOWN}
    expected = usual[group[comparable]]
    excess = size[comparable] - _START_TIMES * expected
    return {
        "start": mean_of(size[comparable]),
        "start_expected": mean_of(expected),
        "start_excess": _estimate(excess, pairs.completion[comparable]),
    }


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's, in float64; 0 for a constant or fewer than three values."""
    if len(x) > 2 and x.min() < x.max() and y.min() < y.max():
        return float(np.corrcoef(x.astype(np.float64), y.astype(np.float64))[0, 1])
    return 0.0


def _correlation_at(pairs: TokenPairs, tokens: np.ndarray | slice) -> float:
    """Correlation of log p and log q over some tokens."""
    return _correlation(pairs.train_logprobs[tokens], pairs.rollout_logprobs[tokens])


def _estimate(values: np.ndarray, rows: np.ndarray) -> TokenMean:
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
        error = float(np.sqrt(count / (count - 1) * (sums @ sums)) / len(values))
    return TokenMean(mean=mean, error=error, completions=count)
