"""Everything that is said about one pair of engines, gathered for the table, the JSON file and the page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dcmdp_jax.lab.mismatch import breakdown
from dcmdp_jax.lab.mismatch.breakdown import Group, Growth, TokenText, WorstToken
from dcmdp_jax.lab.mismatch.causes import CAUSES, Finding, diagnose
from dcmdp_jax.lab.mismatch.evidence import Evidence, Explanation, Lifted, collect
from dcmdp_jax.lab.mismatch.over_training import OverTraining
from dcmdp_jax.lab.mismatch.pairs import TokenPairs
from dcmdp_jax.lab.mismatch.remedy_effects import Effect, effects, not_computed
from dcmdp_jax.lab.mismatch.statistics import Statistics, means_by_completion, measure
from dcmdp_jax.lab.mismatch.tolerance import Recommendation, recommend
from dcmdp_jax.observe.page_kit import json_values

_TEXTS_SHOWN, _TEXT_TOKENS = 8, 400


@dataclasses.dataclass(frozen=True)
class Measured:
    """A pair as it was measured, before anything is concluded.

    Attributes:
        name: of the pair, for people.
        source: what was compared: label -> value.
        pairs: the tokens.
        text: id -> text; None without a tokenizer.
        floors: engine -> mean |p - q| of the engine against itself in another batch shape.
        rounding: see `evidence.Evidence`.
        explanations: controlled re-scorings.
        settings, lifted: see `evidence.Evidence`.
        over_training: by step, rank and source; None unless the pair was recorded over training.
    """

    name: str
    source: Mapping[str, str]
    pairs: TokenPairs
    text: TokenText | None = None
    floors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rounding: float | None = None
    explanations: Sequence[Explanation] = ()
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lifted: Sequence[Lifted] = ()
    over_training: OverTraining | None = None


@dataclasses.dataclass(frozen=True)
class ColoredToken:
    """A token of a completion shown whole: its text, or its id without a tokenizer, and both probabilities."""

    text: str
    train: float
    rollout: float


@dataclasses.dataclass(frozen=True)
class ColoredText:
    """A completion shown whole.

    Attributes:
        completion: its index.
        mean: of |p - q| over its tokens.
        tokens: its first 400 tokens.
        left_out: how many more it has.
    """

    completion: int
    mean: float
    tokens: tuple[ColoredToken, ...]
    left_out: int


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The whole result for one pair.

    Attributes:
        name, source, floors: of `Measured`.
        statistics: in numbers; completions over c for the recommended c.
        findings: causes, the likeliest first.
        recommendation: of c.
        effects: of the corrections.
        not_computed: corrections whose effect depends on advantages, which were not recorded.
        groups: heading -> groups.
        growth: along completions.
        worst: tokens in context.
        texts: the completions of the largest and of the median mismatch.
        evidence: what the findings are drawn from.
        over_training: of `Measured`.
    """

    name: str
    source: Mapping[str, str]
    floors: Mapping[str, float]
    statistics: Statistics
    findings: tuple[Finding, ...]
    recommendation: Recommendation
    effects: tuple[Effect, ...]
    not_computed: tuple[str, ...]
    groups: Mapping[str, tuple[Group, ...]]
    growth: Growth
    worst: tuple[WorstToken, ...]
    texts: tuple[ColoredText, ...]
    evidence: Evidence
    over_training: OverTraining | None

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not finite is None. Texts of whole completions are for the page alone."""
        record = dataclasses.asdict(dataclasses.replace(self, texts=()))
        del record["texts"]
        for finding, said in zip(self.findings, record["findings"], strict=True):
            said |= {"title": finding.title, "remedy": finding.remedy}
        return json_values(record)


def analyze(measured: Measured, tolerance: float | None = None) -> Analysis:
    """Draw all conclusions from a measured pair.

    Args:
        measured: the pair.
        tolerance: c for the share of completions over it; None takes the recommended one.
    """
    pairs, text = measured.pairs, measured.text
    floor = max(measured.floors.values(), default=None)
    evidence = collect(
        pairs, floor=floor, rounding=measured.rounding, explanations=measured.explanations,
        settings=measured.settings, lifted=measured.lifted,
    )  # fmt: skip
    findings = tuple(diagnose(evidence))
    verdict = findings[0]
    odd_rank = measured.over_training.odd_rank if measured.over_training else ""
    defect = verdict.title if CAUSES[verdict.cause].defect or verdict.cause == "too_few" else odd_rank or None
    recommendation = recommend(evidence.mean, floor, defect)
    if tolerance is None and not math.isnan(recommendation.tolerance):
        tolerance = recommendation.tolerance
    groups = {
        "probability under the engine": breakdown.by_probability(pairs),
        "position in the completion": breakdown.by_position(pairs),
        "entropy of the training stack, nats": breakdown.by_entropy(pairs),
        "token class": [] if text is None else breakdown.by_token_class(pairs, text),
        "token": breakdown.by_token(pairs, text),
        "age of the weights": breakdown.by_lag(pairs),
    }
    return Analysis(
        name=measured.name,
        source=measured.source,
        floors=measured.floors,
        statistics=measure(pairs, tolerance),
        findings=findings,
        recommendation=recommendation,
        effects=tuple(effects(pairs)),
        not_computed=tuple(not_computed(pairs)),
        groups={heading: tuple(found) for heading, found in groups.items() if found},
        growth=breakdown.growth(pairs),
        worst=tuple(breakdown.worst_tokens(pairs, text)),
        texts=_texts(pairs, text),
        evidence=evidence,
        over_training=measured.over_training,
    )


def _texts(pairs: TokenPairs, text: TokenText | None) -> tuple[ColoredText, ...]:
    """Half of them the completions of the largest mean, half those around the median; equal ones once."""
    means, bounds = means_by_completion(pairs), pairs.starts[1:]
    alike = {
        (ids.tobytes(), f"{mean:.3g}"): row
        for row, (ids, mean) in reversed(list(enumerate(zip(np.split(pairs.token_ids, bounds), means, strict=True))))
    }
    rows = np.sort(np.fromiter(alike.values(), np.int64))
    order = rows[np.argsort(-means[rows], kind="stable")]
    half = _TEXTS_SHOWN // 2
    middle = max(half, len(order) // 2 - half // 2)
    shown = []
    for row in [*order[:half], *order[middle : middle + half]]:
        begin, length = int(pairs.starts[row]), int(pairs.lengths[row])
        span = slice(begin, begin + min(length, _TEXT_TOKENS))
        columns = (pairs.token_ids[span], pairs.train_logprobs[span], pairs.rollout_logprobs[span])
        tokens = tuple(
            ColoredToken(
                f"{token} " if text is None else text(int(token)),
                float(np.exp(np.float64(p))),
                float(np.exp(np.float64(q))),
            )
            for token, p, q in zip(*columns, strict=True)
        )
        shown.append(ColoredText(int(row), float(means[row]), tokens, length - len(tokens)))
    return tuple(shown)
