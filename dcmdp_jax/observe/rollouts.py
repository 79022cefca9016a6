"""Records every token of a step with both its probabilities: rollouts/step_N.parquet of a run.

One completion a row. About 13 bytes a token after the prompt: an id, two log-probs, a mask; the
other columns are almost constant, or repeat in a group, and take little. A run whose batches lag
adds 4 bytes, one with `rollout.top_logprobs` at most 11 for each listed token. `dcmdp probe` and
`dcmdp view` read them.

| column | type | |
|---|---|---|
| step | int32 | finished training steps, as in metrics.jsonl |
| completion | int32 | place in the step's batch |
| prompt_id | int32 | place of the problem among the training problems |
| source | string | where the problem comes from |
| prompt_token_ids | list of int32 | the prompt as the engine read it |
| token_ids | list of int32 | given tokens, such as a tool's output, included |
| mask | list of bool | true where the policy sampled the token |
| train_logprobs | list of float32 | log p, training stack, weights that made the batch; 0 where not sampled |
| rollout_logprobs | list of float32 | log q, the engine; 0 where not sampled |
| start_logprobs | list of float32 | with a lag: log p_now, the training stack's at the start of the step |
| policy_versions | list of int32 | training step whose weights sampled it; -1 where not sampled |
| top | string | with top-k tokens: JSON, their ids and both log-probs (`dcmdp_jax.record.unpacked_top`) |
| reward, advantage | float32 | of the completion; the advantage before the penalty |

With a lag, staleness is start_logprobs - train_logprobs, mismatch train_logprobs -
rollout_logprobs, the gap their sum.
"""

import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.observe.jsonl import ROLLOUTS_DIRECTORY

_LOG = logging.getLogger(__name__)

_SCALARS = {
    "step": "int32",
    "completion": "int32",
    "prompt_id": "int32",
    "source": "string",
    "reward": "float32",
    "advantage": "float32",
    "top": "string",
}
"""Column with a value for each completion -> pyarrow's name of its type."""
_LISTS = {
    "prompt_token_ids": "int32",
    "token_ids": "int32",
    "policy_versions": "int32",
    "mask": "bool_",
    "train_logprobs": "float32",
    "rollout_logprobs": "float32",
    "start_logprobs": "float32",
}
"""Column with a list for each completion -> pyarrow's name of its elements' type."""


class RolloutWriter:
    """Writes the recordings of a run, and keeps their size within a bound by deleting the oldest.

    Args:
        run_dir: the run directory.
        every_steps: record steps 1, 1 + every_steps, ...; 0: none.
        max_bytes: limit of all files together. A step that alone takes more is not recorded, with a
            warning.
        resume_step: last finished step of the checkpoint that the run continues from; recordings of
            later ones are deleted. None: a new run; recordings of an earlier attempt are moved to
            rollouts.previous.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        every_steps: int,
        max_bytes: float = 2**30,
        resume_step: int | None,
    ) -> None:
        self._directory = Path(run_dir) / ROLLOUTS_DIRECTORY
        self._every = every_steps
        self._max_bytes = max_bytes
        if resume_step is None:
            if self._files():
                previous = self._directory.with_name(f"{ROLLOUTS_DIRECTORY}.previous")
                shutil.rmtree(previous, ignore_errors=True)
                os.replace(self._directory, previous)
            return
        for step, path in self._files().items():
            if step > resume_step:
                path.unlink()

    def due(self, step: int) -> bool:
        """Whether this step is to be recorded."""
        return self._every > 0 and (step - 1) % self._every == 0

    def write(self, step: int, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write a step's file, atomically; then delete the oldest ones above the bound.

        Args:
            step: finished training steps.
            completions: a dict for each, with the columns of the module's table but `step`.
        """
        # pyarrow takes a while to import.
        import pyarrow
        import pyarrow.parquet

        rows = [{"step": step, **completion} for completion in completions]
        columns = {}
        for name, kind in (_SCALARS | _LISTS).items():
            if rows and name not in rows[0]:
                continue
            cell_type = getattr(pyarrow, kind)()
            cells = [row[name] for row in rows]
            if name in _LISTS:
                cell_type = pyarrow.list_(cell_type)
                cells = list(map(np.asarray, cells))
            columns[name] = pyarrow.array(cells, cell_type)

        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"step_{step}.parquet"
        temporary = path.with_suffix(".partial")
        # Ids and log-probs have too many values for a dictionary, which would come on top of them.
        repeating = [
            name for name in columns if not name.endswith(("token_ids", "logprobs", "top"))
        ]
        with temporary.open("wb") as file:  # pyarrow takes no name that is not UTF-8
            pyarrow.parquet.write_table(
                pyarrow.table(columns),
                file,
                compression="zstd",
                use_dictionary=repeating,
            )
        size = temporary.stat().st_size
        if size > self._max_bytes:
            temporary.unlink()
            _LOG.warning(
                "the tokens of step %d take %.3g MiB, more than the %.3g MiB that %s/ may "
                "hold: not recorded",
                step,
                size / 2**20,
                self._max_bytes / 2**20,
                ROLLOUTS_DIRECTORY,
            )
            return

        os.replace(temporary, path)
        files = self._files()
        while (
            len(files) > 1 and sum(path.stat().st_size for path in files.values()) > self._max_bytes
        ):
            files.pop(min(files)).unlink()

    def _files(self) -> dict[int, Path]:
        """The recording of each step."""
        files = {}
        for path in self._directory.glob("step_*.parquet"):
            match = re.fullmatch(r"step_(\d+)\.parquet", path.name)
            if match:
                files[int(match[1])] = path
        return files
