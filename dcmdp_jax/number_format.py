"""Numbers and tables as text for reports and the console. NaN, a missing value, is "-"."""

import math
import shutil
import textwrap
from collections.abc import Mapping, Sequence

_LABEL_WIDTH = 13
_NO_TERMINAL = 1 << 20
"""Columns of a log: no line is as long."""


def number(value: float, form: str = "") -> str:
    """Format by a specification; by default whole numbers without decimals, others by 4 digits."""
    if math.isnan(value):
        return "-"
    if form:
        return format(value, form)
    if abs(value) < 1e9 and value == round(value):
        return f"{value:.0f}"
    return f"{value:.4g}"


def percent(fraction: float) -> str:
    """Format a fraction as 12.5%."""
    if math.isnan(fraction):
        return "-"
    # NumPy rounds otherwise than Python. + 0.0 turns -0.0 into 0.0.
    return f"{round(100 * float(fraction), 1) + 0.0:.1f}%"


def duration(seconds: float) -> str:
    """Format as 1:02:03 or 2:03; "-" if not finite."""
    if not math.isfinite(seconds):
        return "-"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}:{seconds:02d}"
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def text_table(rows: Sequence[Sequence[str]], between: str = "  ") -> list[str]:
    """Return aligned lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append(between.join(cells).rstrip())
    return lines


def labelled(texts: Mapping[str, str]) -> str:
    """Return lines of label and text, the empty ones left out, wrapped at the terminal's width.

    Without a terminal, in a log, nothing is wrapped.
    """
    columns = shutil.get_terminal_size(fallback=(_NO_TERMINAL, 0)).columns
    indent = " " * _LABEL_WIDTH
    lines = []
    for label, text in texts.items():
        start = label.ljust(_LABEL_WIDTH)
        for line in text.splitlines():
            lines += textwrap.wrap(
                line,
                columns,
                initial_indent=start,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            start = indent
    return "\n".join(lines)


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *rows)]
