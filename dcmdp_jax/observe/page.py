"""The report's HTML page. All text from a run is escaped."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dcmdp_jax.observe.metric_names import METRICS, describe
from dcmdp_jax.observe.run_summary import ScoreHistory, Summary, summarize, warnings

if TYPE_CHECKING:
    from dcmdp_jax.observe.report import Run

_SAMPLES_A_STEP = 6

_STYLE = """
:root { --ink: #1f2328; --muted: #656d76; --line: #e2e5e9; --soft: #f6f7f9; --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  color: var(--ink); background: #fff; }
main { max-width: 1100px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 19px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 20px 0 8px; }
p.sub { color: var(--muted); margin: 4px 0 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 12px; }
.card { border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.card .name { color: var(--muted); font-size: 13px; }
.card .value { font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; margin: 2px 0; }
.card .more { color: var(--muted); font-size: 13px; }
ul.warnings { list-style: none; padding: 0; margin: 20px 0 0; }
ul.warnings li { background: #fff6e5; border-left: 4px solid #e69f00; border-radius: 4px;
  padding: 8px 12px; margin: 6px 0; }
figure { margin: 0 0 28px; } figure img { max-width: 100%; height: auto; display: block; }
figcaption { color: var(--muted); font-size: 13px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--muted); font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.key { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; white-space: nowrap; }
tr.differs td { background: #eef6fc; }
details { border: 1px solid var(--line); border-radius: 8px; margin: 8px 0; }
summary { cursor: pointer; padding: 8px 12px; } details > :not(summary) { margin: 0 12px 12px; }
pre { background: var(--soft); border-radius: 6px; padding: 10px 12px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
.tag { display: inline-block; border-radius: 10px; padding: 0 9px; font-size: 12px; margin-right: 6px;
  background: var(--soft); }
.tag.right { background: #dff3ea; color: #00694a; } .tag.wrong { background: #fbe4d8; color: #9a3f00; }
details > .label { color: var(--muted); font-size: 12px; margin: 8px 12px 2px; }
"""


def render(runs: Sequence[Run], images: Sequence[tuple[str, bytes]]) -> str:
    """Render the whole page.

    Args:
        runs: one or more; several are compared.
        images: (caption, PNG bytes), in order.
    """
    title = " / ".join(run.label for run in runs)
    summaries = [summarize(run.series) for run in runs]
    head = _cards(summaries[0]) if len(runs) == 1 else _comparison(runs, summaries)
    longest = max(summary.steps for summary in summaries)
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="sub">{len(runs)} run{"s" if len(runs) > 1 else ""}, {longest} training steps</p>',
        head,
        _warnings(runs),
        "<h2>Curves</h2>",
        *[_image(caption, data) for caption, data in images],
        _samples(runs),
        _config(runs),
        _metric_table(runs),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.4g}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f}%"


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _score_line(score: ScoreHistory) -> str:
    return (
        f"{score.points_gained:+.1f} points from step {score.first_step} to {score.last_step}; "
        f"best {_percent(score.best)} at step {score.best_step}"
    )


def _cards(summary: Summary) -> str:
    cards: list[tuple[str, str, str]] = []
    if not math.isnan(summary.first_reward):
        cards.append(
            (
                "Training reward",
                f"{summary.first_reward:.3f} → {summary.last_reward:.3f}",
                f"mean of the first and last {summary.window} steps" if summary.window > 1 else "first and last step",
            )
        )
    cards += [
        (f"Held-out {score.name}", f"{_percent(score.first)} → {_percent(score.last)}", _score_line(score))
        for score in summary.scores
    ]
    if not math.isnan(summary.mean_discrepancy):
        budget = (
            f"budget c = {_number(summary.tolerance)}, exceeded in {_percent(summary.share_over_tolerance)} of steps"
        )
        cards.append(
            (
                "Mean discrepancy",
                _number(summary.mean_discrepancy),
                "no budget" if math.isnan(summary.tolerance) else budget,
            )
        )
    if not math.isnan(summary.multiplier_low):
        cards.append(
            (
                "Lambda, lowest and highest",
                f"{_number(summary.multiplier_low)} to {_number(summary.multiplier_high)}",
                f"rose {summary.multiplier_rises} times, fell {summary.multiplier_falls} times",
            )
        )
    if not math.isnan(summary.tokens_per_second):
        cards.append(
            (
                "Throughput",
                f"{summary.tokens_per_second:,.0f} tokens/s",
                f"median step; {_duration(summary.seconds)} in training steps",
            )
        )
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card"><div class="name">{html.escape(name)}</div>'
            f'<div class="value">{html.escape(value)}</div><div class="more">{html.escape(more)}</div></div>'
            for name, value, more in cards
        )
        + "</div>"
    )


def _comparison(runs: Sequence[Run], summaries: Sequence[Summary]) -> str:
    rows: list[tuple[str, Callable[[Summary], str]]] = [
        ("training steps", lambda summary: str(summary.steps)),
        ("reward, first steps", lambda summary: _number(summary.first_reward)),
        ("reward, last steps", lambda summary: _number(summary.last_reward)),
        ("mean discrepancy", lambda summary: _number(summary.mean_discrepancy)),
        ("tolerance c", lambda summary: _number(summary.tolerance)),
        ("steps over c", lambda summary: _percent(summary.share_over_tolerance)),
        ("lambda, lowest", lambda summary: _number(summary.multiplier_low)),
        ("lambda, highest", lambda summary: _number(summary.multiplier_high)),
        ("lambda, rises / falls", lambda summary: f"{summary.multiplier_rises} / {summary.multiplier_falls}"),
        ("tokens/s, median step", lambda summary: _number(round(summary.tokens_per_second, 1))),
        ("time in training steps", lambda summary: _duration(summary.seconds)),
    ]
    cells: list[list[str]] = []
    names = list(dict.fromkeys(score.name for summary in summaries for score in summary.scores))
    for name in names:
        found = [next((score for score in summary.scores if score.name == name), None) for summary in summaries]
        for heading, show in (
            ("first", lambda score: _percent(score.first)),
            ("last", lambda score: f"{_percent(score.last)} ({score.points_gained:+.1f} points)"),
            ("best", lambda score: f"{_percent(score.best)} (step {score.best_step})"),
        ):
            cells.append([f"held-out {name}, {heading}", *["-" if score is None else show(score) for score in found]])
    cells += [[name, *[show(summary) for summary in summaries]] for name, show in rows]
    return _table(["", *[run.label for run in runs]], cells, numbers=range(1, len(runs) + 1))


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    key: bool = False,
    marked: Sequence[bool] | None = None,
) -> str:
    """Render a table of escaped text; `numbers` columns align right, `key` sets the first in monospace."""

    def style(column: int, tag: str) -> str:
        names = "number" if column in numbers else "key" if key and column == 0 and tag == "td" else ""
        return f' class="{names}"' if names else ""

    top = "".join(f"<th{style(column, 'th')}>{html.escape(text)}</th>" for column, text in enumerate(header))
    body = "".join(
        ('<tr class="differs">' if marked is not None and marked[index] else "<tr>")
        + "".join(f"<td{style(column, 'td')}>{html.escape(text)}</td>" for column, text in enumerate(row))
        + "</tr>"
        for index, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _warnings(runs: Sequence[Run]) -> str:
    items = [
        html.escape(text if len(runs) == 1 else f"{run.label}: {text}") for run in runs for text in warnings(run.series)
    ]
    return f'<ul class="warnings">{"".join(f"<li>{item}</li>" for item in items)}</ul>' if items else ""


def _image(caption: str, data: bytes) -> str:
    code = base64.b64encode(data).decode("ascii")
    text = html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{code}"><figcaption>{text}</figcaption></figure>'


def _samples(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        steps = sorted({record["step"] for record in run.samples if isinstance(record.get("step"), int)})
        for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
            heading = f"step {step}" if len(runs) == 1 else f"{run.label}, step {step}"
            chosen = [record for record in run.samples if record.get("step") == step][:_SAMPLES_A_STEP]
            parts.append(f"<h3>{html.escape(heading)}</h3>" + "".join(_sample(record) for record in chosen))
    return "<h2>Sample completions</h2>" + "".join(parts) if parts else ""


def _sample(record: dict[str, Any]) -> str:
    def text(name: str) -> str:
        value = record.get(name, "")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    reward = record.get("reward")
    tags = ""
    if isinstance(reward, int | float):
        tags += f'<span class="tag {"right" if reward > 0 else "wrong"}">reward {_number(float(reward))}</span>'
    if isinstance(record.get("discrepancy_mean"), int | float):
        tags += f'<span class="tag">discrepancy {_number(float(record["discrepancy_mean"]))}</span>'
    first = text("prompt").strip().partition("\n")[0]
    return (
        f"<details><summary>{tags}{html.escape(first[:110])}{'…' if len(first) > 110 else ''}</summary>"
        f'<div class="label">prompt</div><pre>{html.escape(text("prompt"))}</pre>'
        f'<div class="label">completion</div><pre>{html.escape(text("completion"))}</pre>'
        f'<div class="label">reference answer</div><pre>{html.escape(text("answer"))}</pre></details>'
    )


def _config(runs: Sequence[Run]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if not keys:
        return ""
    rows = [
        [key, *[json.dumps(run.config[key], ensure_ascii=False) if key in run.config else "-" for run in runs]]
        for key in keys
    ]
    rows.sort(key=lambda row: len(set(row[1:])) == 1)
    differs = [len(set(row[1:])) > 1 for row in rows]
    note = f", {sum(differs)} differ" if len(runs) > 1 else ""
    header = ["key", *([run.label for run in runs] if len(runs) > 1 else ["value"])]
    return (
        f"<h2>Configuration</h2><details{' open' if any(differs) else ''}><summary>{len(keys)} settings{note}</summary>"
        f"{_table(header, rows, key=True, marked=differs)}</details>"
    )


def _metric_table(runs: Sequence[Run]) -> str:
    order = {name: place for place, name in enumerate(METRICS)}
    names = sorted({name for run in runs for name in run.series}, key=lambda name: (order.get(name, len(order)), name))
    rows = []
    for name in names:
        metric = describe(name)
        if len(runs) == 1:
            values = runs[0].series[name][1]
            finite = values[np.isfinite(values)]
            low, high = (finite.min(), finite.max()) if len(finite) else (math.nan, math.nan)
            shown = [_number(float(value)) for value in (values[0], values[-1], low, high)]
        else:
            shown = [_number(float(run.series[name][1][-1])) if name in run.series else "-" for run in runs]
        rows.append([name, *shown, metric.unit, metric.description])
    columns = ["first", "last", "lowest", "highest"] if len(runs) == 1 else [f"last, {run.label}" for run in runs]
    table = _table(["metric", *columns, "unit", "meaning"], rows, numbers=range(1, len(columns) + 1), key=True)
    return f"<h2>Metrics</h2><details><summary>{len(rows)} metrics</summary>{table}</details>"
