"""How a run ends early: all hosts together, all saved; by skipped updates; by an alarm. Facts that
hosts share.
"""

import contextlib
import importlib.metadata
import logging
import os
import platform
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np

from dcmdp_jax.activity import give_back_terminal
from dcmdp_jax.config.settings import Config, to_dict
from dcmdp_jax.data.prompts import digest, digest_of
from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.errors import TrainingStopped, UserError
from dcmdp_jax.fields import flatten
from dcmdp_jax.models.hf_hub import ends_of_files, model_directory
from dcmdp_jax.observe import jsonl, metrics_io
from dcmdp_jax.observe.alarms import ALARMS, WATCHED, Alarm, alarms, broken_completions
from dcmdp_jax.parallel.hosts import Hosts
from dcmdp_jax.rewards.protocol import RewardError
from dcmdp_jax.run.task import Task

_MOST_SKIPPED = 0.2
_MOST_IN_ROW = 8
WINDOW = 20
"""Steps that `optimizer/skipped_share` looks back on."""

_TWICE_S = 1.0
"""Signals that come within this time are one."""
_UNSEEN_S = 2.0

logger = logging.getLogger(__name__)


ENDS_A_RUN = EngineError, MemoryError, jax.errors.JaxRuntimeError
"""Errors after which the finished steps are saved."""


class Interrupted(Exception):
    """A signal ended the run. Every finished step is saved; the next run repeats the unfinished
    one.
    """

    def __init__(self, signal_number: int, where: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} {where}")
        self.signal_number = signal_number


class ExitRequested(Exception):
    """This process or another one was asked to stop. Its own work ends here."""


class CollectiveExit:
    """Scope of per-process work; a signal or failure in one process ends it in all.

    Args:
        hosts: the processes.
        stop: knows of a signal to this one.
        save: saves the state after the last finished step, and returns that step once it is on
            disk. Collective.
    """

    def __init__(self, hosts: Hosts, stop: "StopSignal", save: Callable[[], int]) -> None:
        self._hosts = hosts
        self._stop = stop
        self._save = save

    def check(self) -> None:
        """Raise `ExitRequested`, within `scope`, if a signal came, here or to another process."""
        if self._stop.received is not None or self._hosts.interrupted:
            raise ExitRequested

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Run a block without other processes; leave it with them.

        After a signal to any of them, or the failure of an engine or of a reward function, all save
        what is finished and end the run.

        Raises:
            Interrupted, UserError, EngineError, MemoryError, JaxRuntimeError: the same on all
                processes, or what ended the run on another one.
        """
        failure: Exception | None = None
        try:
            yield
        except ExitRequested:
            self._hosts.interrupt_all()
        except (RewardError, *ENDS_A_RUN) as error:
            failure = error
            self._hosts.interrupt_all()
        broken = isinstance(failure, ENDS_A_RUN)
        received = self._stop.received or 0
        signal_number, failures, breaks = self._hosts.largest(received, failure is not None, broken)
        if not signal_number and not failures:
            return
        if broken and self._hosts.count == 1:
            raise failure
        step = self._save()
        if breaks:
            raise (
                failure if broken else EngineError("the engine failed on another host; see its log")
            )
        if signal_number:
            raise Interrupted(int(signal_number), f"after step {step}, saved")
        raise UserError(
            f"config.rewards.functions: {failure or 'one failed on another host'}; saved after "
            f"step {step}: fix the function and rerun the same command, or set "
            "rewards.on_error=none to ignore its failures (time limit: rewards.timeout)"
        ) from failure


class ThreadExit(CollectiveExit):
    """Exit of work in a thread; the main thread waits for it within `scope`, where all processes
    leave.

    Attributes:
        cancelled: set to end the thread's work.
    """

    def __init__(self, leave: CollectiveExit) -> None:
        self._exit = leave
        self.cancelled = threading.Event()

    def check(self) -> None:
        """Raise `ExitRequested` if the thread is to end, too."""
        if self.cancelled.is_set():
            raise ExitRequested
        self._exit.check()

    scope = staticmethod(contextlib.nullcontext)
    """Run a block; nothing collective is called."""


class StopSignal:
    """Records SIGTERM, SIGINT and SIGHUP; the run polls for them at safe points.

    The first is answered on the console at once, also while a compiled program runs. A second one,
    more than a second later (`timeout` sends one twice), leaves at once: what was saved stays, and
    nothing more is. So does the first one after two seconds in which the run did not look for it,
    as it compiles, where `all_saved` says that nothing is lost.
    """

    def __init__(self, *, nothing_to_lose: bool = False) -> None:
        self._received: int | None = None
        self._looked = False
        self.all_saved: Callable[[], bool] = lambda: nothing_to_lose

    @property
    def received(self) -> int | None:
        """The signal, for the run to look at; None before one came."""
        self._looked = self._received is not None
        return self._received

    def _note(self, number: int, _: FrameType | None) -> None:
        self._received = number

    def _leave_unseen(self, number: int) -> None:
        if not self._looked and self.all_saved():
            self._leave(number, "it compiles, and nothing is lost")

    def _leave(self, number: int, why: str) -> NoReturn:
        give_back_terminal()
        _say(f"{why}: leaves at once; the same command resumes from the newest checkpoint")
        os._exit(128 + number)

    def _answer(self, pipe: int, numbers: list[int]) -> None:
        """Answer signals as the interpreter's own handler puts them into the pipe, until its other
        end is closed.
        """
        answered = None
        while received := os.read(pipe, 1):
            if received[0] not in numbers or (answered and time.monotonic() - answered < _TWICE_S):
                continue
            name = signal.Signals(received[0]).name
            if answered:
                self._leave(received[0], f"{name} again")
            answered = time.monotonic()
            timer = threading.Timer(_UNSEEN_S, self._leave_unseen, (received[0],))
            timer.daemon = True
            timer.start()
            _say(f"{name}: ends what it is doing, saves and leaves; a second {name} leaves at once")

    @contextlib.contextmanager
    def listening(self) -> "Iterator[StopSignal]":
        """Install the handlers for the block; outside the main thread Python gives no signal, and
        this does nothing.

        A SIGHUP that is ignored, as nohup has it, stays ignored: the run goes on without its
        terminal.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        watcher = threading.Thread(
            target=self._answer, args=(read_end, numbers), daemon=True, name="signals"
        )
        watcher.start()
        wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(write_end)
            watcher.join()
            os.close(read_end)


def _say(line: str) -> None:
    """Write a line on the console, whatever the main thread is in the middle of writing."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{line}\n".encode())


def _recorded(config: Config, step: int) -> list[dict[str, Any]]:
    """The recorded metrics of the finished steps; damaged lines are left out."""
    lines = jsonl.readable(Path(config.run_dir) / metrics_io.METRICS_FILE, jsonl.is_number)
    return [record for record in lines if record.get("step", step + 1) <= step]


class SkippedUpdates:
    """The share of skipped updates over the last steps, that of earlier ones read from the run
    directory.
    """

    def __init__(self, config: Config, step: int) -> None:
        """Read what the finished steps skipped.

        Args:
            config: when to give up, the updates of a step, and where the metrics are.
            step: finished steps.
        """
        self._updates = config.mini_batches
        name = "optimizer/skipped_updates"
        before = _recorded(config, step)
        self._last = deque(
            (record[name] or 0 for record in before if name in record), maxlen=WINDOW
        )

    def record(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Count a step's skipped updates; warn of them on the console.

        Returns:
            `optimizer/skipped_share`: of the updates of the last `WINDOW` steps.
        """
        skipped = int(metrics["optimizer/skipped_updates"])
        self._last.append(skipped)
        share = sum(self._last) / (self._updates * len(self._last))
        if skipped:
            numbers = step, skipped, self._updates, 100 * share, len(self._last)
            said = (
                "step %d: %d of %d updates skipped, their gradient is not finite; %.0f%% of "
                "the last %d steps'"
            )
            logger.warning(said, *numbers)
        return {"optimizer/skipped_share": share}

    def check(self, metrics: Mapping[str, Any]) -> None:
        """Give up where gradients stay broken.

        Raises:
            TrainingStopped: after `_MOST_IN_ROW` skipped updates, or over a fifth of the updates of
                `WINDOW` steps.
        """
        share = metrics["optimizer/skipped_share"]
        found = ""
        if len(self._last) == WINDOW and share > _MOST_SKIPPED:
            limit = f" (at most {_MOST_SKIPPED:.0%} may)"
            found = (
                f"{share:.0%} of the updates of the last {WINDOW} steps had a gradient that "
                f"is not finite{limit}"
            )
        if int(metrics["optimizer/skipped_in_row"]) >= _MOST_IN_ROW:
            found = f"{_MOST_IN_ROW} updates in a row had a gradient that is not finite"
        if found:
            raise TrainingStopped(
                f"{found}; export a checkpoint (dcmdp convert export) and start from it "
                "(model.path) with a lower optimizer.learning_rate"
            )


class AlarmWatch:
    """Alarms of `observe.alarms` for a run so far, the steps before a resume included."""

    def __init__(self, config: Config, step: int) -> None:
        """Read what the finished steps recorded.

        Args:
            config: whether an alarm stops the run, and where the metrics are.
            step: finished steps. An alarm that was raised at the last of them is not news.
        """
        self._stops = config.observe.on_alarm == "stop"
        self._measured = config.algorithm.measured_steps
        self._history: dict[str, tuple[list[int], list[float]]] = {
            name: ([], []) for name in WATCHED
        }
        for record in _recorded(config, step):
            self._add(record["step"], record)
        self._raised = {alarm.name for alarm in self._alarms()}
        self._news: list[Alarm] = []

    def record(
        self, step: int, metrics: Mapping[str, Any], completions: np.ndarray
    ) -> dict[str, float]:
        """Look at a step; warn on the console of each alarm that was not raised at the step before.

        Args:
            step: finished steps.
            metrics: the step's metrics.
            completions: mean discrepancy of each completion, 0 on padding.

        Returns:
            `discrepancy/broken_completions`, and `alarm/NAME`, 1 while it is raised, for each of
            `ALARMS`.
        """
        found = {"discrepancy/broken_completions": broken_completions(completions)}
        self._add(step, {**metrics, **found})
        raised = self._alarms()
        self._news = [alarm for alarm in raised if alarm.name not in self._raised]
        self._raised = {alarm.name for alarm in raised}
        for alarm in self._news:
            logger.warning("step %d: alarm %s: %s", step, alarm.name, alarm.text)
        return found | {metric: float(name in self._raised) for name, metric in ALARMS.items()}

    @property
    def ends_the_run(self) -> bool:
        """Whether the last step raised an alarm and the settings stop at one."""
        return self._stops and bool(self._news)

    def stop(self, step: int) -> None:
        """Raise TrainingStopped, which says where the run goes on; the caller has saved the
        state.
        """
        names = ", ".join(alarm.name for alarm in self._news) or "raised on another host"
        raise TrainingStopped(
            f"alarm {names} at step {step}, saved (observe.on_alarm=stop); the same command goes "
            "on from there, with --config.observe.on_alarm=warn without a stop at the next alarm"
        )

    def _add(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, (steps, values) in self._history.items():
            if metrics.get(name) is not None:
                steps.append(step)
                values.append(float(metrics[name]))

    def _alarms(self) -> list[Alarm]:
        series = {
            name: (np.array(s, np.int64), np.array(v))
            for name, (s, v) in self._history.items()
            if s
        }
        return alarms(metrics_io.without_placeholder(series, self._measured))


_LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "transformers")


def settings_and_code(config: Config) -> dict[str, str]:
    """Every setting except `hosts.*`, a digest of this package's code, and the versions of its
    libraries.
    """
    settings = flatten(to_dict(config)).items()
    same = {
        f"config.{name}": repr(value) for name, value in settings if not name.startswith("hosts.")
    }
    versions = {f"version of {name}": importlib.metadata.version(name) for name in _LIBRARIES}
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"))
    code = digest(
        part
        for path in files
        for part in (str(path.relative_to(package)).encode(), path.read_bytes())
    )
    return (
        same
        | versions
        | {"version of Python": platform.python_version(), "code of dcmdp_jax (digest)": code}
    )


def data_facts(task: Task) -> dict[str, str]:
    """Devices, encoded problems, worked solutions and the files of the weights, as this host sees
    them.
    """
    devices = jax.local_devices()
    facts = {"devices": f"{len(devices)} x {devices[0].device_kind}"}
    facts["problems of task.train (digest)"] = digest_of(task.train)
    for held_out, prompts in task.held_out:
        facts[f"problems of {held_out.location} of evaluation.task (digest)"] = digest_of(prompts)
    if task.worked_solutions:
        facts["problems of warmup.task (digest)"] = digest_of(task.worked_solutions)
    if task.config.model.path:
        facts["files of model.path (digest)"] = digest(
            ends_of_files(model_directory(task.config.model.path))
        )
    return facts
