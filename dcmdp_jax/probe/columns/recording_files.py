"""Rows of .parquet, .jsonl and .jsonl.gz files, without what a running job has not finished."""

import contextlib
import dataclasses
import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.errors import UserError, shorten, shorten_name

_BATCH_ROWS = 64
"""Rows of a parquet file in memory at a time."""
_CUT_CHARACTER = "unexpected end of data"
"""Python's reason for a UTF-8 text that ends within a character."""


class UnreadableError(UserError):
    """A file of a known kind that its reader refuses: damaged, or not yet written to its end."""


@dataclasses.dataclass
class LeftOut:
    """Count of what a recording holds and nobody reads; its text is one line.

    Attributes:
        tokens: sampled tokens of which a log-prob or an entropy is null, NaN or infinite.
        first: file, row and column of the first of them.
        rewards: rewards that are null, NaN or infinite, of a recording that has others.
        first_reward: file and row of the first of them.
        unfinished: files that end in the middle of a line or of a step, with the place.
    """

    tokens: int = 0
    first: str = ""
    rewards: int = 0
    first_reward: str = ""
    unfinished: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        descriptions = []
        if self.tokens:
            descriptions.append(
                f"{self.tokens:,} tokens whose log-prob or entropy is null, NaN or infinite, "
                f"the first in {self.first}"
            )
        if self.rewards:
            descriptions.append(
                f"{self.rewards:,} rewards that are null, NaN or infinite, of their step's mean, "
                f"the first in {self.first_reward}"
            )
        if self.unfinished:
            first, *others = self.unfinished
            count = f" and {len(others)} more" if others else ""
            descriptions.append(
                f"what is cut or incomplete, as by a job that is still writing: {first}{count}"
            )
        return "; ".join(descriptions)

    def after(self, words: str) -> str:
        """These words and what was left out, or nothing if nothing was."""
        description = str(self)
        if not description:
            return ""
        return words + description


def require(where: str | Path, options: Mapping[str, str], names: list[str]) -> None:
    """Raise UserError unless each column of `options`, option -> name, is in `names` once."""
    for option, name in options.items():
        count = names.count(name)
        if count > 1:
            raise UserError(
                f"{where}: {count} columns are named {shorten(name)} ({option}); rename all but one"
            )
        if not count:
            raise UserError(
                f"{where}: no column {shorten(name)} ({option}); found are "
                f"{shorten_name(', '.join(map(str, names)))}"
            )


def suffix_of(path: Path) -> str:
    """ ".jsonl", ".jsonl.gz", ".parquet", ...: with the kind of what is compressed."""
    if path.suffix == ".gz":
        return "".join(path.suffixes[-2:])
    return path.suffix


def read_rows(
    path: Path,
    options: Mapping[str, str],
    optional: Collection[str] = (),
    *,
    left_out: LeftOut,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a .parquet, .jsonl or .jsonl.gz file, at least with the named cells.

    Each comes with its place for errors: the file and the line, or the row of a table, from 1.

    Args:
        path: the file.
        options: option that names a column -> column, which must be there.
        optional: columns to read where they are there.
        left_out: is told of a last line that is cut.
    """
    if suffix_of(path) not in (".parquet", ".jsonl", ".jsonl.gz"):
        raise UserError(f"{path}: a recording is .parquet, .jsonl or .jsonl.gz")
    if not path.is_file():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    if path.suffix != ".parquet":
        yield from _json_rows(path, options, left_out)
        return

    with _parquet(path) as file:
        names = file.schema_arrow.names
        require(path, options, names)
        columns = dict.fromkeys((*options.values(), *optional))
        read_names = [name for name in columns if name in names]
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=read_names):
            cells = [_cells(column) for column in batch.columns]
            for row in zip(*cells, strict=True):
                number += 1
                yield f"{path}, row {number}", dict(zip(batch.schema.names, row, strict=True))


def column_names(path: Path, left_out: LeftOut) -> list[str]:
    """Names of a file's columns; of JSON lines those of the first row, empty without one.

    Raises:
        UserError: if it is not readable.
    """
    if path.suffix != ".parquet":
        return next((row.names for _, row in _json_rows(path, {}, left_out)), [])
    with _parquet(path) as file:
        return list(file.schema_arrow.names)


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`; what is wrong with it while it is read is a UserError."""
    # pyarrow takes a while to import; only this needs it.
    import pyarrow
    import pyarrow.parquet

    try:
        # Opened here: pyarrow takes no name that is not UTF-8.
        with path.open("rb") as opened, pyarrow.parquet.ParquetFile(opened) as file:
            yield file
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: holds text that is not UTF-8 ({error})") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise UnreadableError(
            f"{path}: not readable as parquet ({shorten_name(str(error))})"
        ) from None


def _cells(column: Any) -> list[Any]:
    """The cells of a parquet column: arrays where it holds lists of numbers, which is faster."""
    import pyarrow

    if pyarrow.types.is_list(column.type) and not column.null_count:
        values = column.flatten()
        if not values.null_count and pyarrow.types.is_primitive(values.type):
            bounds = np.cumsum(column.value_lengths().to_numpy())
            return np.split(values.to_numpy(zero_copy_only=False), bounds[:-1])
    return column.to_pylist()


def _json_rows(
    path: Path, options: Mapping[str, str], left_out: LeftOut
) -> "Iterator[tuple[str, _Object]]":
    for number, line in _lines(path, left_out):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        unfinished = line.startswith((b"{", b"\xef\xbb\xbf{")) and not line.endswith(b"\n")
        try:
            row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_Object)
        except (ValueError, RecursionError) as error:
            expected = f"valid JSON ({shorten_name(str(error))}); a recording has an object a line"
            cut = unfinished
            if isinstance(error, UnicodeDecodeError):
                expected = f"UTF-8 ({error}); save the file in UTF-8"
                cut = unfinished and error.reason == _CUT_CHARACTER
            if cut:
                left_out.unfinished.append(where)
                return
            raise UserError(f"{where}: not {expected}") from None
        if not isinstance(row, _Object):
            raise UserError(f"{where}: {shorten(row)}, must be a JSON object")
        require(where, options, row.names)
        yield where, row


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
    """A JSON object with all its names; a dict drops the first value of one that comes twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.names = [name for name, _ in pairs]
