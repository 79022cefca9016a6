"""The distribution that tokens were sampled from: support, powers, surprise, and detection limits.

The thresholds are ours, set as those of `evidence`.
"""

from collections.abc import Iterator

import numpy as np

from dcmdp_jax.probe.columns.alignment import RELATED, least_unrelated
from dcmdp_jax.probe.columns.evidence import Evidence
from dcmdp_jax.probe.columns.pairs import CERTAIN

FEWEST_TOKENS = 200
"""Tokens; the columns alone give no verdict with fewer."""
FEWEST_UNCERTAIN = 32
"""Tokens with p and q below 0.9, for a verdict on the distribution they come from."""
_SAMPLE_SHARE = 0.5
"""Effective share of the tokens under weights p / q, for a mean of p / q to be trusted."""

# Support.

MISSING_MASS = 0.005
"""Probability that an engine leaves out; less is not called a cut, however certain it is."""

# Powers, q = p^(1 + b) / Z, which a temperature of 1 / (1 + b) gives.

_SHARPER_ALIGNED = 0.85
"""Least correlation of log q - log p with log p + H for b > 0; noise has less than 0.3."""
_COLD = 0.2
"""Nats below the entropy, where no noise leads."""
_COLD_ALIGNED = 0.75
"""Least correlation that far below the entropy: nearly all log q are near 0."""
_FLATTER_ALIGNED = -0.96
"""Largest correlation for b < 0: a wild p comes near -1 too."""
_FLATTEST = -0.6
"""Least b, a temperature of 2.5: a wild p has a slope of -1."""
_LEAST_POWER = 0.02
"""Least |b|: a temperature of 0.98 or 1.02."""
_CORRELATED = 0.97
"""Least correlation of the columns, where their spread alone shows a temperature."""
_LEAST_SPREAD = 0.03
"""Least |log of the spread's ratio|."""
_SPREAD_TIMES = 5.0
"""The same, in multiples of 1 - correlation^2, which noise of that size leaves."""
_LEAST_LOWERED = 0.01
"""Share of tokens that q finds less likely than p; a cut alone leaves none."""
_VARIANCE_FALLS = 1.6
"""Variance of the surprise today over that at the temperatures that would have been seen."""

# Surprise, mean of -log p - H.

LEAST_SURPRISE = 0.01
"""Nats; a smaller deviation is not called one, however certain it is."""
_SURPRISE_TIMES = 3.0
"""The surprise of tokens from q, in multiples of sqrt(variance x mean d^2), at most."""


def _support_checked(evidence: Evidence) -> bool:
    return evidence.sample_size >= max(FEWEST_TOKENS, _SAMPLE_SHARE * evidence.ratio_tokens)


def is_cut(evidence: Evidence) -> bool:
    """Tokens from q have E[p / q] = 1 whatever p is, unless q leaves tokens out."""
    return (
        _support_checked(evidence)
        and evidence.ratio.below(1, MISSING_MASS)
        and evidence.inner_ratio.below(1, MISSING_MASS)
    )


CauseAndLines = tuple[str, tuple[str, ...]]
"""A cause, "" if it is open, and what shows it."""


def power_between(evidence: Evidence) -> CauseAndLines:
    """Whether one column is a power of the other, renormalized, and whose it is.

    Returns:
        The cause, "" if that is open, and what shows it; no line if neither is a power.
    """
    if evidence.uncertain < FEWEST_UNCERTAIN:
        return "", ()
    if np.isnan(evidence.alignment):
        return _temperature_by_spread(evidence)
    return _temperature_by_surprise(evidence)


def _temperature_by_surprise(evidence: Evidence) -> CauseAndLines:
    power = evidence.power
    alignment = evidence.alignment
    if power > 0:
        # Far below the entropy, where no noise leads, a looser line is enough.
        least = _COLD_ALIGNED if evidence.surprise.below(0, _COLD) else _SHARPER_ALIGNED
        fits = alignment >= least and not evidence.surprise.above(0)
    else:
        # Where p is wild, log q - log p is -log p: a slope of -1, and the columns have little in
        # common.
        fits = (
            alignment <= _FLATTER_ALIGNED
            and power > _FLATTEST
            and evidence.correlation >= _CORRELATED
            and (not evidence.surprise.below(0) or is_cut(evidence))
        )
    if not fits or abs(power) < _LEAST_POWER:
        return "", ()
    line = f"log q - log p follows log p + entropy at a correlation of {alignment:.2f}"
    interval = power - evidence.power_margin, power + evidence.power_margin
    return _whose_power(evidence, power, interval, line, abs(power) * evidence.variance)


def _temperature_by_spread(evidence: Evidence) -> CauseAndLines:
    spread = evidence.spread
    if evidence.correlation < _CORRELATED or abs(spread.mean) <= _least_spread(evidence):
        return "", ()
    # A cut alone makes every token that is left likelier; a power makes some less likely.
    if evidence.lowered < _LEAST_LOWERED and is_cut(evidence):
        return "", ()
    power = np.expm1(spread.mean)
    low = np.expm1(spread.mean - spread.margin)
    high = np.expm1(spread.mean + spread.margin)
    # The spread of log p shrinks with the temperature too, so the power is larger than it says.
    if power > 0:
        high = 3 * high
    else:
        low = 3 * low / (1 - 2 * low)
    line = (
        f"log q spreads {np.exp(spread.mean):.2f} times as far as log p, correlation "
        f"{evidence.correlation:.3f}"
    )
    return _whose_power(evidence, power, (low, high), line, np.inf)


def _whose_power(
    evidence: Evidence,
    power: float,
    interval: tuple[float, float],
    line: str,
    expected: float,
) -> CauseAndLines:
    """The cause of a power and its lines; arguments as in `whose_temperature`."""
    low, high = interval
    bounds = f"{1 / (1 + high):.2f} to {1 / max(1 + low, 1e-2):.2f}"
    line += f": one is the other at a temperature of about {1 / (1 + power):.2f} ({bounds})."
    if is_cut(evidence):
        return "temperature", (line, "The tokens are not sampled from p, whose support is larger.")
    cause, reason = whose_temperature(evidence, expected)
    return cause, (line, reason)


def _least_spread(evidence: Evidence) -> float:
    """The spread's logarithm from which on a temperature is named without entropies.

    A temperature moves the spread by its size and the correlation by its square; noise moves both
    by its square.
    """
    noise = _SPREAD_TIMES * (1 - evidence.correlation**2)
    return max(_LEAST_SPREAD, noise, evidence.spread.margin)


def whose_temperature(evidence: Evidence, expected: float = np.inf) -> tuple[str, str]:
    """Tell whether the training stack's or the engine's log-probs are not what sampled the tokens.

    Args:
        evidence: the evidence.
        expected: size of the surprise in nats if they are the training stack's.

    Returns:
        The cause and why; "" if the tokens are too few to tell.
    """
    surprise = evidence.surprise
    if not np.isnan(surprise.mean):
        gap = f"Surprise less entropy under the training stack: {surprise} nats"
        off = surprise.differs(0)
        certain = off or surprise.margin < expected / 2
    else:
        gap = f"Mean q / p: {evidence.inverse_ratio}, mean p / q: {evidence.ratio}"
        off = evidence.inverse_ratio.differs(1)
        certain = off != evidence.ratio.differs(1)

    if not certain:
        return "", f"{gap}: too few tokens to tell whose."
    if off:
        return "temperature", f"{gap}: the tokens were not sampled from its distribution."
    return (
        "raw_logprobs",
        f"{gap}: the tokens were sampled from its distribution, the engine reports another one.",
    )


def most_surprise(evidence: Evidence) -> float:
    """Nats by which the surprise of tokens sampled from q can differ from 0.

    Cauchy-Schwarz: by at most sqrt(variance x chi^2), and chi^2 is about mean d^2.
    """
    return _SURPRISE_TIMES * np.sqrt(evidence.variance * evidence.square) + LEAST_SURPRISE


def more_surprising_than_either(evidence: Evidence) -> bool:
    """Whether the tokens are more surprising than those of q can be, whatever p is.

    Tokens from q have E[p / q (-log p - H)] = 0, and less if q is cut: cuts take surprising tokens.
    """
    return (
        _support_checked(evidence)
        and evidence.surprise.above(0, LEAST_SURPRISE)
        and evidence.weighted_surprise.above(0, LEAST_SURPRISE)
    )


def power_of_tests(evidence: Evidence) -> list[str]:
    """Name the least effect that each test would have seen, and the tests that were impossible."""
    tests = [*_surprise_test(evidence), *_temperature_test(evidence), *_other_tests(evidence)]
    lines = []
    possible = ", ".join(text for text, was_possible in tests if was_possible)
    if possible:
        lines.append(f"Also tested and not found (detection limits): {possible}.")
    impossible = ", ".join(text for text, was_possible in tests if not was_possible)
    if impossible:
        lines.append(f"Not checked: {impossible}.")
    return lines


def _reach(evidence: Evidence) -> float:
    """Nats by which the surprise must change to be significant: noise raises it to begin with."""
    return abs(evidence.surprise.mean) + evidence.surprise.margin


def _surprise_test(evidence: Evidence) -> Iterator[tuple[str, bool]]:
    """A test's least effect, or why it was not possible; whether it was."""
    if np.isnan(evidence.surprise.mean):
        yield (
            "what neither column contains, as raw log-probs on both sides do (no entropies)",
            False,
        )
    elif evidence.variance > 0:
        lower = higher = most_surprise(evidence) + _reach(evidence)
        if _support_checked(evidence):
            weighted = evidence.weighted_surprise.margin + LEAST_SURPRISE + _reach(evidence)
            higher = min(lower, weighted)
        text = f"raw log-probs on both sides that make tokens {higher:.2g} nats more or "
        yield f"{text}{lower:.2g} less surprising", True


def _temperature_test(evidence: Evidence) -> Iterator[tuple[str, bool]]:
    if evidence.uncertain < FEWEST_UNCERTAIN:
        yield f"a temperature ({evidence.uncertain} tokens with p and q below 0.9)", False
    elif power_between(evidence)[1]:
        yield "whose log-probs that temperature belongs to", False
    elif evidence.variance == 0:
        yield "a temperature (every token is as surprising as the entropy)", False
    elif not np.isnan(evidence.surprise.mean):
        # The variance is that of today's tokens; a lower temperature makes it smaller.
        sharper = _VARIANCE_FALLS * (_reach(evidence) + LEAST_SURPRISE) / evidence.variance
        yield f"a temperature of one column alone below {1 / (1 + sharper):.2f}", True
        flatter = max(
            _LEAST_POWER,
            CERTAIN * np.sqrt(evidence.square / evidence.variance),
            2 * evidence.surprise.margin / evidence.variance,
        )
        if flatter < -_FLATTEST:
            yield f"one above {1 / (1 - flatter):.2f}", True
        else:
            yield "a temperature above 1 (other differences hide it)", False
    elif evidence.correlation >= _CORRELATED:
        least = np.exp(_least_spread(evidence))
        text = f"a temperature of one column alone below {1 / least:.2f} or above {least:.2f}"
        yield text, True
    else:
        yield f"a temperature (no entropies, correlation {evidence.correlation:.2f})", False


def _other_tests(evidence: Evidence) -> Iterator[tuple[str, bool]]:
    if _support_checked(evidence):
        missing = max(evidence.ratio.margin, evidence.inner_ratio.margin) + MISSING_MASS
        yield f"a support that leaves out {missing:.1%} of p", True
    else:
        yield f"the support (effective sample size {evidence.sample_size:,.0f} tokens)", False
    correlation = evidence.whole_correlation
    if correlation > RELATED:
        tokens = least_unrelated(correlation)
        yield f"columns unrelated over the last {tokens} tokens of a completion", True
    else:
        yield f"re-tokenized completions (correlation {correlation:.2f})", False
    if np.isnan(evidence.start_expected):
        yield "the prompts (too few later tokens to compare the first with)", False
    else:
        least = max(0.3, 3 * evidence.start_expected + evidence.start_excess.margin)
        yield f"first tokens {least:.2g} nats apart", True
