"""The paper's one-state toy: three optimal policies at equal mismatch budgets, two-sided and
one-sided.

    dcmdp toy [--budgets 0.005,0.01,0.02,0.05,0.1] [--out runs/toy]

Draws two_sided.png and one_sided.png and prints the table. The command fails if at a budget that
all three measures meet action a6 is not ordered diff > log > ratio. docs/theory.md reads the table.
"""

from pathlib import Path

from dcmdp_jax.commands.cli import Parser, each_once, real
from dcmdp_jax.errors import UserError, naming
from dcmdp_jax.lab.theory.policy import SIDES
from dcmdp_jax.lab.theory.toy import BUDGETS, concentration, draw, solve_toy, table

_DPI = 130
_LARGEST_BUDGET = 1e6


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), solve, draw, print, check."""
    parser = Parser("toy", description="The paper's one-state toy: table, two figures, a check.")
    defaults = ",".join(f"{budget:g}" for budget in BUDGETS)
    about = f"mismatch budgets (default: {defaults})"
    budgets = each_once(real(0, _LARGEST_BUDGET), "budget")
    parser.add_argument("--budgets", type=budgets, default=BUDGETS, metavar="C,C,...", help=about)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/toy"), metavar="DIR", help="default: %(default)s"
    )
    arguments = parser.parse_args(argv[1:])
    with naming("--budgets"):
        sides = {sided: solve_toy(sided, arguments.budgets) for sided in SIDES}
    rows = [row for side in sides.values() for row in side]
    print("\n".join(table(rows)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for sided, side in sides.items():
        draw(side).savefig(arguments.out / f"{sided}_sided.png", dpi=_DPI)
    shares = {
        (sided, budget): concentration(sides[sided], budget)
        for sided in sides
        for budget in arguments.budgets
    }
    _check_order(shares)
    print(f"wrote {arguments.out}/two_sided.png and one_sided.png")


def _check_order(shares: dict[tuple[str, float], dict[str, float] | None]) -> None:
    met = {
        f"{sided}-sided C = {budget:g}": found for (sided, budget), found in shares.items() if found
    }
    for where, found in met.items():
        values = list(found.values())
        if not values[0] > values[1] > values[2]:
            raise UserError(f"{where}: a6 is not ordered diff > log > ratio: {found}")
    told = (
        f"every budget that all three meet: {', '.join(met)}"
        if met
        else "no budget: none is met by all three"
    )
    print(f"check: a6 is ordered diff > log > ratio at {told}")
