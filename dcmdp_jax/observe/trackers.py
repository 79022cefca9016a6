"""Mirrors of a run's metrics and samples: Weights & Biases and Trackio."""

import contextlib
import functools
import importlib
import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.errors import UserError, install_extra, one_line
from dcmdp_jax.observe.jsonl import CONFIG_FILE

_NAMES = {"wandb": "Weights & Biases", "trackio": "Trackio"}
_OFFLINE = {
    "wandb": "log in, or set WANDB_MODE=offline",
    "trackio": "unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL",
}
_COLUMNS = ("prompt", "completion", "answer", "reward", "source", "discrepancy_mean")


def require_tracker(kind: str, project: str) -> None:
    """Raise UserError if the package of a tracker, "wandb" or "trackio", is not installed."""
    try:
        importlib.import_module(kind)
    except ImportError:
        raise UserError(
            f"{kind}_project is {project!r} but {_NAMES[kind]} is not installed: "
            f"{install_extra(kind)}"
        ) from None


class Tracker:
    """A run of Weights & Biases or Trackio. A resumed run goes on with the same one.

    Args:
        kind: "wandb" or "trackio".
        project: its project.
        run_dir: its `{kind}_run_id` tells the run again; config.json is its config.

    Raises:
        UserError: in one line, if it does not start.
    """

    def __init__(self, kind: str, project: str, run_dir: Path) -> None:
        self._package = importlib.import_module(kind)
        identity = run_dir / f"{kind}_run_id"
        if not identity.exists() or not identity.read_text().strip():
            atomic_write(identity, uuid.uuid4().hex)
        run_id = identity.read_text().strip()
        config = None
        if (run_dir / CONFIG_FILE).exists():
            config = json.loads((run_dir / CONFIG_FILE).read_text())

        name = run_dir.resolve().name
        if kind == "wandb":
            start = functools.partial(self._package.init, name=name, id=run_id, dir=str(run_dir))
        else:  # Trackio knows a run by its name.
            start = functools.partial(
                self._package.init,
                name=f"{name}-{run_id[:8]}",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        try:
            with contextlib.redirect_stdout(sys.stderr):
                self.run = start(project=project, resume="allow", config=config)
        except Exception as error:  # the package's own exceptions, or its HTTP client's
            raise UserError(
                f"{_NAMES[kind]} did not start ({one_line(error)}); {_OFFLINE[kind]}"
            ) from error
        self._steps = kind == "trackio"
        if kind == "wandb":
            # W&B refuses steps that go backwards, as after a resume: it counts lines, the axis is
            # our step.
            self.run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the scalars of a step."""
        if self._steps:
            self.run.log(values, step=step)
        else:
            self.run.log({"step": step, **values})

    def write_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Log sample completions as a table."""
        if records:
            rows = []
            for record in records:
                rows.append([step, *(_cell(record.get(name)) for name in _COLUMNS)])
            table = self._package.Table(columns=["step", *_COLUMNS], data=rows)
            self.write(step, {"samples": table})

    def close(self) -> None:
        """Finish the run there."""
        with contextlib.redirect_stdout(sys.stderr):
            self.run.finish()


def _cell(value: Any) -> Any:
    """A number or a text: a chat is its JSON."""
    if isinstance(value, int | float | str | None):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
