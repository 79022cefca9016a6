"""Per-problem JSON lines of an evaluation, written part by part, so that a killed one continues.

`dcmdp view` shows them. The first line says what is evaluated. Then, for each part of a task, one
line per problem and one that closes the part. Nothing in the file depends on time, so a continued
evaluation ends with the same bytes as an uninterrupted one.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.data.prompts import digest_of
from dcmdp_jax.dotted_names import flatten
from dcmdp_jax.errors import UserError, shorten
from dcmdp_jax.evaluation.average import COLUMNS, UNJUDGED, EvaluationResult
from dcmdp_jax.evaluation.held_out import HeldOut, Overlap
from dcmdp_jax.evaluation.table import plain_average, to_record

_Record = Mapping[str, Any]

_DONE = {"done": True}
_LINES = ".problems.jsonl"
_KEYS = {name: name for name in COLUMNS} | {"texts": "completions", "answers": "found"}
"""Field of a result -> its key in a problem's line."""


class EvaluationLog(contextlib.AbstractContextManager["EvaluationLog"]):
    """The file of one evaluation, held by one process.

    Args:
        path: created, or continued where it holds an unfinished evaluation with the same header.
        header: description of the evaluation, JSON types; everything that changes a score.

    Raises:
        UserError: if another process writes the file, or it belongs to another evaluation.
        OSError: if it can't be read or written.
    """

    def __init__(self, path: Path, header: _Record) -> None:
        self._parts: dict[tuple[str, int], EvaluationResult] = {}
        self.path = path
        with contextlib.ExitStack() as on_failure:
            self._file = on_failure.enter_context(path.open("a+b"))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{path}: another process is writing this evaluation; choose another file"
                ) from None
            self._continue(path, json.loads(json.dumps(header)))
            on_failure.pop_all()

    def __exit__(self, *exception: object) -> None:
        if not self._parts:  # nothing to continue from
            self.path.unlink(missing_ok=True)
        self._file.close()

    def finished(self, task: str, part: int) -> EvaluationResult | None:
        """A part's result if the file has all of it."""
        return self._parts.get((task, part))

    def append(
        self,
        part: int,
        problems: Sequence[_Record],
        result: EvaluationResult,
    ) -> None:
        """Write a finished part, and wait until it is on the disk.

        Args:
            part: 0-based within the task.
            problems: each problem's row in its file, and whatever else is to be kept of it.
            result: result on these problems.
        """
        lines = []
        for index, problem in enumerate(problems):
            average = result.problem_averages[index]
            line = {"task": result.task, **problem, "average": average}
            for name, key in _KEYS.items():
                values = getattr(result, name)[index].tolist()
                line[key] = [*map(_plain, values)]
            lines.append(line)
        lines.append(
            {"task": result.task, "part": part, "problems": len(problems), **result.unjudged}
        )
        self._write(lines)
        self._parts[result.task, part] = result

    def close_finished(self) -> None:
        """Mark the evaluation as done and close the file: the next of this name starts over."""
        self._write([_DONE])
        self._file.close()

    def _write(self, lines: Sequence[_Record]) -> None:
        self._file.write(b"".join(map(_encode, lines)))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _continue(self, path: Path, header: dict[str, Any]) -> None:
        """Read the parts that are there; cut off what a kill left of the next one."""
        self._file.seek(0)
        position = 0
        end_of_part = 0
        problems = []
        for number, line in enumerate(self._file):
            position += len(line)
            record = _parse(line)
            if record is None:
                # A kill may have cut the header itself.
                if number == 0 and not _encode(header).startswith(line):
                    raise UserError(f"{path}: holds no evaluation; choose another file")
                break
            if number == 0:
                _check_header(path, record, header)
                end_of_part = position
                continue
            if "part" not in record:
                problems.append(record)
                continue
            if record.get("problems") != len(problems):
                break
            try:
                self._parts[record["task"], record["part"]] = _result(record, problems)
            except (KeyError, TypeError, ValueError):  # damaged, and still JSON
                break
            problems = []
            end_of_part = position
        self._file.truncate(end_of_part)
        if not end_of_part:
            self._write([header])


def _plain(value: Any) -> Any:
    """A truth value or whole number as an integer, which takes fewer bytes."""
    if isinstance(value, bool | float) and value == int(value):
        return int(value)
    return value


def _encode(record: _Record) -> bytes:
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line, None for a torn or foreign one."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _check_header(path: Path, file_header: _Record, header: _Record) -> None:
    file_values = flatten(file_header)
    for name, value in flatten(header).items():
        file_value = file_values.get(name)
        if file_value != value:
            raise UserError(
                f"{path}: holds an unfinished evaluation with "
                f"{name.removeprefix('settings.')}={shorten(file_value)}, this one has "
                f"{shorten(value)}; delete it, or choose another file"
            )


def _result(closing: _Record, problems: Sequence[_Record]) -> EvaluationResult:
    def column(name: str) -> np.ndarray:
        return np.array([problem[_KEYS[name]] for problem in problems], COLUMNS[name])

    return EvaluationResult(
        task=closing["task"],
        **{name: column(name) for name in COLUMNS},
        unjudged={f"verifier_{name}": closing[f"verifier_{name}"] for name in UNJUDGED},
    )


def open_output(
    out: Path | None,
    directory: Path,
    stem: str,
    header: _Record,
) -> tuple[Path, EvaluationLog]:
    """Choose the evaluation's JSON file, and open its lines, `NAME.problems.jsonl` next to it.

    Without `out` the name is the first of `stem`.json, `stem`-2.json, ... that is free or holds
    this evaluation unfinished.

    Args:
        out: the JSON file. A finished evaluation there is replaced in the end, an unfinished one
            continued.
        directory, stem: parts of the name without `out`.
        header: see `EvaluationLog`.

    Raises:
        UserError: if `out` can't be written or belongs to another unfinished evaluation.
    """
    if out is None:
        numbers = itertools.count(2)
        out = directory / f"{stem}.json"
        while not _belongs(out, header):
            out = directory / f"{stem}-{next(numbers)}.json"
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK | os.X_OK):
        raise UserError(
            f"--out: {out} can't be written; name a file in a directory one can write to"
        )
    lines = out.with_suffix(_LINES)
    if lines.exists() and lines.read_bytes().endswith(_encode(_DONE)):
        lines.unlink()
    return out, EvaluationLog(lines, header)


def _belongs(out: Path, header: _Record) -> bool:
    """Whether a name is free, or its evaluation is this one and not done."""
    lines = out.with_suffix(_LINES)
    if not lines.exists():
        return not out.exists()
    with lines.open("rb") as file:
        first_line = file.readline()
        other_lines = file.read()
    return _encode(header).startswith(first_line) and not other_lines.endswith(_encode(_DONE))


def write_json(path: Path, record: _Record) -> None:
    """Write a record as JSON, atomically."""
    atomic_write(path, json.dumps(record, indent=2, allow_nan=False) + "\n")


def evaluation_header(
    settings: _Record,
    held_out: HeldOut,
    *,
    model: str,
    step: int | None,
    files: Iterable[Path],
) -> dict[str, Any]:
    """Everything that changes a score: a continued evaluation must have the same.

    Args:
        settings: settings and arguments of the command that change a score.
        held_out: the tasks.
        model, step, files: name, step and weights of the policy.
    """
    # A directory may get other files under the same name.
    weights = []
    for path in sorted(files):
        stat = path.stat()
        weights.append([path.name, stat.st_size, stat.st_mtime_ns])
    return {
        "model": model,
        "step": step,
        "weights": weights,
        "settings": dict(settings),
        "problems": {task.name: digest_of(prompts) for task, prompts in held_out},
    }


def evaluation_record(
    method: str,
    header: _Record,
    results: Sequence[EvaluationResult],
    held_out: HeldOut,
    overlaps: Mapping[str, Sequence[Overlap]],
    *,
    seed: int,
) -> dict[str, Any]:
    """The results of an evaluation, JSON types.

    Args:
        method: label of the table's row.
        header: see `evaluation_header`.
        results: of each task.
        held_out: the tasks.
        overlaps: by task; empty where nobody asked.
        seed: the bootstrap's.
    """
    tasks = {}
    for result, (_, prompts) in zip(results, held_out, strict=True):
        record = to_record(result, seed=seed)
        record["dropped_prompts"] = prompts.dropped
        record["problem_rows"] = [problem.index for problem in prompts.problems]
        if overlaps:
            record["overlap"] = [*map(dataclasses.asdict, overlaps[result.task])]
        tasks[result.task] = record
    return {
        "method": method,
        "model": header["model"],
        "step": header["step"],
        "settings": header["settings"],
        "average": plain_average(results),
        "tasks": tasks,
    }
