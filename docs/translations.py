"""The page of options of other frameworks, from `dcmdp_jax/integrations/translations.csv`.

    python -m docs.translations           # writes docs/translations.md

A row has the framework, its option, our settings, the slope of the objective in a token's log-prob as the source has
it, commit and date of the reading, and a note. `tests/translations_test.py` computes each slope in float64 and compares
it with that of our settings.
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Iterator
from pathlib import Path

_DOCS = Path(__file__).resolve().parent
TABLE = _DOCS.parent / "dcmdp_jax" / "integrations" / "translations.csv"
PAGE = _DOCS / "translations.md"
_INTRODUCTION = """# Options of other frameworks

Option -> ours, as settings of `algorithm`. Each row was read in the source at the commit and on the date that it has,
"old" if that is more than 60 days before the newest; where it says notes, the source could not be reached. "Slope" is
the derivative of the objective in a token's log-prob, as the source has it, or, where the note begins so, as ours has
it: with pi the policy now, p the trainer's that made the batch and q the engine's, r = p / q,
d = log r, g = pi / p, u = pi / q, A the advantage; prod, geo, mean, total, min and max are over the completion, t is
the token's place, kl the binary KL. `tests/translations_test.py` computes it and compares it with the settings';
where a correction stands beside PPO's clip, the clip is ours, 0.8 to 1.24. Rows without a slope are about something
else than a token's gradient, or have no counterpart.

The table is `dcmdp_jax/integrations/translations.csv`; `python -m docs.translations` writes this page. What our
settings do: [remedies.md](remedies.md).
"""
_AFTER = {
    "verl": "verl divides each completion's loss by the tokens kept in it, then by completions. Ours is the mean over "
    "kept tokens\nwith the weights 1 / length of the whole completion: one that lost half its tokens counts half.",
    "TRL": "In TRL all dropped tokens count: `correction_denominator=all` gives its numbers, those with a KL term "
    "(`beta`) too,\nwhich corrections do not touch there either. TRL's log-ratio is not clamped.",
    "NeMo-RL": "NeMo-RL gives a token with a ratio that is not finite weight 0. Here -inf is clamped, and NaN skips "
    "the update.",
}


def rows() -> list[dict[str, str]]:
    """The table, in its order."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def is_old(row: dict[str, str]) -> bool:
    """Whether a row was read more than 60 days before the newest."""
    newest = max(one["read"] for one in rows())
    return datetime.date.fromisoformat(newest) - datetime.date.fromisoformat(row["read"]) > datetime.timedelta(60)


def page() -> str:
    """The page in Markdown."""
    return "\n".join([_INTRODUCTION, *_sections(rows())]) + "\n"


def _sections(table: list[dict[str, str]]) -> Iterator[str]:
    for framework in dict.fromkeys(row["framework"] for row in table):
        yield f"## {framework}\n\n| option | ours | slope | read | note |\n|---|---|---|---|---|"
        for row in table:
            if row["framework"] == framework:
                read = f"{row['commit']}, {'old: ' * is_old(row)}{row['read']}"
                cells = row["option"], _code(row["ours"]), _code(row["slope"]), read
                yield "| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, row["note"])) + " |"
        yield f"\n{_AFTER[framework]}\n" if framework in _AFTER else ""


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
