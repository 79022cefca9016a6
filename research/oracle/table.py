"""Tables of remedies on the demo's policy, research/oracle.md, and on SmolLM2-135M, docs/evidence_frozen.md.

python -m research.oracle.table
"""

from __future__ import annotations

import json
from pathlib import Path

_HERE = Path(__file__).resolve().parents[2] / "docs" / "evidence"
KEPT, PUBLISHED = _HERE / "oracle_remedies.json", _HERE / "oracle_smollm2.json"


def oracle_page(kept: Path = KEPT) -> list[str]:
    """Lines of Markdown, the smallest error first."""
    (found,) = json.loads(kept.read_text(encoding="utf-8"))
    rows = [["remedy", "error", "±", "bias^2", "variance", "length", "without gradient"], ["---"] * 7]
    for one in found["remedies"]:
        quality, width = one["quality"], one["half_width"]
        figures = quality["error"], width["error"], quality["squared_bias"], quality["variance"], quality["length"]
        shown = ["-" if x is None else f"{x:.2f}" for x in figures]
        rows.append([f"`{one['name']}`", *shown, f"{one['dropped']:.1%}"])
    return [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    print("\n".join((*oracle_page(), "", *oracle_page(PUBLISHED))))
