"""Name the likely cause of a mismatch from measured evidence. Pure: no engine, no file."""

import functools
from collections.abc import Iterator

import numpy as np

from dcmdp_jax.lab.mismatch.causes import CAUSES, Finding, setting_of
from dcmdp_jax.lab.mismatch.evidence import (
    ALL_SHIFTED,
    CERTAIN,
    LARGE_LOG_RATIO,
    RELATED,
    Evidence,
    Lifted,
    least_unrelated,
    outliers,
)
from dcmdp_jax.observe.legs import DECODING

FEWEST_TOKENS = 200
FEWEST_COMPLETIONS = 8
"""With fewer, the columns alone give no verdict."""
FLOAT32_ROUNDING = 1e-5
"""Mean |p - q| of two float32 programs of one model: below 5e-6 in every pair measured."""
_TIMES = 3.0
# SmolLM2-135M in bfloat16: median 0.021 to 0.031 nats, root mean square up to 0.06
# (research/causes.md).
_ROUNDING_LOG_RATIO = 0.04
_ROUNDING_SQUARE = 0.15**2
_EXPLAINED = 0.5
_EXPLAINED_ALONE = 0.9
_LIFTED_AT_ALL = 0.1
_MISSING_MASS = 0.005
_SAMPLE_SHARE = 0.5
_SHARPER_ALIGNED = 0.85
_COLD_ALIGNED = 0.75
_COLD = 0.2
_FLATTER_ALIGNED = -0.96
_FLATTEST = -0.6
_LEAST_POWER = 0.02
_LEAST_LOWERED = 0.01
_FEWEST_UNCERTAIN = 32
_CORRELATED = 0.97
_LEAST_SPREAD = 0.03
_SPREAD_TIMES = 5.0
_LEAST_SURPRISE = 0.01
_SURPRISE_TIMES = 3.0
# Columns of really other weights: 0.97 for a policy 32 steps older, 0.8 at 3 bits, 0.4 to 0.6 with
# noise of half the weights' size, 0.1 to 0.2 with as much noise as weights (research/causes.md).
_NO_RELATION = 0.3
_PENALTY_SHARE = 0.08
_LEAST_PENALTY = 0.005
_VARIANCE_FALLS = 1.6
_OLDER_TIMES = 2.0


def _say(cause: str, *evidence: str) -> Finding:
    return Finding(cause, evidence)


def diagnose(evidence: Evidence) -> list[Finding]:
    """All causes that the evidence supports, the likeliest first; never empty.

    The order of the rules, first match first:

    1. too_few: below 200 tokens or 8 completions, unless a re-scoring or a setting says more.
    2. clean: mean |p - q| within the noise floor or float32's own rounding, and the tokens look
       sampled from p; unchecked, where no entropy was recorded to look at.
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
    found = _causes(evidence)
    if evidence.identical > 1 and found[0].cause != "too_few":
        said = (
            f"{evidence.identical} of {evidence.completions} completions equal another one "
            "token by token"
        )
        chance = (
            "likelier ones are left out: of these fewer than 1 in 1,000 recordings has any "
            "by chance"
        )
        found.insert(
            len(found) if CAUSES[found[0].cause].defect else 0,
            _say("identical", f"{said}; {chance}."),
        )
    return [one._replace(setting=setting_of(one.cause, evidence.framework)) for one in found]


def _causes(e: Evidence) -> list[Finding]:
    few = e.tokens < FEWEST_TOKENS or e.completions < FEWEST_COMPLETIONS
    if few and not e.explanations and not e.lifted:
        return [
            _say(
                "too_few",
                f"{e.tokens:,} tokens of {e.completions:,} completions are not enough: at least "
                f"{FEWEST_TOKENS} of {FEWEST_COMPLETIONS} are.",
            )
        ]
    # Over a large vocabulary an engine of random weights has p and q near 0.
    rounded = FLOAT32_ROUNDING if e.median_log_ratio <= LARGE_LOG_RATIO else 0.0
    if e.mean <= max(e.floor or 0.0, rounded):
        return [_agreeing(e)]
    by_columns = () if few else (_by_columns,)
    found: dict[str, Finding] = {}
    for rule in (
        functools.partial(_explained, least=_EXPLAINED_ALONE),
        *by_columns,
        _lifted,
        _explained,
    ):
        for finding in rule(e):
            found.setdefault(finding.cause, finding)
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
        if not found:
            found = {finding.cause: finding for finding in rule(e)}
    if not found:
        found["undetermined"] = _say(
            "undetermined",
            f"Mean |dp| {e.mean:.2g}, median |log-ratio| {e.median_log_ratio:.2g} nats.",
            *_temperature(e)[1],
        )
    if not any(CAUSES[cause].defect for cause in found):
        cause, finding = found.popitem()
        note = "; sampling not checked" if np.isnan(e.surprise.mean) else ""
        found[cause] = Finding(cause, (*finding.evidence, *_power_of_tests(e)), note)
    return list(found.values())


def _agreeing(e: Evidence) -> Finding:
    bound = (
        f"the noise floor {e.floor:.2g}" if e.floor and e.mean <= e.floor else "what float32 rounds"
    )
    line = f"Mean |dp| {e.mean:.2g} is within {bound}."
    if np.isnan(e.surprise.mean):
        return _say(
            "unchecked", line, "Not checked, for want of entropies: raw log-probs on both sides."
        )
    if e.surprise.below(0) or e.surprise.above(0):
        return _say("raw_logprobs", line, _sampled_elsewhere(e))
    return _say(
        "clean",
        line,
        f"Surprise less entropy {e.surprise}: raw log-probs on both sides would have shown from "
        f"{e.surprise.margin + 0.003:.2g} nats on.",
    )


def _sampled_elsewhere(e: Evidence) -> str:
    less = "less" if e.surprise.mean < 0 else "more"
    which = "sharper or narrower" if e.surprise.mean < 0 else "flatter"
    return (
        f"The tokens are {abs(e.surprise.mean):.3f} +- {e.surprise.error:.3f} nats {less} "
        f"surprising than the training stack's entropy: they were sampled from a {which} "
        "distribution."
    )


def _explained(e: Evidence, least: float = _EXPLAINED) -> Iterator[Finding]:
    """The best re-scoring if its share is at least `least`."""
    ranked = sorted(e.explanations, key=lambda each: -each.share)
    if not ranked or (best := ranked[0]).share < least:
        return
    cause = best.cause
    lines = [f"Scoring with {best.name} explains {best.share:.0%} of the mismatch."]
    if cause == "temperature":
        whose, said = _which_temperature(e)
        cause = whose or cause
        lines.append(said)
    lines += [f"Next best: {second.name}: {max(second.share, 0):.0%}." for second in ranked[1:2]]
    yield _say(cause, *lines)


def _which_temperature(e: Evidence, expected: float = np.inf) -> tuple[str, str]:
    """Tell whose log-probs belong to another distribution than the tokens: the training stack's or
    the engine's.

    Args:
        e: the evidence.
        expected: size of the surprise in nats if they are the training stack's.

    Returns:
        The cause and why; "" if the tokens are too few to tell.
    """
    if not np.isnan(e.surprise.mean):
        gap = f"Surprise less entropy under the training stack: {e.surprise} nats"
        off = e.surprise.below(0) or e.surprise.above(0)
        told = off or e.surprise.margin < expected / 2
    else:
        gap = f"Mean q / p: {e.inverse_ratio}, mean p / q: {e.ratio}"
        off = e.inverse_ratio.below(1) or e.inverse_ratio.above(1)
        told = off != (e.ratio.below(1) or e.ratio.above(1))
    if not told:
        return "", f"{gap}: too few tokens to tell whose."
    if off:
        return "temperature", f"{gap}: the tokens were not sampled from its distribution."
    return (
        "raw_logprobs",
        f"{gap}: the tokens were sampled from its distribution, the engine reports another one.",
    )


def _by_columns(e: Evidence) -> Iterator[Finding]:
    """What the columns show alone; of columns that are shifted against each other nothing else is
    asked.
    """
    if e.course:
        yield _say("unseen_updates", e.course)
    if (found := e.filled) is not None:
        yield _say(
            "filled",
            f"The {found.column}'s log-prob is exactly {found.value:g} on {found.tokens:,} tokens "
            f"where the other's is not near: {found.last} completions end with such a token, "
            f"{found.first} completions begin with one.",
        )
    if e.columns.shifts:
        yield _shifted(e)
        if sum(e.columns.shifts.values()) > ALL_SHIFTED * e.completions:
            return
    if e.columns.exchanged:
        yield _say(
            "misaligned",
            f"{e.columns.exchanged} of {e.completions} completions or more have another one's "
            "log-probs: unrelated to their own, correlated with the other's.",
        )
    if e.columns.unrelated:
        yield _say(
            "unrelated",
            f"In {e.columns.unrelated} of {e.completions} completions the columns have nothing in "
            "common, and the engine's did not sample the tokens: mean min(p / q, 4) is above 1 "
            "in these, which no weights give.",
            "Correlation of log p with log q over all completions: "
            f"{e.columns.correlations[0]:.2f}.",
        )
        if e.columns.unrelated + e.columns.exchanged > ALL_SHIFTED * e.completions:
            return
    yield from _support(e)
    if e.broken > 0:
        yield _say(
            "retokenization",
            f"In {e.broken:.1%} of the completions the columns agree up to one token and have "
            "nothing to do with each other from there on: correlation "
            f"{e.broken_correlation:.2f}, elsewhere {e.whole_correlation:.2f}.",
        )
    older = _OLDER_TIMES * (fresh.mean + fresh.margin) if (fresh := e.lag_means.get(0)) else np.inf
    if any(each.mean - each.margin > older for each in e.lag_means.values()):
        said = ", ".join(f"{lag}: {each.mean:.2g}" for lag, each in sorted(e.lag_means.items()))
        yield _say("stale_weights", f"Mean |dp| by the age of the weights in steps: {said}.")
    if e.start > LARGE_LOG_RATIO and e.start_excess.above(0):
        yield _say(
            "chat_template",
            f"Mean |log-ratio| is {e.start:.2g} nats over the first tokens of a completion and "
            f"{e.start_expected:.2g} over later ones that the engine finds as likely: the "
            "completions begin in different contexts.",
        )
    cause, said = _temperature(e)
    if cause:
        yield _say(cause, *said)
    if e.penalty_share >= _PENALTY_SHARE and e.penalty.above(0, _LEAST_PENALTY):
        yield _say(
            "penalty",
            f"Tokens that the completion already had are {e.penalty} nats less likely for the "
            f"engine than new ones: {e.penalty_share:.0%} of the mean square of the log-ratio.",
        )


def _shifted(e: Evidence) -> Finding:
    """Which completions are shifted, and where to."""
    shifted = sum(e.columns.shifts.values())
    places = []
    for by, count in e.columns.shifts.items():
        place = f"{abs(by)} place{'s' * (abs(by) > 1)} {'earlier' if by > 0 else 'later'}"
        places.append(place if len(e.columns.shifts) == 1 else f"{place} in {count}")
    share = f"in {shifted} of {e.completions} completions ({shifted / e.completions:.0%})"
    some = "" if shifted > ALL_SHIFTED * e.completions else f" {share}"
    correlations = ", ".join(
        f"{by:+d}: {value:.2f}" for by, value in sorted(e.columns.correlations.items())
    )
    return _say(
        "misaligned",
        f"The training stack's column is shifted{some}: it fits the engine's {', '.join(places)}.",
        f"Correlation of log p with log q of the same token (+0) and others there: {correlations}.",
    )


def _unsampled(e: Evidence) -> Iterator[Finding]:
    """Tokens from q have E[p / q] = sum of q p / q over q > 0 = p(q > 0) <= 1, whatever p is."""
    if not (e.ratio.above(1) or e.capped_ratio.above(1)):
        return
    if np.isnan(e.surprise.mean):
        fits = not (e.inverse_ratio.below(1) or e.inverse_ratio.above(1))
        said = f"Mean q / p: {e.inverse_ratio}"
    else:
        fits = not (e.surprise.below(0) or e.surprise.above(0))
        said = f"Surprise less entropy: {e.surprise} nats"
    said += ", as for tokens sampled from p." if fits else ": they were not sampled from p either."
    yield _say(
        "raw_logprobs" if fits and e.correlation > RELATED else "unsampled",
        f"Mean p / q = {e.ratio}. It is at most 1 for tokens sampled from q, whatever the weights "
        "of p: these were not sampled from the engine's column.",
        said,
    )


def _support_checked(e: Evidence) -> bool:
    return e.sample_size >= max(FEWEST_TOKENS, _SAMPLE_SHARE * e.ratio_tokens)


def _support(e: Evidence) -> Iterator[Finding]:
    """Tokens from q have E[p / q] = 1 whatever p is, unless q leaves tokens out."""
    if (
        _support_checked(e)
        and e.ratio.below(1, _MISSING_MASS)
        and e.inner_ratio.below(1, _MISSING_MASS)
    ):
        yield _say(
            "support",
            f"Mean p / q = {e.ratio}; it would be 1 if the engine could sample every token.",
            f"So the engine leaves out tokens that hold {1 - e.ratio.mean:.1%} of p. Effective "
            f"sample size {e.sample_size:,.0f} tokens.",
        )


def _temperature(e: Evidence) -> tuple[str, tuple[str, ...]]:
    """Whether one column is a power of the other, renormalized, and whose it is: the cause, "" if
    that is open.
    """
    if e.uncertain < _FEWEST_UNCERTAIN:
        return "", ()
    if not np.isnan(e.alignment):
        power = e.power
        expected = abs(e.power) * e.variance
        low, high = power - e.power_margin, power + e.power_margin
        if power > 0:
            # Far below the entropy, where no noise leads, a looser line is enough: nearly all log q
            # are near 0.
            fits = e.alignment >= (
                _COLD_ALIGNED if e.surprise.below(0, _COLD) else _SHARPER_ALIGNED
            )
            signs = not e.surprise.above(0)
        else:
            # Where p is wild, log q - log p is -log p: a slope of -1, and the columns have little
            # in common.
            fits = (
                e.alignment <= _FLATTER_ALIGNED
                and power > _FLATTEST
                and e.correlation >= _CORRELATED
            )
            signs = not e.surprise.below(0) or _cut(e)
        fits = fits and signs and abs(power) >= _LEAST_POWER
        line = f"log q - log p follows log p + entropy at a correlation of {e.alignment:.2f}"
    else:
        power = float(np.expm1(e.spread.mean))
        expected = np.inf
        fits = e.correlation >= _CORRELATED and abs(e.spread.mean) > _least_spread(e)
        # A cut alone makes every token that is left likelier; a power makes some less likely.
        fits = fits and (e.lowered >= _LEAST_LOWERED or not _cut(e))
        # The spread of log p shrinks with the temperature too, so the power is larger than the
        # spread says.
        low, high = (
            float(np.expm1(x))
            for x in (e.spread.mean - e.spread.margin, e.spread.mean + e.spread.margin)
        )
        low, high = (low, 3 * high) if power > 0 else (3 * low / (1 - 2 * low), high)
        line = (
            f"log q spreads {np.exp(e.spread.mean):.2f} times as far as log p, correlation "
            f"{e.correlation:.3f}"
        )
    if not fits:
        return "", ()
    bounds = f"{1 / (1 + high):.2f} to {1 / max(1 + low, 1e-2):.2f}"
    line += f": one is the other at a temperature of about {1 / (1 + power):.2f} ({bounds})."
    if _cut(e):
        return "temperature", (line, "The tokens are not sampled from p, whose support is larger.")
    cause, said = _which_temperature(e, expected)
    return cause, (line, said)


def _cut(e: Evidence) -> bool:
    return any(True for _ in _support(e))


def _least_spread(e: Evidence) -> float:
    """The spread's logarithm from which on a temperature is named without entropies.

    A temperature moves the spread by its size and the correlation by its square; noise moves both
    by its square.
    """
    return max(_LEAST_SPREAD, _SPREAD_TIMES * (1 - e.correlation**2), e.spread.margin)


def _others_tokens(e: Evidence) -> Iterator[Finding]:
    """Tokens that neither column's distribution would give; and tokens that are too
    unsurprising.
    """
    if np.isnan(e.surprise.mean):
        return
    # Cauchy-Schwarz: tokens from q differ in surprise by at most sqrt(variance x chi^2), and chi^2
    # is about mean d^2.
    most = _SURPRISE_TIMES * np.sqrt(e.variance * e.square)
    off = e.surprise.below(0, most + _LEAST_SURPRISE) or e.surprise.above(0, most + _LEAST_SURPRISE)
    if off and e.uncertain >= _FEWEST_UNCERTAIN:
        yield _say(
            "raw_logprobs",
            f"{_sampled_elsewhere(e)[:-1]}, and not from the engine's own, which is too near for "
            "that.",
        )
    elif e.uncertain >= _FEWEST_UNCERTAIN and _more_surprising_than_either(e):
        yield _say(
            "raw_logprobs",
            f"{_sampled_elsewhere(e)[:-1]}, and not from the engine's own: weighted by p / q they "
            f"are still {e.weighted_surprise} nats more surprising, tokens sampled from q have 0.",
            "A penalty of repetitions, a bias or a temperature above 1 changes what is sampled, "
            "and not the log-probs.",
        )
    elif e.surprise.below(0, _LEAST_SURPRISE):
        yield _say(
            "sharper",
            _sampled_elsewhere(e),
            "Noise of any kind makes them more surprising. A temperature below 1 with other "
            "differences, or sharper weights: the columns can't tell.",
        )


def _more_surprising_than_either(e: Evidence) -> bool:
    """Tokens from q have E[p / q (-log p - H)] = 0 whatever p is, and less if q is cut: cuts take
    surprising tokens.
    """
    surprises = e.surprise, e.weighted_surprise
    return _support_checked(e) and all(surprise.above(0, _LEAST_SURPRISE) for surprise in surprises)


def _nothing_in_common(e: Evidence) -> Iterator[Finding]:
    """Columns without any relation: weights that were never loaded, or log-probs of other
    tokens.
    """
    most = np.tanh(
        np.arctanh(min(e.correlation, 0.999)) + CERTAIN / np.sqrt(max(e.ratio_tokens - 3, 1))
    )
    if most > _NO_RELATION or e.median_log_ratio <= LARGE_LOG_RATIO:
        return
    line = (
        f"Correlation of log p with log q: {e.correlation:.2f}, median |log-ratio| "
        f"{e.median_log_ratio:.2g} nats."
    )
    if e.surprise.below(e.median_log_ratio / 2, 0):
        yield _say(
            "unrelated", line, f"The tokens fit p alone: surprise less entropy {e.surprise} nats."
        )
    else:
        yield _say(
            "random_weights",
            line,
            "Weights that know the language agree on which tokens are likely.",
        )


def _reach(e: Evidence) -> float:
    """Nats by which the surprise must change to be significant: noise makes tokens more surprising
    to begin with.
    """
    return abs(e.surprise.mean) + e.surprise.margin


def _power_of_tests(e: Evidence) -> list[str]:
    """Name the least effect that each test would have seen, and the tests that were not
    possible.
    """
    seen = []
    unseen = []
    if np.isnan(e.surprise.mean):
        unseen.append(
            "what neither column contains, as raw log-probs on both sides do (no entropies)"
        )
    elif e.variance > 0:
        raw = _SURPRISE_TIMES * np.sqrt(e.variance * e.square) + _LEAST_SURPRISE + _reach(e)
        more = (
            min(raw, e.weighted_surprise.margin + _LEAST_SURPRISE + _reach(e))
            if _support_checked(e)
            else raw
        )
        seen.append(
            f"raw log-probs on both sides that make tokens {more:.2g} nats more or {raw:.2g} less "
            "surprising"
        )
    if e.uncertain < _FEWEST_UNCERTAIN:
        unseen.append(f"a temperature ({e.uncertain} tokens with p and q below 0.9)")
    elif _temperature(e)[1]:
        unseen.append("whose log-probs that temperature belongs to")
    elif e.variance == 0:
        unseen.append("a temperature (every token is as surprising as the entropy)")
    elif not np.isnan(e.surprise.mean):
        # The variance is that of today's tokens; a lower temperature makes it smaller.
        sharper = _VARIANCE_FALLS * (_reach(e) + _LEAST_SURPRISE) / e.variance
        flatter = max(
            _LEAST_POWER, 3.5 * np.sqrt(e.square / e.variance), 2 * e.surprise.margin / e.variance
        )
        seen.append(f"a temperature of one column alone below {1 / (1 + sharper):.2f}")
        if flatter < -_FLATTEST:
            seen.append(f"one above {1 / (1 - flatter):.2f}")
        else:
            unseen.append("a temperature above 1 (other differences hide it)")
    elif e.correlation >= _CORRELATED:
        least = np.exp(_least_spread(e))
        seen.append(f"a temperature of one column alone below {1 / least:.2f} or above {least:.2f}")
    else:
        unseen.append(f"a temperature (no entropies, correlation {e.correlation:.2f})")
    if _support_checked(e):
        missing = max(e.ratio.margin, e.inner_ratio.margin) + _MISSING_MASS
        seen.append(f"a support that leaves out {missing:.1%} of p")
    else:
        unseen.append(f"the support (effective sample size {e.sample_size:,.0f} tokens)")
    if e.whole_correlation > RELATED:
        seen.append(
            f"columns unrelated over the last {least_unrelated(e.whole_correlation)} tokens of a "
            "completion"
        )
    else:
        unseen.append(f"re-tokenized completions (correlation {e.whole_correlation:.2f})")
    if np.isnan(e.start_expected):
        unseen.append("the prompts (too few later tokens to compare the first with)")
    else:
        least = max(0.3, 3 * e.start_expected + e.start_excess.margin)
        seen.append(f"first tokens {least:.2g} nats apart")
    lines = [f"Looked for and not found; would have been seen: {', '.join(seen)}."] if seen else []
    return lines + ([f"Not checked: {', '.join(unseen)}."] if unseen else [])


def _lifted(e: Evidence) -> Iterator[Finding]:
    for each in e.lifted:
        if each.share >= _EXPLAINED:
            yield _say(each.cause, _without(e, each))


def _without(e: Evidence, each: Lifted) -> str:
    left = (1 - each.share) * e.mean
    return (
        f"{e.settings[each.cause][0].upper()}{e.settings[each.cause][1:]}. Without it, as "
        f"{each.engine}, the same engine differs from the training stack by {left:.2g} on the "
        f"same tokens: {each.share:.0%} of the mismatch is gone."
    )


def _settings(e: Evidence) -> Iterator[Finding]:
    """The price of the engine's settings, where nothing that was measured speaks against them."""
    measured = {each.cause: each for each in e.lifted}
    for cause, setting in e.settings.items():
        if cause not in measured:
            scored = (
                "is beyond rounding, no emulation reproduces it"
                if e.explanations
                else "was not scored again"
            )
            yield _say(
                cause,
                f"By its settings, not by measurement: {setting}. Mean |dp| {e.mean:.2g} {scored}.",
            )
        elif measured[cause].share > _LIFTED_AT_ALL:
            yield _say(cause, _without(e, measured[cause]))


def _decoding(e: Evidence) -> Iterator[Finding]:
    # Where the trainer is the engine's own one pass, another rounding of the same dtype is all of
    # the gap.
    others = max((leg.mean for leg in e.legs if leg.name != DECODING), default=0.0)
    for leg in e.legs if e.rounding is not None or others > FLOAT32_ROUNDING else ():
        if leg.name == DECODING and leg.share >= _EXPLAINED_ALONE and leg.mean > FLOAT32_ROUNDING:
            yield _say(
                "recurrent" if e.recurrent else "decoding",
                f"{leg.share:.0%} of the gap lies between its decoding and its own scores: mean "
                f"|dp| {leg.mean:.2g}.",
            )


def _operator(e: Evidence) -> Iterator[Finding]:
    """The first operator that stands out, by depth, where no setting of the engine has it as its
    price.
    """
    price = {"cache": "quantized_cache"}
    found = [
        each
        for each in outliers(e.operators)
        if price.get(each.operator, "quantized_weights") not in e.settings
    ]
    if not found or e.mean <= _TIMES * (e.floor or 0.0):
        return
    alike = sum(each.operator == found[0].operator for each in found)
    more = f" (and {alike - 1} more like it)" if alike > 1 else ""
    rest = float(np.median([each.relative for each in e.operators]))
    yield _say(
        found[0].operator,
        f"On the same input the {found[0]}{more} gives something else: by {found[0].relative:.2g} "
        f"of its size, where half of the {len(e.operators)} operators are within {rest:.1g}.",
    )


def _small(e: Evidence) -> Iterator[Finding]:
    """Small on every token, and no sign that the tokens come from elsewhere, at three standard
    errors.
    """
    expected = (
        ((e.ratio, 1), (e.inverse_ratio, 1))
        if np.isnan(e.surprise.mean)
        else ((e.ratio, 1), (e.surprise, 0))
    )
    near = all(abs(each.mean - value) <= 3 * each.error + 0.003 for each, value in expected)
    small = e.median_log_ratio <= _ROUNDING_LOG_RATIO and e.square <= _ROUNDING_SQUARE
    if e.rounding is None and not e.settings and small and near:
        yield _say(
            "rounding",
            f"Median |log-ratio| {e.median_log_ratio:.2g} nats, as much as bfloat16 rounds "
            "logits. Weights in 8 bits can look the same.",
        )


def _rounding(e: Evidence) -> Iterator[Finding]:
    if e.mean <= _TIMES * (e.floor or 0.0):
        yield _say(
            "rounding",
            f"Mean |dp| {e.mean:.2g}; an engine differs from itself by {e.floor:.2g} in another "
            "batch shape.",
        )
    elif e.rounding is not None and e.mean <= _TIMES * e.rounding:
        yield _say(
            "rounding",
            f"Mean |dp| {e.mean:.2g}; the training stack differs from itself by {e.rounding:.2g} "
            "when it computes in the engine's dtype.",
        )
