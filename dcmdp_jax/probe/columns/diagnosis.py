"""Name the likely cause of a mismatch from measured evidence. Pure: no engine, no file."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from dcmdp_jax.probe.columns.alignment import (
    ALL_SHIFTED,
    LARGE_LOG_RATIO,
    RELATED,
    fisher_z,
)
from dcmdp_jax.probe.columns.causes import CAUSES, Finding, setting_of
from dcmdp_jax.probe.columns.evidence import Evidence, Lifted, outliers
from dcmdp_jax.probe.columns.pairs import CERTAIN, LEAST_DEVIATION
from dcmdp_jax.probe.columns.sampling import (
    FEWEST_TOKENS,
    FEWEST_UNCERTAIN,
    LEAST_SURPRISE,
    is_cut,
    more_surprising_than_either,
    most_surprise,
    power_between,
    power_of_tests,
    whose_temperature,
)

# The thresholds are ours, set as those of `evidence`. What a verdict needs:

FEWEST_COMPLETIONS = 8
"""Completions; the columns alone give no verdict with fewer."""

# Rounding.

FLOAT32_ROUNDING = 1e-5
"""Mean |p - q| of two float32 programs of one model: below 5e-6 in every pair measured."""
_FAR_ABOVE = 100.0
"""Mean |p - q| in multiples of a noise floor, from which float32 rounding is not taken for sure."""
_TIMES = 3.0
"""Mean |p - q| that is still rounding, in multiples of a noise floor or of measured rounding."""
_ROUNDING_LOG_RATIO = 0.04
"""Nats, median |d|: 0.021 to 0.031 for SmolLM2-135M in bfloat16 (research/causes.md)."""
_ROUNDING_SQUARE = 0.15**2
"""Nats squared, mean of d^2: up to 0.06 squared there."""

# Shares of the mismatch.

_EXPLAINED = 0.5
"""What one change explains if it is a cause: more than all others together."""
_EXPLAINED_ALONE = 0.9
"""What one change explains if nothing else needs to be looked for first."""
_LIFTED_AT_ALL = 0.1
"""What goes without a setting of the engine if the setting matters at all."""
_PENALTY_SHARE = 0.08
"""Part of mean d^2: 15% to 70% with a repetition penalty, at most 3% without one."""

# Others.

_LEAST_PENALTY = 0.005
"""Nats by which tokens that the completion had are less likely than new ones."""
_OLDER_TIMES = 2.0
"""Mean |p - q| of tokens from older weights, in multiples of that of the newest."""
_NO_RELATION = 0.3
"""Largest correlation of columns without any relation. Columns of really other weights: 0.97 for
a policy 32 steps older, 0.8 at 3 bits, 0.4 to 0.6 with noise of half the weights' size, 0.1 to 0.2
with as much noise as weights (research/causes.md).
"""


def _say(cause: str, *evidence: str) -> Finding:
    return Finding(cause=cause, evidence=evidence)


def diagnose(evidence: Evidence) -> list[Finding]:
    """All causes that the evidence supports, the most probable first; never empty.

    The order of the rules, first match first:

    1. too_few: below 200 tokens or 8 completions, unless a re-scoring or a setting says more.
    2. clean: mean |p - q| within the noise floor or float32's own rounding, and the tokens look
       sampled from p; unchecked, where no entropy was recorded to look at. Over 100 times a
       measured noise floor: a re-scoring that explains at least 90%, else above_floor.
    3. A re-scoring that explains at least 90% of the mismatch.
    4. What the columns show alone: a discrepancy that grows while the engine stands still, values
       filled in, misaligned or unrelated columns, support, breaks within completions, age of the
       weights, first tokens, a power, a penalty. Of columns that are shifted or unrelated in nearly
       all completions nothing else is asked.
    5. A setting of the engine without which at least 50% of the mismatch is gone: quantized weights
        or cache.
    6. A re-scoring that explains at least 50%.
    7. A mean p / q above 1, which no weights give: raw_logprobs where the tokens fit p, else
        unsampled.
    8. raw log-probs on both sides (a temperature, a cut, a penalty, a bias), or tokens from a
        sharper distribution.
    9. An operator that stands out on the same input, where no setting has it as its price.
    10. rounding: within 3 times the noise floor, or 3 times the measured rounding of the engine's
        dtype.
    11. decoding, where that leg is 90% of the gap, and the other is more than float32's rounding or
       that of the dtype is known.
    12. rounding, where it was not measured and no setting of the engine has a price: median |d|
        within 0.04 nats.
    13. What the engine's settings cost, if nothing above is found; not one without which 90% or
        more remains.
    14. unrelated where log p has nothing in common with log q and the tokens fit p, else
        random_weights.
    15. undetermined.

    Where no defect is found the last line says the least of each that would have been, and what
    could not be checked. Identical completions are named in addition to any other cause.
    """
    findings = _causes(evidence)
    if evidence.identical > 1 and findings[0].cause != "too_few":
        identical = _say(
            "identical",
            f"{evidence.identical} of {evidence.completions} completions equal another one token "
            "by token; likelier ones are left out: of these fewer than 1 in 1,000 recordings has "
            "any by chance.",
        )
        if CAUSES[findings[0].cause].defect:
            findings.append(identical)
        else:
            findings.insert(0, identical)
    return [
        dataclasses.replace(finding, setting=setting_of(finding.cause, evidence.framework))
        for finding in findings
    ]


def _causes(evidence: Evidence) -> list[Finding]:
    few = evidence.tokens < FEWEST_TOKENS or evidence.completions < FEWEST_COMPLETIONS
    if few and not evidence.explanations and not evidence.lifted:
        return [
            _say(
                "too_few",
                f"{evidence.tokens:,} tokens of {evidence.completions:,} completions are not "
                f"enough: at least {FEWEST_TOKENS} of {FEWEST_COMPLETIONS} are.",
            )
        ]
    agreement = evidence.floor or 0.0
    # Over a large vocabulary an engine of random weights has p and q near 0.
    if evidence.median_log_ratio <= LARGE_LOG_RATIO:
        agreement = max(agreement, FLOAT32_ROUNDING)
    if evidence.mean <= agreement:
        explained = []
        if is_far_above(evidence.mean, evidence.floor):
            explained = list(_explained(evidence, _EXPLAINED_ALONE))
        return explained or [_agreeing(evidence)]

    candidates = list(_explained(evidence, _EXPLAINED_ALONE))
    if not few:
        candidates += _by_columns(evidence)
    for lifted in evidence.lifted:
        if lifted.share >= _EXPLAINED:
            candidates.append(_without(evidence, lifted))
    candidates += _explained(evidence)
    for rule in (
        _unsampled,
        _others_tokens,
        _operator,
        _rounding,
        _decoding,
        _small,
        _settings,
        _nothing_in_common,
    ):
        if not candidates:
            candidates = list(rule(evidence))
    if not candidates:
        level = (
            f"Mean |p - q| {evidence.mean:.2g}, median |log-ratio| {evidence.median_log_ratio:.2g} "
            "nats."
        )
        _, lines = power_between(evidence)
        candidates = [_say("undetermined", level, *lines)]

    by_cause: dict[str, Finding] = {}
    for finding in candidates:
        by_cause.setdefault(finding.cause, finding)
    findings = list(by_cause.values())
    if not any(CAUSES[cause].defect for cause in by_cause):
        note = ""
        if np.isnan(evidence.surprise.mean):
            note = "; sampling not checked"
        findings[-1] = dataclasses.replace(
            findings[-1],
            evidence=(*findings[-1].evidence, *power_of_tests(evidence)),
            note=note,
        )
    return findings


def is_far_above(mean: float, floor: float | None) -> bool:
    """Whether a mean |p - q| is over 100 times a noise floor that was measured."""
    return floor is not None and mean > _FAR_ABOVE * floor


def _agreeing(evidence: Evidence) -> Finding:
    bound = "what float32 rounds"
    if evidence.floor and evidence.mean <= evidence.floor:
        bound = f"the noise floor {evidence.floor:.2g}"
    line = f"Mean |p - q| {evidence.mean:.2g} is within {bound}."
    if evidence.mean == 0:
        line += " The columns are equal: one column recorded twice? verl: bypass_mode."

    cause = "clean"
    if is_far_above(evidence.mean, evidence.floor):
        cause = "above_floor"
        times = ""
        if evidence.floor:
            times = f", the mean {evidence.mean / evidence.floor:,.0f} times that"
        line += (
            f" The noise floor is {evidence.floor:.2g}{times}: kernels that sum in "
            "another order differ so, and so does a small change of the weights. Controlled "
            "re-scorings tell which."
        )

    surprise = evidence.surprise
    if np.isnan(surprise.mean):
        return _say(
            "unchecked", line, "Not checked, for want of entropies: raw log-probs on both sides."
        )
    if surprise.differs(0):
        return _say("raw_logprobs", line, _sampled_elsewhere(evidence))
    return _say(
        cause,
        line,
        f"Surprise less entropy {surprise}: raw log-probs on both sides would have shown from "
        f"{surprise.margin + LEAST_DEVIATION:.2g} nats on.",
    )


def _sampled_elsewhere(evidence: Evidence) -> str:
    surprise = evidence.surprise
    comparison = "more"
    shape = "flatter"
    if surprise.mean < 0:
        comparison = "less"
        shape = "sharper or narrower"
    return (
        f"The tokens are {abs(surprise.mean):.3f} +- {surprise.error:.3f} nats {comparison} "
        f"surprising than the training stack's entropy: they were sampled from a {shape} "
        "distribution."
    )


def _explained(evidence: Evidence, least: float = _EXPLAINED) -> Iterator[Finding]:
    """The best re-scoring if its share is at least `least`."""
    ranked = sorted(evidence.explanations, key=lambda explanation: -explanation.share)
    if not ranked or ranked[0].share < least:
        return
    best = ranked[0]
    cause = best.cause
    lines = [f"Scoring with {best.name} explains {best.share:.0%} of the mismatch."]
    if cause == "temperature":
        whose_cause, reason = whose_temperature(evidence)
        cause = whose_cause or cause
        lines.append(reason)
    if len(ranked) > 1:
        lines.append(f"Next best: {ranked[1].name}: {max(ranked[1].share, 0):.0%}.")
    yield _say(cause, *lines)


def _by_columns(evidence: Evidence) -> Iterator[Finding]:
    """Findings from the columns alone.

    No others are looked for where nearly all completions are shifted or unrelated.
    """
    columns = evidence.columns
    completions = evidence.completions
    if evidence.course:
        yield _say("unseen_updates", evidence.course)

    # Columns that are not of the same tokens.
    filled = evidence.filled
    if filled is not None:
        yield _say(
            "filled",
            f"The {filled.column}'s log-prob is exactly {filled.value:g} on {filled.tokens:,} "
            f"tokens where the other's is not near: {filled.last} completions end with such a "
            f"token, {filled.first} completions begin with one.",
        )
    if columns.shifts:
        yield _shifted(evidence)
        if sum(columns.shifts.values()) > ALL_SHIFTED * completions:
            return
    if columns.exchanged:
        yield _say(
            "misaligned",
            f"{columns.exchanged} of {completions} completions or more have another one's "
            "log-probs: unrelated to their own, correlated with the other's.",
        )
    if columns.unrelated:
        yield _say(
            "unrelated",
            f"In {columns.unrelated} of {completions} completions the columns have nothing in "
            "common, and the engine's did not sample the tokens: mean min(p / q, 4) is above 1 "
            "in these, which no weights give.",
            f"Correlation of log p with log q over all completions: {columns.correlations[0]:.2f}.",
        )
        if columns.unrelated + columns.exchanged > ALL_SHIFTED * completions:
            return

    # Tokens or contexts that are not the engine's.
    if is_cut(evidence):
        yield _say(
            "support",
            f"Mean p / q = {evidence.ratio}; it would be 1 if the engine could sample every token.",
            f"So the engine leaves out tokens that hold {1 - evidence.ratio.mean:.1%} of p. "
            f"Effective sample size {evidence.sample_size:,.0f} tokens.",
        )
    if evidence.broken > 0:
        yield _say(
            "retokenization",
            f"In {evidence.broken:.1%} of the completions the columns agree up to one token and "
            "have nothing to do with each other from there on: correlation "
            f"{evidence.broken_correlation:.2f}, elsewhere {evidence.whole_correlation:.2f}.",
        )
    yield from _stale(evidence)
    if evidence.start > LARGE_LOG_RATIO and evidence.start_excess.above(0):
        yield _say(
            "chat_template",
            f"Mean |log-ratio| is {evidence.start:.2g} nats over the first tokens of a completion "
            f"and {evidence.start_expected:.2g} over later ones that the engine finds as likely: "
            "the completions begin in different contexts.",
        )

    # What changes the log-probs from token to token.
    cause, lines = power_between(evidence)
    if cause:
        yield _say(cause, *lines)
    share = evidence.penalty_share
    if share >= _PENALTY_SHARE and evidence.penalty.above(0, _LEAST_PENALTY):
        yield _say(
            "penalty",
            f"Tokens that the completion already had are {evidence.penalty} nats less likely for "
            f"the engine than new ones: {share:.0%} of the mean square of the log-ratio.",
        )


def _stale(evidence: Evidence) -> Iterator[Finding]:
    means = evidence.lag_means
    if 0 not in means:
        return
    older = _OLDER_TIMES * (means[0].mean + means[0].margin)
    if any(mean.mean - mean.margin > older for mean in means.values()):
        by_age = ", ".join(f"{lag}: {mean.mean:.2g}" for lag, mean in sorted(means.items()))
        yield _say("stale_weights", f"Mean |p - q| by the age of the weights in steps: {by_age}.")


def _shifted(evidence: Evidence) -> Finding:
    """Name the completions that are shifted, and where to."""
    shifts = evidence.columns.shifts
    shifted = sum(shifts.values())
    places = []
    for by, count in shifts.items():
        plural = "s" if abs(by) > 1 else ""
        direction = "earlier" if by > 0 else "later"
        shift = f"{abs(by)} place{plural} {direction}"
        if len(shifts) > 1:
            shift += f" in {count}"
        places.append(shift)
    where = ""
    if shifted <= ALL_SHIFTED * evidence.completions:
        share = shifted / evidence.completions
        where = f" in {shifted} of {evidence.completions} completions ({share:.0%})"
    correlations = ", ".join(
        f"{by:+d}: {value:.2f}" for by, value in sorted(evidence.columns.correlations.items())
    )
    return _say(
        "misaligned",
        f"The training stack's column is shifted{where}: it fits the engine's {', '.join(places)}.",
        f"Correlation of log p with log q of the same token (+0) and others there: {correlations}.",
    )


def _unsampled(evidence: Evidence) -> Iterator[Finding]:
    """Tokens from q have E[p / q] = sum of q p / q over q > 0 = p(q > 0) <= 1, whatever p is."""
    if not (evidence.ratio.above(1) or evidence.capped_ratio.above(1)):
        return
    if np.isnan(evidence.surprise.mean):
        fits = not evidence.inverse_ratio.differs(1)
        line = f"Mean q / p: {evidence.inverse_ratio}"
    else:
        fits = not evidence.surprise.differs(0)
        line = f"Surprise less entropy: {evidence.surprise} nats"
    if fits:
        line += ", as for tokens sampled from p."
    else:
        line += ": they were not sampled from p either."
    cause = "unsampled"
    if fits and evidence.correlation > RELATED:
        cause = "raw_logprobs"
    yield _say(
        cause,
        f"Mean p / q = {evidence.ratio}. It is at most 1 for tokens sampled from q, whatever the "
        "weights of p: these were not sampled from the engine's column.",
        line,
    )


def _others_tokens(evidence: Evidence) -> Iterator[Finding]:
    """Find tokens that neither column's distribution gives, and tokens that surprise too little."""
    surprise = evidence.surprise
    if np.isnan(surprise.mean):
        return

    enough = evidence.uncertain >= FEWEST_UNCERTAIN
    if enough and surprise.differs(0, most_surprise(evidence)):
        yield _say(
            "raw_logprobs",
            f"{_sampled_elsewhere(evidence)[:-1]}, and not from the engine's own, which is too "
            "near for that.",
        )
    elif enough and more_surprising_than_either(evidence):
        yield _say(
            "raw_logprobs",
            f"{_sampled_elsewhere(evidence)[:-1]}, and not from the engine's own: weighted by p / "
            f"q they are still {evidence.weighted_surprise} nats more surprising, tokens sampled "
            "from q have 0.",
            "A penalty of repetitions, a bias or a temperature above 1 changes what is sampled, "
            "and not the log-probs.",
        )
    elif surprise.below(0, LEAST_SURPRISE):
        yield _say(
            "sharper",
            _sampled_elsewhere(evidence),
            "Noise of any kind makes them more surprising. A temperature below 1 with other "
            "differences, or sharper weights: the columns can't tell.",
        )


def _nothing_in_common(evidence: Evidence) -> Iterator[Finding]:
    """Columns without any relation: weights never loaded, or log-probs of other tokens."""
    error = 1 / np.sqrt(max(evidence.ratio_tokens - 3, 1))
    largest = np.tanh(fisher_z(evidence.correlation) + CERTAIN * error)
    if largest > _NO_RELATION or evidence.median_log_ratio <= LARGE_LOG_RATIO:
        return
    line = (
        f"Correlation of log p with log q: {evidence.correlation:.2f}, median |log-ratio| "
        f"{evidence.median_log_ratio:.2g} nats."
    )
    surprise = evidence.surprise
    if surprise.below(evidence.median_log_ratio / 2, 0):
        yield _say(
            "unrelated", line, f"The tokens fit p alone: surprise less entropy {surprise} nats."
        )
    else:
        yield _say(
            "random_weights",
            line,
            "Weights that know the language agree on which tokens are likely.",
        )


def _without(evidence: Evidence, lifted: Lifted) -> Finding:
    setting = evidence.settings[lifted.cause]
    return _say(
        lifted.cause,
        f"{setting[0].upper()}{setting[1:]}. Without it, as {lifted.engine}, the same engine "
        f"differs from the training stack by {(1 - lifted.share) * evidence.mean:.2g} on the same "
        f"tokens: {lifted.share:.0%} of the mismatch is gone.",
    )


def _settings(evidence: Evidence) -> Iterator[Finding]:
    """The price of the engine's settings, where nothing that was measured speaks against them."""
    measured = {lifted.cause: lifted for lifted in evidence.lifted}
    scored = "was not scored again"
    if evidence.explanations:
        scored = "is beyond rounding, no emulation reproduces it"
    for cause, setting in evidence.settings.items():
        if cause not in measured:
            yield _say(
                cause,
                f"By its settings, not by measurement: {setting}. Mean |p - q| {evidence.mean:.2g} "
                f"{scored}.",
            )
        elif measured[cause].share > _LIFTED_AT_ALL:
            yield _without(evidence, measured[cause])


def _decoding(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.legs:
        return
    decoding, one_pass = evidence.legs
    # Where the trainer is the engine's own prefill, another rounding of the same dtype is all of
    # the mismatch.
    if evidence.rounding is None and one_pass.mean <= FLOAT32_ROUNDING:
        return
    if decoding.share >= _EXPLAINED_ALONE and decoding.mean > FLOAT32_ROUNDING:
        cause = "decoding"
        if evidence.recurrent:
            cause = "recurrent"
        yield _say(
            cause,
            f"{decoding.share:.0%} of the mismatch arises between its decode and its own prefill: "
            f"mean |p - q| {decoding.mean:.2g}.",
        )


def _operator(evidence: Evidence) -> Iterator[Finding]:
    """The first operator that stands out, by depth, unless it is the price of a setting."""
    unexpected = []
    for outlier in outliers(evidence.operators):
        price = "quantized_cache" if outlier.operator == "cache" else "quantized_weights"
        if price not in evidence.settings:
            unexpected.append(outlier)
    if not unexpected or evidence.mean <= _TIMES * (evidence.floor or 0.0):
        return
    first = unexpected[0]
    alike = sum(outlier.operator == first.operator for outlier in unexpected)
    others = f" (and {alike - 1} more like it)" if alike > 1 else ""
    median = np.median([operator.relative for operator in evidence.operators])
    yield _say(
        first.operator,
        f"On the same input the {first}{others} gives another output: relative error "
        f"{first.relative:.2g}, against a median of {median:.1g} over {len(evidence.operators)} "
        "operators.",
    )


def _small(evidence: Evidence) -> Iterator[Finding]:
    """Small on every token, and no sign within three errors that the tokens come from elsewhere."""
    if np.isnan(evidence.surprise.mean):
        second = evidence.inverse_ratio.mean - 1
        error = evidence.inverse_ratio.error
    else:
        second = evidence.surprise.mean
        error = evidence.surprise.error
    near = (
        abs(evidence.ratio.mean - 1) <= 3 * evidence.ratio.error + LEAST_DEVIATION
        and abs(second) <= 3 * error + LEAST_DEVIATION
    )
    small = evidence.median_log_ratio <= _ROUNDING_LOG_RATIO and evidence.square <= _ROUNDING_SQUARE
    if evidence.rounding is None and not evidence.settings and small and near:
        yield _say(
            "rounding",
            f"Median |log-ratio| {evidence.median_log_ratio:.2g} nats, as much as bfloat16 rounds "
            "logits. Weights in 8 bits can look the same.",
        )


def _rounding(evidence: Evidence) -> Iterator[Finding]:
    if evidence.mean <= _TIMES * (evidence.floor or 0.0):
        yield _say(
            "rounding",
            f"Mean |p - q| {evidence.mean:.2g}; an engine differs from itself by "
            f"{evidence.floor:.2g} in another batch shape.",
        )
    elif evidence.rounding is not None and evidence.mean <= _TIMES * evidence.rounding:
        yield _say(
            "rounding",
            f"Mean |p - q| {evidence.mean:.2g}; the training stack differs from itself by "
            f"{evidence.rounding:.2g} when it computes in the engine's dtype.",
        )
