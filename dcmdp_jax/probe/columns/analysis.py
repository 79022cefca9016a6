"""The results for one pair of engines, gathered for the table, the JSON file and the page."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dcmdp_jax.observe.jsonl import json_values
from dcmdp_jax.observe.legs import legs_of
from dcmdp_jax.probe.columns import causes, diagnosis
from dcmdp_jax.probe.columns.evidence import Evidence, Known, collect
from dcmdp_jax.probe.columns.over_training import OverTraining
from dcmdp_jax.probe.columns.pairs import (
    STATE_MEASURES,
    Recommendation,
    Statistics,
    TokenPairs,
    measure,
    recommend,
)

TokenText = Callable[[int], str]
"""Token id -> its text."""

PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""Bounds of groups by q."""
ENTROPY_EDGES = (0.0, 0.1, 0.3, 1.0, 2.0, 4.0)
"""Nats, bounds of groups by entropy; the last group has no upper one."""
_TOKENS_SHOWN = 20
"""Token ids in the table by token."""
_WORST_SHOWN = 20
"""Tokens shown in their context."""
_MOST_ALIKE = 50
"""Tokens looked at for each one shown: completions of a prompt may all have the same worst one."""
_CONTEXT_BEFORE = 16
"""Tokens shown before one of the worst."""
_CONTEXT_AFTER = 4
"""Tokens shown after it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Tokens that share a property.

    Attributes:
        label: the property.
        tokens: how many.
        mean: their mean |p - q|.
        share: their part of the sum of |p - q| over all tokens.
        mean_log_ratio: mean of |log p - log q|, nats.
    """

    label: str
    tokens: int
    mean: float
    share: float
    mean_log_ratio: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorstToken:
    """A token with a large |p - q|, in its context.

    Attributes:
        completion, position: where it is, both from 0.
        token_id: the token.
        train, rollout: its probabilities p and q.
        before, text, after: decoded; empty without a tokenizer.
    """

    completion: int
    position: int
    token_id: int
    train: float
    rollout: float
    before: str
    text: str
    after: str


def by_probability(pairs: TokenPairs) -> list[Group]:
    """Groups by q, the probability the engine sampled the token with."""
    group = np.digitize(pairs.rollout_probs, PROBABILITY_EDGES[1:-1])
    return _groups(pairs, group, _ranges(PROBABILITY_EDGES))


def by_position(pairs: TokenPairs) -> list[Group]:
    """Groups by place in the completion: 1, 2, 3-4, 5-8, ..."""
    # 0 of the first token, else the whole part of log2(position) and one more.
    _, group = np.frexp(pairs.position)
    labels = ["1", "2"]
    for power in range(1, int(group.max())):
        labels.append(f"{2**power + 1} - {2 ** (power + 1)}")
    return _groups(pairs, group, labels)


def by_entropy(pairs: TokenPairs) -> list[Group]:
    """Groups by the entropy of the training stack's distribution; empty if it is not known."""
    if pairs.entropies is None:
        return []
    labels = [*_ranges(ENTROPY_EDGES), f"over {ENTROPY_EDGES[-1]:g}"]
    return _groups(pairs, np.digitize(pairs.entropies, ENTROPY_EDGES[1:]), labels)


def _ranges(edges: Sequence[float]) -> list[str]:
    return [f"{low:g} - {high:g}" for low, high in itertools.pairwise(edges)]


def by_token(pairs: TokenPairs, text: TokenText | None) -> list[Group]:
    """The tokens with the largest part of the mismatch, at most 20."""
    ids, inverse = np.unique(pairs.token_ids, return_inverse=True)
    labels = []
    for token in ids:
        label = str(token)
        if text is not None:
            label += f" {text(int(token))!r}"
        labels.append(label)
    groups = _groups(pairs, inverse, labels)
    return sorted(groups, key=lambda group: -group.share)[:_TOKENS_SHOWN]


def by_lag(pairs: TokenPairs) -> list[Group]:
    """Groups by the age of the weights that sampled the token; empty if it is not known."""
    if pairs.lags is None:
        return []
    lags, inverse = np.unique(pairs.lags, return_inverse=True)
    return _groups(pairs, inverse, [f"{lag} steps" for lag in lags])


def worst_tokens(pairs: TokenPairs, text: TokenText | None) -> list[WorstToken]:
    """The 20 tokens of the largest |p - q|, largest first, each in its context.

    Completions of one prompt are often the same up to a token. With the same |p - q|, to three
    digits, it is shown once.
    """
    delta = pairs.discrepancy
    ranked = np.argsort(-delta, kind="stable")[: _WORST_SHOWN * _MOST_ALIKE]
    worst: dict[tuple[bytes, str], WorstToken] = {}
    for index in ranked.tolist():
        row = int(pairs.completion[index])
        beginning = pairs.token_ids[pairs.starts[row] : index + 1].tobytes()
        key = (beginning, f"{delta[index]:.3g}")
        if key not in worst:
            worst[key] = _in_context(pairs, row, index, text)
        if len(worst) == _WORST_SHOWN:
            break
    return list(worst.values())


def _in_context(pairs: TokenPairs, row: int, index: int, text: TokenText | None) -> WorstToken:
    span = pairs.span(row)

    def decoded(start: int, stop: int) -> str:
        if text is None:
            return ""
        tokens = pairs.token_ids[max(span.start, start) : min(span.stop, stop)].tolist()
        return "".join(map(text, tokens))

    return WorstToken(
        completion=row,
        position=index - int(span.start),
        token_id=int(pairs.token_ids[index]),
        train=pairs.train_probs[index],
        rollout=pairs.rollout_probs[index],
        before=decoded(index - _CONTEXT_BEFORE, index),
        text=decoded(index, index + 1),
        after=decoded(index + 1, index + 1 + _CONTEXT_AFTER),
    )


def _groups(pairs: TokenPairs, group: np.ndarray, labels: list[str]) -> list[Group]:
    """Groups by number, in order, without the empty ones."""
    delta = pairs.discrepancy
    # Of equal columns all shares are 0.
    total = delta.sum() or 1.0
    counts = np.bincount(group, minlength=len(labels))
    sums = np.bincount(group, delta, len(labels))
    log_ratios = np.bincount(group, np.abs(pairs.log_ratio), len(labels))
    return [
        Group(
            label=labels[number],
            tokens=int(counts[number]),
            mean=sums[number] / counts[number],
            share=sums[number] / total,
            mean_log_ratio=log_ratios[number] / counts[number],
        )
        for number in np.flatnonzero(counts)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateMeasure:
    """A measure of whole states and its estimate from sampled tokens, NaN for the head's mass.

    Attributes:
        title: for people.
        exact: mean over the states.
        bound: how much larger the true mean can be.
        sampled: mean of the sampled tokens' terms.
        noise: standard error of `sampled` for the states given, sqrt(sum (term - exact)^2) / n.
    """

    title: str
    exact: float
    bound: float
    sampled: float
    noise: float


def compare_states(pairs: TokenPairs) -> list[StateMeasure]:
    """How far two engines are apart in whole states, and how noisily sampled tokens say so.

    The engine's k top-k tokens give the exact value of a state, within its bound. Everybody's
    metric has the sampled token alone, whose term has that value as its mean under q:

        total variation        |r - 1| / 2        r = p / q of the sampled token
        KL(q || p)             -log r             (k1)
        KL(p || q)             r log r
        expected |p - q|       |p - q|

    See `state_measures`.

    Returns:
        Each measure over the states of sampled tokens, with its estimate; empty without top-k
        tokens.
    """
    if pairs.states is None:
        return []
    log_ratio = pairs.log_ratio
    ratio = np.exp(log_ratio)
    terms = (np.abs(ratio - 1) / 2, -log_ratio, ratio * log_ratio, pairs.discrepancy)
    states = pairs.states.astype(np.float64)

    measures = []
    for index, (title, term) in enumerate(zip(STATE_MEASURES.values(), terms, strict=True)):
        exact = states[:, 2 * index]
        measures.append(
            StateMeasure(
                title=title,
                exact=exact.mean(),
                bound=states[:, 2 * index + 1].mean(),
                sampled=term.mean(),
                noise=np.sqrt(np.sum((term - exact) ** 2)) / len(term),
            )
        )

    mass, count = states[:, -2:].mean(axis=0)
    head = StateMeasure(
        title=f"mass of the engine's top {count:g} tokens",
        exact=mass,
        bound=math.nan,
        sampled=math.nan,
        noise=math.nan,
    )
    return [*measures, head]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Known):
    """A pair as it was measured, before anything is concluded.

    Attributes:
        name: the pair's name, for people.
        source: label -> value, a description of both sides.
        pairs: the tokens.
        text: id -> text; None without a tokenizer.
        floors: engine -> mean |p - q| of the engine against itself in another batch shape.
        scored: [n] float32 nats, the first engine's own log-probs of the tokens in one pass; None
            if it does not score.
        over_training: mismatch by step, rank and source; None unless the pair was recorded over
            training.
    """

    name: str
    source: Mapping[str, str]
    pairs: TokenPairs
    text: TokenText | None = None
    floors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    scored: np.ndarray | None = None
    over_training: OverTraining | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analysis:
    """The whole result for one pair.

    Attributes:
        name, source, floors: see `Measured`.
        statistics: in numbers; completions over c for the recommended c.
        findings: causes, the most probable first.
        recommendation: the budget c.
        states: whole states and the sampled tokens' estimates of them; empty without top-k
            tokens.
        groups: heading -> groups.
        worst: tokens in context.
        evidence: measurements behind the findings.
        over_training: see `Measured`.
    """

    name: str
    source: Mapping[str, str]
    floors: Mapping[str, float]
    statistics: Statistics
    findings: Sequence[causes.Finding]
    recommendation: Recommendation
    states: Sequence[StateMeasure]
    groups: Mapping[str, Sequence[Group]]
    worst: Sequence[WorstToken]
    evidence: Evidence
    over_training: OverTraining | None

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not finite is None."""
        record = dataclasses.asdict(self)
        for plain, finding in zip(record["findings"], self.findings, strict=True):
            plain.update(title=finding.title, remedy=finding.remedy)
        return json_values(record)


def analyze(measured: Measured, tolerance: float | None = None) -> Analysis:
    """Draw all conclusions from a measured pair.

    Args:
        measured: the pair.
        tolerance: c for the share of completions over it; None takes the recommended one.
    """
    pairs = measured.pairs
    text = measured.text
    floor = max(measured.floors.values(), default=None)
    legs = []
    if measured.scored is not None:
        legs = legs_of(pairs.rollout_logprobs, measured.scored, pairs.train_logprobs)
    over_training = measured.over_training
    settle_first = None  # before a c can be recommended
    alarms = {}
    if over_training is not None:
        settle_first = over_training.odd_rank or None
        alarms = {alarm.name: alarm.text for alarm in over_training.alarms}
    evidence = collect(
        pairs,
        framework=measured.framework,
        rounding=measured.rounding,
        explanations=measured.explanations,
        settings=measured.settings,
        lifted=measured.lifted,
        recurrent=measured.recurrent,
        operators=measured.operators,
        floor=floor,
        legs=legs,
        course=alarms.get("unseen_updates", ""),
    )

    findings = diagnosis.diagnose(evidence)
    verdict = findings[0]
    if causes.CAUSES[verdict.cause].defect or verdict.cause == "too_few":
        settle_first = verdict.title
    recommendation = recommend(evidence.mean, floor, settle_first)
    is_recommended = not math.isnan(recommendation.tolerance)
    if tolerance is None and is_recommended:
        tolerance = recommendation.tolerance
    if over_training is not None and not is_recommended:
        over_training = over_training.without_recommendation()

    groups = {
        "probability under the engine": by_probability(pairs),
        "position in the completion": by_position(pairs),
        "entropy of the training stack, nats": by_entropy(pairs),
        "token": by_token(pairs, text),
        "age of the weights": by_lag(pairs),
    }
    return Analysis(
        name=measured.name,
        source=measured.source,
        floors=measured.floors,
        statistics=measure(pairs, tolerance),
        findings=findings,
        recommendation=recommendation,
        states=compare_states(pairs),
        groups={heading: listed for heading, listed in groups.items() if listed},
        worst=worst_tokens(pairs, text),
        evidence=evidence,
        over_training=over_training,
    )
