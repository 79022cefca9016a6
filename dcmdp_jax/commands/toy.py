"""The paper's one-state toy: three optimal policies at equal mismatch budgets, two-sided and one-sided.

    dcmdp toy [--budgets 0.005,0.01,0.02,0.05,0.1] [--out runs/toy]

Draws two_sided.png and one_sided.png, prints the table, and compares every policy with scipy's SLSQP. The command fails
if one differs by more than 1e-6, or if at a budget that all three meet action a6 is not ordered diff > log > ratio.
Then it prints which charge makes a policy of two steps take a way around the mismatch, by theory and by simulation.
docs/theory.md reads the table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dcmdp_jax.commands.arguments import real
from dcmdp_jax.commands.cli import Parser
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.theory.mismatch import MEASURES, SIDES
from dcmdp_jax.lab.theory.toy import (
    ACTIONS,
    ADVANTAGES,
    BUDGETS,
    INFERENCE_POLICY,
    TOLERANCE,
    ToyRow,
    concentration,
    solve_toy,
    wrong_directions,
)
from dcmdp_jax.lab.theory.way_out import way_out_page
from dcmdp_jax.observe.policy_figure import Panel, draw_policies

_DPI = 130
_LARGEST_BUDGET = 1e6
_NOTES = {"slack": "not reached, lambda = 0", "jump": "met by no lambda"}


class ToyFailed(RuntimeError):
    """The independent solver or the paper's takeaway contradicts the table."""


EXPECTED = (ToyFailed,)
"""Failures whose message is enough."""


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), solve, draw, print, check."""
    parser = Parser("toy", description="The paper's one-state toy: table, two figures, a check.")
    parser.add_argument(
        "--budgets", type=_budgets, default=BUDGETS, metavar="C,C,...",
        help=f"mismatch budgets, the figures' columns (default: {','.join(f'{budget:g}' for budget in BUDGETS)})",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/toy"), metavar="DIR", help="default: %(default)s")
    arguments = parser.parse_args(argv[1:])
    try:
        sides = {sided: solve_toy(sided, arguments.budgets) for sided in SIDES}
    except UserError as error:
        raise UserError(f"--budgets: {error}") from None
    arguments.out.mkdir(parents=True, exist_ok=True)
    print("\n".join(_table([row for rows in sides.values() for row in rows])))
    for sided, rows in sides.items():
        figure = _figure(sided, rows, arguments.budgets)
        figure.savefig(arguments.out / f"{sided}_sided.png", dpi=_DPI)
    record = [_record(row) for rows in sides.values() for row in rows]
    (arguments.out / "toy.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    _check(sides, arguments.budgets)
    print("\n".join(["", *way_out_page()]))
    print(f"wrote {arguments.out}/two_sided.png, one_sided.png, toy.json")


def _budgets(text: str) -> tuple[float, ...]:
    number = real(0, _LARGEST_BUDGET)
    budgets = tuple(number(part.strip()) for part in text.split(","))
    if len(set(budgets)) < len(budgets):
        raise argparse.ArgumentTypeError(f"got {text!r}, every budget must be there once")
    return budgets


def _table(rows: list[ToyRow]) -> list[str]:
    lines = [
        f"{'sided':5}  {'C':>6}  {'measure':7}  {'  '.join(f'{name:>6}' for name in ACTIONS)}  {'<pi,A>':>7}  budget"
    ]
    for row in rows:
        optimum = row.result.optimum
        policy = "  ".join(f"{share:6.4f}" for share in optimum.policy)
        against = wrong_directions(row)
        lines.append(
            f"{row.sided:5}  {row.result.budget:6g}  {row.measure:7}  {policy}  {optimum.advantage:7.4f}  "
            f"{row.result.describe()}" + (f"; against the sign of A: {', '.join(against)}" if against else "")
        )
    return lines


def _figure(sided: str, rows: list[ToyRow], budgets: tuple[float, ...]):
    def panel(row: ToyRow) -> Panel:
        met = row.result.status == "met"
        note = f"lambda = {row.result.optimum.multiplier:.3g}" if met else _NOTES[row.result.status]
        return Panel(row.result.optimum.policy, note, met)

    return draw_policies(
        f"{SIDES[sided].capitalize()} penalties: optimal policies at equal mismatch (outline: inference policy)",
        [f"C = {budget:g}" for budget in budgets],
        {name: [panel(row) for row in rows if row.measure == measure] for measure, name in MEASURES.items()},
        actions=ACTIONS,
        reference=INFERENCE_POLICY,
        advantages=ADVANTAGES,
    )


def _record(row: ToyRow) -> dict[str, object]:
    result = row.result
    return {
        "sided": row.sided,
        "measure": row.measure,
        "budget": result.budget,
        "status": result.status,
        "multiplier": result.optimum.multiplier,
        "mismatch": result.optimum.mismatch,
        "advantage": result.optimum.advantage,
        "policy": result.optimum.policy.tolist(),
        "policy_above_the_jump": None if result.above is None else result.above.policy.tolist(),
        "against_the_sign_of_A": wrong_directions(row),
        "disagreement_with_slsqp": row.disagreement,
    }


def _check(sides: dict[str, list[ToyRow]], budgets: tuple[float, ...]) -> None:
    rows = [row for rows in sides.values() for row in rows]
    worst = max(rows, key=lambda row: row.disagreement)
    if worst.disagreement > TOLERANCE:
        raise ToyFailed(
            f"{worst.sided}-sided {worst.measure} at C = {worst.result.budget:g}: SLSQP's policy differs by "
            f"{worst.disagreement:.2g}, allowed is {TOLERANCE:g}"
        )
    print(f"check: {len(rows)} optima agree with SLSQP to {worst.disagreement:.1g}")
    ordered = []
    for sided, of_side in sides.items():
        for budget in budgets:
            shares = concentration(of_side, budget)
            if shares is None:
                continue
            if sorted(shares.values(), reverse=True) != list(shares.values()) or len(set(shares.values())) < len(
                shares
            ):
                raise ToyFailed(f"{sided}-sided, C = {budget:g}: a6 is not ordered diff > log > ratio: {shares}")
            ordered.append(f"{sided}-sided C = {budget:g}")
    where = (
        f"every budget that all three meet: {', '.join(ordered)}" if ordered else "no budget: none is met by all three"
    )
    print(f"check: a6 is ordered diff > log > ratio at {where}")
