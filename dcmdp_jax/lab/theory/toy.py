"""The paper's one-state toy: six actions, three measures, one column for each mismatch budget."""

from __future__ import annotations

import dataclasses

import numpy as np

from dcmdp_jax.lab.theory.budget import BudgetResult, policy_for_budget
from dcmdp_jax.lab.theory.independent import solve_penalized, solve_within_budget
from dcmdp_jax.lab.theory.mismatch import MEASURES, mismatch

ACTIONS = ("a1", "a2", "a3", "a4", "a5", "a6")
INFERENCE_POLICY = np.array([0.30, 0.30, 0.15, 0.15, 0.05, 0.05])
ADVANTAGES = np.array([-0.1, 0.1, -0.5, 0.5, -1.0, 1.0])
"""The paper's Table 6: high, medium and low probability, each with a negative and a positive advantage."""
BUDGETS = (0.005, 0.01, 0.02, 0.05, 0.1)
"""Ours: the paper does not state the budgets of its figures' columns."""

CONCENTRATION = ("diff", "log", "ratio")
"""The paper's takeaway: at equal budget a6, rare and good, gets most under diff and least under ratio."""
TOLERANCE = 1e-6
_A6 = 5


@dataclasses.dataclass(frozen=True)
class ToyRow:
    """One panel of a figure.

    Attributes:
        measure, sided: what is charged.
        result: the policy, and whether a multiplier meets the budget.
        disagreement: from the independent solver. Largest difference of a probability; at a jump, where the optimum is
            not unique, the larger difference of the penalized objective on its two sides.
    """

    measure: str
    sided: str
    result: BudgetResult
    disagreement: float


def solve_toy(sided: str, budgets: tuple[float, ...] = BUDGETS) -> list[ToyRow]:
    """The rows of one figure: measure by measure, budget by budget, each checked by the independent solver.

    Args:
        sided: "two" or "one".
        budgets: C of each column, above 0.

    Raises:
        UserError: for a budget that no policy meets.
    """
    rows = []
    for measure in MEASURES:
        names = {"measure": measure, "sided": sided}
        for budget in budgets:
            result = policy_for_budget(ADVANTAGES, INFERENCE_POLICY, budget=budget, **names)
            rows.append(ToyRow(measure, sided, result, disagreement(ADVANTAGES, INFERENCE_POLICY, result, **names)))
    return rows


def disagreement(
    advantages: np.ndarray, inference_policy: np.ndarray, result: BudgetResult, *, measure: str, sided: str
) -> float:
    """Distance of `policy_for_budget` from SLSQP, as `ToyRow.disagreement`.

    Differs where advantages are equal: one-sided optima and slack ones are then not unique.
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
        differences.append(abs(objective(found, side.multiplier) - objective(side.policy, side.multiplier)))
    return max(differences)


def concentration(rows: list[ToyRow], budget: float) -> dict[str, float] | None:
    """Probability of a6 by measure, in the order of `CONCENTRATION`; None unless all three meet the budget."""
    met = {row.measure: row.result for row in rows if row.result.budget == budget and row.result.status == "met"}
    if len(met) < len(CONCENTRATION):
        return None
    return {measure: float(met[measure].optimum.policy[_A6]) for measure in CONCENTRATION}


def wrong_directions(row: ToyRow) -> list[str]:
    """Actions that move against the sign of their advantage (the paper says there are none)."""
    moved = row.result.optimum.policy - INFERENCE_POLICY
    return [ACTIONS[i] for i in np.flatnonzero(moved * ADVANTAGES < -1e-12)]
