"""The paper's one-state toy: six actions, three measures, a column for each mismatch budget."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from dcmdp_jax.observe.page_kit import COLORS, INK, make_figure, style_axes
from research.theory.budget import BudgetResult, policy_for_budget
from research.theory.policy import MEASURES, SIDES

ACTIONS = ("a1", "a2", "a3", "a4", "a5", "a6")
INFERENCE_POLICY = np.array([0.30, 0.30, 0.15, 0.15, 0.05, 0.05])
ADVANTAGES = np.array([-0.1, 0.1, -0.5, 0.5, -1.0, 1.0])
"""The paper's Table 6: high, medium and low probability, each with advantages of both signs."""
BUDGETS = (0.005, 0.01, 0.02, 0.05, 0.1)
"""Ours: the paper does not state the budgets of its figures' columns."""
CONCENTRATION = ("diff", "log", "ratio")
"""The paper's takeaway: at equal budget a6, rare and good, gets most under diff, then log."""
_NOTES = {"slack": "not reached, lambda = 0", "jump": "met by no lambda"}
_UNMET = "#bbbbbb"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyRow:
    """A panel of a figure: a measure, its side, and the policy that comes nearest to the budget."""

    measure: str
    sided: str
    result: BudgetResult

    @property
    def against_advantage(self) -> list[str]:
        """Actions that move against the sign of their advantage (the paper says there are none)."""
        moved = self.result.optimum.policy - INFERENCE_POLICY
        return [ACTIONS[i] for i in np.flatnonzero(moved * ADVANTAGES < -1e-12)]


def solve_toy(sided: str, budgets: Sequence[float] = BUDGETS) -> list[ToyRow]:
    """Solve one figure, measure by measure and budget by budget.

    Args:
        sided: "two" or "one".
        budgets: C of each column, above 0.

    Raises:
        UserError: for a budget that no policy meets.
    """

    rows = []
    for measure in MEASURES:
        for budget in budgets:
            result = policy_for_budget(
                ADVANTAGES, INFERENCE_POLICY, budget=budget, measure=measure, sided=sided
            )
            rows.append(ToyRow(measure=measure, sided=sided, result=result))
    return rows


def concentration(rows: Sequence[ToyRow], budget: float) -> dict[str, float] | None:
    """Probability of a6 by measure of `CONCENTRATION`; None unless all three meet the budget."""
    probabilities = {}
    for row in rows:
        if row.result.budget == budget and row.result.status == "met":
            probabilities[row.measure] = float(row.result.optimum.policy[-1])
    if len(probabilities) < len(CONCENTRATION):
        return None
    return {measure: probabilities[measure] for measure in CONCENTRATION}


def table(rows: Sequence[ToyRow]) -> list[str]:
    """Aligned lines of text, one a row."""
    names = "  ".join(f"{name:>6}" for name in ACTIONS)
    lines = [f"{'sided':5}  {'C':>6}  {'measure':7}  {names}  {'<pi,A>':>7}  budget"]
    for row in rows:
        optimum = row.result.optimum
        policy = "  ".join(f"{share:6.4f}" for share in optimum.policy)
        against = ""
        if row.against_advantage:
            against = f"; against the sign of A: {', '.join(row.against_advantage)}"
        lines.append(
            f"{row.sided:5}  {row.result.budget:6g}  {row.measure:7}  {policy}  "
            f"{optimum.advantage:7.4f}  {row.result.describe()}{against}"
        )
    return lines


def draw(rows: Sequence[ToyRow]) -> Figure:
    """Draw the rows of one side: bars of each policy, gray if unmet, over outlines of q."""
    budgets = list(dict.fromkeys(row.result.budget for row in rows))
    figure, panels = make_figure(
        width=2.5 * len(budgets) + 0.6,
        height=1.9 * len(MEASURES) + 0.9,
        title=f"{SIDES[rows[0].sided].capitalize()} penalties: optimal policies at equal mismatch "
        "(outline: the engine)",
        rows=len(MEASURES),
        columns=len(budgets),
        sharey=True,
        sharex=True,
    )
    positions = np.arange(len(ACTIONS))
    colors = np.where(ADVANTAGES > 0, COLORS[0], COLORS[1])
    for number, (axes, row) in enumerate(zip(panels, rows, strict=True)):
        optimum = row.result.optimum
        met = row.result.status == "met"
        note = f"lambda = {optimum.multiplier:.3g}" if met else _NOTES[row.result.status]
        axes.bar(positions, optimum.policy, width=0.62, color=colors if met else _UNMET)
        axes.bar(positions, INFERENCE_POLICY, width=0.86, fill=False, edgecolor=INK, linewidth=0.9)
        axes.set_ylim(0, 1)
        axes.set_xticks(positions, ACTIONS)
        heading = f"C = {row.result.budget:g}\n{note}" if number < len(budgets) else note
        style_axes(axes, heading, y="" if number % len(budgets) else MEASURES[row.measure])
    return figure
