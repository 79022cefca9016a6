"""The same optima from a general solver that knows none of the closed forms: scipy's SLSQP from
many starts.
"""

import numpy as np
from scipy.optimize import minimize

from research.theory.budget import BudgetResult
from research.theory.policy import check_names, mismatch

_FLOOR = 1e-14
"""Smallest probability the solver may try: the gradient of the log is infinite at 0."""
_OPTIONS = {"ftol": 1e-16, "maxiter": 1000}


def solve_within_budget(
    advantages: np.ndarray,
    inference_policy: np.ndarray,
    *,
    budget: float,
    measure: str,
    sided: str = "two",
) -> np.ndarray:
    """Maximize <pi, A> subject to Omega(pi, q) <= C, by SLSQP; the best of its answers.

    Args:
        advantages, inference_policy: [n] float64.
        budget: C > 0.
        measure, sided: as of `optimal_policy`.

    Raises:
        RuntimeError: if no start ends at a policy.
    """
    a = np.asarray(advantages, np.float64)
    q = np.asarray(inference_policy, np.float64)
    omega, slope = _omega(q, measure, sided)
    within = {
        "type": "ineq",
        "fun": lambda pi: 1 - omega(pi) / budget,
        "jac": lambda pi: -slope(pi) / budget,
    }
    return _best(a, q, lambda pi: -a @ pi, lambda pi: -a, [within])


def solve_penalized(
    advantages: np.ndarray,
    inference_policy: np.ndarray,
    *,
    multiplier: float,
    measure: str,
    sided: str = "two",
) -> np.ndarray:
    """Maximize <pi, A> - lambda Omega(pi, q), by SLSQP; the best of its answers. Arguments as of
    `optimal_policy`.
    """
    a = np.asarray(advantages, np.float64)
    q = np.asarray(inference_policy, np.float64)
    omega, slope = _omega(q, measure, sided)
    return _best(
        a, q, lambda pi: multiplier * omega(pi) - a @ pi, lambda pi: multiplier * slope(pi) - a, []
    )


def _omega(q, measure, sided):
    """Omega and its gradient, written from the definitions and not from `mismatch`."""
    check_names(measure, sided)
    weight = {"diff": q, "ratio": 1 / q, "log": q}[measure]

    def deviation(pi):
        raw = np.log(pi / q) if measure == "log" else pi - q
        return raw if sided == "two" else np.maximum(raw, 0)

    def omega(pi):
        return float(weight @ deviation(pi) ** 2)

    def slope(pi):
        return 2 * weight * deviation(pi) * (1 / pi if measure == "log" else 1)

    return omega, slope


def _best(a, q, loss, gradient, constraints):
    simplex = {"type": "eq", "fun": lambda pi: pi.sum() - 1, "jac": lambda pi: np.ones_like(pi)}
    best = np.inf
    answer = None
    for start in [
        q,
        *(
            share * np.eye(len(q))[i] + (1 - share) * q
            for i in range(len(q))
            for share in (0.1, 0.5, 0.9)
        ),
    ]:
        done = minimize(
            loss,
            start,
            jac=gradient,
            method="SLSQP",
            bounds=[(_FLOOR, 1)] * len(q),
            constraints=[simplex, *constraints],
            options=_OPTIONS,
        )
        pi = done.x
        ok = abs(pi.sum() - 1) < 1e-9 and all(c["fun"](pi) > -1e-8 for c in constraints)
        if ok and done.fun < best:
            best = done.fun
            answer = pi
    if answer is None:
        raise RuntimeError("SLSQP found no policy")
    return answer


def disagreement(
    advantages: np.ndarray,
    inference_policy: np.ndarray,
    result: BudgetResult,
    *,
    measure: str,
    sided: str,
) -> float:
    """Largest difference of a probability between `policy_for_budget` and SLSQP.

    At a jump, where the optimum is not unique, the larger difference of the penalized objective on
    its two sides.
    """
    names = {"measure": measure, "sided": sided}
    if result.status != "jump":
        found = solve_within_budget(advantages, inference_policy, budget=result.budget, **names)
        return float(np.abs(found - result.optimum.policy).max())

    def objective(policy: np.ndarray, multiplier: float) -> float:
        return float(policy @ advantages - multiplier * mismatch(policy, inference_policy, **names))

    differences = []
    for side in (result.optimum, result.above):
        found = solve_penalized(advantages, inference_policy, multiplier=side.multiplier, **names)
        differences.append(
            abs(objective(found, side.multiplier) - objective(side.policy, side.multiplier))
        )
    return max(differences)
