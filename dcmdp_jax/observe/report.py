"""The report of runs: plots as PNG, one self-contained HTML page with the same figures; the model card."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.errors import UserError
from dcmdp_jax.number_format import markdown_table, number, percent
from dcmdp_jax.observe.jsonl import PLOTS_DIRECTORY, REPORT_FILE
from dcmdp_jax.observe.metric_names import METRICS, metric_of
from dcmdp_jax.observe.metrics_io import Series
from dcmdp_jax.observe.page_kit import drawable, inline_svg, render_page
from dcmdp_jax.observe.plots import FIGURES
from dcmdp_jax.observe.run_summary import RecordedRun, facts, provenance, read_run, verdict, warnings
from dcmdp_jax.version import REPOSITORY

_DPI = 130


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
    # matplotlib would read a dollar in a directory's name as mathematics.
    series = {drawable(run.label).replace("$", r"\$"): run.series for run in runs}
    figures = []
    for stem, (caption, draw) in FIGURES.items():
        if (figure := draw(series)) is not None:
            figure.savefig(plots / f"{stem}.png", dpi=_DPI)
            figures.append((caption, inline_svg(figure)))
    report = Path(out_dir) / REPORT_FILE
    atomic_write(report, render_page("report.html", figures=figures, **report_content(runs)))
    return report


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


def report_content(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Values of the template `report.html`, all but its images.

    Args:
        runs: one or more; several are compared.
    """
    several = len(runs) > 1
    named = [(f"{run.label}: " if several else "", run) for run in runs]
    columns = [{name: f"{value} ({more})" if more else value for name, value, more in facts(run)} for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    return {
        "title": " / ".join(run.label for run in runs),
        "labels": [run.label for run in runs],
        "verdicts": [label + verdict(run) for label, run in named],
        "provenance": [] if several else list(provenance(runs[0]).values()),
        "facts": facts(runs[0]),
        "comparison": [[name, *(column.get(name, "-") for column in columns)] for name in names],
        "problems": [label + text for label, run in named for text in warnings(run.series)],
        "held_out": _held_out(runs),
        "settings": _settings(runs),
        "metrics": _metrics(runs),
    }


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


def _settings(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Every setting; first the ones that differ between runs."""
    texts = [{key: json.dumps(value, ensure_ascii=False) for key, value in run.config.items()} for run in runs]
    keys = dict.fromkeys(key for text in texts for key in text)
    rows = [[key, *(text.get(key, "-") for text in texts)] for key in keys]
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
            finite = np.where(np.isfinite(values), values, np.nan)
            chosen = [values[0], values[-1], np.fmin.reduce(finite), np.fmax.reduce(finite)]
        else:
            chosen = [run.series[name][1][-1] if name in run.series else math.nan for run in runs]
        show, unit = (percent, "share") if metric.unit == "fraction" else (number, metric.unit)
        rows.append([name, *(show(float(value)) for value in chosen), unit, metric.description])
    columns = ["first", "last", "lowest", "highest"] if len(runs) == 1 else [f"last, {run.label}" for run in runs]
    return {"header": ["metric", *columns, "unit", "meaning"], "rows": rows}


_POINTS = 12
"""Rows of the curve's table."""
_COLUMNS = {"dual/multiplier": "lambda", "discrepancy/mean": "mean discrepancy", "dual/tolerance": "c"}
_COLUMNS["reward/mean"] = "reward"
_PROJECT = f"[dcmdp_jax]({REPOSITORY})" if REPOSITORY else "dcmdp_jax"
CITATION = """@article{liu2026dcmdp,
  title = {Reformulate LLM Reinforcement Learning for Efficient Training under Black-box Discrepancy},
  author = {Liu, Jiashun and Liu, Runze and Wan, Xu and Liang, Jing and Tang, Hongyao and Pan, Ling},
  year = {2026}
}
@software{dcmdp_jax,
  title = {dcmdp_jax: DC-GRPO in JAX}
}"""


def model_card(run_dir: Path, step: int, *, on_hub: Callable[[str], bool]) -> str:
    """The text of the card: the run's sentence and facts up to `step`, lambda's curve, command, versions, citation.

    What a run did not record is left out.

    Args:
        run_dir: the run directory.
        step: the checkpoint's step; later steps are left out.
        on_hub: whether the path that the run started from names a model on the Hub, which is then the base model.
    """
    run = read_run(run_dir, without_metrics=True).until(step)
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if on_hub(start := str(run.config.get("model.path") or "")):
        front.append(f"base_model: {start.partition('@')[0]}")
    front += ["tags: [dcmdp_jax, dc-grpo, grpo, reinforcement-learning]", "---"]
    parts = [
        "\n".join(front),
        f"# {run.label}, step {step}",
        f"Trained with {_PROJECT}, method `{run.config.get('algorithm.method', 'dc_grpo')}`: reinforcement learning "
        "under a budget c for the mean of |p_train - p_infer|, the difference between the probabilities that the "
        "training stack and the inference engine give a sampled token. Lambda is the price of that difference.",
    ]
    if run.series:
        rows = [[cell.replace("|", r"\|") for cell in fact] for fact in facts(run)]
        parts += [verdict(run), "\n".join(markdown_table(["", "at this step", ""], rows))]
        parts += _curve(run.series)
    if said := provenance(run):
        parts.append(f"## How it was made\n\n    {said.pop('command')}\n\n{', '.join(said.values())}.")
    parts.append(f"## Citation\n\n```bibtex\n{CITATION}\n```")
    return "\n\n".join(parts) + "\n"


def _curve(series: Series) -> list[str]:
    """Lambda and what it follows, at about a dozen steps."""
    if "dual/multiplier" not in series:
        return []
    names = [name for name in _COLUMNS if name in series]
    steps = series["dual/multiplier"][0]
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, min(_POINTS, len(steps))).round().astype(int))]
    values = {name: dict(zip(*map(np.ndarray.tolist, series[name]), strict=True)) for name in names}
    rows = [[str(each), *(number(values[name].get(each, math.nan)) for name in names)] for each in chosen.tolist()]
    return ["## Lambda's curve", "\n".join(markdown_table(["step", *map(_COLUMNS.get, names)], rows))]
