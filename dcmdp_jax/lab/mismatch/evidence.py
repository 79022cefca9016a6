"""Evidence for why two columns of log-probs differ, measured without any model.

p is the training stack's probability of a sampled token, q the engine's, d = log p - log q. H is
the entropy of the training stack's distribution at the token, where it was recorded. Standard
errors take completions, not tokens, as independent.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dcmdp_jax.lab.mismatch.pairs import TokenPairs, mean_of
from dcmdp_jax.observe.legs import Leg

LARGE_LOG_RATIO = 0.3
"""Nats. Rounding and 8-bit quantization leave the median |d| of any stretch of tokens far below
it.
"""
INNER_LOG_RATIO = 1.5
_UNCERTAIN = 0.9
_FEWEST_UNCERTAIN = 16
_SHORTEST_PART = 4
_TIMES_BEFORE = 5.0
RELATED = 0.8
_UNRELATED = 0.5
_FEWEST_UNRELATED = 8
_START_TOKENS = 4
_SETTLED_FROM = 16
_START_TIMES = 3.0
_FEWEST_ALIKE = 16
_LOG_Q_EDGES = (-6.0, -4.0, -3.0, -2.2, -1.5, -1.0, -0.6, -0.3, -0.1, -0.02)
CERTAIN = 3.5
_LOWERED = 0.02
_FAR = 0.7
_NEAR = 0.05
_FEWEST_FILLED = 8
_FEWEST_FILLED_ROWS = 4
_TIMES_NEAR = 5
_RATIO_CAP = 4.0
_CUT_SURPRISE = 0.1
_CUT_FAR = 0.7
_AT_EDGES = 0.9
_SHIFTS = (-2, -1, 1, 2)
_FEWEST_LAGGED = 16
_LEAST_GAIN = 0.1
_NEARER = 0.7
_FIRST_TOKENS = 8
ALL_SHIFTED = 0.9
_COMPARED = 64
_MOST_SUSPECTS = 16


class Explanation(NamedTuple):
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


class Lifted(NamedTuple):
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


class OperatorDifference(NamedTuple):
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
        return self.operator if self.layer is None else f"{self.operator} of layer {self.layer}"


_IN_A_LAYER = ("norm", "attention", "cache", "mlp", "head")


def in_order(sizes: Mapping[str, Any], layer: int | None) -> list[OperatorDifference]:
    """Differences of a layer, or of what comes after the last, in the order of the forward pass."""
    return [
        OperatorDifference(name, layer, float(sizes[name])) for name in _IN_A_LAYER if name in sizes
    ]


_TIMES_MEDIAN = 10.0
_LEAST_RELATIVE = 1e-4


def outliers(operators: Sequence[OperatorDifference]) -> list[OperatorDifference]:
    """Operators that differ by ten times the median of all, and by 1e-4; none if that is not the
    smaller half.
    """
    if not operators:
        return []
    least = max(
        _TIMES_MEDIAN * float(np.median([each.relative for each in operators])), _LEAST_RELATIVE
    )
    found = [each for each in operators if each.relative > least]
    return found if 2 * len(found) < len(operators) else []


class Filled(NamedTuple):
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


class Alignment(NamedTuple):
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


class TokenMean(NamedTuple):
    """A mean over tokens and its standard error, clustered by completion; NaN if it was not
    measured.

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
        """3.5 standard errors; for few completions the quantile of Student's t that is as rare (1
        in 4,300).
        """
        z = CERTAIN
        df = max(self.completions - 1, 1)
        first = (z**2 + 1) / 4
        second = (5 * z**4 + 16 * z**2 + 3) / 96
        third = (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / 384
        return z * self.error * (1 + first / df + second / df**2 + third / df**3)

    def above(self, value: float, by: float = 0.003) -> bool:
        """Above `value` by `by` and the margin."""
        return self.mean - self.margin > value + by

    def below(self, value: float, by: float = 0.003) -> bool:
        """Below `value` by `by` and the margin."""
        return self.mean + self.margin < value - by

    def __str__(self) -> str:
        return f"{self.mean:.3f} +- {self.error:.3f}"


UNKNOWN = TokenMean(np.nan, np.nan)


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


@dataclasses.dataclass(frozen=True)
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
    surprise: TokenMean
    weighted_surprise: TokenMean
    variance: float
    power: float
    power_margin: float
    alignment: float
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


def collect(pairs: TokenPairs, **known: Any) -> Evidence:
    """Measure everything that the columns alone show, and add what only engines can: fields from
    `floor` on.
    """
    size = {
        "tokens": len(pairs.token_ids),
        "completions": len(pairs.lengths),
        "mean": float(pairs.discrepancy.mean()),
    }
    lags = _lag_means(pairs)
    identical = _identical(pairs)
    filled, pairs = _filled(pairs)
    misplaced, alignment = _alignment(pairs)
    broken, correlations = _breaks(pairs, misplaced)
    kept = ~(broken | misplaced)[pairs.completion]
    start = _start(pairs, kept)
    if start["start"] > LARGE_LOG_RATIO and start["start_excess"].above(0):
        kept &= pairs.position >= _SETTLED_FROM
    kept = kept if kept.any() else np.ones(len(kept), bool)
    return Evidence(
        **size,
        **_sampling(pairs, kept),
        broken=float(broken.mean()),
        broken_correlation=correlations[0],
        whole_correlation=correlations[1],
        **start,
        lag_means=lags,
        filled=filled,
        columns=alignment,
        identical=identical,
        **known,
    )


def _identical(pairs: TokenPairs) -> int:
    """See `Evidence.identical`. A pair of rare ones has a chance of sum_y q_i(y) q_j(y) <= 1 /
    (1000 N^2).
    """
    columns = (pairs.train_logprobs, pairs.rollout_logprobs)
    spans = {}
    likeliest = np.maximum(*(np.add.reduceat(x, pairs.starts, dtype=np.float64) for x in columns))
    for row in np.flatnonzero(likeliest < -np.log(1000.0) - 2 * np.log(len(pairs.lengths))):
        span = slice(pairs.starts[row], pairs.starts[row] + pairs.lengths[row])
        spans.setdefault(pairs.token_ids[span].tobytes(), []).append(pairs.rollout_logprobs[span])
    # Equal ids of which the engine's log-probs differ are of other prompts, or were not recorded.
    found = (
        [np.median(np.abs(x - twins[0])) < LARGE_LOG_RATIO for x in twins]
        for twins in spans.values()
    )
    return sum(sum(alike) for alike in found if sum(alike) > 1)


def _lag_means(pairs: TokenPairs) -> dict[int, TokenMean]:
    delta = pairs.discrepancy
    rows = pairs.completion
    chosen = (
        {} if pairs.lags is None else {int(lag): pairs.lags == lag for lag in np.unique(pairs.lags)}
    )
    return {lag: _estimate(delta[own], rows[own]) for lag, own in chosen.items()}


def _sampling(pairs: TokenPairs, kept: np.ndarray) -> dict[str, float | TokenMean]:
    """Measure which distribution the kept tokens were sampled from."""
    d = pairs.log_ratio[kept]
    rows = pairs.completion[kept]
    log_p, log_q = (
        x[kept].astype(np.float64) for x in (pairs.train_logprobs, pairs.rollout_logprobs)
    )
    weight = np.exp(d)
    inner = np.abs(d) <= INNER_LOG_RATIO
    uncertain = np.minimum(log_p, log_q) < np.log(_UNCERTAIN)
    found: dict[str, float | TokenMean] = {
        "median_log_ratio": float(
            np.median(np.abs(d[uncertain] if uncertain.sum() >= _FEWEST_UNCERTAIN else d))
        ),
        "square": float(np.mean(d**2)),
        "ratio": _estimate(weight, rows),
        "inner_ratio": _estimate(1 + (weight - 1) * inner, rows),
        "capped_ratio": _estimate(np.minimum(weight, _RATIO_CAP), rows),
        "inverse_ratio": _estimate(np.exp(-d), rows),
        "sample_size": float(weight.sum() ** 2 / np.sum(weight**2)),
        "ratio_tokens": len(d),
        "surprise": UNKNOWN,
        "weighted_surprise": UNKNOWN,
        "variance": np.nan,
        "power": np.nan,
        "power_margin": np.nan,
        "alignment": np.nan,
        "spread": TokenMean(0.0, np.inf),
        "correlation": _correlation(log_p, log_q),
        "lowered": float(np.mean(d > _LOWERED)),
        "uncertain": int(np.sum(np.maximum(log_p, log_q) < np.log(_UNCERTAIN))),
    }
    if pairs.entropies is not None:
        x = log_p + pairs.entropies[kept]
        found |= {
            "surprise": _estimate(-x, rows),
            "weighted_surprise": _estimate(-x * weight, rows),
        }
        found["variance"] = float(np.mean(x**2))
        slope = _slope(x, -d, rows)
        aligned = _correlation(-d, x)
        unexplained = abs(slope.mean) * np.sqrt(max(1 - aligned**2, 0.0))
        found |= {
            "power": slope.mean,
            "power_margin": 2 * slope.error + unexplained,
            "alignment": aligned,
        }
    had = _less_group_means(_had_before(pairs)[kept].astype(np.float64), log_q)
    found["penalty"] = _slope(had, _less_group_means(d, log_q), rows)
    found["penalty_share"] = float(
        found["penalty"].mean ** 2 * np.mean(had**2) / max(np.mean(d**2), 1e-300)
    )
    if log_p.std() and log_q.std():
        change = [(((x - x.mean()) / x.std()) ** 2 - 1) / 2 for x in (log_q, log_p)]
        spread = _estimate(change[0] - change[1], rows)
        found["spread"] = spread._replace(mean=float(np.log(log_q.std() / log_p.std())))
    return found


def _slope(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> TokenMean:
    """Least-squares slope of y over x, its error clustered by completion; 0 for a constant x."""
    x = x - x.mean()
    y = y - y.mean()
    if not (square := float(np.mean(x**2))):
        return TokenMean(0.0, np.inf)
    slope = float(np.mean(x * y)) / square
    return _estimate(x * (y - slope * x) / square, rows)._replace(mean=slope)


def _had_before(pairs: TokenPairs) -> np.ndarray:
    """[n] bool, tokens whose id occurs earlier in their completion."""
    had = np.ones(len(pairs.token_ids), bool)
    had[np.unique(pairs.completion * 2**31 + pairs.token_ids, return_index=True)[1]] = False
    return had


def _less_group_means(values: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Values less the mean of the tokens that the engine finds as likely."""
    group = np.digitize(log_q, _LOG_Q_EDGES)
    return values - (np.bincount(group, values) / np.maximum(np.bincount(group), 1))[group]


def _filled(pairs: TokenPairs) -> tuple[Filled | None, TokenPairs]:
    """Values that are not measured, such as 0 or -9999 at the end of completions, and all other
    tokens.

    Where a column is far from the other one, its values are spread out; even rounded ones have
    neighbors as frequent. A value that 8 tokens of 4 completions there share, five times as many as
    there are within 5% of it, was filled in. Near temperature 0 most values are zeros; where a cut
    leaves one token, so is that token's, see `_left_by_a_cut`.
    """
    columns = {"engine": pairs.rollout_logprobs, "training stack": pairs.train_logprobs}
    far = np.abs(pairs.train_logprobs - pairs.rollout_logprobs) > _FAR
    for name, column in columns.items() if far.any() else ():
        values, counts = np.unique(column[far], return_counts=True)
        value = values[counts.argmax()]
        same = column == value
        exact = far & same
        near = far & ~same & (np.abs(column - value) < _NEAR * (abs(value) + 1))
        spread_out = (
            len(np.unique(pairs.completion[exact])) >= _FEWEST_FILLED_ROWS and same.mean() <= 0.5
        )
        enough = exact.sum() >= max(_FEWEST_FILLED, _TIMES_NEAR * near.sum())
        if spread_out and enough and not (value == 0 and _left_by_a_cut(pairs, same, column)):
            last = exact[pairs.starts + pairs.lengths - 1].sum()
            first = exact[pairs.starts].sum()
            return Filled(name, float(value), int(exact.sum()), int(last), int(first)), pairs.where(
                ~exact
            )
    return None, pairs


def _left_by_a_cut(pairs: TokenPairs, zeros: np.ndarray, column: np.ndarray) -> bool:
    """Whether log-probs of exactly 0 are those of tokens that a cut (min-p, top-k of 1) leaves
    alone.

    The engine was all but sure of such a token, so the other column finds it likelier than the
    average token: by its entropy, or without entropies by the share of tokens below one half. What
    was filled in stands on any token, or in a row at the beginning or the end of completions.
    """
    other = pairs.train_logprobs if column is pairs.rollout_logprobs else pairs.rollout_logprobs
    if pairs.entropies is not None:
        surprise = _estimate(
            -(pairs.train_logprobs + pairs.entropies)[zeros], pairs.completion[zeros]
        )
        return surprise.below(0, _CUT_SURPRISE)
    at_edges = 0
    for row in np.split(zeros, pairs.starts[1:]):
        if not row.all():
            at_edges += int(np.argmin(row)) + int(np.argmin(row[::-1]))
    far = other < -_FAR
    return at_edges < _AT_EDGES * zeros.sum() and mean_of(far[zeros]) < _CUT_FAR * mean_of(
        far[~zeros]
    )


def _alignment(pairs: TokenPairs) -> tuple[np.ndarray, Alignment]:
    """[N] bool, completions whose columns are not of the same tokens; and how the columns are
    aligned.
    """
    shifts = _shifts(pairs)
    shifted = shifts != 0
    counts = {
        int(by): int(count)
        for by, count in zip(*np.unique(shifts[shifted], return_counts=True), strict=True)
    }
    own = shifted[pairs.completion] if shifted.any() else np.ones(len(pairs.token_ids), bool)
    correlations = {0: _correlation(pairs.train_logprobs[own], pairs.rollout_logprobs[own])}
    for by in _SHIFTS:
        early, late = _lagged(pairs, own, by)
        correlations[by] = _correlation(pairs.train_logprobs[early], pairs.rollout_logprobs[late])

    if shifted.mean() > ALL_SHIFTED:
        return shifted, Alignment(correlations, counts, exchanged=0, unrelated=0)
    exchanged = _exchanged(pairs, shifted)
    unrelated = _unrelated(pairs, shifted)
    # A few of many unrelated ones resemble another completion by chance; of exchanged ones most are
    # found.
    if 2 * exchanged.sum() < unrelated.sum():
        exchanged = np.zeros_like(exchanged)
    else:
        unrelated = np.zeros_like(unrelated)
    alignment = Alignment(correlations, counts, int(exchanged.sum()), int(unrelated.sum()))
    return shifted | exchanged | unrelated, alignment


def _lagged(pairs: TokenPairs, own: np.ndarray, by: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the tokens of `own`, [n] bool, that have one `by` places later in their
    completion, and of these.
    """
    position = pairs.position
    length = pairs.lengths[pairs.completion]
    early = np.flatnonzero(own & (position + by >= 0) & (position + by < length))
    return early, early + by


def _shifts(pairs: TokenPairs) -> np.ndarray:
    """[N] int, the places by which log p of a completion is shifted against its log q; 0 for none.

    A completion is a candidate for a shift that brings its first 8 tokens nearer to each other.
    Over the other tokens of the candidates, which had no part in the choice, the shift must take
    30% of the mean |d|, significantly. A completion that was re-tokenized is shifted too, from its
    break on: at least half of the completions whose later tokens are nearer must be candidates.
    """
    rows = pairs.completion
    count = len(pairs.lengths)
    everything = np.ones(len(rows), bool)
    shifts = np.zeros(count, np.int64)
    best = np.zeros(count)
    for by in _SHIFTS:
        early, late = _lagged(pairs, everything, by)
        if len(early) < _FEWEST_LAGGED:
            continue
        shifted_ratio = pairs.train_logprobs[early] - pairs.rollout_logprobs[late].astype(
            np.float64
        )
        gap = np.abs(shifted_ratio)
        before = np.abs(pairs.log_ratio[early])
        gain = before - gap
        row = rows[early]
        place = pairs.position[early] - max(-by, 0)
        first = place < np.minimum(_FIRST_TOKENS, (pairs.lengths[row] - abs(by)) // 2)

        candidates = np.bincount(row[first], gain[first], count) > 0
        nearer = np.bincount(row[~first], gain[~first], count) > 0
        tested = ~first & candidates[row]
        if (
            candidates.sum() < 2
            or not tested.any()
            or 2 * (candidates & nearer).sum() < nearer.sum()
        ):
            continue
        # Tokens as independent: few completions may be shifted, and neighbors' gains hardly depend
        # on each other.
        relative = gain / np.maximum(gap + before, 1e-9)
        estimate = _estimate(relative[tested], np.arange(tested.sum()))
        if estimate.above(0, _LEAST_GAIN) and gap[tested].mean() < _NEARER * before[tested].mean():
            total = np.bincount(row, gain, count)
            better = total > best
            shifts[better], best[better] = by, total[better]
    return shifts


def _unrelated(pairs: TokenPairs, shifted: np.ndarray) -> np.ndarray:
    """[N] bool, completions whose columns have nothing in common, though q did not sample their
    tokens either.

    Other weights lower the correlation too, but what q samples has a mean min(p / q, 4) of at most
    1. Either all completions that are not shifted are unrelated, or some whose correlation is far
        below that of the others. Those
    that were re-tokenized agree in their 5th to 8th token: the unrelated ones must not.
    """
    log_p = pairs.train_logprobs
    log_q = pairs.rollout_logprobs
    rows = pairs.completion
    position = pairs.position
    none = np.zeros(len(shifted), bool)
    # Other prompts make the first tokens unrelated too; that is told apart by `_start`.
    first = (position >= _START_TOKENS) & (position < _FIRST_TOKENS)
    chosen = ~shifted

    def related(tokens: np.ndarray, least: float = _UNRELATED) -> bool:
        return _correlation(log_p[tokens], log_q[tokens]) >= least

    if related(chosen[rows]):
        columns = zip(*(np.split(x, pairs.starts[1:]) for x in (log_p, log_q)), strict=True)
        own = np.array([_correlation(p, q) for p, q in columns])
        error = 1 / np.sqrt(np.maximum(pairs.lengths - 3, 1))
        low = np.arctanh(np.clip(own, -0.999, 0.999)) + CERTAIN * error < np.arctanh(RELATED)
        chosen &= low & (pairs.lengths > _FIRST_TOKENS)
        if chosen.sum() < 2 or not related(~(chosen | shifted)[rows], RELATED):
            return none
        size = np.abs(pairs.log_ratio)
        later = position >= _FIRST_TOKENS
        start_mean = np.bincount(rows[first], size[first], len(chosen)) / (
            _FIRST_TOKENS - _START_TOKENS
        )
        later_mean = np.bincount(rows[later], size[later], len(chosen)) / np.maximum(
            pairs.lengths - _FIRST_TOKENS, 1
        )
        if (start_mean > later_mean / 2)[chosen].mean() < 0.5 or related(chosen[rows]):
            return none
    elif related(chosen[rows] & first):
        return none
    tokens = chosen[rows]
    capped = np.minimum(np.exp(pairs.log_ratio[tokens]), _RATIO_CAP)
    return chosen if len(capped) and _estimate(capped, rows[tokens]).above(1) else none


def _exchanged(pairs: TokenPairs, shifted: np.ndarray) -> np.ndarray:
    """[N] bool, completions whose log p is related to the log q of another one and not to their
    own.

    The first 64 tokens of up to 16 completions whose columns are unrelated are correlated with all
    that are as long, and so are their probabilities, in which a few very unlikely tokens weigh
    less. The best counts if no chance among so many gives it (Fisher's z).
    """
    log_p, log_q = (
        np.split(x, pairs.starts[1:]) for x in (pairs.train_logprobs, pairs.rollout_logprobs)
    )
    wild = np.add.reduceat(np.abs(pairs.log_ratio), pairs.starts) / pairs.lengths > LARGE_LOG_RATIO
    wild &= ~shifted
    found = np.zeros(len(wild), bool)
    chance = CERTAIN**2 + 2 * np.log(len(wild))
    suspects = [
        row for row in np.flatnonzero(wild) if _correlation(log_p[row], log_q[row]) < _UNRELATED
    ]
    for row in suspects[:_MOST_SUSPECTS]:
        n = min(len(log_p[row]), _COMPARED)
        ours = log_p[row][:n]
        likely = [x[:n] for x in log_q if len(x) >= n and _correlation(ours, x[:n]) > RELATED]
        best = max(
            (min(_correlation(ours, x), _correlation(np.exp(ours), np.exp(x))) for x in likely),
            default=0.0,
        )
        found[row] = (
            n > 3 and best > RELATED and np.arctanh(min(best, 0.999)) ** 2 * (n - 3) > chance
        )
    found[suspects[_MOST_SUSPECTS:]] = (
        2 * found.sum() > _MOST_SUSPECTS
    )  # where most are, so are the others
    return found if found.sum() > 1 else np.zeros(len(found), bool)


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
    low, high = np.median(size[:best]), np.median(size[best:])
    return best if high > LARGE_LOG_RATIO and high > _TIMES_BEFORE * low else None


def least_unrelated(correlation: float) -> int:
    """Tokens without any correlation that stand out where the others have this one (Fisher's z)."""
    return max(
        _FEWEST_UNRELATED, 3 + int(np.ceil((CERTAIN / np.arctanh(min(correlation, 0.999))) ** 2))
    )


def _breaks(pairs: TokenPairs, misplaced: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """[N] bool, broken completions; and the columns' correlation after their breaks and elsewhere.

    A copied beginning followed by free text looks like a break where weights differ: there the
    columns go on to agree about which tokens are likely. After a real break they have nothing to do
    with each other.
    """
    d = pairs.log_ratio
    starts = pairs.starts
    # A break needs a token above the level; most recordings are done here.
    wild = (np.maximum.reduceat(np.abs(d), starts) > LARGE_LOG_RATIO) & ~misplaced
    places = [
        break_at(d[at : at + n]) if w else None
        for at, n, w in zip(starts, pairs.lengths, wild, strict=True)
    ]
    after = np.zeros(len(d), bool)
    for place, at, n in zip(places, starts, pairs.lengths, strict=True):
        if place is not None:
            after[at + place : at + n] = True
    broken = np.array([place is not None for place in places])
    log_p = pairs.train_logprobs.astype(np.float64)
    log_q = pairs.rollout_logprobs.astype(np.float64)
    # Other prompts make first tokens unrelated too; that is told apart by `_start`.
    before = ~after & (pairs.position >= _START_TOKENS) & ~misplaced[pairs.completion]
    correlations = (
        _correlation(log_p[after], log_q[after]),
        _correlation(log_p[before], log_q[before]),
    )
    if (
        after.sum() >= _FEWEST_UNRELATED
        and correlations[0] < _UNRELATED
        and correlations[1] > RELATED
    ):
        low, high = (np.arctanh(np.clip(each, -0.999, 0.999)) for each in correlations)
        if high - low > CERTAIN / np.sqrt(after.sum() - 3):
            # Where one is broken, shorter or noisier breaks than `break_at` sees are too.
            tails = [
                slice(at + n // 2, at + n) for at, n in zip(starts, pairs.lengths, strict=True)
            ]
            unrelated = [
                bool(w)
                and tail.stop - tail.start >= _SHORTEST_PART
                and np.median(np.abs(d[tail])) > LARGE_LOG_RATIO
                and _correlation(log_p[tail], log_q[tail]) < _UNRELATED
                for tail, w in zip(tails, wild, strict=True)
            ]
            return broken | np.array(unrelated), correlations
    return np.zeros(len(broken), bool), (np.nan, _correlation(log_p, log_q))


def _start(pairs: TokenPairs, kept: np.ndarray) -> dict[str, float | TokenMean]:
    """The first tokens against later ones of the same q: uncertain tokens differ more, wherever
    they are.
    """
    size = np.abs(pairs.log_ratio)
    position = pairs.position
    rows = pairs.completion
    group = np.digitize(pairs.rollout_logprobs, _LOG_Q_EDGES)
    first = kept & (position < _START_TOKENS)
    later = kept & (position >= _SETTLED_FROM)
    counts = np.bincount(group[later], minlength=len(_LOG_Q_EDGES) + 1)
    usual = np.bincount(group[later], size[later], len(_LOG_Q_EDGES) + 1) / np.maximum(counts, 1)
    known = first & (counts[group] >= _FEWEST_ALIKE)
    if not known.any():
        return {"start": mean_of(size[first]), "start_expected": np.nan, "start_excess": UNKNOWN}
    expected = usual[group[known]]
    return {
        "start": mean_of(size[known]),
        "start_expected": mean_of(expected),
        "start_excess": _estimate(size[known] - _START_TIMES * expected, rows[known]),
    }


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    varied = len(x) > 2 and x.min() < x.max() and y.min() < y.max()
    return float(np.corrcoef(x.astype(np.float64), y.astype(np.float64))[0, 1]) if varied else 0.0


def _estimate(values: np.ndarray, rows: np.ndarray) -> TokenMean:
    """Mean over tokens, its error by the sums of each completion; `rows` has each token's
    completion.
    """
    mean = float(values.mean())
    sums = np.bincount(rows, values - mean)
    count = len(np.unique(rows))
    error = np.sqrt(count / (count - 1) * (sums @ sums)) / len(values) if count > 1 else np.inf
    return TokenMean(mean, float(error), count)
