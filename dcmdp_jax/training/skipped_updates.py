"""Updates that a step skipped because their gradient was not finite: the line that says so, and when a run gives up."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcmdp_jax.config.settings import Config
from dcmdp_jax.observe import jsonl
from dcmdp_jax.observe.metrics_io import METRICS_FILE

WINDOW = 20
"""Steps that `optimizer/skipped_share` looks back on."""

logger = logging.getLogger(__name__)


class TrainingStopped(RuntimeError):
    """Training gave up: too many updates had no finite gradient."""


class SkippedUpdates:
    """The share of skipped updates over the last steps, that of earlier ones read from the run directory."""

    def __init__(self, config: Config, step: int) -> None:
        """Read what the finished steps skipped.

        Args:
            config: when to give up, the updates of a step, and where the metrics are.
            step: finished steps.
        """
        self._settings, self._updates = config.training, config.mini_batches
        skipped = {
            record.get("step"): record["optimizer/skipped_updates"] or 0
            for record in jsonl.read(Path(config.run_dir) / METRICS_FILE)
            if "optimizer/skipped_updates" in record
        }
        steps = range(max(0, step - WINDOW), step)
        self._last = deque((skipped[s + 1] for s in steps if s + 1 in skipped), maxlen=WINDOW)

    def record(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Count a step's skipped updates; warn of them on the console.

        Returns:
            `optimizer/skipped_share`: of the updates of the last `WINDOW` steps.
        """
        skipped = int(metrics["optimizer/skipped_updates"])
        self._last.append(skipped)
        share = sum(self._last) / (self._updates * len(self._last))
        if skipped:
            logger.warning(
                "step %d: %d of %d updates skipped, their gradient is not finite; %.0f%% of the last %d steps'",
                step, skipped, self._updates, 100 * share, len(self._last),
            )  # fmt: skip
        return {"optimizer/skipped_share": share}

    def check(self, metrics: Mapping[str, Any]) -> None:
        """Give up where gradients stay broken.

        Raises:
            TrainingStopped: after `max_skipped_in_row`, or over `max_skipped_share` of `WINDOW` steps.
        """
        limit, share = self._settings.max_skipped_in_row, self._settings.max_skipped_share
        if int(metrics["optimizer/skipped_in_row"]) >= limit:
            found = f"{limit} updates in a row had a gradient that is not finite (training.max_skipped_in_row)"
        elif len(self._last) == WINDOW and metrics["optimizer/skipped_share"] > share:
            found = (
                f"{metrics['optimizer/skipped_share']:.0%} of the updates of the last {WINDOW} steps had a gradient "
                f"that is not finite (training.max_skipped_share={share})"
            )
        else:
            return
        raise TrainingStopped(
            f"{found}; export a checkpoint (bin.convert export) and start from it (model.path) with a lower "
            "optimizer.learning_rate"
        )
