"""Numbers and tables as text for reports and the console. NaN, a missing value, is "-"."""

import math
from collections.abc import Sequence


def number(value: float, form: str = "") -> str:
    """Format by a format specification; by default a whole number without decimals, others with 4
    digits.
    """
    if math.isnan(value):
        return "-"
    if not form:
        form = (
            ".0f" if math.isfinite(value) and value == round(value) and abs(value) < 1e9 else ".4g"
        )
    return format(value, form)


def percent(fraction: float) -> str:
    """Format a fraction as 12.5%."""
    return "-" if math.isnan(fraction) else f"{round(100 * fraction, 1) + 0.0:.1f}%"


def duration(seconds: float) -> str:
    """Format as 1:02:03 or 2:03; "-" if not finite."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def text_table(rows: Sequence[Sequence[str]], between: str = "  ") -> list[str]:
    """Return aligned lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        between.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *rows)]
