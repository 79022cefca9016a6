"""The report of one or several runs: plots as PNG, and one self-contained HTML page with the same figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import flatten
from dcmdp_jax.inputs import read_json_object
from dcmdp_jax.observe import jsonl
from dcmdp_jax.observe.metrics_io import Series, read_metrics
from dcmdp_jax.observe.page_kit import inline_svg, render_page
from dcmdp_jax.observe.plots import FIGURES
from dcmdp_jax.observe.report_content import report_content, verdict
from dcmdp_jax.observe.run_files import CONFIG_FILE, HELD_OUT_FILE, PLOTS_DIRECTORY, REPORT_FILE, SAMPLES_FILE
from dcmdp_jax.observe.run_summary import summarize
from dcmdp_jax.observe.starts import describe_starts

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
    name, samples = label or run_dir.resolve().name, jsonl.read(run_dir / SAMPLES_FILE)
    return RecordedRun(name, series, config, samples, jsonl.read(run_dir / HELD_OUT_FILE), describe_starts(run_dir))


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
    """What happened in a run, as its report begins.

    Raises:
        ValueError, OSError: as `read_run`.
    """
    run = read_run(run_dir)
    return verdict(run, summarize(run.series))


def run_figures(runs: Sequence[RecordedRun]) -> list[tuple[str, str]]:
    """Caption and inline SVG of each figure that the runs have metrics for."""
    return [(caption, inline_svg(figure)) for _, caption, figure in _drawn(runs)]


def _drawn(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, str, Figure]]:
    for stem, (caption, draw) in FIGURES.items():
        # A dollar in a directory's name is no mathematics.
        if (figure := draw({run.label.replace("$", r"\$"): run.series for run in runs})) is not None:
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
