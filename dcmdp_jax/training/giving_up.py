"""When a run gives up: too many skipped updates, or an alarm that is told to stop it."""

import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.errors import TrainingStopped
from dcmdp_jax.observe import jsonl, metrics_io
from dcmdp_jax.observe.alarms import ALARMS, WATCHED, Alarm, alarms, broken_completions
from dcmdp_jax.training.training_session import TrainingSession

_MAX_SKIPPED_SHARE = 0.2
"""Share of skipped updates over `WINDOW` steps above which a run gives up."""
_MAX_SKIPPED_IN_ROW = 8
"""Skipped updates in a row at which it gives up; float16's loss scale is then 256 times lower."""
WINDOW = 20
"""Steps that `optimizer/skipped_share` looks back on."""

logger = logging.getLogger(__name__)


def _recorded(run_dir: str, step: int) -> list[dict[str, Any]]:
    """The recorded metrics of the finished steps; damaged lines are left out."""
    lines = jsonl.readable(Path(run_dir) / metrics_io.METRICS_FILE)
    return [record for record in lines if record.get("step", step + 1) <= step]


class SkippedUpdates:
    """The share of skipped updates over the last steps, those before a resume included."""

    def __init__(self, run_dir: str, step: int, *, updates: int) -> None:
        """Read what the finished steps skipped.

        Args:
            run_dir: where the metrics are.
            step: finished steps.
            updates: updates of a step.
        """
        self._updates = updates
        self._skipped: deque[int] = deque(maxlen=WINDOW)
        for record in _recorded(run_dir, step):
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

    def __init__(self, run_dir: str, step: int, *, stops: bool, measured_steps: int) -> None:
        """Read what the finished steps recorded.

        Args:
            run_dir: where the metrics are.
            step: finished steps. An alarm that was raised at the last of them is not news.
            stops: whether an alarm stops the run.
            measured_steps: steps from whose discrepancy c is measured, or 0.
        """
        self._stops = stops
        self._measured = measured_steps
        self._history: dict[str, tuple[list[int], list[float]]] = {
            name: ([], []) for name in WATCHED
        }
        for record in _recorded(run_dir, step):
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
            logger.warning("step %d: alert %s: %s", step, alarm.name, alarm.text)
        for name, metric in ALARMS.items():
            new_metrics[metric] = float(name in self._raised)
        return new_metrics

    @property
    def ends_the_run(self) -> bool:
        """Whether the last step raised an alarm and the settings stop at one."""
        return self._stops and bool(self._news)

    def check(self, session: TrainingSession) -> None:
        """Collective: save and give up where an alarm ends the run on any host.

        Raises:
            TrainingStopped: which says where the run goes on.
        """
        [ends] = session.hosts.largest(self.ends_the_run)
        if not ends:
            return
        session.save(wait=True)
        names = ", ".join(alarm.name for alarm in self._news) or "raised on another host"
        raise TrainingStopped(
            f"alert {names} at step {session.step}, saved (observe.on_alarm=stop); the same command goes "
            "on from there, with --config.observe.on_alarm=warn without a stop at the next alert"
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
