"""Runs of a study in one process: the real trainer, whose compiled step and engine like runs share."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.config.settings import Config, to_dict
from dcmdp_jax.fields import flatten
from dcmdp_jax.lab.studies.kept_metrics import append_kept_metrics, kept_runs
from dcmdp_jax.lab.studies.study import StudyRun
from dcmdp_jax.observe.metrics_io import read_metrics
from dcmdp_jax.run.run import Run
from dcmdp_jax.run.services import Services
from dcmdp_jax.training.build import StepPrograms, make_step_programs
from dcmdp_jax.training.loop import train

_FREE = ("run_dir", "training.seed", "algorithm.multiplier")
"""Settings that are in no compiled program: runs that differ in nothing else share their parts."""
_OF_THE_STEP = ("algorithm.", "optimizer.")
"""Sections that the engine does not see: runs that differ in these alone share it, and each has a step of its own."""


class Shared(contextlib.ExitStack):
    """The parts of the last kind of run. Another kind makes its own step, and its own engine if it needs another."""

    def __init__(self) -> None:
        super().__init__()
        self._services: Services | None = None
        self._programs: StepPrograms | None = None
        self._kind: dict[str, Any] = {}

    def train(self, config: Config, show: Callable[[str], None]) -> None:
        """Train a run with what can be shared."""
        kind, before = _kind_of(config), self._kind
        if _of_the_engine(kind) != _of_the_engine(before):
            self.close()
            self._services = None
        run = Run.check(config)
        if kind != before:
            self._programs = make_step_programs(config, run.task.model, run.placement, run.task.lora)
            self._kind = kind

        def start() -> Services:
            self._services = run.start(shared=self, lent=self._services)
            return self._services

        train(run.task, run.placement, run.weights, start, show=show, programs=self._programs)


def run_in_one_process(
    runs: Sequence[StudyRun],
    configs: Sequence[Config],
    kept: Path,
    show: Callable[[str], None],
    evaluate: Callable[[StudyRun], Mapping[str, float]],
) -> None:
    """Train the runs that `kept` has not, one after another; append each one's metrics and remove its directory.

    Args:
        runs: a study's runs. They are run kind by kind, so that each step is compiled once.
        configs: theirs, checked.
        kept: the study's metrics, written after each run: a study that is stopped goes on with the next run.
        show: gets a line for each finished run.
        evaluate: gives metrics of a run's last policy, while its directory is there.

    Raises:
        Interrupted: after a signal; the run in progress is begun again next time.
    """
    done = kept_runs(kept)
    kinds = list(map(_kind_of, configs))
    first = [kinds.index(kind) for kind in kinds]
    todo = sorted(range(len(runs)), key=lambda place: (first[place], place))
    todo = [place for place in todo if (runs[place].arm, runs[place].seed) not in done]
    with Shared() as shared:
        for number, place in enumerate(todo, start=1):
            run, config = runs[place], configs[place]
            # What a stopped study left behind has trained in part.
            shutil.rmtree(run.directory, ignore_errors=True)
            shared.train(config, show=lambda line: None)
            series, step = read_metrics(run.directory), np.array([config.training.steps])
            series |= {name: (step, np.array([value])) for name, value in evaluate(run).items()}
            append_kept_metrics(kept, run.arm, run.seed, series)
            shutil.rmtree(run.directory)
            show(f"[{number}/{len(todo)}] {run.label}: kept in {kept}")


def _of_the_engine(kind: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kind.items() if not name.startswith(_OF_THE_STEP)}


def _kind_of(config: Config) -> dict[str, Any]:
    """Dotted name of every setting but `_FREE` -> its value."""
    return {name: value for name, value in flatten(to_dict(config)).items() if name not in _FREE}
