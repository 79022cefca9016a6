"""Runs of a study in one process: the real trainer, whose compiled step and engine like runs share.

    python -m research.sweep --study=configs/studies/lag.py --kept=research/kept/lag.jsonl.gz
    python -m research.sweep --study=... --kept=... --seeds=0,1 --arms=grpo,exact \
        --config.training.steps=20

Like `python -m research.studies`, but of a finished run only its metrics stay, in the file of --kept. Runs that
the file has are skipped; kept runs whose multiplier is not what their arm's settings give are
refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.commands import evaluate as evaluate_command
from dcmdp_jax.commands.failures import run_main
from dcmdp_jax.config.settings import Config, to_dict
from dcmdp_jax.dotted_names import flatten
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.table import read_scores
from dcmdp_jax.observe.metrics_io import read_metrics
from dcmdp_jax.run.run import Run
from dcmdp_jax.run.services import Services, start_services
from dcmdp_jax.training.exit import Interrupted
from dcmdp_jax.training.loop import train
from dcmdp_jax.training.step_programs import StepPrograms, make_step_programs
from research.replay import check_replay
from research.studies.results import read_kept_metrics, write_kept_metrics
from research.studies.study import Study, StudyRun
from research.studies.study_runs import (
    EVALUATION,
    evaluation_words,
    write_results,
)
from research.studies.sweep import (
    arm_values,
    check_evaluation,
    parse_study,
    resolve,
    study_parser,
)

_FREE = ("run_dir", "training.seed", "algorithm.multiplier")
"""Settings that are in no compiled program: runs that differ in nothing else share their parts."""
_OF_THE_STEP = ("algorithm.", "optimizer.")
"""Sections that the engine does not see: runs that differ in these alone share it, and each has a
step of its own.
"""


class Shared(contextlib.ExitStack):
    """The parts of the last kind of run. Another kind makes its own step, and its own engine if it
    needs another.
    """

    def __init__(self) -> None:
        super().__init__()
        self._services: Services | None = None
        self._programs: StepPrograms | None = None
        self._kind: dict[str, Any] = {}

    def train(self, config: Config, show: Callable[[str], None]) -> None:
        """Train a run with what can be shared."""
        kind = _kind_of(config)
        before = self._kind
        if _of_the_engine(kind) != _of_the_engine(before):
            self.close()
            self._services = None
        run = Run.check(config)
        if kind != before:
            self._programs = make_step_programs(
                config, run.task.model, run.placement, run.task.lora
            )
            self._kind = kind

        def start() -> Services:
            if self._services is None:
                # What rewards print is discarded: the directory of the first run is removed before
                # the next.
                self._services = self.enter_context(start_services(run.task, run.placement.engine))
            # Rewards are no setting of the algorithm: they are the same wherever the engine is.
            return dataclasses.replace(self._services, closing=contextlib.ExitStack())

        train(run, start_services=start, show=show, programs=self._programs)


def run_in_one_process(
    runs: Sequence[StudyRun],
    configs: Sequence[Config],
    kept: Path,
    show: Callable[[str], None],
    evaluate: Callable[[StudyRun], Mapping[str, float]],
) -> None:
    """Train the runs that `kept` has not, one after another; append each one's metrics and remove
    its directory.

    Args:
        runs: a study's runs. They are run kind by kind, so that each step is compiled once.
        configs: theirs, checked.
        kept: the study's metrics, written after each run: a study that is stopped goes on with the
            next run.
        show: gets a line for each finished run.
        evaluate: gives metrics of a run's last policy, while its directory is there.

    Raises:
        Interrupted: after a signal; the run in progress is begun again next time.
    """
    table = read_kept_metrics(kept, None) if kept.exists() else {}
    kinds = list(map(_kind_of, configs))
    first = [kinds.index(kind) for kind in kinds]
    todo = sorted(range(len(runs)), key=lambda place: (first[place], place))
    todo = [place for place in todo if runs[place].seed not in table.get(runs[place].arm, {})]
    with Shared() as shared:
        for number, place in enumerate(todo, start=1):
            run = runs[place]
            config = configs[place]
            # What a stopped study left behind has trained in part.
            shutil.rmtree(run.directory, ignore_errors=True)
            shared.train(config, show=lambda line: None)
            series = read_metrics(run.directory)
            step = np.array([config.training.steps])
            series |= {name: (step, np.array([value])) for name, value in evaluate(run).items()}
            table.setdefault(run.arm, {})[run.seed] = series
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_kept_metrics(kept, table)
            shutil.rmtree(run.directory)
            show(f"[{number}/{len(todo)}] {run.label}: kept in {kept}")


def _of_the_engine(kind: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kind.items() if not name.startswith(_OF_THE_STEP)}


def _kind_of(config: Config) -> dict[str, Any]:
    """Dotted name of every setting but `_FREE` -> its value."""
    return {name: value for name, value in flatten(to_dict(config)).items() if name not in _FREE}


def check_kept(kept: Path, study: Study, overrides: Sequence[str] = ()) -> None:
    """Refuse kept runs whose multiplier is not what their arm's settings give.

    Raises:
        UserError: in one line, naming file, arm and seed.
    """
    if kept.exists():
        try:
            runs = read_kept_metrics(kept, list(study.arms))
            check_replay(
                runs,
                {
                    arm: arm_values(study.arms[arm], overrides)
                    for arm, seeds in runs.items()
                    if seeds
                },
            )
        except UserError as error:
            raise UserError(f"--kept: {kept}: {error}") from None


def evaluated(study: Study, run: StudyRun) -> dict[str, float]:
    """Scores of a trained run by the study's `evaluation`: `evaluation/TASK/avg@K`; empty for a
    study without one.

    In this process: a process of its own takes as long to start as the evaluation itself.

    Raises:
        UserError: if the evaluation fails.
    """
    if not study.evaluation:
        return {}
    out = run.directory / EVALUATION
    log = run.directory.with_name(f"{run.directory.name}.log")
    words = [str(run.directory), *evaluation_words(study, run), "--out", str(out)]
    with (
        log.open("w", encoding="utf-8") as lines,
        contextlib.redirect_stdout(lines),
        contextlib.redirect_stderr(lines),
    ):
        try:
            evaluate_command.main(["evaluate", *words])
        except UserError as error:
            raise UserError(f"{run.label}: its evaluation: {error} (log: {log})") from None
    scores = read_scores(out)
    return {
        f"evaluation/{task}/avg@{scores.samples[task]}": value
        for task, value in scores.averages.items()
    }


def main(argv: list[str]) -> int:
    """Parse the arguments (program name first), check every run, run what is not kept, compare."""
    parser = study_parser("Run a study in one process; keep the metrics of each finished run.")
    parser.add_argument(
        "--kept",
        required=True,
        type=Path,
        metavar="FILE",
        help="metrics of finished runs (.jsonl.gz)",
    )
    arguments, study, out, overrides = parse_study(parser, argv)
    runs, configs = resolve(study, out, overrides, arguments.arms)
    check_evaluation(study, runs, configs)
    check_kept(arguments.kept, study, overrides)
    show = functools.partial(print, flush=True)
    code = 0
    try:
        run_in_one_process(runs, configs, arguments.kept, show, functools.partial(evaluated, study))
    except Interrupted as stopped:
        show(f"stopped; the same command continues after the runs in {arguments.kept}")
        code = 128 + stopped.signal_number
    if arguments.kept.exists():
        show(write_results(study, read_kept_metrics(arguments.kept, list(study.arms)), out))
    return code


if __name__ == "__main__":
    run_main(main)
