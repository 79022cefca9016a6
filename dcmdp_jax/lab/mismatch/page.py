"""The results of one or several pairs of engines: a table for the terminal, JSON, figures and one
HTML page.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.lab.mismatch import evidence, over_training
from dcmdp_jax.lab.mismatch.analysis import Analysis, Measured, StateMeasure
from dcmdp_jax.lab.mismatch.pairs import TokenPairs, means_by_completion
from dcmdp_jax.number_format import number, percent, text_table
from dcmdp_jax.observe import page_kit
from dcmdp_jax.observe.page_kit import COLORS, INK, make_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JSON_FILE = "probe.json"
PAGE_FILE = "probe.html"
PLOTS_DIRECTORY = "plots"
LEFT_OUT = "left out"
"""Label, in a pair's source, of what a recording holds and was not read."""
_MOST_COMPLETIONS = 500
"""Of each pair, those with the largest mean |p - q|."""
_POINTS = 20_000
_LEAST_DRAWN = 1e-8


def write(
    title: str, measured: Sequence[Measured], analyses: Sequence[Analysis], out_dir: Path
) -> Path:
    """Write `out_dir`/probe.json, probe.html and plots/*.png; existing ones are replaced.

    Args:
        title: heading of the page.
        measured, analyses: the pairs and their results, in one order.
        out_dir: made if it is not there.

    Returns:
        The path of the page, which embeds its figures and completions and makes no request.
    """
    parts = []
    for one, analysis in zip(measured, analyses, strict=True):
        slug = re.sub(r"[^A-Za-z0-9.=_]+", "-", analysis.name).strip("-")
        drawn = (
            (f"{slug}-{stem}", said, draw(one.pairs, analysis))
            for stem, (said, draw) in _FIGURES.items()
        )
        parts.append((analysis, page_kit.page_figures(drawn, out_dir / PLOTS_DIRECTORY)))
    write_json(title, analyses, out_dir, finished=True)
    completions = page_kit.completions_data(
        [each for one in measured for each in _completions(one)]
    )
    given = {"title": title, "parts": parts, "completions": completions}
    atomic_write(
        out_dir / PAGE_FILE,
        page_kit.render_page("mismatch.html", scripts=["completions.js"], **given),
    )
    return out_dir / PAGE_FILE


def write_json(title: str, analyses: Sequence[Analysis], out_dir: Path, *, finished: bool) -> None:
    """Write `out_dir`/probe.json alone; not `finished` if more is being measured."""
    out_dir.mkdir(parents=True, exist_ok=True)
    record = {
        "title": title,
        "finished": finished,
        "pairs": [analysis.to_json() for analysis in analyses],
    }
    atomic_write(out_dir / JSON_FILE, json.dumps(record, indent=1, allow_nan=False) + "\n")


def _completions(one: Measured) -> Iterator[page_kit.Completion]:
    pairs = one.pairs
    text = one.text
    for row in np.argsort(-means_by_completion(pairs), kind="stable")[:_MOST_COMPLETIONS]:
        span = slice(int(pairs.starts[row]), int(pairs.starts[row] + pairs.lengths[row]))
        p, q = (
            np.exp(each[span].astype(np.float64))
            for each in (pairs.train_logprobs, pairs.rollout_logprobs)
        )
        words = [
            f" {token}" if text is None else text(token) for token in pairs.token_ids[span].tolist()
        ]
        yield page_kit.Completion(run=one.name, tokens=words, train_probs=p, rollout_probs=q)


def table(analyses: Sequence[Analysis]) -> str:
    """A table of the pairs, one column each, for a terminal."""
    columns = [["", *_LABELS.split("; ")], *map(_column, analyses)]
    lines = text_table(list(zip(*columns, strict=True)))
    for analysis in analyses:
        lines.append("")
        if LEFT_OUT in analysis.source:
            lines.append(f"{LEFT_OUT}: {analysis.source[LEFT_OUT]}")
        for place, finding in enumerate(analysis.findings):
            lines.append(f"{analysis.name}: {'also ' if place else ''}{finding.title}")
            lines += [f"  {line}" for line in (*finding.evidence, f"-> {finding.remedy}")]
        lines.append(f"  {analysis.recommendation.reasoning}")
        if legs := analysis.evidence.legs:
            said = (f"{leg.name} {leg.mean:.3g} ({leg.share:.0%} of the gap)" for leg in legs)
            lines.append(f"  mean |dp| of its legs: {', '.join(said)}")
        lines += _first_operator(analysis)
        lines += state_lines(analysis.states)
        if analysis.over_training is not None:
            lines += ["", *_over_training(analysis.over_training)]
    return "\n".join(lines)


def _first_operator(analysis: Analysis) -> list[str]:
    """A line on the first operator that differs; none where operators were not compared."""
    if not (operators := analysis.evidence.operators):
        return []
    half = float(np.median([each.relative for each in operators]))
    stand_out = [
        f"the first to stand out: {each}, {each.relative:.2g}"
        for each in evidence.outliers(operators)
    ]
    said = (stand_out or ["none stands out"])[0]
    return [
        f"  {len(operators)} operators on the same input, half within {half:.2g} of their size; "
        f"{said}"
    ]


def state_lines(states: Sequence[StateMeasure]) -> list[str]:
    """A table for a terminal; no line without states."""
    if not states:
        return []
    rows = [[title, *(number(x, ".4g") for x in values)] for title, *values in states]
    return text_table(
        [["  whole states", "exact", "at most more", "sampled tokens say", "+-"], *rows]
    )


_LABELS = (
    "tokens; completions; mean |dp|; p50; p99; max; k1, nats; k3, nats; Pearson; |eps|: "
    "mean, p50, p95"
)
_LABELS += "; effective sample size; noise floor; recommended c; completions over c"


def _column(analysis: Analysis) -> list[str]:
    found = analysis.statistics
    numbers = (found.mean, found.p50, found.p99, found.max, found.k1, found.k3, found.pearson)
    eps = (found.displacement_abs_mean, found.displacement_abs_p50, found.displacement_abs_p95)
    return [
        analysis.name,
        f"{found.tokens:,}",
        f"{found.completions:,}",
        *(number(value, ".3g") for value in numbers),
        ", ".join(number(value, ".2g") for value in eps),
        percent(found.effective_sample_size),
        number(max(analysis.floors.values(), default=math.nan), ".3g"),
        number(analysis.recommendation.tolerance, ".3g"),
        percent(found.completions_over),
    ]


def _over_training(over: over_training.OverTraining) -> list[str]:
    """The first, the last and the largest step, the ranks, the sources, what stands out, and the
    alarms.
    """
    means = {step.step: step.statistics.mean for step in over.steps}
    largest = max(means, key=means.get)
    first, last = over.steps[0].step, over.steps[-1].step
    lines = [
        f"over {len(means)} steps: mean |dp| {means[first]:.3g} in step {first}, {means[last]:.3g} "
        f"in step {last}, at most {means[largest]:.3g} in step {largest}"
    ]
    for heading, parts in (("by rank", over.ranks), ("by source", over.sources)):
        if parts:
            lines.append(
                f"{heading}: {', '.join(f'{part.name} {part.mean:.3g}' for part in parts)}"
            )
    lines += [f"  {note}" for note in over.notes]
    c = (
        f"c = {over.tolerance:.3g}, {over.tolerance_from}"
        if math.isfinite(over.tolerance)
        else "no c"
    )
    lines.append(f"alarms over the steps ({c}): {'none' if not over.alarms else ''}".rstrip())
    return lines + [f"  {alarm.name}: {alarm.text}" for alarm in over.alarms]


def _draw_steps(pairs: TokenPairs, analysis: Analysis) -> "Figure | None":
    """Draw mean and 99% quantile of |p - q| of each step, and c; None without several steps."""
    from matplotlib.ticker import MaxNLocator

    over = analysis.over_training
    if over is None or len(over.steps) < 2:
        return None
    figure, (axes,) = make_figure(7.2, 4.2)
    for name, color in (("mean", COLORS[0]), ("p99", COLORS[1])):
        values = [getattr(step.statistics, name) for step in over.steps]
        axes.plot(
            [step.step for step in over.steps], values, "o-", color=color, markersize=3, label=name
        )
    if over.tolerance > 0:
        axes.axhline(
            over.tolerance,
            color=INK,
            linestyle="--",
            linewidth=1.2,
            label=f"c {over.tolerance:.2g}",
        )
    style_axes(axes, x="step", y="|p - q|", legend=True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def _draw_scatter(pairs: TokenPairs, analysis: Analysis) -> "Figure":
    """Draw p against q of every token, at most 20,000 of them, evenly chosen."""
    every = -(-len(pairs.token_ids) // _POINTS)
    p, q = (
        np.exp(x[::every].astype(np.float64))
        for x in (pairs.train_logprobs, pairs.rollout_logprobs)
    )
    figure, (axes,) = make_figure(5.2, 4.2)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8)
    axes.scatter(q, p, s=5, alpha=0.35, color=COLORS[0], linewidths=0, rasterized=True)
    style_axes(axes, x="probability under the engine, q", y="under the training stack, p")
    return figure


def _draw_distribution(pairs: TokenPairs, analysis: Analysis) -> "Figure":
    """Draw the share of tokens above each |p - q|, with the mean, the noise floors and the
    recommended c.
    """
    delta = np.sort(pairs.discrepancy)
    positive = delta[delta > 0]
    figure, (axes,) = make_figure(7.2, 4.2)
    if len(positive):
        above = np.arange(len(positive), 0, -1) / len(delta)
        keep = np.unique(np.linspace(0, len(positive) - 1, 2000).astype(int))
        axes.loglog(positive[keep], above[keep], color=COLORS[0])
    lines = {
        "mean": (analysis.statistics.mean, COLORS[1], "-"),
        "c": (analysis.statistics.tolerance, INK, "--"),
    }
    lines |= {
        f"noise floor, {name}": (value, COLORS[2], ":") for name, value in analysis.floors.items()
    }
    for label, (value, color, style) in lines.items():
        if value > 0:
            axes.axvline(
                value, color=color, linestyle=style, linewidth=1.4, label=f"{label} {value:.2g}"
            )
    style_axes(axes, x="|p - q|", y="share of tokens above", legend=True)
    return figure


def _draw_operators(pairs: TokenPairs, analysis: Analysis) -> "Figure | None":
    """Draw the relative difference of each operator by layer; None where it was not measured."""
    found = analysis.evidence.operators
    if not found:
        return None
    layers = 1 + max(each.layer for each in found if each.layer is not None)
    figure, (axes,) = make_figure(7.2, 4.2)
    for name, color in zip(
        dict.fromkeys(each.operator for each in found), itertools.cycle(COLORS), strict=False
    ):
        own = [each for each in found if each.operator == name]
        # Before the first layer, or after the last.
        at = [
            (-1 if name == "embedding" else layers) if each.layer is None else each.layer
            for each in own
        ]
        axes.plot(
            at,
            [max(each.relative, _LEAST_DRAWN) for each in own],
            "o-",
            color=color,
            markersize=3,
            label=name,
        )
    axes.set_yscale("log")
    style_axes(axes, x="layer", y="relative difference", legend=True)
    return figure


_FIGURES: "dict[str, tuple[str, Callable[[TokenPairs, Analysis], Figure | None]]]" = {
    "steps": ("|p - q| over training.", _draw_steps),
    "scatter": ("Each token's probability under both.", _draw_scatter),
    "distribution": (
        "Share of tokens above each |p - q|; mean, noise floors and c.",
        _draw_distribution,
    ),
    "operators": (
        "Each operator of the engine against the training stack's, on the same input.",
        _draw_operators,
    ),
}
"""File stem to (caption, function)."""
