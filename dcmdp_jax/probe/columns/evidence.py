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
from dcmdp_jax.probe.columns.alignment import (
    LARGE_LOG_RATIO,
    RATIO_CAP,
    START_TOKENS,
    Alignment,
    align,
    find_breaks,
)
from dcmdp_jax.probe.columns.pairs import (
    UNKNOWN,
    TokenMean,
    TokenPairs,
    mean_of,
    pearson,
    token_mean,
)

# Sizes of the log-ratio and of the probabilities.

INNER_LOG_RATIO = 1.5
"""Nats. Tokens with a larger |d| do not count in `Evidence.inner_ratio`."""
_UNCERTAIN = 0.9
"""Probability. p and q of a token above it can't differ much, whatever is wrong."""
_FEWEST_UNCERTAIN = 16
"""Tokens below it for a median of their own."""
_LOWERED = 0.02
"""Nats, what bfloat16 rounds log-probs by (research/causes.md); see `Evidence.lowered`."""
_LOG_Q_EDGES = (-6.0, -4.0, -3.0, -2.2, -1.5, -1.0, -0.6, -0.3, -0.1, -0.02)
"""Nats. Tokens between two edges are about as likely for the engine, so they can be compared."""

# First tokens of completions, which show different prompts.

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
_TIMES_RUNS = 5
"""Runs of tokens in random order, in multiples of those of padding."""
_HASH_FACTOR = np.int64(6364136223846793005)
"""a of `_prefix_hashes`, odd: that of Knuth's generator MMIX."""
_LOWEST = -1e6
"""Nats; -inf counts as this."""
_CUT_SURPRISE = 0.1
"""Nats. Tokens that a cut leaves alone are less surprising than the entropy by more."""
_CUT_FAR = 0.7
"""Share of unlikely tokens among those that a cut leaves alone, in multiples of all others'."""
_AT_EDGES = 0.9
"""Share of zeros that stand at the ends of completions: more are padding, not a cut."""

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
    median = np.median([operator.relative for operator in operators])
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
        ratio_tokens: tokens in the means of p / q.
        sample_size: effective number of these tokens under weights p / q.
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
        legs: the gap's two legs, that of decoding first; empty if the engine does not score.

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
    mean = pairs.discrepancy.mean()
    lag_means = _lag_means(pairs)
    identical = _identical(pairs)

    # One fault after another is set aside, so that a second cause shows.
    filled, pairs = _filled(pairs)
    misplaced, alignment = align(pairs)
    broken, correlations = find_breaks(pairs, misplaced)
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
        broken=broken.mean(),
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
        means[int(lag)] = token_mean(pairs.discrepancy[mask], pairs.completion[mask])
    return means


def _sampling(pairs: TokenPairs, mask: np.ndarray) -> dict[str, Any]:
    """Measure which distribution the tokens of `mask`, [n] bool, were sampled from."""
    rows = pairs.completion[mask]
    log_p = pairs.train_logprobs[mask].astype(np.float64)
    log_q = pairs.rollout_logprobs[mask].astype(np.float64)
    log_ratio = pairs.log_ratio[mask]
    ratio = np.exp(log_ratio)
    square = np.mean(log_ratio**2)

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
        "median_log_ratio": np.median(distance),
        "square": square,
        "ratio": token_mean(ratio, rows),
        "inner_ratio": token_mean(1 + inner_excess, rows),
        "capped_ratio": token_mean(np.minimum(ratio, RATIO_CAP), rows),
        "inverse_ratio": token_mean(np.exp(-log_ratio), rows),
        "sample_size": ratio.sum() ** 2 / np.sum(ratio**2),
        "ratio_tokens": len(log_ratio),
        "spread": _spread(log_p, log_q, rows),
        "correlation": pearson(log_p, log_q),
        "lowered": np.mean(log_ratio > _LOWERED),
        "uncertain": int(np.sum(both_are_uncertain)),
        "penalty": penalty,
        "penalty_share": penalty_share,
    }
    if pairs.entropies is not None:
        measurements |= _surprise(log_p + pairs.entropies[mask], log_ratio, rows)
    return measurements


def _surprise(deviation: np.ndarray, log_ratio: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    """Fields of `Evidence` that need entropies; `deviation` is log p + H of each token."""
    slope = _slope(deviation, -log_ratio, rows)
    alignment = pearson(-log_ratio, deviation)
    unexplained = abs(slope.mean) * np.sqrt(max(1 - alignment**2, 0.0))
    return {
        "surprise": token_mean(-deviation, rows),
        "weighted_surprise": token_mean(-deviation * np.exp(log_ratio), rows),
        "variance": np.mean(deviation**2),
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
    mean = np.log(log_q.std() / log_p.std())
    return dataclasses.replace(token_mean(change_q - change_p, rows), mean=mean)


def _slope(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> TokenMean:
    """Least-squares slope of y over x, its error clustered by completion.

    0 with an infinite error for a constant x.
    """
    x = x - x.mean()
    y = y - y.mean()
    square = np.mean(x**2)
    if not square:
        return TokenMean(mean=0.0, error=np.inf)
    slope = np.mean(x * y) / square
    return dataclasses.replace(token_mean(x * (y - slope * x) / square, rows), mean=slope)


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
    there are within 5% of it, was filled in. Samples of one prompt that begin with the same tokens
    have the same log-probs there, so these count once. Near temperature 0 most values are zeros;
    where a cut leaves one token, so is that token's, see `_left_by_a_cut`.

    Returns:
        The filled values, None without any; all other tokens.
    """
    log_p = pairs.train_logprobs
    log_q = pairs.rollout_logprobs
    far = np.abs(log_p - log_q) > _FAR
    if not far.any():
        return None, pairs

    counted = _without_repeats(pairs, far)
    for name, column, other in (("engine", log_q, log_p), ("training stack", log_p, log_q)):
        values, counts = np.unique(column[counted], return_counts=True)
        value = values[counts.argmax()]
        same = column == value
        exact = counted & same
        near = counted & ~same & (np.abs(column - value) < _NEAR * (abs(value) + 1))

        rows = len(np.unique(pairs.completion[exact]))
        if rows < _FEWEST_FILLED_ROWS:
            continue
        if same.mean() > 0.5 and not _in_long_runs(pairs, same):
            continue
        if exact.sum() < max(_FEWEST_FILLED, _TIMES_NEAR * near.sum()):
            continue
        if value == 0 and _left_by_a_cut(pairs, same, other):
            continue

        exact = far & same
        filled = Filled(
            column=name,
            value=float(value),
            tokens=int(exact.sum()),
            last=int(exact[pairs.starts + pairs.lengths - 1].sum()),
            first=int(exact[pairs.starts].sum()),
        )
        return filled, pairs.where(~exact)
    return None, pairs


def _in_long_runs(pairs: TokenPairs, mask: np.ndarray) -> bool:
    """Whether the tokens of `mask` stand in long runs, as padding does.

    A value that most tokens have otherwise, as in a clipped column or near temperature 0, stands
    anywhere: of k tokens, k (1 - share of `mask`) are followed by another value.
    """
    follows = np.append(False, mask[:-1]) & (pairs.position > 0)
    runs = np.sum(mask & ~follows)
    return _TIMES_RUNS * runs < mask.sum() * (1 - mask.mean())


def _without_repeats(pairs: TokenPairs, mask: np.ndarray) -> np.ndarray:
    """[n] bool, the tokens of `mask` less those that repeat a measurement of another completion.

    These have the same ids up to and with their own, and the same log-probs to 0.01 nats. A pair
    has no prompts: samples of different ones differ in the log-probs that are not filled in.
    """
    index = np.flatnonzero(mask)
    hashes = _prefix_hashes(pairs)[index]
    log_p = np.maximum(pairs.train_logprobs[index], _LOWEST)
    log_q = np.maximum(pairs.rollout_logprobs[index], _LOWEST)
    hundredths = np.rint(100 * np.stack([log_p, log_q])).astype(np.int64)
    measurements = np.column_stack([hashes, *hundredths])
    _, first_index = np.unique(measurements, axis=0, return_index=True)
    distinct = np.zeros(len(mask), bool)
    distinct[index[first_index]] = True
    return distinct


def _prefix_hashes(pairs: TokenPairs) -> np.ndarray:
    """[n] int64, of the ids of a completion up to each token: sum_t (id_t + 1) a^t mod 2^64."""
    powers = np.cumprod(np.full(pairs.lengths.max(), _HASH_FACTOR))
    terms = (pairs.token_ids + np.int64(1)) * powers[pairs.position]
    sums = np.cumsum(terms)
    return sums - np.repeat((sums - terms)[pairs.starts], pairs.lengths)


def _left_by_a_cut(pairs: TokenPairs, zeros: np.ndarray, other: np.ndarray) -> bool:
    """Whether log-probs of exactly 0 are of tokens that a cut (min-p, top-k of 1) leaves alone.

    The engine was all but sure of such a token, so the other column finds it likelier than the
    average token: by its entropy, or by the share of tokens below one half without entropies and
    where most tokens are zeros: sure ones may all follow the first. What was filled in stands on
    any token, or in a row at the beginning or the end of completions.
    """
    far = other < -_FAR
    likelier = mean_of(far[zeros]) < _CUT_FAR * mean_of(far[~zeros])
    if zeros.mean() > 0.5:
        return likelier
    if pairs.entropies is not None:
        surprise = -(pairs.train_logprobs + pairs.entropies)[zeros]
        return token_mean(surprise, pairs.completion[zeros]).below(0, _CUT_SURPRISE)

    at_edges = 0
    for row in np.split(zeros, pairs.starts[1:]):
        if not row.all():
            at_edges += np.argmin(row) + np.argmin(row[::-1])
    return at_edges < _AT_EDGES * zeros.sum() and likelier


def _start(pairs: TokenPairs, mask: np.ndarray) -> dict[str, Any]:
    """Compare the first tokens with later ones of the same q: uncertain tokens differ more."""
    size = np.abs(pairs.log_ratio)
    group = np.digitize(pairs.rollout_logprobs, _LOG_Q_EDGES)
    groups = len(_LOG_Q_EDGES) + 1
    first = mask & (pairs.position < START_TOKENS)
    later = mask & (pairs.position >= _SETTLED_FROM)
    counts = np.bincount(group[later], minlength=groups)
    usual = np.bincount(group[later], size[later], groups) / np.maximum(counts, 1)

    comparable = first & (counts[group] >= _FEWEST_ALIKE)
    expected = usual[group[comparable]]
    excess = UNKNOWN
    if comparable.any():
        first = comparable
        excess = token_mean(size[first] - _START_TIMES * expected, pairs.completion[first])
    return {
        "start": mean_of(size[first]),
        "start_expected": mean_of(expected),
        "start_excess": excess,
    }
