"""Everything that is said about one pair of engines, gathered for the table, the JSON file and the
page.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dcmdp_jax.lab.mismatch import causes, diagnosis
from dcmdp_jax.lab.mismatch.evidence import Evidence, Known, collect
from dcmdp_jax.lab.mismatch.over_training import OverTraining
from dcmdp_jax.lab.mismatch.pairs import (
    STATE_MEASURES,
    Recommendation,
    Statistics,
    TokenPairs,
    measure,
    recommend,
)
from dcmdp_jax.observe.jsonl import json_values
from dcmdp_jax.observe.legs import legs_of

TokenText = Callable[[int], str]
"""Token id -> its text."""

PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
ENTROPY_EDGES = (0.0, 0.1, 0.3, 1.0, 2.0, 4.0)
_TOKENS_SHOWN = 20
_MOST_ALIKE = 50
_WORST_SHOWN = 20
_CONTEXT_BEFORE = 16
_CONTEXT_AFTER = 4


class Group(NamedTuple):
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


class WorstToken(NamedTuple):
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
    q = np.exp(pairs.rollout_logprobs.astype(np.float64))
    labels = [
        f"{low:g} - {high:g}"
        for low, high in zip(PROBABILITY_EDGES, PROBABILITY_EDGES[1:], strict=False)
    ]
    return _groups(pairs, np.digitize(q, PROBABILITY_EDGES[1:-1]), labels)


def by_position(pairs: TokenPairs) -> list[Group]:
    """Groups by place in the completion: 1, 2, 3-4, 5-8, ..."""
    position = pairs.position
    group = np.zeros(len(position), np.int64)
    group[position > 0] = np.floor(np.log2(position[position > 0])).astype(np.int64) + 1
    labels = ["1", *(f"{2**k + 1} - {2 ** (k + 1)}" if k else "2" for k in range(int(group.max())))]
    return _groups(pairs, group, labels)


def by_entropy(pairs: TokenPairs) -> list[Group]:
    """Groups by the entropy of the training stack's distribution; empty if it is not known."""
    if pairs.entropies is None:
        return []
    labels = [
        f"{low:g} - {high:g}" for low, high in zip(ENTROPY_EDGES, ENTROPY_EDGES[1:], strict=False)
    ]
    return _groups(
        pairs,
        np.digitize(pairs.entropies, ENTROPY_EDGES[1:]),
        [*labels, f"over {ENTROPY_EDGES[-1]:g}"],
    )


def by_token(pairs: TokenPairs, text: TokenText | None) -> list[Group]:
    """The tokens with the largest part of the mismatch, at most 20."""
    ids, inverse = np.unique(pairs.token_ids, return_inverse=True)
    labels = [str(token) if text is None else f"{token} {text(int(token))!r}" for token in ids]
    groups = _groups(pairs, inverse, labels)
    return sorted(groups, key=lambda group: -group.share)[:_TOKENS_SHOWN]


def by_lag(pairs: TokenPairs) -> list[Group]:
    """Groups by the age of the weights that sampled the token; empty if it is not known."""
    if pairs.lags is None:
        return []
    lags, inverse = np.unique(pairs.lags, return_inverse=True)
    return _groups(pairs, inverse, [f"{lag} steps" for lag in lags])


def worst_tokens(pairs: TokenPairs, text: TokenText | None) -> list[WorstToken]:
    """The 20 tokens of the largest |p - q|, largest first, each with 16 tokens before and 4 after
    it.

    Completions of one prompt are often the same up to a token, which is then shown once.
    """
    delta = pairs.discrepancy
    starts = pairs.starts
    completion = pairs.completion
    found: dict[tuple[bytes, str], WorstToken] = {}
    for index in np.argsort(-delta, kind="stable")[: _WORST_SHOWN * _MOST_ALIKE].tolist():
        row = int(completion[index])
        same = pairs.token_ids[starts[row] : index + 1].tobytes(), f"{delta[index]:.3g}"
        if same in found or len(found) == _WORST_SHOWN:
            continue
        begin, end = int(starts[row]), int(starts[row] + pairs.lengths[row])
        bounds = (
            max(begin, index - _CONTEXT_BEFORE),
            index,
            index + 1,
            min(end, index + 1 + _CONTEXT_AFTER),
        )
        spans = [pairs.token_ids[a:b].tolist() for a, b in itertools.pairwise(bounds)]
        texts = ["" if text is None else "".join(map(text, span)) for span in spans]
        p, q = (
            float(np.exp(np.float64(x[index])))
            for x in (pairs.train_logprobs, pairs.rollout_logprobs)
        )
        found[same] = WorstToken(row, index - begin, int(pairs.token_ids[index]), p, q, *texts)
    return list(found.values())


def _groups(pairs: TokenPairs, group: np.ndarray, labels: list[str]) -> list[Group]:
    """Groups by number, in order, without the empty ones."""
    delta = pairs.discrepancy
    d = np.abs(pairs.log_ratio)
    counts, sums, ratios = (
        np.bincount(group, weights, len(labels)) for weights in (None, delta, d)
    )
    total = delta.sum()
    return [
        Group(label, int(n), s / n, s / total if total else 0.0, r / n)
        for label, n, s, r in zip(
            labels, counts.tolist(), sums.tolist(), ratios.tolist(), strict=True
        )
        if n
    ]


class StateMeasure(NamedTuple):
    """A measure of whole states and its estimate from sampled tokens; of the head's mass the exact
    value alone.

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


def compare_states(pairs: TokenPairs) -> tuple[StateMeasure, ...]:
    """How far two engines are apart in whole states, and how noisily the sampled tokens say so; see
    `state_measures`.

    The engine's k likeliest tokens give the exact value of a state, within its bound. Everybody's
    metric has the sampled token alone, whose term has that value as its mean under q:

        total variation        |r - 1| / 2        r = p / q of the sampled token
        KL(q || p)             -log r             (k1)
        KL(p || q)             r log r
        expected |p - q|       |p - q|

    Returns:
        Each measure over the states of sampled tokens, with its estimate; empty without likeliest
        tokens.
    """
    if pairs.states is None:
        return ()
    log_ratio = pairs.log_ratio
    states = pairs.states.astype(np.float64)
    ratio = np.exp(log_ratio)
    terms = np.abs(ratio - 1) / 2, -log_ratio, ratio * log_ratio, pairs.discrepancy
    found = []
    for place, (title, term) in enumerate(zip(STATE_MEASURES.values(), terms, strict=True)):
        exact = states[:, 2 * place]
        bound = states[:, 2 * place + 1]
        noise = float(np.sqrt(np.sum((term - exact) ** 2)) / len(term))
        found.append(
            StateMeasure(title, float(exact.mean()), float(bound.mean()), float(term.mean()), noise)
        )
    mass, count = states[:, -2:].mean(axis=0)
    return (
        *found,
        StateMeasure(f"mass of the engine's {count:g} likeliest", float(mass), *(math.nan,) * 3),
    )


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The whole result for one pair.

    Attributes:
        name, source, floors: see `Measured`.
        statistics: in numbers; completions over c for the recommended c.
        findings: causes, the likeliest first.
        recommendation: the budget c.
        states: whole states and the sampled tokens' estimates of them; empty without likeliest
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
    findings: tuple[causes.Finding, ...]
    recommendation: Recommendation
    states: tuple[StateMeasure, ...]
    groups: Mapping[str, tuple[Group, ...]]
    worst: tuple[WorstToken, ...]
    evidence: Evidence
    over_training: OverTraining | None

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not finite is None."""
        record = dataclasses.asdict(self)
        for plain, finding in zip(record["findings"], self.findings, strict=True):
            plain |= {"title": finding.title, "remedy": finding.remedy}
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
    known = {field.name: getattr(measured, field.name) for field in dataclasses.fields(Known)}
    legs = (
        []
        if measured.scored is None
        else legs_of(pairs.rollout_logprobs, measured.scored, pairs.train_logprobs)
    )
    over = measured.over_training
    course = (
        next((alarm.text for alarm in over.alarms if alarm.name == "unseen_updates"), "")
        if over
        else ""
    )
    evidence = collect(pairs, floor=floor, legs=legs, course=course, **known)
    findings = tuple(diagnosis.diagnose(evidence))
    verdict = findings[0]
    odd_rank = over.odd_rank if over else ""
    defect = (
        verdict.title
        if causes.CAUSES[verdict.cause].defect or verdict.cause == "too_few"
        else odd_rank or None
    )
    recommendation = recommend(evidence.mean, floor, defect)
    if tolerance is None and not math.isnan(recommendation.tolerance):
        tolerance = recommendation.tolerance
    if over is not None and math.isnan(recommendation.tolerance):
        over = over.without_recommendation()
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
        groups={heading: tuple(found) for heading, found in groups.items() if found},
        worst=tuple(worst_tokens(pairs, text)),
        evidence=evidence,
        over_training=over,
    )
