"""The metrics of a run, written to JSON lines, TensorBoard and trackers, and read back; its starts.

A run directory holds

    metrics.jsonl  {"step": 3, "reward/mean": 0.41, ...}: one flat object for a training step, and
                   one more of the same step for an evaluation; readers merge by step
    rollouts/      tokens with both probabilities of some steps, see `dcmdp_jax.observe.rollouts`
    samples.jsonl  {"step": 3, "prompt": ..., "completion": ..., "answer": ..., "reward": ...,
                   "rewards": ..., ...}
    starts.jsonl   {"step": 0, "time": ..., "command": ..., "commit": ..., "machine": ...}: one line
                   for a start
    tensorboard/   the same scalars ("@" of a name becomes "_": TensorBoard allows no such
                   character)

`step` counts finished training steps: step 1 is the first, an evaluation at step 0 is of the
initial policy. `dcmdp_jax.observe.jsonl` defines how numbers that are not finite are written.
"""

import logging
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from dcmdp_jax.errors import UserError, shorten
from dcmdp_jax.observe import jsonl, rollouts, trackers
from dcmdp_jax.observe.jsonl import (
    HELD_OUT_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    STARTS_FILE,
    TENSORBOARD_DIRECTORY,
)
from dcmdp_jax.observe.metric_names import current_name
from dcmdp_jax.version import __version__

_LARGEST_STEP = np.iinfo(np.int64).max
"""Steps are kept in int64."""


def record_start(run_dir: Path, step: int, devices: int, started: datetime | None = None) -> None:
    """Append the command, the code, the machine and the date of a start to `starts.jsonl`.

    Args:
        run_dir: the run directory.
        step: finished training steps at this start.
        devices: number of training devices.
        started: when the run was first started, which its first line says; None is now.
    """
    start = datetime.now().astimezone()
    if started is not None and not jsonl.readable(run_dir / STARTS_FILE):
        start = started
    program = Path(sys.argv[0])
    name = program.name
    # `python -m bin.train` of a checkout is `dcmdp train`.
    if program.parent == Path(__file__).resolve().parents[2] / "bin":
        name = f"dcmdp {program.stem}"
    line = {
        "step": step,
        "time": start.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": f"{name} {shlex.join(sys.argv[1:])}".strip(),
        "commit": code_commit(),
        "version": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "machine": f"{devices} x {jax.devices()[0].device_kind}, {os.cpu_count()} cores, "
        f"{platform.machine()}",
    }
    with open(run_dir / STARTS_FILE, "a", encoding="utf-8") as file:
        file.write(jsonl.encode(line))


def code_commit() -> str:
    """The commit of the checkout that this package is run from, `+changes` if files differ.

    Empty outside of one.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    command = "git describe --always --exclude=* --abbrev=10 --dirty=+changes".split()
    try:
        result = subprocess.run(
            command,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=5.0,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()


_LOG = logging.getLogger(__name__)

CLOCK = "time/clock"
"""Metric of each line of metrics.jsonl: when it was written."""
_AGAINST_C = {"dual/tolerance", "dual/violation", "discrepancy/completions_over_tolerance"}

Records = Sequence[Mapping[str, Any]]
Scalar = float | int | np.generic | np.ndarray | jax.Array
Series = dict[str, tuple[np.ndarray, np.ndarray]]
"""Metric name to (steps [n] int64, ascending and unique; values [n] float64)."""


class MetricsWriter:
    """Writes a run's metrics, each call a line on disk before it returns.

    In a run of several hosts only process 0 makes a writer.

    Resuming: lines of steps after `resume_step` are dropped atomically and a line torn by a kill is
    repaired, in both files, so a resumed run records each step once. Write a step before its
    checkpoint is saved; otherwise a kill between the two loses the step's line.

    Args:
        run_dir: made if absent.
        projects: "wandb" or "trackio" -> project to mirror scalars and samples to (`Tracker`); ""
            for none.
        resume_step: the last finished step of the checkpoint the run continues from. None starts a
            new run; lines of an earlier attempt without a checkpoint are moved to
            `metrics.jsonl.previous`.
        rollouts_every_steps: interval of `RolloutWriter`; 0 records nothing.
        devices: number of training devices; None for all of JAX's.
        started: see `record_start`.
        listener: called with (step, host values) as each line is written, for a live display.

    Raises:
        UserError: if the run directory can't be written, or a tracker is not installed or does not
            start.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        projects: Mapping[str, str] = MappingProxyType({}),
        resume_step: int | None = None,
        listener: Callable[[int, Mapping[str, float]], None] | None = None,
        rollouts_every_steps: int = 0,
        devices: int | None = None,
        started: datetime | None = None,
    ) -> None:
        projects = {kind: project for kind, project in projects.items() if project}
        for kind, project in projects.items():
            trackers.require_tracker(kind, project)
        self._listener = listener
        self._step = 0
        self._closed = False
        self._run_dir = run_dir = Path(run_dir)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            jsonl.truncate(run_dir / STARTS_FILE)  # all starts stay; a torn last line goes
            for name in (METRICS_FILE, SAMPLES_FILE, HELD_OUT_FILE):
                _prepare(run_dir / name, resume_step)
            self._rollouts = rollouts.RolloutWriter(
                run_dir, every_steps=rollouts_every_steps, resume_step=resume_step
            )
        except OSError as error:
            raise UserError(
                f"run directory {run_dir} can't be written ({error.strerror}); choose another"
            ) from error
        record_start(run_dir, resume_step or 0, devices or jax.device_count(), started)
        self._trackers = [
            trackers.Tracker(kind, project, run_dir) for kind, project in projects.items()
        ]

        # It imports torch wherever torch is installed: five seconds before every error message.
        from tensorboardX import SummaryWriter

        purge_step = 0 if resume_step is None else resume_step + 1
        # The suffix keeps a run that resumes within the second from truncating the event file
        # before it (tensorboardX 2.6 names files by the second and opens them for writing). Events
        # from purge_step on are hidden.
        self._tensorboard = SummaryWriter(
            str(run_dir / TENSORBOARD_DIRECTORY),
            purge_step=purge_step,
            max_queue=10_000,
            flush_secs=10,
            filename_suffix=f".{os.getpid()}.{resume_step or 0}",
        )

    def write(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """Write the metrics of a step.

        Args:
            step: finished training steps; not below that of the call before.
            metrics: name to scalar: a number or an array of shape []. Waits for arrays on a device.

        Raises:
            ValueError: if the step goes backwards, a value is not a scalar, a metric is named
                "step", or the writer is closed.
        """
        if step < self._step:
            raise ValueError(f"metrics of step {step} came after step {self._step}")
        self._step = step

        values = {}
        # A transfer guard allows an explicit device_get. A list keeps the order of the names; a
        # dict would come back sorted.
        for name, value in zip(metrics, jax.device_get(list(metrics.values())), strict=True):
            number = np.asarray(value).item() if np.ndim(value) == 0 else None
            if name == "step" or not isinstance(number, int | float):
                raise ValueError(
                    f"metric {name} is {value!r}; allowed: a number or an array of shape [], not "
                    '"step"'
                )
            values[name] = number
        self._append(METRICS_FILE, step, [values | {CLOCK: round(time.time(), 3)}])

        # None once its files could not be written.
        tensorboard = self._live_tensorboard()
        if tensorboard is not None:
            for name, value in values.items():
                if np.isfinite(value):
                    tensorboard.add_scalar(name, value, step)
        for tracker in self._trackers:
            tracker.write(step, values)
        if self._listener is not None:
            self._listener(step, values)

    def write_samples(self, step: int, records: Records) -> None:
        """Append sample completions to samples.jsonl, at once.

        Args:
            step: finished training steps.
            records: host data: "prompt", "completion", "answer", "reward", "rewards", "source",
                "discrepancy_mean", and "extra" where reward functions logged something about the
                completion.

        Raises:
            ValueError: if JSON can't represent a value of a record, or the writer is closed.
        """
        self._append(SAMPLES_FILE, step, records)
        for tracker in self._trackers:
            tracker.write_samples(step, records)

    def write_held_out(self, step: int, records: Records) -> None:
        """Write completions of held-out problems, in place of earlier ones of `step`.

        A run that was killed before the evaluation's metrics were written evaluates that step
        again.

        Args:
            step: finished training steps.
            records: host data: "task", "place" of the problem, "prompt", "completion", "answer",
                "reward".
        """
        jsonl.truncate(self._run_dir / HELD_OUT_FILE, step - 1)
        self._append(HELD_OUT_FILE, step, records)

    def _append(self, name: str, step: int, records: Records) -> None:
        if self._closed:
            raise ValueError(f"{name}: step {step} came after close()")
        with open(self._run_dir / name, "a", encoding="utf-8") as file:
            file.writelines([jsonl.encode({"step": step, **record}) for record in records])

    def records(self, step: int) -> bool:
        """Whether the tokens of this step are to be recorded."""
        return self._rollouts.due(step)

    def write_rollouts(self, step: int, completions: Records) -> None:
        """Record the tokens of a step; see `dcmdp_jax.observe.rollouts`."""
        self._rollouts.write(step, completions)

    def _live_tensorboard(self) -> Any:
        """The TensorBoard writer, or None once its thread has died.

        tensorboardX writes in a thread, behind a queue of a fixed length. A full disk ends that
        thread, and then the queue would block the run, in the next `put` or at the process's exit.
        """
        if self._tensorboard is not None:
            events = self._tensorboard.file_writer.event_writer
            if not events._worker.is_alive():
                _LOG.warning(
                    "TensorBoard's files can't be written (is the disk full?); going on without "
                    "them"
                )
                events._event_queue.cancel_join_thread()
                self._tensorboard = None
        return self._tensorboard

    def close(self) -> None:
        """Close TensorBoard's files and the trackers. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        tensorboard = self._live_tensorboard()
        if tensorboard is not None:
            tensorboard.close()
        for tracker in self._trackers:
            tracker.close()


class NoWriter:
    """Takes every call of a `MetricsWriter` and does nothing: for processes but the first."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def has_record(run_dir: str | Path, step: int, prefix: str) -> bool:
    """Whether a metric of `step` whose name starts with `prefix` is on disk."""
    for record in jsonl.readable(Path(run_dir) / METRICS_FILE):
        if record.get("step") == step and any(name.startswith(prefix) for name in record):
            return True
    return False


def read_metrics(run_dir: str | Path) -> Series:
    """Every metric of a run directory; a step's later line wins, a torn last one is skipped.

    Returns:
        Name to (steps [n] int64 ascending, values [n] float64). A null value reads as NaN. A table
        with a row for each step: `pandas.DataFrame({name: pandas.Series(values, steps) for name,
        (steps, values) in metrics.items()})`.

    Raises:
        ValueError: if the directory or a metric in it is missing, or a line that can't be read.
    """
    run_dir = Path(run_dir)
    path = run_dir / METRICS_FILE
    if not path.exists():
        fault = "it does not exist"
        if run_dir.is_dir():
            fault = f"it holds no {METRICS_FILE}"
        elif run_dir.exists():
            fault = "a file"
        raise UserError(f"{run_dir} is not a run directory: {fault}")

    merged: dict[str, dict[int, float]] = {}
    for number, record in enumerate(jsonl.read(path), start=1):
        step = record.pop("step", None)
        if not isinstance(step, int) or abs(step) > _LARGEST_STEP:
            raise UserError(
                f'{path} record {number}: "step" is {shorten(step)}; allowed: a whole number of '
                "int64"
            )
        for name, value in record.items():
            if not jsonl.is_number(value):
                raise UserError(f"{path} record {number}: {name} is {value!r}; allowed: a number")
            if value is None:
                value = float("nan")
            try:
                merged.setdefault(current_name(name), {})[step] = float(value)
            except OverflowError:
                raise UserError(
                    f"{path} record {number}: {name} is {shorten(value)}; allowed: a number that "
                    "float64 holds"
                ) from None
    if not merged:
        raise UserError(f"{path} holds no metrics yet; wait for the run's first step")

    series = {}
    for name, points in merged.items():
        steps = sorted(points)
        values = np.array([points[step] for step in steps], np.float64)
        series[name] = np.array(steps, np.int64), values
    return series


def without_placeholder(series: Series, measured_steps: int) -> Series:
    """The metrics without what compares with c at the first steps, which measure c."""
    later_series = dict(series)
    for name in _AGAINST_C & series.keys():
        steps, values = later_series.pop(name)
        later = steps > measured_steps
        if later.any():
            later_series[name] = steps[later], values[later]
    return later_series


def _prepare(path: Path, resume_step: int | None) -> None:
    """Cut a file to the records up to a step, or begin a new one and keep the old one aside."""
    if resume_step is not None:
        jsonl.truncate(path, resume_step)
    elif path.exists() and path.stat().st_size:
        aside = path.with_name(path.name + ".previous")
        os.replace(path, aside)
        _LOG.warning(
            "a new run starts in %s: the earlier %s is now %s",
            path.parent,
            path.name,
            aside.name,
        )
    path.touch()
