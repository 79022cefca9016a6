"""The mismatch Omega between a policy over one state's actions and the inference policy, in three measures."""

from __future__ import annotations

import numpy as np

MEASURES = {"diff": "probability difference", "ratio": "probability ratio", "log": "log-probability difference"}
"""The measure's name, as in `config.algorithm.measure`, and the paper's words for it."""
SIDES = {"two": "two-sided", "one": "one-sided"}
"""two: every deviation is charged. one: only what lies above the inference policy."""

LARGEST_ONE_SIDED_LOG = 4 / np.e**2
"""No policy has a larger one-sided log mismatch: log(y)^2 <= (4 / e^2) y for y >= 1, and sum q y = sum pi = 1."""


def mismatch(policy: np.ndarray, inference_policy: np.ndarray, *, measure: str, sided: str = "two") -> float:
    """Quadratic mismatch of a policy, the paper's Omega.

        diff    sum_a q_a (pi_a - q_a)^2
        ratio   sum_a (pi_a - q_a)^2 / q_a
        log     sum_a q_a (log(pi_a / q_a))^2

    One-sided, an action with pi_a below q_a adds nothing.

    Args:
        policy: [n] float64, pi >= 0.
        inference_policy: [n] float64, q > 0.
        measure: "diff", "ratio" or "log".
        sided: "two" or "one".

    Returns:
        Omega >= 0; infinite for the two-sided log where an action has probability 0.

    Raises:
        ValueError: for an unknown measure or side.
    """
    check_names(measure, sided)
    pi, q = np.asarray(policy, np.float64), np.asarray(inference_policy, np.float64)
    if sided == "one":
        pi = np.maximum(pi, q)
    if measure == "diff":
        return float(np.sum(q * (pi - q) ** 2))
    if measure == "ratio":
        return float(np.sum((pi - q) ** 2 / q))
    with np.errstate(divide="ignore"):
        return float(np.sum(q * np.log(pi / q) ** 2))


def largest_mismatch(inference_policy: np.ndarray, *, measure: str, sided: str = "two") -> float:
    """A bound that no policy's mismatch exceeds: exact but for the one-sided log.

    diff and ratio are convex, so their maximum is at a policy with a single action. The two-sided log has none.

    Args:
        inference_policy: [n] float64, q > 0.
        measure, sided: as of `mismatch`.
    """
    check_names(measure, sided)
    if measure == "log":
        return LARGEST_ONE_SIDED_LOG if sided == "one" else np.inf
    single = np.eye(len(inference_policy))
    return max(mismatch(policy, inference_policy, measure=measure, sided=sided) for policy in single)


def check_names(measure: str, sided: str) -> None:
    """Raise ValueError for a measure or side that is none."""
    if measure not in MEASURES:
        raise ValueError(f"measure = {measure!r}: allowed are {', '.join(MEASURES)}")
    if sided not in SIDES:
        raise ValueError(f"sided = {sided!r}: allowed are {', '.join(SIDES)}")
