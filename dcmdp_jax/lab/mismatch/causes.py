"""Name the likely cause of a mismatch from measured evidence. Pure: no engine, no file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np

from dcmdp_jax.lab.mismatch.evidence import LARGE_LOG_RATIO, Evidence, Explanation, Lifted

FLOAT32_ROUNDING = 1e-5
"""Mean |p - q| of two float32 programs of one model: below 5e-6 in every pair measured (docs/probe.md)."""
_TIMES = 3.0
_ROUNDING_LOG_RATIO = 0.02
_EXPLAINED, _EXPLAINED_ALONE = 0.5, 0.9
_LIFTED_AT_ALL = 0.1


@dataclasses.dataclass(frozen=True)
class Cause:
    """A kind of mismatch.

    Attributes:
        title: one noun phrase.
        remedy: what to do, one line.
        defect: to be repaired. The others are the price of a fast engine, which a budget c can bound.
    """

    title: str
    remedy: str
    defect: bool


CAUSES: Mapping[str, Cause] = MappingProxyType({
    "clean": Cause("no mismatch above the noise floor", "Nothing to do.", False),
    "rounding": Cause(
        "rounding noise of the compute dtype",
        "Bound it by c, or compute both sides in float32 or with the same kernels.", False,
    ),
    "quantized_weights": Cause(
        "quantized weights of the engine",
        "Bound it by c, correct it by importance weights, or train through the same quantization.", False,
    ),
    "quantized_cache": Cause(
        "quantized key-value cache of the engine",
        "Bound it by c, calibrate the cache's scales, or keep the cache in the compute dtype.", False,
    ),
    "temperature": Cause(
        "sampling temperature not accounted for",
        "Divide the training stack's logits by the temperature that the tokens are sampled at.", True,
    ),
    "support": Cause(
        "truncated support (top-p, top-k, min-p) not accounted for",
        "Sample with top_p=1 and no top_k, or mask the training stack's logits to the engine's support.", True,
    ),
    "raw_logprobs": Cause(
        "raw log-probs reported in place of those sampled from",
        "Have the engine report processed log-probs (vLLM: logprobs_mode=processed_logprobs).", True,
    ),
    "stale_weights": Cause(
        "stale weights in the engine",
        "Push the weights before each step and prove the push by checksums; a lag that is meant needs a correction.",
        True,
    ),
    "unsynchronized_tensor": Cause(
        "a tensor that was not synchronized",
        "Look at that tensor's name, fusion and shape in the weight transfer; then compare checksums.", True,
    ),
    "retokenization": Cause(
        "completions re-tokenized between the engines",
        "Pass the sampled token ids on. Never decode a completion and encode it again.", True,
    ),
    "chat_template": Cause(
        "different prompts: chat template or special tokens",
        "Render each prompt once and pass its token ids to both engines.", True,
    ),
    "undetermined": Cause(
        "other weights or another precision",
        "Probe the two engines with the model (and with --earlier weights): re-scoring tells these causes apart.",
        False,
    ),
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Finding:
    """A cause and why it is named.

    Attributes:
        cause: key of `CAUSES`.
        evidence: what was measured, one sentence each.
    """

    cause: str
    evidence: tuple[str, ...]

    @property
    def title(self) -> str:
        """The cause in words."""
        return CAUSES[self.cause].title

    @property
    def remedy(self) -> str:
        """The remedy in words."""
        return CAUSES[self.cause].remedy


def diagnose(evidence: Evidence) -> list[Finding]:
    """All causes that the evidence supports, the likeliest first; never empty.

    The order of the rules, first match first:

    1. clean: mean |p - q| within the noise floor or float32's own rounding, and the tokens look sampled from p.
    2. A re-scoring that explains at least 90% of the mismatch.
    3. What the columns show alone: support, breaks within completions, age of the weights.
    4. A setting of the engine without which at least 50% of the mismatch is gone: quantized weights or cache.
    5. A re-scoring that explains at least 50%.
    6. What the columns suggest: chat template, temperature, raw log-probs.
    7. rounding: within 3 times the noise floor, or 3 times the measured rounding of the engine's dtype; where that was
       not measured and no setting of the engine has a price, median |d| within 0.02 nats.
    8. What the engine's settings cost, if nothing above is found; not one without which 90% or more remains.
    9. undetermined.
    """
    e = evidence
    if e.mean <= max(e.floor or 0.0, FLOAT32_ROUNDING):
        if e.surprise.below(0):
            return [Finding("raw_logprobs", (
                f"The two columns agree, but the tokens are {-e.surprise.mean:.3f} nats less surprising than the "
                "distribution's entropy: they were sampled from a sharper or narrower one.",
            ))]  # fmt: skip
        bound = f"the noise floor {e.floor:.2g}" if e.floor and e.mean <= e.floor else "what float32 rounds"
        return [Finding("clean", (f"Mean |dp| {e.mean:.2g} is within {bound}.",))]
    rules = (
        lambda: _explained(e, _EXPLAINED_ALONE, 2.0), lambda: _support(e), lambda: _breaks(e), lambda: _lag(e),
        lambda: _lifted(e), lambda: _explained(e, _EXPLAINED, _EXPLAINED_ALONE), lambda: _start(e),
        lambda: _sampling(e), lambda: _rounding(e),
    )  # fmt: skip
    found: dict[str, Finding] = {}
    for rule in rules:
        for finding in rule():
            found.setdefault(finding.cause, finding)
    if not found:
        found |= {finding.cause: finding for finding in _settings(e)}
    if not found:
        found["undetermined"] = Finding("undetermined", (
            f"Mean |dp| {e.mean:.2g}, median |log-ratio| {e.median_log_ratio:.2g} nats, no sign of a defect in "
            "sampling, tokens or prompts.",
        ))  # fmt: skip
    return list(found.values())


def _explained(e: Evidence, least: float, most: float) -> Iterator[Finding]:
    """The best re-scoring if its share is in [least, most)."""
    best = max(e.explanations, key=lambda each: each.share, default=None)
    if best is None or not least <= best.share < most:
        return
    cause = best.cause
    lines = [f"Scoring with {best.name} explains {best.share:.0%} of the mismatch."]
    if cause == "temperature":
        cause, said = _which_temperature(e)
        lines.append(said)
    if second := _runner_up(e, best):
        lines.append(f"Next best: {second.name}: {max(second.share, 0):.0%}.")
    yield Finding(cause, tuple(lines))


def _runner_up(e: Evidence, best: Explanation) -> Explanation | None:
    rest = [each for each in e.explanations if each is not best]
    return max(rest, key=lambda each: each.share, default=None)


def _which_temperature(e: Evidence) -> tuple[str, str]:
    """Whose log-probs belong to another distribution than the tokens: the training stack's, or the engine's."""
    if not np.isnan(e.surprise.mean):
        gap = f"Surprise minus entropy under the training stack: {e.surprise.mean:+.3f} +- {e.surprise.error:.3f} nats"
        off = e.surprise.below(0) or e.surprise.above(0)
    else:
        gap = f"Mean q / p: {e.inverse_ratio.mean:.3f} +- {e.inverse_ratio.error:.3f}"
        off = e.inverse_ratio.below(1) or e.inverse_ratio.above(1)
    if off:
        return "temperature", f"{gap}: the tokens were not sampled from its distribution."
    return "raw_logprobs", f"{gap}: the tokens were sampled from its distribution, the engine reports another one."


def _support(e: Evidence) -> Iterator[Finding]:
    """q is renormalized over a smaller set: p / q = p(S), never above 1 but for noise, and on average below 1."""
    one_sided = e.positive < 0.03 or (e.positive < 0.2 and e.median_log_ratio < LARGE_LOG_RATIO)
    if one_sided and e.ratio.below(1) and e.correlation > 0.8:
        yield Finding("support", (
            f"Mean p / q = {e.ratio.mean:.3f} +- {e.ratio.error:.3f}; it would be 1 if the engine could sample every "
            "token.",
            f"p is above q on {e.positive:.1%} of the tokens that differ: q is p divided by the mass that was kept, "
            f"{e.smallest_ratio:.2f} or more of it.",
        ))  # fmt: skip


def _breaks(e: Evidence) -> Iterator[Finding]:
    rest_is_clean = not np.isnan(e.unbroken_mean) and e.unbroken_mean < 0.1 * e.mean
    if e.broken > 0 and e.broken_share > 0.8 and rest_is_clean:
        yield Finding("retokenization", (
            f"{e.broken:.1%} of the completions agree up to one token and disagree from there on; they hold "
            f"{e.broken_share:.0%} of the mismatch.",
            f"The other completions differ by {e.unbroken_mean:.2g} on average.",
        ))  # fmt: skip


def _lag(e: Evidence) -> Iterator[Finding]:
    old = {lag: mean for lag, mean in e.lag_means.items() if lag > 0}
    if 0 in e.lag_means and old and max(old.values()) > 3 * e.lag_means[0]:
        said = ", ".join(f"{lag}: {mean:.2g}" for lag, mean in sorted(e.lag_means.items()))
        yield Finding("stale_weights", (f"Mean |dp| by the age of the weights in steps: {said}.",))


def _sampling(e: Evidence) -> Iterator[Finding]:
    """One column is a power of the other, renormalized: almost a straight line of another slope."""
    # Far from its entropy, a looser line is enough: at a low temperature nearly all tokens have log q near 0.
    aligned = 0.7 if abs(e.surprise.mean) > 0.2 else 0.85
    if e.correlation < aligned or abs(np.log(e.spread)) < 0.07:
        return
    from_train = not (e.inverse_ratio.below(1) or e.inverse_ratio.above(1))
    from_rollout = not (e.ratio.below(1) or e.ratio.above(1))
    if not np.isnan(e.surprise.mean):
        from_train = not (e.surprise.below(0) or e.surprise.above(0))
    line = (
        f"log q spreads {e.spread:.2f} times as far as log p, at a correlation of {e.correlation:.2f}: the two are at "
        "different temperatures."
    )
    if from_train != from_rollout or not from_train:
        cause, said = _which_temperature(e)
        yield Finding(cause, (line, said))


def _start(e: Evidence) -> Iterator[Finding]:
    if e.start > LARGE_LOG_RATIO and e.start > 5 * e.settled:
        yield Finding("chat_template", (
            f"Mean |log-ratio| is {e.start:.2g} nats over the first tokens of a completion and {e.settled:.2g} from "
            "the 17th on: the completions begin in different contexts.",
        ))  # fmt: skip


def _lifted(e: Evidence) -> Iterator[Finding]:
    for each in e.lifted:
        if each.share >= _EXPLAINED:
            yield Finding(each.cause, (_without(e, each),))


def _without(e: Evidence, each: Lifted) -> str:
    left = (1 - each.share) * e.mean
    return (
        f"{e.settings[each.cause][0].upper()}{e.settings[each.cause][1:]}. Without it, as {each.engine}, the same "
        f"engine differs from the training stack by {left:.2g} on the same tokens: {each.share:.0%} of the mismatch is "
        "gone."
    )


def _settings(e: Evidence) -> Iterator[Finding]:
    """The price of the engine's settings, where nothing that was measured speaks against them."""
    measured = {each.cause: each for each in e.lifted}
    for cause, setting in e.settings.items():
        if cause not in measured:
            scored = "is beyond rounding, no emulation reproduces it" if e.explanations else "was not scored again"
            yield Finding(cause, (
                f"By its settings, not by measurement: {setting}. Mean |dp| {e.mean:.2g} {scored}, and nothing speaks "
                "of a defect in sampling, tokens or prompts.",
            ))  # fmt: skip
        elif measured[cause].share > _LIFTED_AT_ALL:
            yield Finding(cause, (_without(e, measured[cause]), "Nothing speaks of a defect."))


def _rounding(e: Evidence) -> Iterator[Finding]:
    if e.mean <= _TIMES * (e.floor or 0.0):
        yield Finding("rounding", (
            f"Mean |dp| {e.mean:.2g}; an engine differs from itself by {e.floor:.2g} in another batch shape.",
        ))  # fmt: skip
    elif e.rounding is not None:
        if e.mean <= _TIMES * e.rounding:
            yield Finding("rounding", (
                f"Mean |dp| {e.mean:.2g}; the training stack differs from itself by {e.rounding:.2g} when it computes "
                "in the engine's dtype.",
            ))  # fmt: skip
    elif not e.settings and e.median_log_ratio <= _ROUNDING_LOG_RATIO and not (e.ratio.below(1) or e.ratio.above(1)):
        yield Finding("rounding", (
            f"Median |log-ratio| {e.median_log_ratio:.2g} nats, as much as bfloat16 rounds logits, on either side.",
        ))  # fmt: skip
