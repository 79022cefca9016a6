"""Runs a study: a grid of configs and seeds, one after another, and compares them.

    dcmdp sweep --study=configs/studies/methods.py                       demo size, on a CPU
    dcmdp sweep --study=configs/studies/methods.py:paper                 the paper's constants
    dcmdp sweep --study=... --seeds=0,1,2 --config.training.steps=20     a shorter one
    dcmdp sweep --study=... --arms=grpo,exact                            some arms alone
    dcmdp sweep --study=... --dry_run                                    list the runs and stop
    dcmdp sweep --study=... --redraw=docs/evidence/embedded.jsonl.gz     tables and figures of kept metrics

Each run is `dcmdp train` in OUT/ARM/seedN, its output in OUT/ARM/seedN.log. The same command continues a study
that was stopped: finished runs are skipped, a cut one resumes. When the command ends, OUT has of the finished runs
results.md, results.json, figures/ and metrics.jsonl.gz, which is small and enough to draw the others again.
docs/paper.md lists the studies.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import dcmdp_jax
from dcmdp_jax.commands.arguments import whole
from dcmdp_jax.commands.cli import Parser
from dcmdp_jax.commands.flags import parse as parse_run
from dcmdp_jax.commands.studies import load_study
from dcmdp_jax.config.settings import Config, for_sampling, to_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.log import write_json
from dcmdp_jax.evaluation.table import format_comparison, read_scores
from dcmdp_jax.lab.studies.dose import ascending, ascent_table, dose_claims, dose_panels, dose_table
from dcmdp_jax.lab.studies.kept_metrics import read_kept_metrics, write_kept_metrics
from dcmdp_jax.lab.studies.oracle_order import oracle_order, oracle_panels
from dcmdp_jax.lab.studies.results import (
    MEASURES,
    Table,
    curves,
    held_out,
    measure_arms,
    paired_differences,
    record,
    recorded,
    tables,
)
from dcmdp_jax.lab.studies.study import SET_BY_THE_STUDY, Study, StudyRun, check_collisions, runs_of
from dcmdp_jax.observe.metrics_io import read_metrics
from dcmdp_jax.observe.study_figures import draw_answer, draw_curves, draw_differences, draw_doses, draw_oracle
from dcmdp_jax.run.directory import check_run_directory

_OVERRIDE = "--config."
_FINISHED = "finished.json"
_EVALUATION = "evaluation.json"
_METRICS = "metrics.jsonl.gz"
_STOPPED = {128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
_DPI = 130
# File stem: heading, unit, metric.
_CURVES = {
    "reward": ("Reward", "mean reward", "reward/mean"),
    "discrepancy": ("Discrepancy between the engines (dashed: the budget c)", "discrepancy", "discrepancy/mean"),
    "multiplier": ("Lagrange multiplier", "lambda", "dual/multiplier"),
    "entropy": ("Policy entropy", "nats", "policy/entropy"),
}


class _Commands:
    """Runs one command at a time. SIGTERM ends it, and every later one before it begins."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def __enter__(self) -> _Commands:
        self._before = signal.signal(signal.SIGTERM, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _stop(self, *_: object) -> None:
        self._stopped = True
        if self._process is not None:
            self._process.terminate()

    def call(self, run: StudyRun, words: Sequence[str], label: str) -> int:
        """The exit code of `dcmdp WORDS`, 128 + N for signal N. Its output goes to the run's log."""
        log = run.directory.with_name(f"{run.directory.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        if self._stopped:
            return 128 + signal.SIGTERM
        with log.open("a", encoding="utf-8") as file:
            # The package of this process, whatever the working directory holds.
            package_root = str(Path(dcmdp_jax.__file__).resolve().parents[1])
            path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dcmdp_jax", *words],
                stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip
            if self._stopped:  # the signal came while it was started
                self._process.terminate()
            try:
                code = self._process.wait()
            except KeyboardInterrupt:  # the terminal sent it to both
                self._process.wait()
                code = 128 + signal.SIGINT
        if self._stopped:
            return 128 + signal.SIGTERM
        code = 128 - code if code < 0 else code
        if code and code not in _STOPPED:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            print(f"{label}: failed with exit code {code}: {lines[-1] if lines else ''} (log: {log})", flush=True)
        return code


def main(argv: list[str]) -> int:
    """Parse the arguments (program name first), check every run, run what is not finished, compare."""
    overrides = [word for word in argv[1:] if word.startswith(_OVERRIDE)]
    arguments = _parser().parse_args([word for word in argv[1:] if word not in overrides])
    if arguments.study is None:
        raise UserError("--study is missing; for example --study=methods")
    study = load_study(arguments.study)
    if arguments.seeds is not None:
        study = dataclasses.replace(study, seeds=arguments.seeds)
    out = arguments.out or Path("runs") / "studies" / _directory_name(arguments.study)
    if arguments.redraw is not None:
        if overrides or arguments.seeds is not None or arguments.dry_run or arguments.one_process is not None:
            raise UserError(
                "--redraw: the metrics are kept already; leave out --seeds, --dry_run, --one_process and --config.*"
            )
        series = read_kept_metrics(arguments.redraw, list(study.arms))
        notes = [] if arguments.oracle is None else ["\n".join(oracle_order(arguments.oracle, series, study.baseline))]
        _write_results(study, series, notes, [], out)
        if arguments.oracle is not None:
            figure = draw_oracle("Each charge's gradient against the exact one", oracle_panels(arguments.oracle))
            figure.savefig(out / "figures" / "oracle.png", dpi=_DPI)
        return 0
    if arguments.oracle is not None:
        raise UserError("--oracle: goes with --redraw, the metrics of the study's runs")
    run_now = [arm for arm, one in study.arms.items() if not one.past]
    if unknown := [arm for arm in arguments.arms or () if arm not in run_now]:
        raise UserError(f"--arms: got {unknown[0]!r}, which is none of the study's: {', '.join(run_now)}")
    runs, configs = _resolve(study, out, overrides, arguments.arms, resumes=arguments.one_process is None)
    if arguments.dry_run:
        for run in runs:
            print(f"{run.label}: dcmdp train {' '.join(run.arguments)}")
    _check_evaluation(study, runs, configs)
    if arguments.dry_run:
        return 0
    if arguments.one_process is not None:
        return _in_one_process(study, runs, configs, arguments.one_process, out)
    failed: list[StudyRun] = []
    code = 0
    with _Commands() as commands:
        for number, (run, config) in enumerate(zip(runs, configs, strict=True), start=1):
            code = _finish(commands, run, config, study.evaluation, f"[{number}/{len(runs)}] {run.label}")
            if code in _STOPPED:
                print("stopped; the same command continues", flush=True)
                break
            failed += [run] if code else []
    _compare(study, runs, failed, out)
    return code if code in _STOPPED else int(bool(failed))


def _in_one_process(study: Study, runs: Sequence[StudyRun], configs: Sequence[Config], kept: Path, out: Path) -> int:
    """Run what `kept` has not in this process, kind by kind, and compare."""
    if study.evaluation:
        raise UserError("--one_process: the study has an evaluation, which needs each run's directory; leave it out")
    # Imported late: a study of processes needs no training code in this one.
    from dcmdp_jax.lab.studies.one_process import run_in_one_process
    from dcmdp_jax.training.stopping import Interrupted

    code = 0
    try:
        run_in_one_process(runs, configs, kept, functools.partial(print, flush=True))
    except Interrupted as stopped:
        print(f"stopped; the same command continues after the runs in {kept}", flush=True)
        code = 128 + stopped.signal_number
    if kept.exists():
        _write_results(study, read_kept_metrics(kept, list(study.arms)), [], [], out)
    return code


def _parser() -> Parser:
    parser = Parser(
        "sweep",
        description="Run a study's grid of configs and seeds, one after another, and compare them. "
        "--config.section.name=value overrides a setting in every run; the same command continues.",
    )
    parser.add_argument("--study", metavar="FILE[:ARGUMENT]", help="name of a study of configs/studies/, or a file")
    parser.add_argument("--seeds", type=_seeds, metavar="N,N,...", help="default: the study's own")
    parser.add_argument(
        "--arms", type=lambda text: text.split(","), metavar="ARM,ARM,...", help="run these alone, in this order"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/studies/NAME of the study")
    parser.add_argument(
        "--dry_run", action="store_true", help="list the runs, check every config and the evaluation, and stop"
    )
    parser.add_argument(
        "--one_process",
        type=Path,
        metavar="FILE",
        help="run in this process, where like runs compile once; keep the metrics of each finished run in FILE "
        "(.jsonl.gz), and nothing else. Runs that FILE has are skipped",
    )
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="draw the metrics.jsonl.gz of a study; run nothing")
    parser.add_argument(
        "--oracle",
        type=Path,
        metavar="FILE",
        help="with --redraw: remedies.json of probe --remedies --study; rank correlation of its order with the runs'",
    )
    return parser


def _seeds(text: str) -> tuple[int, ...]:
    number = whole(0, 2**31 - 1)
    seeds = tuple(number(part.strip()) for part in text.split(","))
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"got {text!r}, every seed must be there once")
    return seeds


def _directory_name(given: str) -> str:
    location, _, argument = given.partition(":")
    return Path(location).stem + (f"_{argument}" if argument else "")


def _resolve(
    study: Study, out: Path, overrides: Sequence[str], arms: Sequence[str] | None = None, *, resumes: bool = True
) -> tuple[list[StudyRun], list[Config]]:
    """Every run of `arms`, else of all, with its checked config, before the first is begun.

    Checks whether it can resume, where it would.
    """
    for word in overrides:
        name, equals, _ = word.removeprefix(_OVERRIDE).partition("=")
        if not equals:
            raise UserError(f"{word}: its value is missing; settings are given as --config.section.name=value")
        if name in SET_BY_THE_STUDY:
            raise UserError(f"{word}: the study sets {name} for each run; use --out and --seeds")
    runs = runs_of(study, out, overrides)
    if arms is not None:
        runs = [run for arm in arms for run in runs if run.arm == arm]
    configs = []
    for run in runs:
        try:
            configs.append(parse_run(["train", *run.arguments]).config)
        except UserError as error:
            raise UserError(f"study: {run.label}: {error}") from None
    check_collisions(runs, [to_dict(config) for config in configs])
    for config in configs if resumes else []:
        check_run_directory(config)
    return runs, configs


def _evaluation_words(run: StudyRun, evaluation: Sequence[str]) -> list[str]:
    """Arguments of dcmdp evaluate for a run."""
    return [str(run.directory), *evaluation, "--method", run.arm, "--out", str(run.directory / _EVALUATION)]


def _check_evaluation(study: Study, runs: Sequence[StudyRun], configs: Sequence[Config]) -> None:
    """Refuse arguments, tasks and lengths that dcmdp evaluate would refuse once a run is trained."""
    if not study.evaluation:
        return
    # transformers takes a while to import; a study without an evaluation does not need it.
    from dcmdp_jax.commands.evaluate import parse, read_tasks
    from dcmdp_jax.run.model_run import PAPERS_EVALUATION, ModelRun
    from dcmdp_jax.run.run import Run

    seen = set()
    for run, config in zip(runs, configs, strict=True):
        if (run.directory / _EVALUATION).exists():
            continue
        try:
            arguments, overrides = parse(_evaluation_words(run, study.evaluation))
            if arguments.step is not None and arguments.step > config.training.steps:
                raise UserError(f"--step: got {arguments.step}, the run has training.steps={config.training.steps}")
            one = for_sampling(config, PAPERS_EVALUATION | overrides)
            # Seeds, and most arms, are asked the same by the same kind of model.
            asked = one.task, one.rewards, one.rollout, one.evaluation, arguments.overlap
            if (key := repr((config.model, config.max_total_tokens, asked))) in seen:
                continue
            seen.add(key)
            trained = Run(config)
            read_tasks(ModelRun(one, model=trained.model, tokenizer=trained.tokenizer), arguments)
        except UserError as error:
            raise UserError(f"study: evaluation of {run.label}: {error}") from None


def _finish(commands: _Commands, run: StudyRun, config: Config, evaluation: Sequence[str], label: str) -> int:
    """Train and evaluate one run as far as it is not done; the exit code of what failed."""
    done = run.directory / _FINISHED
    began = time.monotonic()
    # A run may be told to go on: more steps than it was finished with.
    if not done.exists() or json.loads(done.read_text())["steps"] < config.training.steps:
        code = commands.call(run, ["train", *run.arguments], label)
        if code:
            return code
        write_json(done, {"steps": config.training.steps})
        (run.directory / _EVALUATION).unlink(missing_ok=True)
    if evaluation and not (run.directory / _EVALUATION).exists():
        code = commands.call(run, ["evaluate", *_evaluation_words(run, evaluation)], f"{label}, evaluation")
        if code:
            return code
    print(f"{label}: finished ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


def _compare(study: Study, runs: Sequence[StudyRun], failed: Sequence[StudyRun], out: Path) -> None:
    """Tables and figures of the runs that are finished."""
    finished = [run for run in runs if (run.directory / _FINISHED).exists()]
    notes = [f"Failed: {', '.join(run.label for run in failed)}."] if failed else []
    if waiting := len(runs) - len(finished) - len(failed):
        notes.append(f"Not finished: {waiting} of {len(runs)} runs.")
    series: Table = {
        arm: {run.seed: read_metrics(run.directory) for run in finished if run.arm == arm} for arm in study.arms
    }
    evaluated = [run.directory / _EVALUATION for run in finished if (run.directory / _EVALUATION).exists()]
    _write_results(study, series, notes, evaluated, out)
    if finished:
        write_kept_metrics(out / _METRICS, series)


def _write_results(study: Study, series: Table, notes: Sequence[str], evaluated: Sequence[Path], out: Path) -> None:
    text = tables(study.title, series, study.baseline, notes)
    if evaluated:
        text += f"\n```\n{format_comparison([read_scores(path) for path in evaluated])}\n```\n"
    if study.doses and series.get(study.baseline):
        text += f"\nDifferences to {study.baseline}, seed by seed, over the last half of the steps.\n\n"
        text += dose_table(series, study.baseline)
        if ascending(series):
            text += f"\nDual ascent.\n\n{ascent_table(series, study.baseline)}"
        if study.control:
            text += f"\nCarried by the runs, and larger than what the perturbation of {study.control} does:\n\n"
            text += "\n".join(dose_claims(series, study.baseline, study.control)) + "\n"
    print(text)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.md").write_text(text, encoding="utf-8")
    write_json(out / "results.json", record(study.title, series, study.baseline, notes))
    if any(series.values()):
        print(f"wrote {out}/results.md, results.json and {_draw(study, series, out / 'figures')}/*.png")


def _draw(study: Study, series: Table, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    budgets = {
        arm: float(next(iter(seeds.values()))["dual/tolerance"][1][-1])
        for arm, seeds in series.items()
        if seeds and "dual/tolerance" in next(iter(seeds.values()))
    }
    scores = curves(series, held_out)
    if scores:
        draw_curves(f"{study.title}: held-out score", "avg@K", scores, baseline=study.baseline).savefig(
            directory / "held_out.png", dpi=_DPI
        )
    for stem, (heading, unit, name) in _CURVES.items():
        found = curves(series, functools.partial(recorded, name=name))
        if found:
            level = budgets if stem == "discrepancy" else None
            figure = draw_curves(f"{study.title}: {heading}", unit, found, level, baseline=study.baseline)
            figure.savefig(directory / f"{stem}.png", dpi=_DPI)
    for name in ("held_out", "discrepancy"):
        differences = paired_differences(measure_arms(series, MEASURES[name]), study.baseline)
        shown = {
            arm: (found.mean, found.half_width, found.values) for arm, found in differences.items() if found.values
        }
        if shown:
            title = f"{study.title}: difference to {study.baseline} by seed"
            figure = draw_differences(title, MEASURES[name].title, shown)
            figure.savefig(directory / f"difference_{name}.png", dpi=_DPI)
    if study.doses and series.get(study.baseline):
        panels = dose_panels(series, study.baseline, study.doses)
        draw_doses(study.title, study.baseline, panels).savefig(directory / "doses.png", dpi=_DPI)
        if moving := ascending({arm: seeds for arm, seeds in series.items() if arm not in study.doses}):
            found = [
                curves({arm: series[arm] for arm in arms}, functools.partial(recorded, name=name))
                for name, arms in (("dual/multiplier", moving), ("discrepancy/mean", [study.baseline, *moving]))
            ]
            first = dict(list(panels.items())[:2])
            figure = draw_answer(study.title, study.baseline, first, *found, budgets[moving[0]])
            figure.savefig(directory / "answer.png", dpi=_DPI)
    return directory
