"""Whether a mismatch explains that the reward fell: signs in a run's metrics, with advice."""

import dataclasses

import numpy as np

from dcmdp_jax.observe.alarms import ALARMS, Series

_LEAST_STEPS = 10
_OTHER_ALERTS = ("penalty", "identical", "rounding", "truncation")
"""Alerts that are about something else than the mismatch."""
_SUPPORTING = (
    (
        "discrepancy/mean",
        True,
        (0, 2),
        "The discrepancy had doubled before the reward fell: repair what dcmdp probe names; else "
        "use a more precise engine, or fewer updates per weight sync.",
    ),
    (
        "mismatch/effective_sample_size",
        False,
        (0.8, 1),
        "The effective sample size was below 80%: few tokens carry the update. Compare the "
        "mitigations of docs/remedies.md.",
    ),
)
"""Metric, whether it is divided by its first values, bounds beyond which it is a sign, advice."""
_OPPOSING = (
    (
        "discrepancy/mean",
        True,
        (2, np.inf),
        "The discrepancy had not doubled when the reward fell; a policy that breaks changes its "
        "mismatch as well.",
    ),
    (
        "reward/all_equal_groups",
        False,
        (0, 0.9),
        "Nearly all groups have one reward, so there is no signal: change the difficulty of the "
        "prompts, or use dynamic sampling.",
    ),
    (
        "completion/truncated_fraction",
        False,
        (0, 0.5),
        "Most completions are cut by the length limit: raise rollout.max_completion_tokens.",
    ),
    (
        "policy/kl",
        True,
        (0, 10),
        "The policy moved far from its start (policy/kl): lower the learning rate, or raise "
        "algorithm.kl_coefficient.",
    ),
    (
        "policy/entropy",
        True,
        (0.1, np.inf),
        "The policy's entropy is nearly gone: lower the learning rate, and look at the reward.",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollapseSigns:
    """Signs in the steps up to a fall of the reward. Only a zero-mismatch control decides.

    Attributes:
        step: where the reward fell below half its best.
        supporting: sentences for the mismatch as the cause.
        opposing: sentences for another cause.
    """

    step: int
    supporting: list[str]
    opposing: list[str]


def collapse_signs(series: Series) -> CollapseSigns | None:
    """Look for the signs; None if the reward was not recorded, or ends above half its best.

    The rules are ours. A value is a mean over a tenth of the steps.
    """
    if "reward/mean" not in series or len(series["reward/mean"][0]) < _LEAST_STEPS:
        return None
    steps, values = series["reward/mean"]
    window = max(1, len(steps) // 10)
    rewards = np.convolve(values, np.full(window, 1 / window), "valid")
    best = int(np.argmax(rewards))
    low = rewards < rewards[best] / 2
    if not low[-1]:
        return None
    fall = int(steps[window - 1 + best + np.argmax(low[best:])])

    def before(name: str) -> np.ndarray:
        times, recorded = series.get(name, (np.zeros(0), np.zeros(0)))
        return recorded[times < fall]

    def sentences(rules: tuple) -> list[str]:
        texts = []
        for name, is_relative, (lower, upper), text in rules:
            recorded = before(name)
            if len(recorded):
                value = recorded[-window:].mean()
                if is_relative:
                    value /= recorded[:window].mean()
                if value < lower or value > upper:
                    texts.append(text)
        return texts

    supporting = sentences(_SUPPORTING)
    for name, metric in ALARMS.items():
        if name not in _OTHER_ALERTS and before(metric).any():
            supporting.append(f"The alert {name} was raised before the reward fell.")
    return CollapseSigns(step=fall, supporting=supporting, opposing=sentences(_OPPOSING))
