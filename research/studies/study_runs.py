"""The runs of a study as processes, one after another, and what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import dcmdp_jax
from dcmdp_jax.evaluation.log import write_json
from dcmdp_jax.evaluation.table import format_comparison, read_scores
from dcmdp_jax.observe.metrics_io import Series, read_metrics
from research.studies.results import Table, save_figures, tables, write_kept_metrics
from research.studies.study import Study, StudyRun

EVALUATION = "evaluation.json"
"""What an evaluated run has in its directory."""
STOPPED = {128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
"""Exit codes of a command that a signal ended."""
_FINISHED = "finished.json"
_METRICS = "metrics.jsonl.gz"


def run_command(words: Sequence[str], log: Path) -> int:
    """Run `dcmdp WORDS` with its output in `log`; a SIGTERM of ours ends it too.

    Returns:
        Its exit code, 128 + N for signal N.
    """
    # The package of this process, whatever the working directory holds.
    package_root = str(Path(dcmdp_jax.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "dcmdp_jax", *words]
    started: list[subprocess.Popen[bytes]] = []
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        for process in started:
            process.terminate()

    log.parent.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with log.open("a", encoding="utf-8") as file:
            env = os.environ | {"PYTHONPATH": path}
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
        started.append(process)
        if stopped:  # the signal came while it was started
            process.terminate()
        code = process.wait()
    except KeyboardInterrupt:  # the terminal sent it to both
        started[0].wait()
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    if stopped:
        return 128 + signal.SIGTERM
    return 128 - code if code < 0 else code


def finish_run(
    run: StudyRun, steps: int, evaluation: Sequence[str], label: str, show: Callable[[str], None]
) -> int:
    """Train and evaluate a run as far as it is not done, and say so.

    Args:
        run: one run of a study.
        steps: training steps; a finished run may be told to go on.
        evaluation: arguments of `dcmdp evaluate` after the run's directory; empty: it is not
            evaluated.
        label: the run's name for people.
        show: gets a line of what became of it.

    Returns:
        0, or the exit code of the command that failed.
    """
    done = run.directory / _FINISHED
    scores = run.directory / EVALUATION
    log = run.directory.with_name(f"{run.directory.name}.log")
    began = time.monotonic()
    if not done.exists() or json.loads(done.read_text())["steps"] < steps:
        code = run_command(["train", *run.arguments], log)
        if code:
            return _failed(code, label, log, show)
        write_json(done, {"steps": steps})
        scores.unlink(missing_ok=True)
    if evaluation and not scores.exists():
        code = evaluate_run(run, evaluation, log)
        if code:
            return _failed(code, f"{label}, evaluation", log, show)
    show(f"{label}: finished ({time.monotonic() - began:.0f} s)")
    return 0


def evaluation_words(study: Study, run: StudyRun) -> list[str]:
    """Arguments of `dcmdp evaluate` after a run's directory."""
    return [*study.evaluation, "--method", run.arm] if study.evaluation else []


def evaluate_run(run: StudyRun, words: Sequence[str], log: Path) -> int:
    """Score a trained run; the exit code."""
    return run_command(
        ["evaluate", str(run.directory), *words, "--out", str(run.directory / EVALUATION)], log
    )


def _failed(code: int, label: str, log: Path, show: Callable[[str], None]) -> int:
    if code not in STOPPED:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        show(f"{label}: failed with exit code {code}: {lines[-1] if lines else ''} (log: {log})")
    return code


def compare(study: Study, runs: Sequence[StudyRun], failed: Sequence[StudyRun], out: Path) -> str:
    """Write tables, figures and kept metrics of the runs that are finished; return the tables."""
    finished = [run for run in runs if (run.directory / _FINISHED).exists()]
    notes = []
    if failed:
        notes.append(f"Failed: {', '.join(run.label for run in failed)}.")
    waiting = len(runs) - len(finished) - len(failed)
    if waiting:
        notes.append(f"Not finished: {waiting} of {len(runs)} runs.")

    series: dict[str, dict[int, Series]] = {arm: {} for arm in study.arms}
    evaluations = []
    for run in finished:
        series[run.arm][run.seed] = read_metrics(run.directory)
        if (run.directory / EVALUATION).exists():
            evaluations.append(run.directory / EVALUATION)
    if finished:
        write_kept_metrics(out / _METRICS, series)
    return write_results(study, series, out, notes, evaluations)


def write_results(
    study: Study,
    series: Table,
    out: Path,
    notes: Sequence[str] = (),
    evaluations: Sequence[Path] = (),
) -> str:
    """Write results.md and figures/ into `out`; return the tables, and what was written.

    Args:
        study: the study.
        series: metrics of its finished runs.
        out: directory; made.
        notes: lines under the tables.
        evaluations: evaluation files of the runs.
    """
    text = tables(study.title, series, study.baseline, notes)
    if evaluations:
        text += f"\n```\n{format_comparison(list(map(read_scores, evaluations)))}\n```\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.md").write_text(text, encoding="utf-8")
    if any(series.values()):
        save_figures(study.title, study.baseline, series, out / "figures")
        text += f"\nwrote {out}/results.md and {out / 'figures'}/*.png"
    return text
