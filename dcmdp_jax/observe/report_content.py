"""The text and numbers that the report shows, as plain lists for its template."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dcmdp_jax.number_format import duration, number, percent
from dcmdp_jax.number_format import score as shown
from dcmdp_jax.observe.metric_names import METRICS, metric_of
from dcmdp_jax.observe.run_summary import Summary, overlap, summarize, warnings, what_the_multiplier_did

if TYPE_CHECKING:
    from dcmdp_jax.observe.report import RecordedRun

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
        "cards": _cards(summaries[0]) + _overlap_card(runs[0]),
        "comparison": _comparison(summaries),
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
        gained = f"{score.points_gained:+.1f} points from step {score.first_step} to {score.last_step}"
        more = f"{gained}; best {shown(score.best)} at step {score.best_step}"
        cards.append((f"Held-out {score.name}", f"{shown(score.first)} → {shown(score.last)}", more))
    if not math.isnan(summary.mean_discrepancy):
        over = f"budget c = {number(summary.tolerance)}, exceeded in {percent(summary.share_over_tolerance)} of steps"
        more = "no budget" if math.isnan(summary.tolerance) else over
        cards.append(("Mean discrepancy", number(summary.mean_discrepancy), more))
    if not math.isnan(summary.multiplier_low):
        span = f"{number(summary.multiplier_low)} to {number(summary.multiplier_high)}"
        moves = f"rose {summary.multiplier_rises} times, fell {summary.multiplier_falls} times"
        cards.append(("Lambda, lowest and highest", span, moves))
    if not math.isnan(summary.tokens_per_second):
        more = f"median step; {duration(summary.seconds)} in training steps"
        cards.append(("Throughput", f"{number(summary.tokens_per_second, ',.0f')} tokens/s", more))
    return cards


def _overlap_card(run: RecordedRun) -> list[tuple[str, str, str]]:
    found = overlap(run.series)
    return [("Overlap won", *found)] if found else []


def _comparison(summaries: Sequence[Summary]) -> list[list[str]]:
    """Rows of the headline numbers, a column for each run."""
    rows: list[tuple[str, Callable[[Summary], str]]] = [
        ("training steps", lambda summary: str(summary.steps)),
        ("reward, first steps", lambda summary: number(summary.first_reward)),
        ("reward, last steps", lambda summary: number(summary.last_reward)),
        ("mean discrepancy", lambda summary: number(summary.mean_discrepancy)),
        ("tolerance c", lambda summary: number(summary.tolerance)),
        ("steps over c", lambda summary: percent(summary.share_over_tolerance)),
        ("lambda, lowest", lambda summary: number(summary.multiplier_low)),
        ("lambda, highest", lambda summary: number(summary.multiplier_high)),
        ("lambda, rises / falls", lambda summary: f"{summary.multiplier_rises} / {summary.multiplier_falls}"),
        ("tokens/s, median step", lambda summary: number(round(summary.tokens_per_second, 1))),
        ("time in training steps", lambda summary: duration(summary.seconds)),
    ]
    cells: list[list[str]] = []
    for name in dict.fromkeys(score.name for summary in summaries for score in summary.scores):
        found = [next((score for score in summary.scores if score.name == name), None) for summary in summaries]
        for heading, show in (
            ("first", lambda score: shown(score.first)),
            ("last", lambda score: f"{shown(score.last)} ({score.points_gained:+.1f} points)"),
            ("best", lambda score: f"{shown(score.best)} (step {score.best_step})"),
        ):
            cells.append([f"held-out {name}, {heading}", *["-" if score is None else show(score) for score in found]])
    return cells + [[name, *[show(summary) for summary in summaries]] for name, show in rows]


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
            chosen = [record for record in run.samples if record.get("step") == step]
            parts.append((heading, chosen[:_SAMPLES_PER_STEP]))
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
            shown = [number(float(value)) for value in (values[0], values[-1], low, high)]
        else:
            shown = [number(float(run.series[name][1][-1])) if name in run.series else "-" for run in runs]
        rows.append([name, *shown, metric.unit, metric.description])
    columns = ["first", "last", "lowest", "highest"] if len(runs) == 1 else [f"last, {run.label}" for run in runs]
    return {"header": ["metric", *columns, "unit", "meaning"], "rows": rows}


def _bounds(run: RecordedRun, name: str, step: int) -> str:
    """The 95% interval of a held-out score at a step, where it was recorded."""
    task, found = name.rpartition("/")[0], []
    for bound in ("low", "high"):
        steps, values = run.series.get(f"eval_interval/{task}/{bound}", (np.zeros(0), np.zeros(0)))
        found += values[steps == step].tolist()
    return f" (95% interval {shown(found[0])} to {shown(found[1])})" if len(found) == 2 else ""


def verdict(run: RecordedRun, summary: Summary) -> str:
    """One sentence that says what happened in a run."""
    said = [f"{summary.steps} training steps"]
    if model := run.config.get("model.path"):
        engine = f"the engine {run.config.get('rollout.engine')} in {run.config.get('rollout.precision')}"
        said[0] += f" of {model} against {engine}"
    if summary.scores:
        held_out = summary.scores[0]
        first, last = (
            f"{shown(value)}{_bounds(run, held_out.name, step)}"
            for value, step in ((held_out.first, held_out.first_step), (held_out.last, held_out.last_step))
        )
        said.append(f"held-out {held_out.name} went from {first} to {last}")
    elif not math.isnan(summary.first_reward):
        said.append(f"the training reward went from {number(summary.first_reward)} to {number(summary.last_reward)}")
    if story := what_the_multiplier_did(run.series):
        said.append(story)
    return f"{said[0]}: {'; '.join(said[1:])}." if said[1:] else f"{said[0]}."
