"""Parts that all pages and figures share: HTML of the templates, one figure style, completions.

A page extends `templates/page.html`, which has the style, and uses the macros of `parts.html`:
`table`, `figure`, `warnings`. Figures, data and scripts are embedded, all text is escaped, and no
page makes a request: it runs the scripts of `templates/` that it names, and its content security
policy allows their hashes alone.
"""

import base64
import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
"""Points of a curve or an area above which it is a picture within the SVG: a screen has no more
columns.
"""


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
    width: float, height: float, title: str = "", *, rows: int = 1, columns: int = 1, **options: Any
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
    axes: "Axes", title: str = "", *, x: str = "", y: str = "", legend: bool = False
) -> None:
    """Finish a panel: heading, axis labels, a faint grid behind the data, and of the frame the
    bottom alone.
    """
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
    """Draw each panel of a matplotlib figure as an `<svg>` element; the figure's heading is for
    pictures alone.

    Text stays text, and the same figure gives the same bytes. The figure is changed: save it as a
    picture before.
    """
    import matplotlib

    for axes in figure.axes:
        for line in axes.get_lines():
            line.set_rasterized(len(line.get_xdata()) > _FINEST)
        for area in axes.collections:
            area.set_rasterized(sum(len(path.vertices) for path in area.get_paths()) > _FINEST)
    figure.suptitle("")
    made = []
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "dcmdp_jax", "font.family": "sans-serif"}
    ):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for panel in figure.axes:
            for axes in figure.axes:
                axes.set_visible(axes is panel)
            drawn = io.StringIO()
            figure.savefig(
                drawn,
                format="svg",
                dpi=_DPI,
                metadata={"Date": None},
                bbox_inches="tight",
                pad_inches=0.06,
            )
            text = drawn.getvalue()
            made.append(
                re.sub(
                    r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL
                )
            )
    return markupsafe.Markup("".join(made))


def page_figures(
    figures: "Iterable[tuple[str, str, Figure | None]]", directory: Path
) -> list[tuple[str, str]]:
    """Save figures as `directory`/STEM.png, and draw them for a page; a figure that is None is left
    out.

    Args:
        figures: file stem, caption and figure.
        directory: made if absent.

    Returns:
        Each caption and its figure as HTML, see `inline_svg`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for stem, caption, figure in figures:
        if figure is not None:
            figure.savefig(directory / f"{stem}.png", dpi=_DPI)
            drawn.append((caption, inline_svg(figure)))
    return drawn


def _source(name: str) -> markupsafe.Markup:
    """A script of `templates/`, as it stands."""
    return markupsafe.Markup(_ENVIRONMENT.loader.get_source(_ENVIRONMENT, name)[0])


def _source_hash(name: str) -> markupsafe.Markup:
    """The hash of a script's bytes, as a content security policy names it."""
    digest = hashlib.sha256(_source(name).encode("utf-8")).digest()
    return markupsafe.Markup(f"'sha256-{base64.b64encode(digest).decode('ascii')}'")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("dcmdp_jax.observe"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"as_text": _as_text, "number": number, "percent": percent}
_ENVIRONMENT.filters |= {"source": _source, "source_hash": _source_hash}
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}


CONTROL = r"<[|｜][^<>\n]{1,40}[|｜]>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]|<(?:bos|eos|pad)>"
"""Control tokens of the families' chat templates, also in JavaScript."""
_USER = re.compile(
    r"<[|｜](?:im_start|start)[|｜]>user(?:\s|<[|]message[|]>)|<[|]start_header_id[|]>user<[|]end_header_id[|]>"
    r"|<start_of_turn>user\s|<[|｜][Uu]ser[|｜]>|\[INST\]"
)


def title_of(prompt: str) -> str:
    """The first line of a prompt's last user message, or of the prompt where no chat template is
    known.
    """
    message = _USER.split(prompt)[-1] if _USER.search(prompt) else re.sub(CONTROL, "", prompt)
    lines = re.split(CONTROL, message.lstrip())[0].strip().splitlines()
    return lines[0] if lines else ""


MOST_TOKENS = 260_000
"""Tokens on one page, at `_BYTES` each."""
_BYTES = 17
_FULL_COLOR = 0.99
"""Quantile of |p - q| over a page's tokens from which on a token has the full color: mismatch
differs by orders between engines, so no absolute scale shows all.
"""
_UNIT = 100_000
_LEAST_SHOWN = 100
_MOST_SHOWN = 2_000
_OVERHEAD = 20
"""Tokens of a completion on a page: at least and at most; what its other fields take, in tokens."""
_LONGEST_PROMPT = 2_000
MOST_LISTED = 5
"""Of the engine's likeliest tokens in a state, those on a page."""


class Completion(NamedTuple):
    """A completion to look at. What is not known is None.

    Attributes:
        run, source: names.
        step: finished training steps.
        prompt, answer, found: texts, the last what was read as the completion's answer; "" if not
            known.
        text: the completion, where its tokens are not known.
        tokens: text of each token.
        train_probs, rollout_probs: [T] of each token; NaN where it was not sampled.
        top: for each token at most `MOST_LISTED` of the engine's likeliest in its place: text, p
            and q.
        reward, advantage: the completion's.
        discrepancy: mean |p - q| over its sampled tokens, where the tokens are not known.
    """

    run: str | None = None
    step: int | None = None
    source: str | None = None
    prompt: str = ""
    answer: str = ""
    found: str = ""
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
    """Return what `completions.js` shows, in few bytes: 2,000 completions with short prompts stay
    below 5 MB.

    Tokens are numbers into one list of words, probabilities have five decimals, long completions
    are cut, and long prompts in their middle; both say by how much.

    Args:
        completions: in any order. If they are too many, each is cut to as many tokens as fit, but
            not below 100, or without tokens to 17 times as many characters; then every k-th is
            kept, so that all steps stay. What is cut or left out is counted.
        most_tokens: on the page.

    Returns:
        Values that JSON can hold: `words`; `rows`, the largest mean |p - q| first; `left_out`;
        `unit`, by which probabilities are multiplied; and `full_color`, the |p - q| from which on a
        token has the full color.
    """
    sizes = np.array(
        [len(each.tokens or ()) or len(each.text) // _BYTES for each in completions], np.int64
    )
    if any(each.top is not None for each in completions):
        most_tokens //= 1 + MOST_LISTED  # a listed token takes what a token does
    counts = range(_LEAST_SHOWN, _MOST_SHOWN + 1, 50)
    tokens = {n: int((np.minimum(sizes, n) + _OVERHEAD).sum()) for n in counts}
    longest = max((n for n in counts if tokens[n] <= most_tokens), default=_LEAST_SHOWN)
    kept = completions[:: max(1, math.ceil(tokens[longest] / most_tokens))]
    words: dict[str, int] = {}
    rows = sorted(
        (_row(each, words, longest) for each in kept), key=lambda row: -(row["discrepancy"] or 0)
    )
    pairs = [pair for row in rows if "p" in row for pair in zip(row["p"], row["q"], strict=True)]
    full = np.quantile([abs(p - q) for p, q in pairs if p is not None] or [0], _FULL_COLOR)
    shown = {
        "words": list(words),
        "rows": rows,
        "left_out": len(completions) - len(kept),
        "control": CONTROL,
    }
    return shown | {"unit": _UNIT, "full_color": max(1.0, float(full)) / _UNIT}


def _row(each: Completion, words: dict[str, int], longest: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run": each.run,
        "step": each.step,
        "source": each.source,
        "prompt": _without_middle(each.prompt),
        "title": title_of(each.prompt),
        "reward": _finite(each.reward),
        "advantage": _finite(each.advantage),
        "answer": each.answer,
        "found": each.found,
    }
    if each.tokens is None:
        text = each.text[: longest * _BYTES]
        row |= {"discrepancy": _finite(each.discrepancy), "text": text, "length": len(each.text)}
        return row | {"more": len(each.text) - len(text)}
    p = np.asarray(each.train_probs, float)
    q = np.asarray(each.rollout_probs, float)
    sampled = np.isfinite(p) & np.isfinite(q)
    mean = float(np.abs(p - q)[sampled].mean()) if sampled.any() else None
    shown = slice(0, longest)
    row |= {
        "discrepancy": _finite(mean),
        "length": len(each.tokens),
        "more": max(0, len(each.tokens) - longest),
        "tokens": [words.setdefault(word, len(words)) for word in each.tokens[shown]],
        "p": _whole(p[shown], sampled[shown]),
        "q": _whole(q[shown], sampled[shown]),
    }
    if each.top is not None:
        row["top"] = [
            [
                (words.setdefault(word, len(words)), round(_UNIT * p), round(_UNIT * q))
                for word, p, q in state
            ]
            for state in each.top[shown]
        ]
    return row


def _without_middle(prompt: str) -> str:
    """A prompt with what it begins with and, as the question may come last, what it ends with."""
    cut = len(prompt) - _LONGEST_PROMPT
    half = _LONGEST_PROMPT // 2
    return (
        prompt if cut <= 0 else f"{prompt[:half]}\n[... {cut:,} characters ...]\n{prompt[-half:]}"
    )


def _whole(values: np.ndarray, known: np.ndarray) -> list[int | None]:
    return [
        round(_UNIT * v) if k else None
        for v, k in zip(values.tolist(), known.tolist(), strict=True)
    ]


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
