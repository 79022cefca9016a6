"""The page of options of other frameworks, from `dcmdp_jax/integrations/translations.csv`.

    python -m docs.translations           # writes docs/translations.md

A row has the framework, its option, our settings, the slope of the objective in a token's log-prob
as the source has it, commit and date of the reading, and a note. `tests/translations_test.py`
computes each slope in float64 and compares it with that of our settings.
"""

from __future__ import annotations

import csv
import datetime
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_DOCS = Path(__file__).resolve().parent
TABLE = _DOCS.parent / "dcmdp_jax" / "integrations" / "translations.csv"
PAGE = _DOCS / "translations.md"
_INTRODUCTION = """# Options of other frameworks

Find an option of another framework and the settings of `algorithm` that do the same; [remedies.md](remedies.md)
explains them. Options were read in the source, at the framework's commit and date or at the row's own; "old" is more
than 60 days before the newest, "notes" an unavailable source.

"Slope" is the derivative of the objective in a token's log-prob, by the source, or by ours where the note begins so:
pi is the policy now, p the trainer's that made the batch, q the engine's, r = p / q, d = log r, g = pi / p, u = pi /
q, A the advantage; prod, geo, mean, total, min and max are over the completion, t is the token's position, kl the
binary KL, and `C` our clip, `where((A>0)&(g>1.24)|(A<0)&(g<0.8), 0, g)`. `tests/translations_test.py` compares it
with the settings'. Rows without a slope do not concern a token's gradient, or have no counterpart.

`python -m docs.translations` writes this page from `dcmdp_jax/integrations/translations.csv`.
"""
_CLIP = "where((A>0)&(g>1.24)|(A<0)&(g<0.8), 0, g)"
_AFTER = {
    "verl": "verl divides each completion's loss by the tokens kept in it, then by completions. "
    "With ours a completion that lost\nhalf its tokens counts half.",
    "TRL": "In TRL all dropped tokens count: `correction_denominator=all` gives its numbers, "
    "those with a KL term (`beta`) too,\nwhich corrections do not touch there either. "
    "TRL's log-ratio is not clamped.",
    "NeMo-RL": "NeMo-RL gives a token with a ratio that is not finite weight 0. Here -inf is "
    "clamped, and NaN skips the update.",
}


def rows() -> list[dict[str, str]]:
    """The table, in its order."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def is_old(row: dict[str, str]) -> bool:
    """Whether a row was read more than 60 days before the newest."""
    newest = max(one["read"] for one in rows())
    return datetime.date.fromisoformat(newest) - datetime.date.fromisoformat(
        row["read"]
    ) > datetime.timedelta(60)


def page() -> str:
    """The page in Markdown."""
    return "\n".join([_INTRODUCTION, *_sections(rows())]) + "\n"


def _sections(table: list[dict[str, str]]) -> Iterator[str]:
    for framework in dict.fromkeys(row["framework"] for row in table):
        own = [row for row in table if row["framework"] == framework]
        ((most, _),) = Counter(map(_read, own)).most_common(1)
        yield (
            f"## {framework}\n\nRead at {most}.\n\n| option | ours | slope | note "
            "|\n|---|---|---|---|"
        )
        for row in own:
            note = "; ".join(
                part for part in (f"at {_read(row)}" * (_read(row) != most), row["note"]) if part
            )
            cells = row["option"], _code(row["ours"]), _code(row["slope"].replace(_CLIP, "C")), note
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield f"\n{_AFTER[framework]}\n" if framework in _AFTER else ""


def _read(row: dict[str, str]) -> str:
    """Commit and date of the reading."""
    return f"{row['commit']}, {'old: ' * is_old(row)}{row['read']}"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
