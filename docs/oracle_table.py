"""The table of every remedy on the demo's policy, docs/probe.md, from the kept numbers.

python -m docs.oracle_table
"""

from __future__ import annotations

import json
from pathlib import Path

KEPT = Path(__file__).resolve().parent / "evidence" / "oracle_remedies.json"


def oracle_page() -> list[str]:
    """Lines of Markdown, the smallest error first."""
    (found,) = json.loads(KEPT.read_text(encoding="utf-8"))
    rows = [["remedy", "error", "±", "bias^2", "variance", "length", "without gradient"], ["---"] * 7]
    for one in found["remedies"]:
        quality, width = one["quality"], one["half_width"]
        figures = quality["error"], width["error"], quality["squared_bias"], quality["variance"], quality["length"]
        shown = ["-" if x is None else f"{x:.2f}" for x in figures]
        rows.append([f"`{one['name']}`", *shown, f"{one['dropped']:.1%}"])
    return [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    print("\n".join(oracle_page()))
