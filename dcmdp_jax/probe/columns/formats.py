"""Recording formats of the frameworks: file patterns, keys, and the meaning of each column.

To add a format, add an entry to `FORMATS`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.engines.process_memory import show_torch
from dcmdp_jax.errors import UserError, naming, shorten, shorten_name
from dcmdp_jax.probe.columns.recording import Cells, Columns, numbers, refuse
from dcmdp_jax.probe.columns.recording_files import (
    LeftOut,
    UnreadableError,
    column_names,
    read_rows,
    require,
    suffix_of,
)

_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".pt")


@dataclasses.dataclass(frozen=True)
class StepRank:
    """Step and rank at which a row was recorded; None where it is not known."""

    step: int | None = None
    rank: int | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Key to sort by: step, then rank; unknown ones first."""
        return (-1 if self.step is None else self.step, -1 if self.rank is None else self.rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A framework's recording.

    Attributes:
        patterns: globs of its files, at any depth below a directory; JSON lines may also be
            compressed.
        columns: names of the columns that it always has.
        named: regular expression of the step, or of step and rank, in a path; by default none is
            found.
        numbered: columns of step and rank in each row; a path that says them must agree.
        writer: who writes it, for people.
        marks: further columns of each row, which tell it from the others.
        optional: kind of column -> name, used where a row has it.
        source: column with the name of the task or environment; "" for none.
        prepare: changes a row in place into what `recording.checked_row` takes.
    """

    patterns: tuple[str, ...]
    columns: Columns
    writer: str
    marks: tuple[str, ...] = ()
    named: str = "(?!)"
    numbered: Sequence[str] = ("step", "rank")
    optional: Mapping[str, str] = dataclasses.field(default_factory=dict)
    source: str = ""
    prepare: Callable[[Cells], None] = lambda row: None

    @property
    def keys(self) -> set[str]:
        """Columns that each row has."""
        return {*self.columns.options().values(), *self.marks}

    def step_rank(self, path: Path, row: Mapping[str, Any]) -> StepRank:
        """Step and rank at which a row of a file was recorded.

        Raises:
            UserError: one of them is no whole number, or the path says another.
        """
        recorded = [_whole_number(name, row.get(name)) for name in self.numbered]
        match = re.search(self.named, path.as_posix())
        if not match:
            return StepRank(*recorded)
        in_path = list(map(int, match.groups()))
        for name, value, expected in zip(self.numbered, recorded, in_path, strict=False):
            if value not in (None, expected):
                raise UserError(
                    f"{name} is {value}, the file's name says {expected}; leave out a copy, or "
                    "name the file by what it holds"
                )
        return StepRank(*in_path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedFile:
    """A file of a recording: its path, its framework, and the place of its first row."""

    path: Path
    framework: str
    step_rank: StepRank


def identify(path: Path, left_out: LeftOut) -> RecordedFile | None:
    """The framework that wrote a file, by the names of its columns; None for a file without rows.

    Raises:
        UserError: with the keys found and the formats tried, or the column that the nearest one
            lacks, if none knows them; if the file is not readable.
    """
    keys = _keys(path, left_out)
    if not keys:
        return None
    lacking = {name: sorted(file_format.keys - set(keys)) for name, file_format in FORMATS.items()}
    framework = min(lacking, key=lambda name: len(lacking[name]))
    missing = lacking[framework]
    nearest = FORMATS[framework]
    if not missing:
        first_row = next(_file_rows(path, nearest, left_out), None)
        if first_row is None:
            return None
        where, row = first_row
        with naming(where):
            step_rank = nearest.step_rank(path, row)
        if framework == "recorder":
            framework = str(row.get("framework") or "columns")
        return RecordedFile(
            path=path,
            framework=framework,
            step_rank=step_rank,
        )

    listed = shorten_name(", ".join(map(str, keys)))
    if 2 * len(missing) < len(nearest.keys):
        raise UserError(
            f"{path}: looks like {framework}, column {', '.join(missing)} is missing; another name "
            f"is given by --train-column, --rollout-column and so on. Keys found: {listed}"
        )
    if path.suffix != ".pt":
        _refuse_columns(path, keys, listed, left_out)
    formats = "; ".join(
        f"{name} ({', '.join(sorted(file_format.keys))})" for name, file_format in FORMATS.items()
    )
    raise UserError(
        f"{path}: no format knows it. Keys found: {listed}. Formats tried: {formats}. "
        "Columns of other names are given by --train-column, --rollout-column and so on"
    )


def _whole_number(name: str, value: Any) -> int | None:
    """A step or a rank, which pandas writes as 1.0 beside nulls; None where there is none."""
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value % 1 != 0 or abs(value) >= 2**63:
        raise UserError(f"{name} is {shorten(value)}, must be a whole number of int64")
    return int(value)


def _refuse_columns(path: Path, names: list[str], listed: str, left_out: LeftOut) -> None:
    """Say which columns of the first row hold log-probs and token ids, or that there are none."""
    _, row = next(read_rows(path, {}, names, left_out=left_out), ("", {}))
    logprobs = []
    ids = []
    for name in names:
        column = _as_numbers(row.get(name))
        if column is None:
            continue
        if column.max() <= 0 > column.min():
            logprobs.append(name)
        if column.min() >= 0 and (column % 1 == 0).all():
            ids.append(name)

    if logprobs:
        token_option = f" and --token-column={ids[0]}" if ids else ""
        raise UserError(
            f"{path}: no format knows it. {shorten_name(', '.join(logprobs))} hold log-probs: "
            "name the training stack's by --train-column, the engine's by "
            f"--rollout-column{token_option}. Keys found: {listed}"
        )
    if not ids:
        raise UserError(
            f"{path}: text without log-probs. Keys found: {listed}. verl, TRL and SkyRL write "
            "none by themselves: record both with dcmdp_jax.record in the trainer's process "
            "(docs/probe.md), then probe that recording"
        )


def _as_numbers(cell: Any) -> np.ndarray | None:
    """The values of a list of numbers, without nulls; None if it is none or empty."""
    if not isinstance(cell, list | np.ndarray):
        return None
    values = [value for value in cell if value is not None]
    numbers = {int, float, np.float32, np.float64, np.int32, np.int64}
    if not values or not numbers.issuperset(map(type, values)):
        return None
    return np.array(values)


def format_of(framework: str) -> Format:
    """The format of a framework; the recorder's for one that has none of its own."""
    return FORMATS.get(framework, FORMATS["recorder"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRow:
    """A row of a recording.

    Attributes:
        where: file and line or row, for errors.
        step_rank: where it was recorded.
        source: task or environment, if known.
        columns: names what this row has.
        cells: by column.
    """

    where: str
    step_rank: StepRank
    source: str | None
    columns: Columns
    cells: Cells


def rows_of(files: Sequence[RecordedFile], left_out: LeftOut) -> Iterator[RecordedRow]:
    """The rows of a recording's files.

    Raises:
        UserError: naming a row that has a step, a mask, entropies or ages and the rows before it
            have none, or the other way round.
    """
    first_names = None
    for file in files:
        file_format = format_of(file.framework)
        for where, cells in _file_rows(file.path, file_format, left_out):
            with naming(where):
                step_rank = file_format.step_rank(file.path, cells)
                file_format.prepare(cells)
            present = {
                kind: name
                for kind, name in file_format.optional.items()
                if cells.get(name) is not None
            }
            names = {name for kind, name in present.items() if kind in _OF_EVERY_ROW}
            if step_rank.step is not None:
                names.add("step")

            if first_names is None:
                first_names = names
            for name in sorted(names ^ first_names):
                difference = "is given, the rows before have none"
                if name in first_names:
                    difference = "is null or missing, the rows before have it"
                raise UserError(f"{where}: {name} {difference}; give it to every row or to none")

            yield RecordedRow(
                where=where,
                step_rank=step_rank,
                source=_source_name(cells.get(file_format.source)),
                columns=dataclasses.replace(file_format.columns, **present),
                cells=cells,
            )


def files_below(directory: Path) -> list[Path]:
    """Files at any depth that a format's pattern matches, or else all of a known suffix."""
    patterns = []
    for file_format in FORMATS.values():
        for pattern in file_format.patterns:
            patterns.append(pattern)
            if pattern.endswith(".jsonl"):
                patterns.append(f"{pattern}.gz")
    files = _matching(directory, patterns)
    return files or _matching(directory, [f"*{suffix}" for suffix in _SUFFIXES])


def _matching(directory: Path, patterns: list[str]) -> list[Path]:
    files = set()
    for pattern in patterns:
        files.update(path for path in directory.rglob(pattern) if path.is_file())
    return sorted(files)


def _source_name(source: Any) -> str | None:
    """NeMo-RL names an agent by an object with a name."""
    if isinstance(source, list) and len(source) == 1:
        source = source[0]
    if isinstance(source, Mapping):
        source = source.get("name", dict(source))
    if source is None:
        return None
    return str(source)


def _keys(path: Path, left_out: LeftOut) -> list[str]:
    if path.suffix == ".pt":
        payload = _load_torch(path)
        if not isinstance(payload, dict):
            return [type(payload).__name__]
        samples = payload.get("samples")
        if isinstance(samples, list) and samples and isinstance(samples[0], dict):
            return [*payload, *samples[0]]
        return list(payload)
    if suffix_of(path) not in _SUFFIXES:
        raise UserError(
            f"{path}: a recording is a {', '.join(_SUFFIXES)} file, a directory, or a glob of these"
        )
    return column_names(path, left_out)


def _file_rows(path: Path, file_format: Format, left_out: LeftOut) -> Iterator[tuple[str, Cells]]:
    if path.suffix == ".pt":
        yield from _slime_rows(path, file_format)
        return
    optional = [*file_format.optional.values(), file_format.source, *_PLACE, *_SHOWN]
    yield from read_rows(path, file_format.columns.options(), optional, left_out=left_out)


def _slime_rows(path: Path, file_format: Format) -> Iterator[tuple[str, Cells]]:
    """The samples of a slime dump, with tensors as lists and numbers."""
    payload = _load_torch(path)
    version = _plain(payload["format_version"])
    if version != _SLIME_VERSION:
        raise UserError(
            f"{path}: format_version is {shorten(version)}, must be {_SLIME_VERSION}: its columns "
            "may mean something else; dump with a slime that writes this version"
        )
    # Of the whole rollout, before samples are filtered out.
    rewards = _plain(payload.get("raw_reward"))
    if rewards is None:
        rewards = []
    if not isinstance(rewards, list):
        raise UserError(
            f"{path}: raw_reward is {shorten(rewards)}, must be a list with one reward a sample of "
            "the rollout"
        )

    rewards_by_position = dict(enumerate(rewards))
    for number, sample in enumerate(payload["samples"], start=1):
        where = f"{path}, row {number}"
        if not isinstance(sample, dict):
            raise UserError(f"{where}: the sample is {shorten(sample)}, must be a dict")
        row = {name: _plain(cell) for name, cell in sample.items()}
        present = [name for name, cell in row.items() if cell is not None]
        require(where, file_format.columns.options(), present)
        row["rollout_id"] = _plain(payload.get("rollout_id"))
        position = row.get("rollout_position")
        if isinstance(position, int):
            row["reward"] = _plain(rewards_by_position.get(position))
        yield where, row


def _plain(cell: Any) -> Any:
    """A tensor as a list or a number; anything else as it is."""
    if hasattr(cell, "tolist"):
        return cell.tolist()
    return cell


@functools.lru_cache(maxsize=1)
def _load_torch(path: Path) -> Any:
    """The content of a torch file, cached: its keys, first row and all rows are asked for."""
    show_torch()
    try:
        import torch
    except ImportError:
        raise UserError(
            f"{path}: slime's dumps are torch files; reading them needs torch: pip install torch"
        ) from None
    try:
        # Tensors and plain values alone: nothing in the file is executed.
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler does
        raise UnreadableError(
            f"{path}: not readable by torch ({_torch_reason(error)}); dump it again, or leave it "
            "out"
        ) from None


def _torch_reason(error: Exception) -> str:
    """The first sentence of torch's error without terminal codes; ours where that says nothing."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    sentence = lines[0].partition(". ")[0] if lines else ""
    # A cut file is an invalid argument of the system, a file of text a number.
    if isinstance(error, OSError | KeyError) or " " not in sentence:
        return "it is empty, cut or no torch file"
    return shorten_name(sentence)


_OF_EVERY_ROW = ("mask", "entropy", "lag")
"""Kinds of optional columns that the rows of a recording have together or not at all."""
_SLIME_VERSION = 2
"""`format_version` of the dumps whose columns are known."""
_PLACE = ("step", "rank", "framework")
_SHOWN = ("reward", "advantage", "advantages", "prompt_id", "prompt_token_ids")
"""Columns that `dcmdp view` shows of a completion."""


def _nemo_row(row: Cells) -> None:
    """NeMo-RL writes each row as a batch of one: every cell is in a list of its own."""
    rewards = row.get("rewards")
    if isinstance(rewards, list) and len(rewards) == 1:
        row["reward"] = rewards[0]
    for name in (
        "token_ids",
        "token_loss_mask",
        "generation_logprobs",
        "prev_logprobs",
        "advantages",
    ):
        cell = row.get(name)
        if isinstance(cell, list) and len(cell) == 1 and isinstance(cell[0], list):
            row[name] = cell[0]


def _slime_sample(row: Cells) -> None:
    """Keep the response's tokens, which the mask has: `tokens` has the prompt too."""
    if isinstance(row["tokens"], list) and isinstance(row["loss_masks"], list):
        row["tokens"] = row["tokens"][max(len(row["tokens"]) - len(row["loss_masks"]), 0) :]


def _own_row(row: Cells) -> None:
    """Make ages of versions; a token of step k is sampled for version k - 1's update."""
    step = row.get("step")
    if step is None:
        raise UserError("step is null or missing; each row of a run has its step, leave others out")
    versions = numbers("policy_versions", row["policy_versions"])
    future = ~(versions < step)
    refuse("policy_versions", versions, future, f"must be below the row's step, {step}")
    row["policy_versions"] = step - 1 - versions


FORMATS = {
    "nemo-rl": Format(
        patterns=("train_data_step*.jsonl",),
        columns=Columns(
            token="token_ids",
            train="prev_logprobs",
            rollout="generation_logprobs",
            mask="token_loss_mask",
        ),
        source="agent_ref",
        named=r"step(\d+)\.jsonl[^/]*$",
        numbered=(),
        prepare=_nemo_row,
        writer="NeMo-RL, train_data_step*.jsonl of its log directory",
    ),
    "prime-rl": Format(
        patterns=("step_*/rank_*.jsonl",),
        columns=Columns(
            token="token_ids",
            train="trainer_logprobs",
            rollout="inference_logprobs",
            mask="loss_mask",
        ),
        optional={"entropy": "entropy"},
        source="env_name",
        named=r"step_(\d+)/rank_(\d+)\.jsonl",
        writer="prime-rl, trainer.enable_token_export",
    ),
    "slime": Format(
        patterns=("train_*.pt", "train_data/*.pt"),
        marks=("format_version", "samples"),
        columns=Columns(
            token="tokens", train="log_probs", rollout="rollout_log_probs", mask="loss_masks"
        ),
        numbered=("rollout_id", "data_parallel_rank"),
        prepare=_slime_sample,
        writer="slime, --save-debug-train-data",
    ),
    "dcmdp": Format(
        patterns=("rollouts/step_*.parquet",),
        marks=("prompt_id",),
        columns=Columns(
            token="token_ids",
            train="train_logprobs",
            rollout="rollout_logprobs",
            mask="mask",
            lag="policy_versions",
        ),
        optional={"top": "top"},
        source="source",
        named=r"step_(\d+)\.parquet$",
        numbered=("step",),
        prepare=_own_row,
        writer="this trainer, rollouts/ of a run directory",
    ),
    "recorder": Format(
        patterns=("step_*/rank_*.jsonl",),
        columns=Columns("token_ids", "train_logprobs", "rollout_logprobs"),
        optional={"mask": "mask", "entropy": "entropies", "lag": "lag", "top": "top"},
        source="source",
        named=r"step_(\d+)/rank_(\d+)\.jsonl",
        writer="dcmdp_jax.record, or columns of its names, from TRL, verl, SkyRL or any other "
        "trainer",
    ),
}
"""Framework -> format. TRL, verl and SkyRL record by `dcmdp_jax.record`, which writes the
framework's name.
"""
