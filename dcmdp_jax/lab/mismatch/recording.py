"""Recorded token ids with two log-prob columns, of whichever framework: parquet or JSON lines, checked row by row."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.errors import UserError
from dcmdp_jax.inputs import shorten, shorten_name
from dcmdp_jax.lab.mismatch.pairs import TokenPairs, make_pairs
from dcmdp_jax.lab.mismatch.recording_columns import Columns as Columns
from dcmdp_jax.lab.mismatch.recording_columns import LeftOut, check_distinct, check_whole, checked_row, require

_BATCH_ROWS = 64
_CUT_CHARACTER = "unexpected end of data"


class UnreadableError(UserError):
    """A file of a known kind that its reader does not take: damaged, or not yet written to its end."""


Row = dict[str, np.ndarray]
"""Kind of column -> the sampled tokens' values, or one value of the completion; from `columns.checked_row`."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """Content of a recording.

    Attributes:
        pairs: the tokens.
        rows: in the file.
        kept_every: 1 if all rows are in `pairs`; k if only every k-th is, because of `max_tokens`.
        left_out: tokens and lines that are not in `pairs` nor in `rows`.
    """

    pairs: TokenPairs
    rows: int
    kept_every: int
    left_out: LeftOut


class KeptRows:
    """Rows in bounded memory, spread evenly over all that come.

    While more than `max_tokens` tokens are held, every second row held is dropped and half as many are taken from
    there on. One row is always kept.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._held = max_tokens, 0
        self._kept: list[tuple[int, Row]] = []
        self._rewards: dict[Any, list[float]] = {}
        self.rows, self.every = 0, 1

    def add(self, row: Row) -> None:
        """Take the next row, or leave it out."""
        number, self.rows = self.rows, self.rows + 1
        if "reward" in row:
            # Of every row: the mean of a group is over rows that are not kept too.
            self._rewards.setdefault(row["group"].item(), []).append(float(row["reward"]))
        if number % self.every or not len(row["token"]):
            return
        self._kept.append((number, row))
        self._held += len(row["token"])
        while self._held > self._max_tokens and len(self._kept) > 1:
            self.every *= 2
            self._kept = [each for each in self._kept if each[0] % self.every == 0] or self._kept[:1]
            self._held = sum(len(row["token"]) for _, row in self._kept)

    def pairs(self, source: str | Path, left_out: LeftOut) -> TokenPairs:
        """The tokens kept.

        Raises:
            UserError: naming `source` and what was left out, if there is none.
        """
        if not self._kept:
            raise UserError(f"{source}: no sampled token in {self.rows} rows{left_out.after('; left out: ')}")
        return pairs_of([row for _, row in self._kept], self._rewards)


def pairs_of(rows: Iterable[Row], rewards: Mapping[Any, list[float]] | None = None) -> TokenPairs:
    """Lay the tokens of rows behind one another. `rewards` are all of each group, for the rows' advantages."""
    rows = list(rows)
    optional = {"entropies": "entropy", "lags": "lag", "advantages": "advantage"}
    given = {key: [row[name] for row in rows] for key, name in optional.items() if all(name in row for row in rows)}
    if rewards:
        given["advantages"] = [_above_mean(float(row["reward"]), rewards[row["group"].item()]) for row in rows]
    return make_pairs(*([row[name] for row in rows] for name in ("token", "train", "rollout")), **given)


def read_recording(path: str | Path, columns: Columns, *, max_tokens: int) -> Recording:
    """Read a recording in bounded memory (`KeptRows`); every row is checked, also those that are not kept.

    Args:
        path: .parquet, or .jsonl or .jsonl.gz with one JSON object a line.
        columns: names of the columns.
        max_tokens: tokens to keep at most, except that one row is always kept.

    Raises:
        UserError: one line naming file, row, column and what is wrong: a column that is not there (with those that
            are), there twice or given for two things, text that is not UTF-8, cells of different lengths, a value
            that the column cannot have, log-probs in base 2 or 10 or never filled in.
        FileNotFoundError: if there is no such file.
    """
    path = Path(path)
    check_distinct(columns)
    kept, left_out = KeptRows(max_tokens), LeftOut()
    for number, cells in enumerate(read_rows(path, columns.options(), left_out=left_out)):
        kept.add(checked_row(f"{path}, row {number}", cells, columns, left_out))
    pairs = kept.pairs(path, left_out)
    check_whole(path, pairs, columns)
    return Recording(pairs, kept.rows, kept.every, left_out)


def suffix_of(path: Path) -> str:
    """ ".jsonl", ".jsonl.gz", ".parquet", ...: with the kind of what is compressed."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


def read_rows(
    path: Path,
    wanted: Mapping[str, str],
    optional: Collection[str] = (),
    *,
    left_out: LeftOut,
    first: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of a .parquet, .jsonl or .jsonl.gz file, at least with the named cells.

    Args:
        path: of the file.
        wanted: option that names a column -> column, which must be there.
        optional: columns to read where they are there.
        left_out: is told of a last line that is cut.
        first: read this many rows at most.
    """
    if suffix_of(path) not in (".parquet", ".jsonl", ".jsonl.gz"):
        raise UserError(f"{path}: a recording is .parquet, .jsonl or .jsonl.gz")
    if not path.is_file():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    if path.suffix != ".parquet":
        yield from _json_rows(path, wanted, left_out, first)
        return
    # pyarrow takes a while to import; only this needs it.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            require(path, wanted, names)
            read = dict.fromkeys((*wanted.values(), *(name for name in optional if name in names)))
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(read)):
                columns = {name: _cells(batch.column(name)) for name in batch.schema.names}
                yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: holds text that is not UTF-8 ({error})") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise UnreadableError(f"{path}: not readable as parquet ({shorten_name(str(error))})") from None


def column_names(path: Path, left_out: LeftOut) -> list[str]:
    """Names of a file's columns; of JSON lines, those of its first row; empty if it has none.

    Raises:
        UserError: if it is not readable.
    """
    if path.suffix != ".parquet":
        return next((row.names for row in _json_rows(path, {}, left_out, 1)), [])
    import pyarrow
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_schema(path).names)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path}: not readable as parquet ({shorten_name(str(error))})") from None


def _cells(column: Any) -> list[Any]:
    """The cells of a parquet column: arrays where it holds lists of numbers, which is much faster than Python's."""
    import pyarrow

    if pyarrow.types.is_list(column.type) and not column.null_count:
        values = column.flatten()
        if not values.null_count and pyarrow.types.is_primitive(values.type):
            bounds = np.cumsum(column.value_lengths().to_numpy())
            return np.split(values.to_numpy(zero_copy_only=False), bounds[:-1])
    return column.to_pylist()


def _json_rows(path: Path, wanted: Mapping[str, str], left_out: LeftOut, first: int | None = None) -> Iterator[_Object]:
    for number, line in _lines(path, left_out):
        if not line.strip():
            continue
        if first is not None and (first := first - 1) < 0:
            return
        where = f"{path}, line {number}"
        unfinished = line.startswith((b"{", b"\xef\xbb\xbf{")) and not line.endswith(b"\n")
        try:
            row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_Object)
        except UnicodeDecodeError as error:
            if unfinished and error.reason == _CUT_CHARACTER:
                left_out.unfinished.append(where)
                return
            raise UserError(f"{where}: not UTF-8 ({error}); save the file in UTF-8") from None
        except (ValueError, RecursionError) as error:
            if unfinished:
                left_out.unfinished.append(where)
                return
            raise UserError(f"{where}: not valid JSON ({shorten_name(str(error))})") from None
        if not isinstance(row, _Object):
            raise UserError(f"{where}: {shorten(row)}, must be a JSON object")
        require(where, wanted, row.names)
        yield row


def _lines(path: Path, left_out: LeftOut) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line, also of a compressed file, as far as it goes."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):  # noqa: B007 - the number is for the error
                yield number, line
    except EOFError:
        left_out.unfinished.append(f"{path}, after line {number}")
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: not readable as gzip ({shorten_name(str(error))})") from None


class _Object(dict):
    """A JSON object that keeps all its names: of a name that comes twice, a dict drops the first value."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.names = [name for name, _ in pairs]


def _above_mean(reward: float, group: list[float]) -> float:
    """The reward less the mean of its group; exactly 0 where all are equal."""
    return 0.0 if min(group) == max(group) else reward - float(np.mean(group))
