"""Names of the files in a run directory, and strict JSON lines that survive a kill.

A line is one object, NaN is preserved, and a torn last line is detected.

JSON cannot represent NaN and infinity. They are written as the strings "NaN", "Infinity" and
"-Infinity" (protobuf's JSON convention): every parser reads the file, a diverged value differs from
a missing one, and Python's `float()` and pandas convert the strings back.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.errors import UserError

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
HELD_OUT_FILE = "held_out_samples.jsonl"
ROLLOUTS_DIRECTORY = "rollouts"
STARTS_FILE = "starts.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"
PLOTS_DIRECTORY = "plots"
REPORT_FILE = "report.html"


def rewards_log(host: int) -> str:
    """File that has what the reward functions of a host printed."""
    if host:
        return f"rewards_{host}.log"
    return "rewards.log"


Record = dict[str, Any]
"""A line of a file."""
_LOG = logging.getLogger(__name__)


def encode(record: Mapping[str, Any]) -> str:
    """Encode a record as one line of strict JSON, newline included.

    Args:
        record: values may be strings, numbers, numpy scalars, None, and lists or mappings of these.

    Raises:
        ValueError: if JSON cannot represent a value's type.
    """
    return json.dumps(json_values(record, by_name=True), allow_nan=False, ensure_ascii=False) + "\n"


def json_values(value: Any, *, by_name: bool = False) -> Any:
    """Return a tree of what strict JSON holds.

    Args:
        value: NumPy's values become Python's, named tuples mappings.
        by_name: write NaN and infinity by their names; else they become None.

    Raises:
        ValueError: if JSON cannot represent a value's type.
    """
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): json_values(item, by_name=by_name) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [json_values(item, by_name=by_name) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        if not by_name:
            return None
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(
        f"a record holds {value!r} of type {type(value).__name__}; allowed: text, numbers, lists, "
        "mappings"
    )


def read(path: Path) -> list[Record]:
    """Read all records of a file; skip a last line torn by a kill. A missing file has no records.

    Raises:
        ValueError: if any other line is not a JSON object, with its number.
    """
    if not path.exists():
        return []
    records = []
    for number, complete, _, record in _lines(path):
        if record is not None:
            records.append(record)
        elif complete:
            raise UserError(f"{path} line {number} is not a JSON object; delete that line")
    return records


def is_number(value: object) -> bool:
    """Whether a value of a record is a number or null."""
    return (
        value is None or isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity")
    )


def readable(path: Path) -> list[Record]:
    """All records that can be read, for readers that must not stop a run; see `truncate`."""
    if not path.exists():
        return []
    lines = _lines(path, numbers_only=path.name == METRICS_FILE)
    return [record for *_, record in lines if record is not None]


def truncate(path: Path, last_step: float = math.inf) -> None:
    """Atomically drop the records of steps after `last_step`, and unreadable lines.

    A file that needs no change is not touched. An unreadable line in the middle (after a power cut)
    is dropped with a warning: a metric line must not stop a run from resuming. A line of
    `METRICS_FILE` is unreadable too where a value is no number.

    Args:
        path: file of records with "step"; may be missing.
        last_step: the last step to keep.
    """
    if not path.exists():
        return
    lines = []
    for number, complete, line, record in _lines(path, numbers_only=path.name == METRICS_FILE):
        step = None if record is None else record.get("step")
        if isinstance(step, int):
            if step <= last_step:
                if not complete:
                    line += b"\n"
                lines.append(line)
        elif complete:
            _LOG.warning("%s line %d is unreadable and was dropped", path, number)
    content = b"".join(lines)
    if content != path.read_bytes():
        atomic_write(path, content)


def _lines(
    path: Path, *, numbers_only: bool = False
) -> Iterator[tuple[int, bool, bytes, Record | None]]:
    """Yield (number, ends in a newline, bytes, record or None if unreadable) of non-empty lines.

    With `numbers_only` a record with another value is unreadable.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            is_readable = isinstance(record, dict)
            if is_readable and numbers_only:
                is_readable = all(map(is_number, record.values()))
            if not is_readable:
                record = None
            yield number, line.endswith(b"\n"), line, record
