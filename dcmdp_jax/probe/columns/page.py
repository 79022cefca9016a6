"""The results of pairs of engines: a table for the terminal, JSON, figures and one HTML page."""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.number_format import number, percent, text_table
from dcmdp_jax.observe import page_kit
from dcmdp_jax.observe.page_kit import COLORS, INK, make_figure, style_axes
from dcmdp_jax.probe.columns import evidence, over_training
from dcmdp_jax.probe.columns.analysis import Analysis, Measured, StateMeasure
from dcmdp_jax.probe.columns.pairs import TokenPairs, means_by_completion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JSON_FILE = "probe.json"
PAGE_FILE = "probe.html"
PLOTS_DIRECTORY = "plots"
LEFT_OUT = "left out"
"""Label, in a pair's source, of what a recording holds and was not read."""
_MOST_COMPLETIONS = 500
"""Completions of each pair on the page, those with the largest mean |p - q|."""
_POINTS = 20_000
"""Tokens in the scatter plot; more are one stain."""
_LEAST_DRAWN = 1e-8
"""Smallest relative difference on the logarithmic axis."""


def write(
    title: str,
    measured: Sequence[Measured],
    analyses: Sequence[Analysis],
    out_dir: Path,
) -> Path:
    """Write `out_dir`/probe.json, probe.html and plots/*.png; existing ones are replaced.

    Args:
        title: heading of the page.
        measured, analyses: the pairs and their results, in one order.
        out_dir: made if it is not there.

    Returns:
        The path of the page, which embeds its figures and completions and makes no request.
    """
    sections = []
    completions = []
    for pair, analysis in zip(measured, analyses, strict=True):
        slug = re.sub(r"[^A-Za-z0-9.=_]+", "-", analysis.name).strip("-")
        figures = [
            (f"{slug}-{stem}", caption, draw(pair.pairs, analysis))
            for stem, (caption, draw) in _FIGURES.items()
        ]
        sections.append((analysis, page_kit.page_figures(figures, out_dir / PLOTS_DIRECTORY)))
        completions += _completions(pair)

    write_json(title, analyses, out_dir, finished=True)
    html = page_kit.render_page(
        "mismatch.html",
        scripts=["completions.js"],
        title=title,
        parts=sections,
        completions=page_kit.completions_data(completions),
    )
    atomic_write(out_dir / PAGE_FILE, html)
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


def _completions(measured: Measured) -> Iterator[page_kit.Completion]:
    pairs = measured.pairs
    decode = measured.text or " {}".format
    for row in np.argsort(-means_by_completion(pairs), kind="stable")[:_MOST_COMPLETIONS]:
        span = pairs.span(row)
        yield page_kit.Completion(
            run=measured.name,
            tokens=[decode(token) for token in pairs.token_ids[span].tolist()],
            train_probs=pairs.train_probs[span],
            rollout_probs=pairs.rollout_probs[span],
        )


def table(analyses: Sequence[Analysis]) -> str:
    """A table of the pairs, one column each, for a terminal."""
    columns = [_column(analysis) for analysis in analyses]
    lines = text_table(list(zip(("", *_LABELS), *columns, strict=True)))
    for analysis in analyses:
        lines.append("")
        if LEFT_OUT in analysis.source:
            lines.append(f"{LEFT_OUT}: {analysis.source[LEFT_OUT]}")
        also = ""
        for finding in analysis.findings:
            lines.append(f"{analysis.name}: {also}{finding.title}")
            lines += [f"  {line}" for line in (*finding.evidence, f"-> {finding.remedy}")]
            also = "also "
        lines.append(f"  {analysis.recommendation.reasoning}")
        legs = ", ".join(
            f"{leg.name} {leg.mean:.3g} ({percent(leg.share)})" for leg in analysis.evidence.legs
        )
        if legs:
            lines.append(f"  Mismatch by source, mean |p - q|: {legs}.")
        lines += _first_operator(analysis)
        lines += state_lines(analysis.states)
        if analysis.over_training is not None:
            lines += ["", *_over_training(analysis.over_training)]
    return "\n".join(lines)


def _first_operator(analysis: Analysis) -> list[str]:
    """A line on the first operator that differs; none where operators were not compared."""
    operators = analysis.evidence.operators
    if not operators:
        return []
    half = np.median([operator.relative for operator in operators])
    outliers = evidence.outliers(operators)
    first = "no outlier"
    if outliers:
        first = f"first outlier {outliers[0]}, {outliers[0].relative:.2g}"
    return [
        f"  {len(operators)} operators compared on the same input: median relative error "
        f"{half:.2g}, {first}."
    ]


def state_lines(states: Sequence[StateMeasure]) -> list[str]:
    """A table for a terminal; no line without states."""
    if not states:
        return []
    rows = [["  whole distributions", "over top-k", "at most more", "by sampled tokens", "+-"]]
    for state in states:
        values = (state.exact, state.bound, state.sampled, state.noise)
        rows.append([state.title, *(number(value, ".4g") for value in values)])
    return text_table(rows)


_LABELS = (
    "tokens",
    "completions",
    "mean |p - q|",
    "p50",
    "p99",
    "max",
    "k1, nats",
    "k3, nats",
    "Pearson",
    "|eps|: mean, p50, p95",
    "effective sample size",
    "noise floor",
    "recommended c",
    "completions over c",
)


def _column(analysis: Analysis) -> list[str]:
    """The values of `_LABELS`, below the pair's name."""
    statistics = analysis.statistics
    values = [
        number(getattr(statistics, name), ".3g")
        for name in ("mean", "p50", "p99", "max", "k1", "k3", "pearson")
    ]
    displacement = [
        number(getattr(statistics, f"displacement_abs_{name}"), ".2g")
        for name in ("mean", "p50", "p95")
    ]
    return [
        analysis.name,
        f"{statistics.tokens:,}",
        f"{statistics.completions:,}",
        *values,
        ", ".join(displacement),
        percent(statistics.effective_sample_size),
        number(max(analysis.floors.values(), default=math.nan), ".3g"),
        number(analysis.recommendation.tolerance, ".3g"),
        percent(statistics.completions_over),
    ]


def _over_training(over: over_training.OverTraining) -> list[str]:
    """The first, last and largest step, ranks, sources, what stands out, and the alarms."""
    means = {step.step: step.statistics.mean for step in over.steps}
    largest = max(means, key=means.get)
    first = over.steps[0].step
    last = over.steps[-1].step
    course = f"mean |p - q| {means[first]:.3g} in step {first}"
    if last != first:
        course = (
            f"over {len(means)} steps: {course}, "
            f"{means[last]:.3g} in step {last}, at most {means[largest]:.3g} in step {largest}"
        )
    lines = [course]
    for heading, slices in (("by rank", over.ranks), ("by source", over.sources)):
        if slices:
            values = ", ".join(f"{named.name} {named.mean:.3g}" for named in slices)
            lines.append(f"{heading}: {values}")
    lines += [f"  {note}" for note in over.notes]
    c = "no c"
    if math.isfinite(over.tolerance):
        c = f"their own c = {over.tolerance:.3g}, {over.tolerance_from}"
    heading = f"alerts over the steps ({c}):"
    if not over.alarms:
        heading += " none"
    lines.append(heading)
    lines += [f"  {alarm.name}: {alarm.text}" for alarm in over.alarms]

    if over.collapse:
        return lines + over.collapse.lines
    return [*lines, over.without_collapse]


def _draw_steps(pairs: TokenPairs, analysis: Analysis) -> "Figure | None":
    """Draw the reward, and mean and 99% quantile of |p - q|, by step; None without several."""
    from matplotlib.ticker import MaxNLocator

    over = analysis.over_training
    if over is None or len(over.steps) < 2:
        return None
    columns = 1 + over.has_rewards
    figure, panels = make_figure(5.4 * columns, 4.0, columns=columns)
    axes = panels[-1]
    steps = [step.step for step in over.steps]
    if over.has_rewards:
        rewards = [step.reward for step in over.steps]
        panels[0].plot(steps, rewards, "o-", color=COLORS[2], markersize=3)
        style_axes(panels[0], x="step", y="mean reward")
    for name, color in (("mean", COLORS[0]), ("p99", COLORS[1])):
        values = [getattr(step.statistics, name) for step in over.steps]
        axes.plot(steps, values, "o-", color=color, markersize=3, label=name)
    c = over.tolerance
    if c > 0:
        axes.axhline(c, color=INK, linestyle="--", linewidth=1.2, label=f"c {c:.2g}")
    style_axes(axes, x="step", y="|p - q|", legend=True)
    for panel in panels:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def _draw_scatter(pairs: TokenPairs, analysis: Analysis) -> "Figure":
    """Draw p against q of every token, at most 20,000 of them, evenly chosen."""
    every = -(-len(pairs.token_ids) // _POINTS)
    p = pairs.train_probs[::every]
    q = pairs.rollout_probs[::every]
    figure, (axes,) = make_figure(5.4, 4.0)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8)
    axes.scatter(q, p, s=5, alpha=0.35, color=COLORS[0], linewidths=0, rasterized=True)
    style_axes(axes, x="probability under the engine, q", y="under the training stack, p")
    return figure


def _draw_distribution(pairs: TokenPairs, analysis: Analysis) -> "Figure":
    """Draw the share of tokens above each |p - q|, the mean, the noise floors and c."""
    delta = np.sort(pairs.discrepancy)
    positive = delta[delta > 0]
    figure, (axes,) = make_figure(5.4, 4.0)
    if len(positive):
        above = np.arange(len(positive), 0, -1) / len(delta)
        drawn = np.unique(np.linspace(0, len(positive) - 1, 2000).astype(int))
        axes.loglog(positive[drawn], above[drawn], color=COLORS[0])

    def mark(label: str, value: float, color: str, style: str) -> None:
        if value > 0:
            text = f"{label} {value:.2g}"
            axes.axvline(value, color=color, linestyle=style, linewidth=1.4, label=text)

    mark("mean", analysis.statistics.mean, COLORS[1], "-")
    mark("c", analysis.statistics.tolerance, INK, "--")
    for name, floor in analysis.floors.items():
        mark(f"noise floor, {name}", floor, COLORS[2], ":")
    style_axes(axes, x="|p - q|", y="share of tokens above", legend=True)
    return figure


def _draw_operators(pairs: TokenPairs, analysis: Analysis) -> "Figure | None":
    """Draw the relative difference of each operator by layer; None where it was not measured."""
    operators = analysis.evidence.operators
    if not operators:
        return None
    layers = 1 + max(operator.layer for operator in operators if operator.layer is not None)
    figure, (axes,) = make_figure(5.4, 4.0)
    colors = itertools.cycle(COLORS)
    for name in dict.fromkeys(operator.operator for operator in operators):
        # Before the first layer, or after the last.
        outside = -1 if name == "embedding" else layers
        alike = [operator for operator in operators if operator.operator == name]
        numbers = [outside if operator.layer is None else operator.layer for operator in alike]
        values = [max(operator.relative, _LEAST_DRAWN) for operator in alike]
        axes.plot(numbers, values, "o-", color=next(colors), markersize=3, label=name)
    axes.set_yscale("log")
    style_axes(axes, x="layer", y="relative difference", legend=True)
    return figure


_FIGURES: "dict[str, tuple[str, Callable[[TokenPairs, Analysis], Figure | None]]]" = {
    "steps": ("Over training: |p - q|, and the reward where it was recorded.", _draw_steps),
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
