"""How a run ends early, on all hosts, all saved: a signal, an error, skipped updates, an alarm."""

import contextlib
import dataclasses
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

_MAX_SKIPPED_SHARE = 0.2
"""Share of skipped updates over `WINDOW` steps above which a run gives up."""
_MAX_SKIPPED_IN_ROW = 8
"""Skipped updates in a row at which it gives up; float16's loss scale is then 256 times lower."""
WINDOW = 20
"""Steps that `optimizer/skipped_share` looks back on."""

_TWICE_S = 1.0
"""Signals that come within this time are one."""
_UNSEEN_S = 2.0
"""Time after which a signal that the run did not look for ends it, where nothing is lost."""

logger = logging.getLogger(__name__)


ENDS_A_RUN = EngineError, MemoryError, jax.errors.JaxRuntimeError
"""Errors after which the finished steps are saved."""


class Interrupted(Exception):
    """A signal ended the run. Finished steps are saved; the next run repeats the unfinished one."""

    def __init__(self, signal_number: int, where: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} {where}")
        self.signal_number = signal_number


class ExitRequested(Exception):
    """This process or another one was asked to stop. Its own work ends here."""


@dataclasses.dataclass(eq=False)
class CollectiveExit:
    """Scope of per-process work; a signal or failure in one process ends it in all.

    Attributes:
        hosts: the processes.
        stop: knows of a signal to this one.
        save: saves the state after the last finished step, and returns that step once it is on
            disk. Collective.
    """

    hosts: Hosts
    stop: "StopSignal"
    save: Callable[[], int]

    def check(self) -> None:
        """Raise `ExitRequested`, within `scope`, if a signal came, here or to another process."""
        if self.stop.received is not None or self.hosts.interrupted:
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
            self.hosts.interrupt_all()
        except (RewardError, *ENDS_A_RUN) as error:
            failure = error
            self.hosts.interrupt_all()

        broken = isinstance(failure, ENDS_A_RUN)
        signal_number, any_failure, any_broken = self.hosts.largest(
            self.stop.received or 0, failure is not None, broken
        )
        if not signal_number and not any_failure:
            return
        if broken and self.hosts.count == 1:
            raise failure
        step = self.save()
        if broken:
            raise failure
        if any_broken:
            raise EngineError("the engine failed on another host; see its log")
        if signal_number:
            raise Interrupted(int(signal_number), f"after step {step}, saved")
        raise UserError(
            f"config.rewards.functions: {failure or 'one failed on another host'}; saved after "
            f"step {step}: fix the function and rerun the same command, or set "
            "rewards.on_error=none to ignore its failures (time limit: rewards.timeout)"
        ) from failure


class ThreadExit(CollectiveExit):
    """Exit of work in a thread, for which the main thread waits within its own `scope`.

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
        """Answer signals as Python's handler writes them to the pipe, until that closes."""
        answered = None
        while True:
            received = os.read(pipe, 1)
            if not received:
                return
            number = received[0]
            if number not in numbers or (answered and time.monotonic() - answered < _TWICE_S):
                continue
            name = signal.Signals(number).name
            if answered:
                self._leave(number, f"{name} again")
            answered = time.monotonic()
            timer = threading.Timer(_UNSEEN_S, self._leave_unseen, (number,))
            timer.daemon = True
            timer.start()
            _say(f"{name}: ends what it is doing, saves and leaves; a second {name} leaves at once")

    @contextlib.contextmanager
    def listening(self) -> "Iterator[StopSignal]":
        """Install the handlers for the block.

        Outside the main thread Python gives no signal, and this does nothing. A SIGHUP that is
        ignored, as nohup has it, stays ignored: the run goes on without its terminal.
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
            target=self._answer,
            args=(read_end, numbers),
            daemon=True,
            name="signals",
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
    """The share of skipped updates over the last steps, those before a resume included."""

    def __init__(self, config: Config, step: int) -> None:
        """Read what the finished steps skipped.

        Args:
            config: when to give up, the updates of a step, and where the metrics are.
            step: finished steps.
        """
        self._updates = config.mini_batches
        self._skipped: deque[int] = deque(maxlen=WINDOW)
        for record in _recorded(config, step):
            if "optimizer/skipped_updates" in record:
                self._skipped.append(record["optimizer/skipped_updates"] or 0)

    def record(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Count a step's skipped updates; warn of them on the console.

        Returns:
            `optimizer/skipped_share`: of the updates of the last `WINDOW` steps.
        """
        skipped = int(metrics["optimizer/skipped_updates"])
        self._skipped.append(skipped)
        share = sum(self._skipped) / (self._updates * len(self._skipped))
        if skipped:
            logger.warning(
                "step %d: %d of %d updates skipped, their gradient is not finite; %.0f%% of "
                "the last %d steps'",
                step,
                skipped,
                self._updates,
                100 * share,
                len(self._skipped),
            )
        return {"optimizer/skipped_share": share}

    def check(self, metrics: Mapping[str, Any]) -> None:
        """Give up where gradients stay broken.

        Raises:
            TrainingStopped: after `_MAX_SKIPPED_IN_ROW` skipped updates, or over a fifth of the
                updates of `WINDOW` steps.
        """
        share = metrics["optimizer/skipped_share"]
        if int(metrics["optimizer/skipped_in_row"]) >= _MAX_SKIPPED_IN_ROW:
            reason = f"{_MAX_SKIPPED_IN_ROW} updates in a row had a gradient that is not finite"
        elif len(self._skipped) == WINDOW and share > _MAX_SKIPPED_SHARE:
            reason = (
                f"{share:.0%} of the updates of the last {WINDOW} steps had a gradient that "
                f"is not finite (at most {_MAX_SKIPPED_SHARE:.0%} may)"
            )
        else:
            return
        raise TrainingStopped(
            f"{reason}; export a checkpoint (dcmdp convert export) and start from it "
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
        self,
        step: int,
        metrics: Mapping[str, Any],
        completions: np.ndarray,
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
        new_metrics = {"discrepancy/broken_completions": broken_completions(completions)}
        self._add(step, {**metrics, **new_metrics})
        raised = self._alarms()
        self._news = [alarm for alarm in raised if alarm.name not in self._raised]
        self._raised = {alarm.name for alarm in raised}
        for alarm in self._news:
            logger.warning("step %d: alarm %s: %s", step, alarm.name, alarm.text)
        for name, metric in ALARMS.items():
            new_metrics[metric] = float(name in self._raised)
        return new_metrics

    @property
    def ends_the_run(self) -> bool:
        """Whether the last step raised an alarm and the settings stop at one."""
        return self._stops and bool(self._news)

    def stop(self, step: int) -> None:
        """Raise TrainingStopped, which says where the run goes on; the state is saved already."""
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
        series = {}
        for name, (steps, values) in self._history.items():
            if steps:
                series[name] = np.array(steps, np.int64), np.array(values)
        return alarms(metrics_io.without_placeholder(series, self._measured))


_LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "transformers")


def settings_and_code(config: Config) -> dict[str, str]:
    """Every setting except `hosts.*`, a digest of our code, and the libraries' versions."""
    facts = {}
    for name, value in flatten(to_dict(config)).items():
        if not name.startswith("hosts."):
            facts[f"config.{name}"] = repr(value)
    for name in _LIBRARIES:
        facts[f"version of {name}"] = importlib.metadata.version(name)
    facts["version of Python"] = platform.python_version()
    package = Path(__file__).parents[1]
    contents = []
    for path in sorted(package.rglob("*.py")):
        contents += str(path.relative_to(package)).encode(), path.read_bytes()
    facts["code of dcmdp_jax (digest)"] = digest(contents)
    return facts


def data_facts(task: Task) -> dict[str, str]:
    """Devices, encoded problems and the files of the weights, as this host sees them."""
    devices = jax.local_devices()
    facts = {"devices": f"{len(devices)} x {devices[0].device_kind}"}
    facts["problems of task.train (digest)"] = digest_of(task.train)
    for held_out, prompts in task.held_out:
        facts[f"problems of {held_out.location} of evaluation.task (digest)"] = digest_of(prompts)
    if task.worked_solutions:
        facts["problems of warmup.task (digest)"] = digest_of(task.worked_solutions)
    if task.config.model.path:
        directory = model_directory(task.config.model.path)
        facts["files of model.path (digest)"] = digest(ends_of_files(directory))
    return facts
