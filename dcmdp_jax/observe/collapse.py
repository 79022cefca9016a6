"""Whether a mismatch explains that the reward fell: signs in a run's metrics, with advice."""

import dataclasses

import numpy as np

from dcmdp_jax.observe.alarms import ALARMS, Series

LEAST_STEPS = 10
"""Steps from which on a fall of the reward is judged."""
_STILL_HIGH = 0.9
"""Share of its best at which the reward has not begun to fall."""
_OTHER_ALERTS = ("penalty", "identical", "rounding", "truncation")
"""Alerts that are about something else than the mismatch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sign:
    """A rule about a metric just before the reward fell.

    Attributes:
        metric: its name.
        advice: what was seen, and what to do.
        is_relative: compare the last value over the first one, not the last value itself.
        above, below: the rule holds beyond these bounds.
    """

    metric: str
    advice: str
    is_relative: bool = False
    above: float = np.inf
    below: float = -np.inf

    def holds(self, values: np.ndarray, window: int) -> bool:
        """Whether the mean of the last `window` values is beyond a bound; no value: False."""
        if not len(values):
            return False
        last = values[-window:].mean()
        if self.is_relative:
            first = values[:window].mean()
            if first <= 0:  # nothing to compare with
                return False
            last /= first
        return bool(last > self.above or last < self.below)


_SUPPORTING = (
    _Sign(
        metric="discrepancy/mean",
        is_relative=True,
        above=2,
        advice="The discrepancy had doubled before the reward fell: repair what dcmdp probe names; "
        "else use a more precise engine, or fewer updates per weight sync.",
    ),
    _Sign(
        metric="mismatch/effective_sample_size",
        below=0.8,
        advice="The effective sample size was below 80%: few tokens carry the update. Compare the "
        "mitigations of docs/remedies.md.",
    ),
)
_OPPOSING = (
    _Sign(
        metric="discrepancy/mean",
        is_relative=True,
        below=2,
        advice="The discrepancy had not doubled when the reward fell; a policy that breaks changes "
        "its mismatch as well.",
    ),
    _Sign(
        metric="reward/all_equal_groups",
        above=0.9,
        advice="Nearly all groups have one reward, so there is no signal: change the difficulty of "
        "the prompts, or use dynamic sampling.",
    ),
    _Sign(
        metric="completion/truncated_fraction",
        above=0.5,
        advice="Most completions are cut by the length limit: raise rollout.max_completion_tokens.",
    ),
    _Sign(
        # Nats a token. It is 0 before the first update, so there is nothing to be relative to.
        metric="policy/kl",
        above=0.5,
        advice="The policy moved far from its start (policy/kl): lower the learning rate, or raise "
        "algorithm.kl_coefficient.",
    ),
    _Sign(
        metric="policy/entropy",
        is_relative=True,
        below=0.1,
        advice="The policy's entropy is nearly gone: lower the learning rate, and look at the "
        "reward.",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollapseSigns:
    """Signs in the steps up to a fall of the reward. Only a zero-mismatch control decides.

    Attributes:
        step: the last one before the fall.
        supporting: sentences for the mismatch as the cause.
        opposing: sentences for another cause.
    """

    step: int
    supporting: list[str]
    opposing: list[str]

    @property
    def lines(self) -> list[str]:
        """A heading, the signs, and what decides."""
        return [
            f"After step {self.step} the reward fell by more than half: is the mismatch why?",
            *(f"  it is: {advice}" for advice in self.supporting),
            *(f"  it is not: {advice}" for advice in self.opposing),
            "  A control decides: the same run and seeds, sampled by the training stack itself or "
            "by the engine in its precision (dcmdp train: rollout.precision=exact).",
        ]


def collapse_signs(series: Series) -> CollapseSigns | None:
    """Look for the signs; None if the reward was not recorded, or ends above half its best.

    The rules are ours. A value is a mean over a tenth of the steps. A reward that can be negative
    is measured from its lowest value.
    """
    steps, rewards = _finite(series, "reward/mean")
    if len(steps) < LEAST_STEPS:
        return None
    window = len(steps) // 10
    means = np.convolve(rewards, np.full(window, 1 / window), "valid")
    heights = means - min(0.0, means.min())
    best = int(np.argmax(heights))
    is_low = heights < heights[best] / 2
    if not is_low[-1]:
        return None
    first_low = best + int(np.argmax(is_low[best:]))
    is_high = heights[:first_low] >= _STILL_HIGH * heights[best]
    last_high = int(np.flatnonzero(is_high)[-1])
    fall = int(steps[last_high + window - 1])

    values_before = {}
    for name in series:
        times, values = _finite(series, name)
        values_before[name] = values[times <= fall]

    def advice_of(signs: tuple[_Sign, ...]) -> list[str]:
        nothing = np.zeros(0)
        return [
            sign.advice
            for sign in signs
            if sign.holds(values_before.get(sign.metric, nothing), window)
        ]

    supporting = advice_of(_SUPPORTING)
    for name, metric in ALARMS.items():
        if name not in _OTHER_ALERTS and np.any(values_before.get(metric, False)):
            supporting.append(f"The alert {name} was raised before the reward fell.")
    return CollapseSigns(step=fall, supporting=supporting, opposing=advice_of(_OPPOSING))


def _finite(series: Series, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric, where they are finite."""
    steps, values = series.get(name, (np.zeros(0), np.zeros(0)))
    is_finite = np.isfinite(values)
    return steps[is_finite], values[is_finite]
