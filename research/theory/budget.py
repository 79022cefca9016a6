"""The multiplier at which the optimal policy spends a budget, and what to say if there is none."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq

from dcmdp_jax.errors import UserError
from research.theory.policy import (
    MEASURES,
    SIDES,
    Optimum,
    check_state,
    largest_mismatch,
    optimal_policy,
)

_MET = 1e-9
"""Relative distance from the budget up to which it counts as met."""
_EPSILON = np.finfo(float).eps
_FARTHEST = 680.0
"""|log lambda| up to which a multiplier is looked for; float64 ends there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetResult:
    """Result of the multiplier for one budget C.

    Attributes:
        budget: C.
        status: "met": the optimum at `optimum.multiplier` has mismatch C. "slack": the best policy
            of all costs less than C, so the constraint does not bind and the multiplier is 0.
            "jump": no multiplier gives C, because the optimum jumps over it; `optimum` is the one
            below C and `above` the one over it.
        optimum: never above C. As near to it as the rounding of a policy's probabilities lets it
            be.
        above: the other side of a jump, else None.
    """

    budget: float
    status: str
    optimum: Optimum
    above: Optimum | None = None

    def describe(self) -> str:
        """One line for people."""
        if self.status == "met":
            return f"met at lambda = {self.optimum.multiplier:.4g}"
        if self.status == "slack":
            return (
                f"not reached: the best policy of all spends {self.optimum.mismatch:.4g}, so "
                "lambda = 0"
            )
        return (
            f"met by no lambda: at {self.optimum.multiplier:.4g} the optimum jumps from "
            f"{self.optimum.mismatch:.4g} to {self.above.mismatch:.4g}"
        )


def policy_for_budget(
    advantages: np.ndarray,
    inference_policy: np.ndarray,
    *,
    budget: float,
    measure: str,
    sided: str = "two",
) -> BudgetResult:
    """Find lambda with Omega(pi*(lambda), q) = C.

    Omega(pi*(lambda)) never rises with lambda, so a bisection finds the multiplier wherever there
    is one. Where it exists, the policy also solves: maximize <pi, A> subject to Omega(pi, q) <= C.

    Args:
        advantages, inference_policy: see `optimal_policy`.
        budget: C >= 0.
        measure, sided: see `optimal_policy`.

    Raises:
        UserError: if no policy has mismatch C, or none whose probabilities are float64 numbers.
        ValueError: see `optimal_policy`.
    """
    a, q = check_state(advantages, inference_policy)
    if not (budget >= 0 and math.isfinite(budget)):
        raise UserError(
            f"budget = {budget:g}: no policy has that mismatch; must be a number of at least 0"
        )
    largest = largest_mismatch(q, measure=measure, sided=sided)
    if budget > largest:
        raise UserError(
            f"budget = {budget:g}: no policy has that mismatch; with the {SIDES[sided]} "
            f"{MEASURES[measure]} the largest is {largest:.4g}"
        )

    def optimum(multiplier: float) -> Optimum:
        return optimal_policy(a, q, multiplier=multiplier, measure=measure, sided=sided)

    if budget == 0:
        return BudgetResult(budget=budget, status="met", optimum=optimum(np.inf))
    bounded = measure != "log" or sided == "one" or bool(np.all(a == a.max()))
    if bounded:
        free = optimum(0.0)
        if free.mismatch <= budget:
            status = "met" if free.mismatch == budget else "slack"
            return BudgetResult(budget=budget, status=status, optimum=free)

    below, above = _at_the_budget(optimum, float(np.ptp(a)), budget)
    # The second term is what the rounding of pi does to Omega in any of the measures.
    rounding = _MET * budget + 64 * _EPSILON * math.sqrt(budget * (1 + budget))
    if budget - below.mismatch <= rounding:
        return BudgetResult(budget=budget, status="met", optimum=below)
    if not budget < above.mismatch < math.inf:
        raise UserError(
            f"budget = {budget:g}: the policy that spends it has probabilities too small for "
            f"float64; must be at most {below.mismatch:.6g} here"
        )
    return BudgetResult(budget=budget, status="jump", optimum=below, above=above)


def _at_the_budget(
    optimum: Callable[[float], Optimum], spread: float, budget: float
) -> tuple[Optimum, Optimum]:
    """The optima of two neighboring multipliers: one spends at most the budget, the other more."""

    def excess(log_multiplier: float) -> float:
        with np.errstate(divide="ignore"):
            spent = np.log(optimum(spread * math.exp(log_multiplier)).mismatch / budget)
        return float(np.clip(spent, -_FARTHEST, _FARTHEST))

    low = high = 0.0
    while excess(high) > 0:
        high += 4.0
    while excess(low) <= 0 and low > -_FARTHEST:
        low -= 4.0
    root = low
    if excess(low) > 0:
        root = brentq(excess, low, high, xtol=1e-15, rtol=4 * _EPSILON, maxiter=500)
    multiplier = spread * math.exp(root)
    below = above = optimum(multiplier)
    step = 4 * _EPSILON
    while below.mismatch > budget:
        below = optimum(multiplier * (1 + step))
        step = 2 * step
    step = 4 * _EPSILON
    while above.mismatch <= budget and step < 1:
        above = optimum(multiplier * (1 - step))
        step = 2 * step
    return below, above
