"""Whether a mismatch explains that the reward fell: signs in a run's metrics, with advice."""

import dataclasses

import numpy as np

from dcmdp_jax.observe.alarms import ALARMS, Series

_LEAST_STEPS = 10
_FALLEN = 0.5
"""Reward after a fall, over its best."""
_RISEN = 2.0
"""Discrepancy over its first, where it counts as risen."""
_OTHER_ALERTS = ("penalty", "identical", "rounding", "truncation")
"""Alerts that are about something else than the mismatch."""
_LEAST_SAMPLE_SIZE = 0.8
_OTHER_CAUSES = {
    "reward/all_equal_groups": (
        0.9,
        "Nearly all groups have one reward, so there is no signal: change the difficulty of the "
        "prompts, or use dynamic sampling.",
    ),
    "completion/truncated_fraction": (
        0.5,
        "Most completions are cut by the length limit: raise rollout.max_completion_tokens.",
    ),
}
"""Metric -> share above which it explains a fall of the reward, and what to do."""
_MOVED = {
    "policy/kl": (
        10.0,
        "The policy moved far from its start (policy/kl): lower the learning rate, or raise "
        "algorithm.kl_coefficient.",
    ),
    "policy/entropy": (
        0.1,
        "The policy's entropy is nearly gone: lower the learning rate, and look at the reward.",
    ),
}
"""Metric -> ratio to its first that explains a fall, beyond it in its direction, and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollapseSigns:
    """Signs in the steps up to a fall of the reward. Only a zero-mismatch control decides.

    Attributes:
        step: where the reward fell below half its best.
        supporting: sentences for the mismatch as the cause.
        opposing: sentences for another cause.
    """

    step: int
    supporting: tuple[str, ...]
    opposing: tuple[str, ...]


def collapse_signs(series: Series) -> CollapseSigns | None:
    """Look for the signs; None if the reward was not recorded, or ends above half its best."""
    steps, rewards = _smooth(series, "reward/mean")
    if len(rewards) < _LEAST_STEPS:
        return None
    best = int(np.argmax(rewards))
    low = rewards < _FALLEN * rewards[best]
    if not low[-1] or rewards[best] <= 0:
        return None
    fall = int(steps[best + np.argmax(low[best:])])

    supporting = []
    opposing = []
    times, discrepancy = _smooth(series, "discrepancy/mean")
    risen = times[discrepancy > _RISEN * discrepancy[:1]]
    if len(risen) and risen[0] < fall:
        supporting.append(
            f"The discrepancy had doubled by step {risen[0]}, before the reward fell: repair what "
            "dcmdp probe names; else use a more precise engine, or fewer updates per weight sync."
        )
    elif len(times):
        opposing.append(
            "The discrepancy had not doubled when the reward fell; a policy that breaks changes "
            "its mismatch as well."
        )
    for name, metric in ALARMS.items():
        at, raised = _until(series, metric, fall)
        if raised.any() and name not in _OTHER_ALERTS:
            supporting.append(f"The alert {name} was raised in step {at[np.argmax(raised)]}.")
    _, sample_size = _until(series, "mismatch/effective_sample_size", fall)
    if sample_size.min(initial=1.0) < _LEAST_SAMPLE_SIZE:
        supporting.append(
            f"The effective sample size fell to {sample_size.min():.2f}: few tokens carry the "
            "update. Compare the mitigations of docs/remedies.md."
        )

    for metric, (limit, advice) in _OTHER_CAUSES.items():
        _, values = _until(series, metric, fall)
        if len(values) and values[-_LEAST_STEPS:].mean() > limit:
            opposing.append(advice)
    for metric, (ratio, advice) in _MOVED.items():
        _, values = _until(series, metric, fall)
        if len(values) and (values[-1] - ratio * values[0]) * (ratio - 1) > 0:
            opposing.append(advice)
    return CollapseSigns(step=fall, supporting=tuple(supporting), opposing=tuple(opposing))


def _until(series: Series, name: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps and finite values of a metric up to a step; empty if it was not recorded."""
    steps, values = series.get(name, (np.zeros(0, np.int64), np.zeros(0)))
    until = np.isfinite(values) & (steps <= step)
    return steps[until], values[until]


def _smooth(series: Series, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and means over a tenth of the finite values, each of the values up to its step."""
    steps, values = _until(series, name, np.iinfo(np.int64).max)
    if not len(values):
        return steps, values
    window = max(1, len(values) // 10)
    return steps[window - 1 :], np.convolve(values, np.full(window, 1 / window), "valid")
