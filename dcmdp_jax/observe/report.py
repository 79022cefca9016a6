"""The report of one or several runs: plots as PNG, and one self-contained HTML page with the same figures."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import flatten
from dcmdp_jax.inputs import read_json_object
from dcmdp_jax.number_format import duration, number, percent
from dcmdp_jax.observe import jsonl
from dcmdp_jax.observe.jsonl import CONFIG_FILE, HELD_OUT_FILE, PLOTS_DIRECTORY, REPORT_FILE, SAMPLES_FILE, STARTS_FILE
from dcmdp_jax.observe.metric_names import METRICS, metric_of
from dcmdp_jax.observe.metrics_io import Series, read_metrics, without_placeholder
from dcmdp_jax.observe.page_kit import drawable, inline_svg, render_page, title_of
from dcmdp_jax.observe.plots import FIGURES
from dcmdp_jax.observe.run_summary import Summary, legs, overlap, summarize, warnings, what_the_multiplier_did

_DPI = 130


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """Contents of a run directory.

    Attributes:
        label: name in the report, unique among the runs shown together.
        series: its metrics.
        config: dotted key to value; empty if the run saved none.
        samples: sample completions, in the order written.
        held_out: completions of held-out problems, in the order written.
        starts: sentences about command, code, machine and date.
    """

    label: str
    series: Series
    config: dict[str, Any]
    samples: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    starts: list[str]


def read_run(run_dir: str | Path, label: str | None = None) -> RecordedRun:
    """Read a run directory; skip a last line torn by a kill.

    Args:
        run_dir: the directory.
        label: the run's name; by default the directory's.

    Raises:
        ValueError: if it is not a run directory, has no metrics yet, or has a file that cannot be parsed.
        OSError: if a file can't be read.
    """
    run_dir = Path(run_dir)
    series = read_metrics(run_dir)
    path = run_dir / CONFIG_FILE
    config = flatten(read_json_object(path)) if path.exists() else {}
    series = without_placeholder(series, config.get("algorithm.tolerance_steps", 0))
    name, samples = label or run_dir.resolve().name, jsonl.read(run_dir / SAMPLES_FILE)
    return RecordedRun(name, series, config, samples, jsonl.read(run_dir / HELD_OUT_FILE), _describe_starts(run_dir))


def write_report(run_dirs: Sequence[str | Path], out_dir: str | Path) -> Path:
    """Write `out_dir`/plots/*.png and `out_dir`/report.html; several runs overlay and are compared in a table.

    Args:
        run_dirs: one or more run directories, in display order.
        out_dir: created if absent; an existing report in it is replaced.

    Returns:
        Path of report.html. The page embeds its figures, runs no script and makes no request.

    Raises:
        ValueError: if no directory is given, one is given twice, or one is not a readable run (see `read_run`).
        OSError: if `out_dir` is not writable.
    """
    if not run_dirs:
        raise UserError("no run directory given; name at least one")
    paths = [Path(run_dir).resolve() for run_dir in run_dirs]
    runs = [read_run(path, label) for path, label in zip(paths, labels_of(paths), strict=True)]
    plots = Path(out_dir) / PLOTS_DIRECTORY
    plots.mkdir(parents=True, exist_ok=True)
    figures = []
    for stem, caption, figure in _drawn(runs):
        figure.savefig(plots / f"{stem}.png", dpi=_DPI)
        figures.append((caption, inline_svg(figure)))
    report = Path(out_dir) / REPORT_FILE
    atomic_write(report, render_page("report.html", figures=figures, **report_content(runs)))
    return report


def first_sentence(run_dir: str | Path) -> str:
    """Return the sentence with which a run's report begins.

    Raises:
        ValueError, OSError: see `read_run`.
    """
    run = read_run(run_dir)
    return verdict(run, summarize(run.series))


def run_figures(runs: Sequence[RecordedRun]) -> list[tuple[str, str]]:
    """Caption and inline SVG of each figure that the runs have metrics for."""
    return [(caption, inline_svg(figure)) for _, caption, figure in _drawn(runs)]


def _drawn(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, str, Figure]]:
    for stem, (caption, draw) in FIGURES.items():
        # A dollar in a directory's name is no mathematics.
        if (figure := draw({drawable(run.label).replace("$", r"\$"): run.series for run in runs})) is not None:
            yield stem, caption, figure


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes that are unique.

    Raises:
        UserError: if one is there twice.
    """
    if twice := [path for place, path in enumerate(paths) if path in paths[:place]]:
        raise UserError(f"run directory {twice[0]} is given twice")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


_SAMPLES_PER_STEP = 6


def report_content(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Values of the template `report.html`, all but its images.

    Args:
        runs: one or more; several are compared.
    """
    summaries = [summarize(run.series) for run in runs]
    several = len(runs) > 1
    return {
        "title": " / ".join(run.label for run in runs),
        "labels": [run.label for run in runs],
        "steps": max(summary.steps for summary in summaries),
        "verdicts": [
            f"{run.label}: {verdict(run, summary)}" if several else verdict(run, summary)
            for run, summary in zip(runs, summaries, strict=True)
        ],
        "provenance": [fact for run in runs for fact in run.starts] if not several else [],
        "cards": _cards(summaries[0]) + _run_cards(runs[0]),
        "comparison": _comparison(runs, summaries),
        "problems": [f"{run.label}: {text}" if several else text for run in runs for text in warnings(run.series)],
        "held_out": _held_out(runs),
        "samples": _samples(runs),
        "settings": _settings(runs),
        "metrics": _metrics(runs),
    }


def _cards(summary: Summary) -> list[tuple[str, str, str]]:
    """(name, value, more) of the headline numbers that the run has."""
    cards = []
    if not math.isnan(summary.first_reward):
        window = f"mean of the first and last {summary.window} steps" if summary.window > 1 else "first and last step"
        cards.append(("Training reward", f"{summary.first_reward:.3f} → {summary.last_reward:.3f}", window))
    for score in summary.scores:
        gained = f"{score.gained} from step {score.first_step} to {score.last_step}"
        more = f"{gained}; best {score.form(score.best)} at step {score.best_step}"
        cards.append((f"Held-out {score.name}", f"{score.form(score.first)} → {score.form(score.last)}", more))
    if not math.isnan(summary.mean_discrepancy):
        over = f"budget c = {number(summary.tolerance)}, exceeded in {percent(summary.share_over_tolerance)} of steps"
        more = "no budget c yet" if math.isnan(summary.tolerance) else over
        cards.append(("Mean discrepancy", number(summary.mean_discrepancy), more))
    if not math.isnan(summary.multiplier_low):
        span = f"{number(summary.multiplier_low)} to {number(summary.multiplier_high)}"
        moves = f"rose {summary.multiplier_rises} times, fell {summary.multiplier_falls} times"
        cards.append(("Lambda, lowest and highest", span, moves))
    if not math.isnan(summary.tokens_per_second):
        more = f"median step; {duration(summary.seconds)} in training steps"
        cards.append(("Throughput", f"{number(summary.tokens_per_second, ',.0f')} tokens/s", more))
    return cards


def _run_cards(run: RecordedRun) -> list[tuple[str, str, str]]:
    cards = ("Overlap won", overlap(run.series)), ("Where the gap is", legs(run.series))
    return [(name, *found) for name, found in cards if found]


def _comparison(runs: Sequence[RecordedRun], summaries: Sequence[Summary]) -> list[list[str]]:
    """Rows of the headline numbers as on the cards, a column for each run."""
    columns = [
        {name: f"{value} ({more})" for name, value, more in _cards(summary) + _run_cards(run)}
        for run, summary in zip(runs, summaries, strict=True)
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    steps = ["Training steps", *[str(summary.steps) for summary in summaries]]
    return [steps, *([name, *[column.get(name, "-") for column in columns]] for name in names)]


def _held_out(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str], list[dict[str, Any]]]]:
    """(task, headings, problems) of what was written before and after; a problem has a prompt and both completions."""
    parts = []
    for run in runs:
        for task in dict.fromkeys(record["task"] for record in run.held_out):
            found = {(record["step"], record["place"]): record for record in run.held_out if record["task"] == task}
            steps = sorted({step for step, _ in found})
            ends = list(dict.fromkeys((steps[0], steps[-1])))
            rows = [{"prompt": record["prompt"], "answer": record["answer"],
                     "written": [found.get((end, place), {}) for end in ends]}
                    for (step, place), record in found.items() if step == ends[0]]  # fmt: skip
            name = task if len(runs) == 1 else f"{run.label}, {task}"
            parts.append((name, [f"after step {step}" if step else "before training" for step in ends], rows))
    return parts


def _samples(runs: Sequence[RecordedRun]) -> list[tuple[str, list[dict[str, Any]]]]:
    """(heading, records) of the first and the last step with samples."""
    parts = []
    for run in runs:
        steps = sorted({record["step"] for record in run.samples if isinstance(record.get("step"), int)})
        for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
            heading = f"step {step}" if len(runs) == 1 else f"{run.label}, step {step}"
            chosen = [record for record in run.samples if record.get("step") == step][:_SAMPLES_PER_STEP]
            parts.append((heading, [{**record, "title": title_of(str(record.get("prompt", "")))} for record in chosen]))
    return parts


def _settings(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Every setting, those that differ between runs first."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = [
        [key, *[json.dumps(run.config[key], ensure_ascii=False) if key in run.config else "-" for run in runs]]
        for key in keys
    ]
    rows.sort(key=lambda row: len(set(row[1:])) == 1)
    return {"rows": rows, "differs": [len(set(row[1:])) > 1 for row in rows]}


def _metrics(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Every metric, with its unit and meaning."""
    order = {name: place for place, name in enumerate(METRICS)}
    names = sorted({name for run in runs for name in run.series}, key=lambda name: (order.get(name, len(order)), name))
    rows = []
    for name in names:
        metric = metric_of(name)
        if len(runs) == 1:
            values = runs[0].series[name][1]
            finite = values[np.isfinite(values)]
            low, high = (finite.min(), finite.max()) if len(finite) else (math.nan, math.nan)
            chosen = [values[0], values[-1], low, high]
        else:
            chosen = [run.series[name][1][-1] if name in run.series else math.nan for run in runs]
        show, unit = (percent, "share") if metric.unit == "fraction" else (number, metric.unit)
        rows.append([name, *(show(float(value)) for value in chosen), unit, metric.description])
    columns = ["first", "last", "lowest", "highest"] if len(runs) == 1 else [f"last, {run.label}" for run in runs]
    return {"header": ["metric", *columns, "unit", "meaning"], "rows": rows}


def _bounds(run: RecordedRun, summary: Summary, step: int) -> str:
    """The 95% interval of the first held-out score at a step, where it was recorded."""
    score, found = summary.scores[0], []
    task = score.name.rpartition("/")[0]
    for bound in ("low", "high"):
        steps, values = run.series.get(f"eval_interval/{task}/{bound}", (np.zeros(0), np.zeros(0)))
        found += values[steps == step].tolist()
    return f" (95% interval {score.form(found[0])} to {score.form(found[1])})" if len(found) == 2 else ""


def verdict(run: RecordedRun, summary: Summary) -> str:
    """One sentence that says what happened in a run."""
    said = [f"{summary.steps} training steps"]
    if model := run.config.get("model.path"):
        engine = f"the engine {run.config.get('rollout.engine')} in {run.config.get('rollout.precision')}"
        said[0] += f" of {model} against {engine}"
    if summary.scores:
        held_out = summary.scores[0]
        first, last = (
            f"{held_out.form(value)}{_bounds(run, summary, step)}"
            for value, step in ((held_out.first, held_out.first_step), (held_out.last, held_out.last_step))
        )
        said.append(f"held-out {held_out.name} went from {first} to {last}")
    elif not math.isnan(summary.first_reward):
        said.append(f"the training reward went from {number(summary.first_reward)} to {number(summary.last_reward)}")
    if story := what_the_multiplier_did(run.series, begins_at_cap=_begins_at_cap(run)):
        said.append(story)
    return f"{said[0]}: {'; '.join(said[1:])}." if said[1:] else f"{said[0]}."


def _begins_at_cap(run: RecordedRun) -> bool:
    """Whether lambda moves by dual ascent and began at its upper end."""
    eta, first, cap = (run.config.get(f"algorithm.{n}") for n in ("dual_learning_rate", "multiplier", "multiplier_max"))
    recorded = run.series.get("dual/multiplier")
    return bool(eta and recorded and first == cap and recorded[1][0] == np.float32(first))


def _describe_starts(run_dir: Path) -> list[str]:
    """Sentences about a run's starts for its report; none for a run directory that recorded none."""
    lines: list[dict[str, Any]] = jsonl.readable(run_dir / STARTS_FILE)
    if not lines:
        return []
    first, last = lines[0], lines[-1]
    code = f"dcmdp_jax {last.get('version')}" + (f", commit {last['commit']}" if last.get("commit") else "")
    said = [f"{first.get('time')}", f"{last.get('command')}", code, f"{last.get('machine')}, jax {last.get('jax')}"]
    if len(lines) > 1:
        said.append(f"resumed {len(lines) - 1} times, last at step {last.get('step')}")
    return said
