"""Per-problem JSON lines of an evaluation, written part by part: `dcmdp view` shows them, a killed one continues.

The first line says what is evaluated. Then, for each part of a task, one line per problem and one that closes the part.
Nothing in the file depends on time, so a continued evaluation ends with the same bytes as an uninterrupted one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import VERIFIER_COUNTS, EvaluationResult
from dcmdp_jax.evaluation.held_out import HeldOut
from dcmdp_jax.evaluation.overlap import Overlap
from dcmdp_jax.evaluation.table import plain_average, to_record
from dcmdp_jax.inputs import shorten

_DONE = {"done": True}


class EvaluationLog:
    """The file of one evaluation, held by one process.

    Args:
        path: created, or continued where it holds an unfinished evaluation with the same header.
        header: description of the evaluation, JSON types; everything that changes a score.

    Raises:
        UserError: if another process writes the file, or it belongs to another evaluation.
        OSError: if it can't be read or written.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._parts: dict[tuple[str, int], EvaluationResult] = {}
        self.path = path
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(f"{path}: another process is writing this evaluation; choose another file") from None
        try:
            self._continue(path, json.loads(json.dumps(header)))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> EvaluationLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._parts:  # nothing to continue from
            self.path.unlink(missing_ok=True)
        self._file.close()

    def finished(self, task: str, part: int) -> EvaluationResult | None:
        """A part's result if the file has all of it."""
        return self._parts.get((task, part))

    def append(self, part: int, asked: Sequence[Mapping[str, Any]], result: EvaluationResult) -> None:
        """Write a finished part, and wait until it is on the disk.

        Args:
            part: 0-based within the task.
            asked: each problem's row in its file, and whatever else is to be kept of it.
            result: result on these problems.
        """
        lines = [
            {
                "task": result.task,
                **problem,
                "average": float(result.problem_averages[index]),
                "scores": [int(score) if score == int(score) else score for score in result.scores[index].tolist()],
                "lengths": result.lengths[index].tolist(),
                "truncated": result.truncated[index].astype(int).tolist(),
                "unparsed": result.unparsed[index].astype(int).tolist(),
                "completions": result.texts[index].tolist(),
                "found": result.found[index].tolist(),
            }
            for index, problem in enumerate(asked)
        ]
        counts = {name: getattr(result, name) for name in VERIFIER_COUNTS}
        lines.append({"task": result.task, "part": part, "problems": len(asked), **counts})
        self._write(lines)
        self._parts[result.task, part] = result

    def close_finished(self) -> None:
        """Mark the evaluation as done and close the file: the next one with this name starts over."""
        self._write([_DONE])
        self._file.close()

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._file.write(b"".join(map(_encode, lines)))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _continue(self, path: Path, header: dict[str, Any]) -> None:
        """Read the parts that are there; cut off what a kill left of the next one."""
        self._file.seek(0)
        kept, place, waiting = 0, 0, []
        for number, line in enumerate(self._file):
            place += len(line)
            record = _parse(line)
            if number == 0 and record is None and not _encode(header).startswith(line):
                raise UserError(f"{path}: holds no evaluation; choose another file")
            if record is None:
                break
            if number == 0:
                _check_header(path, record, header)
            elif "part" in record:
                if record.get("problems") != len(waiting):
                    break
                try:
                    self._parts[record["task"], record["part"]] = _result(record, waiting)
                except (KeyError, TypeError, ValueError):  # damaged, and still JSON
                    break
                waiting = []
            else:
                waiting.append(record)
                continue
            kept = place
        self._file.truncate(kept)
        if not kept:
            self._write([header])


def _encode(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line, None for a torn or foreign one."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _check_header(path: Path, found: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    for name, value in header.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            _check_header(path, found[name], value)
        elif found.get(name) != value:
            raise UserError(
                f"{path}: holds an unfinished evaluation with {name}={shorten(found.get(name))}, this one has "
                f"{shorten(value)}; delete it, or choose another file"
            )


def _result(closing: Mapping[str, Any], problems: Sequence[Mapping[str, Any]]) -> EvaluationResult:
    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([problem[name] for problem in problems], dtype)

    return EvaluationResult(
        task=closing["task"],
        scores=column("scores", np.float32),
        lengths=column("lengths", np.int32),
        truncated=column("truncated", bool),
        unparsed=column("unparsed", bool),
        texts=column("completions", object),
        found=column("found", object),
        **{name: closing[name] for name in VERIFIER_COUNTS},
    )


def open_output(out: Path | None, directory: Path, stem: str, header: Mapping[str, Any]) -> tuple[Path, EvaluationLog]:
    """Choose the evaluation's JSON file, found writable, and open its lines, `NAME.problems.jsonl` next to it.

    Without `out` the name is the first of `stem`.json, `stem`-2.json, ... that is free or holds this evaluation
    unfinished.

    Args:
        out: the JSON file. A finished evaluation there is replaced in the end, an unfinished one continued.
        directory, stem: parts of the name without `out`.
        header: see `EvaluationLog`.

    Raises:
        UserError: if `out` can't be written or belongs to another unfinished evaluation.
    """
    if out is None:
        out, number = directory / f"{stem}.json", 1
        while not _belongs(out, header):
            number += 1
            out = directory / f"{stem}-{number}.json"
    if out.is_dir():
        raise UserError(f"--out: {out} is a directory, name a file")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK | os.X_OK):
        raise UserError(f"--out: {out} can't be written, {out.parent} is no directory one can write to")
    lines = _lines_path(out)
    if lines.exists() and lines.read_bytes().endswith(_encode(_DONE)):
        lines.unlink()
    return out, EvaluationLog(lines, header)


def _lines_path(out: Path) -> Path:
    return out.with_suffix(".problems.jsonl")


def _belongs(out: Path, header: Mapping[str, Any]) -> bool:
    """Whether a name is free, or its evaluation is this one and not done."""
    lines = _lines_path(out)
    if not lines.exists():
        return not out.exists()
    with lines.open("rb") as file:
        first, rest = file.readline(), file.read()
    return _encode(header).startswith(first) and not rest.endswith(_encode(_DONE))


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, atomically."""
    atomic_write(path, json.dumps(record, indent=2, allow_nan=False) + "\n")


def evaluation_header(
    settings: Mapping[str, Any], held_out: HeldOut, *, model: str, step: int | None, files: Iterable[Path]
) -> dict[str, Any]:
    """Everything that changes a score: a continued evaluation must have the same.

    Args:
        settings: settings and arguments of the command that change a score.
        held_out: the tasks.
        model, step, files: name, step and weights of the policy.
    """
    return {
        "model": model,
        "step": step,
        # A directory may get other files under the same name.
        "weights": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(files)],
        "settings": dict(settings),
        "problems": {task.name: _digest(prompts) for task, prompts in held_out},
    }


def _digest(prompts: EncodedPrompts) -> str:
    asked = [(ids.tolist(), problem.answer) for ids, problem in zip(prompts.token_ids, prompts.problems, strict=True)]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def evaluation_record(
    method: str,
    header: Mapping[str, Any],
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
        rows = [problem.index for problem in prompts.problems]
        made = to_record(result, seed=seed) | {"dropped_prompts": prompts.dropped, "problem_rows": rows}
        if overlaps:
            made["overlap"] = [overlap._asdict() for overlap in overlaps[result.task]]
        tasks[result.task] = made
    described = {name: header[name] for name in ("model", "step", "settings")}
    return {"method": method, **described, "average": plain_average(results), "tasks": tasks}
