"""The results of one or several pairs of engines: a table for the terminal, JSON, PNGs and one HTML page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.lab.mismatch.analysis import Analysis, Measured
from dcmdp_jax.lab.mismatch.over_training import OverTraining
from dcmdp_jax.lab.mismatch.statistics import means_by_completion
from dcmdp_jax.number_format import number, percent
from dcmdp_jax.observe.completions import Completion, completions_data
from dcmdp_jax.observe.html_page import inline_svg, render_page

JSON_FILE, PAGE_FILE, PLOTS_DIRECTORY = "probe.json", "probe.html", "plots"
LEFT_OUT = "left out"
"""Label, in a pair's source, of what a recording holds and was not read."""
_EPS = ("mean", "p50", "p95")
_DPI = 110
COMPLETIONS_FILE = "completions.json"
"""The completions of each pair with the largest mean |p - q|, as `observe.completions` has them for a page."""
_MOST_COMPLETIONS = 500


def write(title: str, measured: Sequence[Measured], analyses: Sequence[Analysis], out_dir: Path) -> Path:
    """Write `out_dir`/probe.json, probe.html, completions.json and plots/*.png; existing ones are replaced.

    Args:
        title: of the page.
        measured, analyses: of each pair, in order.
        out_dir: made if it is not there.

    Returns:
        The path of the page, which embeds its figures, runs no script and makes no request.
    """
    # The plotting library takes most of a second to import.
    from dcmdp_jax.lab.mismatch.figures import figures_of

    plots = out_dir / PLOTS_DIRECTORY
    plots.mkdir(parents=True, exist_ok=True)
    images = []
    for one, analysis in zip(measured, analyses, strict=True):
        drawn = []
        for stem, (caption, draw) in figures_of(analysis).items():
            figure = draw(one.pairs, analysis)
            figure.savefig(plots / f"{_slug(analysis.name)}-{stem}.png", dpi=_DPI)
            drawn.append((caption, inline_svg(figure)))
        images.append(drawn)
    record = {"title": title, "pairs": [analysis.to_json() for analysis in analyses]}
    atomic_write(out_dir / JSON_FILE, json.dumps(record, indent=1, allow_nan=False) + "\n")
    shown = completions_data([each for one in measured for each in _completions(one)])
    atomic_write(out_dir / COMPLETIONS_FILE, json.dumps(shown, allow_nan=False) + "\n")
    page = out_dir / PAGE_FILE
    parts = list(zip(analyses, images, strict=True))
    atomic_write(page, render_page("mismatch.html", title=title, parts=parts, color=_color))
    return page


def _completions(one: Measured) -> Iterator[Completion]:
    pairs, text = one.pairs, one.text
    for row in np.argsort(-means_by_completion(pairs), kind="stable")[:_MOST_COMPLETIONS]:
        span = slice(int(pairs.starts[row]), int(pairs.starts[row] + pairs.lengths[row]))
        words = [f" {token}" if text is None else text(token) for token in pairs.token_ids[span].tolist()]
        p, q = (np.exp(each[span].astype(np.float64)) for each in (pairs.train_logprobs, pairs.rollout_logprobs))
        yield Completion(run=one.name, tokens=words, train_probs=p, rollout_probs=q)


def table(analyses: Sequence[Analysis]) -> str:
    """A table of the pairs, one column each, for a terminal."""
    rows = [
        ("", [analysis.name for analysis in analyses]),
        ("tokens", [f"{analysis.statistics.tokens:,}" for analysis in analyses]),
        ("completions", [f"{analysis.statistics.completions:,}" for analysis in analyses]),
    ]
    fields = {
        "mean |dp|": "mean", "p50": "p50", "p99": "p99", "max": "max", "k1, nats": "k1", "k3, nats": "k3",
        "Pearson": "pearson",
    }  # fmt: skip
    rows += [(label, [number(getattr(a.statistics, name), ".3g") for a in analyses]) for label, name in fields.items()]
    rows += [
        (
            "|eps|: mean, p50, p95",
            [", ".join(number(getattr(a.statistics, f"displacement_abs_{x}"), ".2g") for x in _EPS) for a in analyses],
        ),
        ("effective sample size", [percent(a.statistics.effective_sample_size) for a in analyses]),
        ("noise floor", [number(max(a.floors.values(), default=math.nan), ".3g") for a in analyses]),
        ("recommended c", [number(a.recommendation.tolerance, ".3g") for a in analyses]),
        ("completions over c", [percent(a.statistics.completions_over) for a in analyses]),
        ("first, last quarter", [f"{number(a.growth.first, '.3g')}, {number(a.growth.last, '.3g')}" for a in analyses]),
    ]
    widths = [max(len(row[1][column]) for row in rows) for column in range(len(analyses))]
    lines = [
        f"{label:<22}" + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for label, cells in rows
    ]
    for analysis in analyses:
        lines.append("")
        if LEFT_OUT in analysis.source:
            lines.append(f"{LEFT_OUT}: {analysis.source[LEFT_OUT]}")
        for place, finding in enumerate(analysis.findings):
            lines.append(f"{analysis.name}: {'also ' if place else ''}{finding.title}")
            lines += [f"  {line}" for line in (*finding.evidence, f"-> {finding.remedy}")]
        lines.append(f"  {analysis.recommendation.reasoning}")
        if analysis.over_training is not None:
            lines += ["", *_over_training(analysis.over_training)]
    return "\n".join(lines)


def _over_training(over: OverTraining) -> list[str]:
    """The first, the last and the largest step, the ranks, the sources, what stands out, and the alarms."""
    means = {step.step: step.statistics.mean for step in over.steps}
    largest = max(means, key=means.get)
    first, last = over.steps[0].step, over.steps[-1].step
    lines = [
        f"over {len(means)} steps: mean |dp| {means[first]:.3g} in step {first}, {means[last]:.3g} in step {last}, at "
        f"most {means[largest]:.3g} in step {largest}"
    ]
    for heading, parts in (("by rank", over.ranks), ("by source", over.sources)):
        if parts:
            lines.append(f"{heading}: {', '.join(f'{part.name} {part.mean:.3g}' for part in parts)}")
    lines += [f"  {note}" for note in over.notes]
    c = f"c = {over.tolerance:.3g}, {over.tolerance_from}" if math.isfinite(over.tolerance) else "no c"
    lines.append(f"alarms over the steps ({c}): {'none' if not over.alarms else ''}".rstrip())
    return lines + [f"  {alarm.name}: {alarm.text}" for alarm in over.alarms]


def _color(train: float, rollout: float, full: float) -> str:
    """Orange where the training stack finds the token likelier, blue where the engine does; full from `full` on."""
    strength = min(abs(train - rollout) / full, 1.0) if full > 0 else 0.0
    return f"rgba({'213,94,0' if train > rollout else '0,114,178'},{strength:.2f})"


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=_]+", "-", name).strip("-")
