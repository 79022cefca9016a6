"""The paper's one-state toy: three optimal policies at equal mismatch budgets, two-sided and
one-sided.

    python -m research.theory [--budgets 0.005,0.01,0.02,0.05,0.1] [--out runs/toy]

Draws two_sided.png and one_sided.png and prints the table. The command fails if at a budget that
all three measures meet action a6 is not ordered diff > log > ratio. docs/theory.md reads the table.
"""

from pathlib import Path

from dcmdp_jax.commands.arguments import Parser, real
from dcmdp_jax.errors import UserError, naming
from research.arguments import each_once
from research.theory.policy import SIDES
from research.theory.toy import BUDGETS, concentration, draw, solve_toy, table

_DPI = 130
_LARGEST_BUDGET = 1e6


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), solve, draw, print, check."""
    parser = Parser(
        prog="python -m research.theory",
        description="The paper's one-state toy: table, two figures, a check.",
    )
    defaults = ",".join(f"{budget:g}" for budget in BUDGETS)
    about = f"mismatch budgets (default: {defaults})"
    budgets = each_once(real(_LARGEST_BUDGET), "budget")
    parser.add_argument("--budgets", type=budgets, default=BUDGETS, metavar="C,C,...", help=about)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/toy"), metavar="DIR", help="default: %(default)s"
    )
    arguments = parser.parse_args(argv[1:])

    with naming("--budgets"):
        sides = {sided: solve_toy(sided, arguments.budgets) for sided in SIDES}
    print("\n".join(table(sum(sides.values(), []))))
    arguments.out.mkdir(parents=True, exist_ok=True)
    shares = {}
    for sided, side in sides.items():
        draw(side).savefig(arguments.out / f"{sided}_sided.png", dpi=_DPI)
        for budget in arguments.budgets:
            shares[f"{sided}-sided C = {budget:g}"] = concentration(side, budget)
    _check_order(shares)
    print(f"wrote {arguments.out}/two_sided.png and one_sided.png")


def _check_order(shares: dict[str, dict[str, float] | None]) -> None:
    """Print at which budgets a6 is ordered diff > log > ratio; None is not met by all three."""
    budgets = []
    for budget, by_measure in shares.items():
        if by_measure:
            diff, log, ratio = by_measure.values()
            if not diff > log > ratio:
                raise UserError(f"{budget}: a6 is not ordered diff > log > ratio: {by_measure}")
            budgets.append(budget)
    where = "no budget: none is met by all three"
    if budgets:
        where = f"every budget that all three meet: {', '.join(budgets)}"
    print(f"check: a6 is ordered diff > log > ratio at {where}")
