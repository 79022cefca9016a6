"""Whether a mismatch explains that the reward fell: signs in a run's metrics, with advice."""

import dataclasses

import numpy as np

from dcmdp_jax.observe.alarms import ALARMS, Series, finite_points, finite_values, until

LEAST_STEPS = 10
"""Steps from which on a fall of the reward is judged."""
_STILL_HIGH = 0.9
"""Share of its best, or of its usual height, at which the reward has not begun to fall."""
_DOUBLED = 2
_FEW_LOST = 0.95
"""Effective sample size from which on a steady mismatch is small."""
_MANY_LOST = 0.8
"""Effective sample size below which few tokens carry the update."""
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

    def holds(self, series: Series, window: int) -> bool:
        """Whether the mean of the last `window` values is beyond a bound; no value: False."""
        values = finite_values(series, self.metric)
        if not len(values):
            return False
        last = values[-window:].mean()
        if self.is_relative:
            last = _growth(values, window)
        return last > self.above or last < self.below


def _growth(values: np.ndarray, window: int) -> float:
    """The mean of the last `window` values over that of the first; NaN if that is not positive."""
    if not len(values) or values[:window].mean() <= 0:
        return np.nan
    return values[-window:].mean() / values[:window].mean()


_OPPOSING = (
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
        step: the last one before the fall, at the earliest.
        supporting: sentences for the mismatch as the cause.
        opposing: sentences for another cause.
        undecided: sentences about what speaks for neither.
    """

    step: int
    supporting: list[str]
    opposing: list[str]
    undecided: list[str]

    @property
    def lines(self) -> list[str]:
        """A heading, the signs, and what decides."""
        return [
            f"After step {self.step} the reward fell by more than half: is the mismatch why?",
            *(f"  a sign that it is: {advice}" for advice in self.supporting),
            *(f"  a sign that it is not: {advice}" for advice in self.opposing),
            *(f"  undecided: {advice}" for advice in self.undecided),
            "  A control decides: the same run and seeds, sampled by the training stack itself or "
            "by the engine in its precision (dcmdp train: rollout.precision=exact).",
        ]


def collapse_signs(series: Series) -> CollapseSigns | None:
    """Look for the signs; None if the reward was not recorded, or ends above half its best.

    The rules are ours. A value is a mean over a tenth of the steps. A reward that can be negative
    is measured from its lowest value. What happens between the earliest and the latest beginning of
    the fall decides nothing.
    """
    steps, rewards = finite_points(series, "reward/mean")
    if len(steps) < LEAST_STEPS:
        return None
    window = len(steps) // 10
    fall = _fall(steps, rewards, window)
    if fall is None:
        return None
    earliest, latest = fall
    before = until(series, earliest)
    supporting = []
    opposing = []
    undecided = []

    growth = _growth(finite_values(before, "discrepancy/mean"), window)
    later_growth = _growth(finite_values(until(series, latest), "discrepancy/mean"), window)
    sizes = finite_values(before, "mismatch/effective_sample_size")
    if growth > _DOUBLED:
        supporting.append(
            "The discrepancy had doubled before the reward fell: repair what dcmdp probe names; "
            "else use a more precise engine, or fewer updates per weight sync."
        )
    elif later_growth > _DOUBLED:
        undecided.append(
            f"The discrepancy doubled between steps {earliest} and {latest}, in which the reward "
            "began to fall."
        )
    elif growth < _DOUBLED and len(sizes) and sizes[:window].mean() < _FEW_LOST:
        undecided.append(
            "The discrepancy had not doubled, but the mismatch was large from the first step on: "
            f"an effective sample size of {sizes[:window].mean():.0%}."
        )
    elif growth < _DOUBLED:
        opposing.append("The discrepancy had not doubled when the reward fell.")

    if len(sizes) and sizes[-window:].mean() < _MANY_LOST:
        supporting.append(
            "The effective sample size was below 80%: few tokens carry the update. Compare the "
            "mitigations of docs/remedies.md."
        )
    for name, metric in ALARMS.items():
        if name not in _OTHER_ALERTS and np.any(finite_values(before, metric)):
            supporting.append(f"The alert {name} was raised before the reward fell.")
    for sign in _OPPOSING:
        if sign.holds(before, window):
            opposing.append(sign.advice)
    return CollapseSigns(
        step=earliest, supporting=supporting, opposing=opposing, undecided=undecided
    )


def _fall(steps: np.ndarray, rewards: np.ndarray, window: int) -> tuple[int, int] | None:
    """Last step before the fall, at the earliest and at the latest; None if it did not fall.

    Noise hides where a fall begins: after the last mean near the best one, or after the last one
    near the median of those before the fall.
    """
    means = np.convolve(rewards, np.full(window, 1 / window), "valid")
    heights = means - min(0.0, means.min())
    best = np.argmax(heights)
    is_low = heights < heights[best] / 2
    if not is_low[-1]:
        return None
    before_low = heights[: best + np.argmax(is_low[best:])]
    usual = np.median(before_low[before_low >= heights[best] / 2])

    def last_step_near(height: float) -> int:
        last = np.flatnonzero(before_low >= _STILL_HIGH * height)[-1]
        return int(steps[last + window - 1])

    return last_step_near(heights[best]), last_step_near(usual)
