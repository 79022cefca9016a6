"""Parts that all pages and figures share: HTML of the templates, one figure style, completions.

A page extends `templates/page.html`, which has the style, and uses the macros of `parts.html`:
`table`, `figure`, `warnings`. Figures, data and scripts are embedded, all text is escaped, and no
page makes a request: it runs the scripts of `templates/` that it names, and its content security
policy allows their hashes alone.
"""

import base64
import dataclasses
import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe
import numpy as np

from dcmdp_jax.number_format import number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's, distinguishable with common color blindness; without yellow, which is faint on
# white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK = "#222222"
MUTED = "#666666"
LEGEND = {"frameon": False, "fontsize": 9, "labelcolor": INK}
_DPI = 130
_FINEST = 4000
"""Points above which a curve or an area is a picture in the SVG: a screen has no more columns."""


def render_page(template: str, **values: Any) -> str:
    """Render a page.

    Args:
        template: file name in `templates/`.
        values: variables of the template; `scripts`, names of scripts in `templates/`, is empty if
            absent. Filters: `as_text` makes text of a JSON value, `number` and `percent` format as
            in `number_format`.

    Raises:
        jinja2.UndefinedError: if the template reads a value that is not given.
    """
    return drawable(_ENVIRONMENT.get_template(template).render({"scripts": (), **values}))


def drawable(text: str) -> str:
    """Return text with a ? for each byte of a file's name that is not UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def make_figure(
    width: float,
    height: float,
    title: str = "",
    *,
    rows: int = 1,
    columns: int = 1,
    **options: Any,
) -> "tuple[Figure, list[Axes]]":
    """Make a figure and its panels, row by row, without pyplot's global state.

    Args:
        width, height: inches.
        title: heading of the whole figure.
        rows, columns: numbers of panels.
        options: further arguments of `Figure.subplots`.
    """
    # The plotting library takes most of a second to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def style_axes(
    axes: "Axes",
    title: str = "",
    *,
    x: str = "",
    y: str = "",
    legend: bool = False,
) -> None:
    """Finish a panel: heading, axis labels, a faint grid, and of the frame the bottom alone."""
    axes.set_title(title, fontsize=10, color=INK, loc="left", pad=6)
    axes.set_xlabel(x, color=MUTED, fontsize=9)
    axes.set_ylabel(y, color=MUTED, fontsize=9)
    axes.set_axisbelow(True)
    axes.grid(color="#e3e3e3", linewidth=0.8)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#bbbbbb")
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(**LEGEND, loc="best")


def inline_svg(figure: "Figure") -> markupsafe.Markup:
    """Draw each panel of a matplotlib figure as an `<svg>` element.

    The figure's heading is for pictures alone. Text stays text, and the same figure gives the same
    bytes. The figure is changed: save it as a picture before.
    """
    import matplotlib

    for axes in figure.axes:
        for line in axes.get_lines():
            line.set_rasterized(len(line.get_xdata()) > _FINEST)
        for area in axes.collections:
            area.set_rasterized(sum(len(path.vertices) for path in area.get_paths()) > _FINEST)
    figure.suptitle("")
    svg_options = {
        "svg.fonttype": "none",
        "svg.hashsalt": "dcmdp_jax",
        "font.family": "sans-serif",
    }
    with matplotlib.rc_context(svg_options):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        elements = [_panel_svg(figure, panel) for panel in figure.axes]
    return markupsafe.Markup("".join(elements))


def _panel_svg(figure: "Figure", panel: "Axes") -> str:
    for axes in figure.axes:
        axes.set_visible(axes is panel)
    file = io.StringIO()
    figure.savefig(
        file,
        format="svg",
        dpi=_DPI,
        metadata={"Date": None},
        bbox_inches="tight",
        pad_inches=0.06,
    )
    text = file.getvalue()
    element = text[text.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>\s*", "", element, flags=re.DOTALL)


def page_figures(
    figures: "Iterable[tuple[str, str, Figure | None]]", directory: Path
) -> list[tuple[str, str]]:
    """Save figures as `directory`/STEM.png, and draw them for a page; None is left out.

    Args:
        figures: file stem, caption and figure.
        directory: made if absent.

    Returns:
        Each caption and its figure as HTML, see `inline_svg`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    elements = []
    for stem, caption, figure in figures:
        if figure is not None:
            figure.savefig(directory / f"{stem}.png", dpi=_DPI)
            elements.append((caption, inline_svg(figure)))
    return elements


def _source(name: str) -> markupsafe.Markup:
    """A script of `templates/`, as it stands."""
    return markupsafe.Markup(_ENVIRONMENT.loader.get_source(_ENVIRONMENT, name)[0])


def _source_hash(name: str) -> markupsafe.Markup:
    """The hash of a script's bytes, as a content security policy names it."""
    digest = hashlib.sha256(_source(name).encode("utf-8")).digest()
    return markupsafe.Markup(f"'sha256-{base64.b64encode(digest).decode('ascii')}'")


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("dcmdp_jax.observe"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "as_text": _as_text,
    "number": number,
    "percent": percent,
    "source": _source,
    "source_hash": _source_hash,
}
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}


CONTROL = r"<[|｜][^<>\n]{1,40}[|｜]>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]|<(?:bos|eos|pad)>"
"""Control tokens of the families' chat templates, also in JavaScript."""
_USER = re.compile(
    r"<[|｜](?:im_start|start)[|｜]>user(?:\s|<[|]message[|]>)"
    r"|<[|]start_header_id[|]>user<[|]end_header_id[|]>"
    r"|<start_of_turn>user\s|<[|｜][Uu]ser[|｜]>|\[INST\]"
)


def title_of(prompt: str) -> str:
    """The first line of a prompt's last user message, or of the prompt without a known template."""
    if _USER.search(prompt):
        message = _USER.split(prompt)[-1]
    else:
        message = re.sub(CONTROL, "", prompt)
    lines = re.split(CONTROL, message.lstrip())[0].strip().splitlines()
    if not lines:
        return ""
    return lines[0]


MOST_TOKENS = 260_000
"""Tokens on one page: below 5 MB at `_BYTES` each."""
_BYTES = 17
"""Bytes of a token on a page, and characters that take as much."""
_FULL_COLOR = 0.99
"""Quantile of |p - q| over a page's tokens from which on a token has the full color: mismatch
differs by orders between engines, so no absolute scale shows all.
"""
_UNIT = 100_000
"""Whole numbers of a probability: five decimals."""
_LEAST_SHOWN = 100
"""Tokens that are shown of every completion, if it has as many."""
_MOST_SHOWN = 2_000
"""Tokens that are shown of a completion at most."""
_OVERHEAD = 20
"""What the other fields of a completion take, in tokens."""
_LONGEST_PROMPT = 2_000
"""Characters of a prompt on a page."""
MOST_LISTED = 5
"""Of the engine's top-k tokens in a state, those on a page."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A completion to look at. What is not known is None.

    Attributes:
        run, source: names.
        step: finished training steps.
        prompt, answer: texts; "" if not known.
        extracted_answer: what was read as the completion's answer; "" if not known.
        text: the completion, where its tokens are not known.
        tokens: text of each token.
        train_probs, rollout_probs: [T] of each token; NaN where it was not sampled.
        top: for each token at most `MOST_LISTED` of the engine's top-k tokens in its place: text, p
            and q.
        reward, advantage: the completion's.
        discrepancy: mean |p - q| over its sampled tokens, where the tokens are not known.
    """

    run: str | None = None
    step: int | None = None
    source: str | None = None
    prompt: str = ""
    answer: str = ""
    extracted_answer: str = ""
    text: str = ""
    tokens: Sequence[str] | None = None
    train_probs: np.ndarray | None = None
    rollout_probs: np.ndarray | None = None
    top: Sequence[Sequence[tuple[str, float, float]]] | None = None
    reward: float | None = None
    advantage: float | None = None
    discrepancy: float | None = None


def completions_data(
    completions: Sequence[Completion], most_tokens: int = MOST_TOKENS
) -> dict[str, Any]:
    """Return what `completions.js` shows; 2,000 completions with short prompts stay below 5 MB.

    Tokens are numbers into one list of words, probabilities have five decimals, long completions
    are cut, and long prompts in their middle; both say by how much.

    Args:
        completions: in any order. If they are too many, each is cut to as many tokens as fit, but
            to no fewer than 100. A completion without tokens is cut to 17 characters for each of
            them. If they still do not fit, every k-th is kept, so that all steps stay. What is cut
            or left out is counted.
        most_tokens: on the page.

    Returns:
        Values that JSON can hold: `words`; `rows`, the largest mean |p - q| first; `left_out`;
        `unit`, by which probabilities are multiplied; and `full_color`, the |p - q| from which on a
        token has the full color.
    """
    lengths = []
    for completion in completions:
        if completion.tokens:
            lengths.append(len(completion.tokens))
        else:
            lengths.append(len(completion.text) // _BYTES)
    if any(completion.top is not None for completion in completions):
        most_tokens //= 1 + MOST_LISTED  # a listed token takes what a token does

    def tokens_if_cut(longest: int) -> int:
        return (np.minimum(lengths, longest) + _OVERHEAD).sum()

    longest = _LEAST_SHOWN
    for limit in range(_LEAST_SHOWN, _MOST_SHOWN + 1, 50):
        if tokens_if_cut(limit) <= most_tokens:
            longest = limit
    every_kth = max(1, math.ceil(tokens_if_cut(longest) / most_tokens))
    page_completions = completions[::every_kth]

    words: dict[str, int] = {}
    rows = [_row(completion, words, longest) for completion in page_completions]
    rows.sort(key=lambda row: -(row["discrepancy"] or 0))
    differences = []
    for row in rows:
        for p, q in zip(row.get("p", ()), row.get("q", ()), strict=True):
            if p is not None:
                differences.append(abs(p - q))
    full_color = np.quantile(differences or [0], _FULL_COLOR)
    return {
        "words": list(words),
        "rows": rows,
        "left_out": len(completions) - len(page_completions),
        "control": CONTROL,
        "unit": _UNIT,
        "full_color": max(1.0, full_color) / _UNIT,
    }


def _row(completion: Completion, words: dict[str, int], longest: int) -> dict[str, Any]:
    """A completion for JSON. A new word is added to `words` under the next number."""
    row: dict[str, Any] = {
        "run": completion.run,
        "step": completion.step,
        "source": completion.source,
        "prompt": _without_middle(completion.prompt),
        "title": title_of(completion.prompt),
        "reward": _finite(completion.reward),
        "advantage": _finite(completion.advantage),
        "answer": completion.answer,
        "found": completion.extracted_answer,
    }
    if completion.tokens is None:
        text = completion.text[: longest * _BYTES]
        row |= {
            "discrepancy": _finite(completion.discrepancy),
            "text": text,
            "length": len(completion.text),
            "more": len(completion.text) - len(text),
        }
        return row

    differences = completion.train_probs - completion.rollout_probs
    sampled = np.isfinite(differences)
    mean = None
    if sampled.any():
        mean = np.abs(differences[sampled]).mean()
    tokens = completion.tokens[:longest]

    def word_number(word: str) -> int:
        return words.setdefault(word, len(words))

    row |= {
        "discrepancy": _finite(mean),
        "length": len(completion.tokens),
        "more": len(completion.tokens) - len(tokens),
        "tokens": list(map(word_number, tokens)),
        "p": _in_units(completion.train_probs, sampled[:longest]),
        "q": _in_units(completion.rollout_probs, sampled[:longest]),
    }
    if completion.top is not None:
        row["top"] = []
        for state in completion.top[:longest]:
            listed = []
            for word, p, q in state:
                listed.append((word_number(word), round(_UNIT * p), round(_UNIT * q)))
            row["top"].append(listed)
    return row


def _without_middle(prompt: str) -> str:
    """A prompt with its beginning and, as the question may come last, its end."""
    cut = len(prompt) - _LONGEST_PROMPT
    if cut <= 0:
        return prompt
    half = _LONGEST_PROMPT // 2
    return f"{prompt[:half]}\n[... {cut:,} characters ...]\n{prompt[-half:]}"


def _in_units(probabilities: np.ndarray, sampled: np.ndarray) -> list[int | None]:
    """The first probabilities in whole units for JSON, None where no token was sampled."""
    units = []
    for probability, is_sampled in zip(probabilities.tolist(), sampled, strict=False):
        units.append(round(_UNIT * probability) if is_sampled else None)
    return units


def _finite(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")
