"""Recorded token ids with two log-prob columns, of whichever framework: parquet or JSON lines, checked row by row."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.errors import UserError
from dcmdp_jax.inputs import shorten, shorten_name
from dcmdp_jax.lab.mismatch.pairs import TokenPairs, make_pairs

_BATCH_ROWS = 64
# Half precision may leave a log-prob a little above 0 and an entropy a little below.
_ROUNDING = 1e-3
_LARGEST = np.iinfo(np.int32).max
_BASES = {"2": 1 / math.log(2), "10": 1 / math.log(10)}
_OTHER_BASE_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of a recording's columns; each cell is a list with one entry for each token.

    Attributes:
        token: token ids, whole numbers that int32 holds.
        train, rollout: log-probs in nats, training stack's and engine's.
        mask: 1 on sampled tokens, 0 on prompt and padding; "" if every token was sampled.
        entropy: of the training stack, nats, at least 0; "" if there is none.
        lag: age of the weights that sampled a token in training steps, whole numbers from 0, a list or one number; ""
            if there is none.
        advantage: of the completion, a number, or a list with the same number for each token; "" if there is none.
        reward: of the completion, a number; "" if there is none. Less its group's mean it has the advantage's sign.
        group: prompt that a completion answers, a number or text; needed with `reward`.
    """

    token: str
    train: str
    rollout: str
    mask: str = ""
    entropy: str = ""
    lag: str = ""
    advantage: str = ""
    reward: str = ""
    group: str = ""

    def options(self) -> dict[str, str]:
        """Option of `bin.probe` -> column, for those that are given."""
        return {f"--{name}-column": value for name, value in dataclasses.asdict(self).items() if value}


@dataclasses.dataclass(frozen=True)
class Recording:
    """Content of a recording.

    Attributes:
        pairs: the tokens.
        rows: in the file.
        kept_every: 1 if all rows are in `pairs`; k if only every k-th is, because of `max_tokens`.
    """

    pairs: TokenPairs
    rows: int
    kept_every: int


def read_recording(path: str | Path, columns: Columns, *, max_tokens: int) -> Recording:
    """Read a recording in bounded memory; every row is checked, also those that are not kept.

    While more than `max_tokens` tokens are held, every second row held is dropped and half as many are taken from
    there on. So at most `max_tokens` tokens and one batch of rows are in memory, and the rows kept are spread evenly.

    Args:
        path: .parquet, or .jsonl with one JSON object a line.
        columns: names of the columns.
        max_tokens: tokens to keep at most, except that one row is always kept.

    Raises:
        UserError: one line naming file, row, column and what is wrong: a column that is not there (with those that
            are), there twice or given for two things, text that is not UTF-8, cells of different lengths, a value
            that the column cannot have, log-probs in base 2 or 10 or never filled in.
        FileNotFoundError: if there is no such file.
    """
    path = Path(path)
    _check_distinct(columns)
    kept: list[dict[str, np.ndarray]] = []
    held, every, rows = 0, 1, 0
    rewards: dict[Any, list[float]] = {}
    for number, cells in enumerate(_rows(path, columns)):
        rows += 1
        where = f"{path}, row {number}"
        row = _checked(where, cells, columns)
        if columns.reward:
            # Of every row: the mean of a group is over rows that are not kept too.
            rewards.setdefault(row["group"].item(), []).append(float(row["reward"]))
        if number % every or not len(row["token"]):
            continue
        kept.append(row | {"number": np.array(number)})
        held += len(row["token"])
        while held > max_tokens and len(kept) > 1:
            every *= 2
            kept = [row for row in kept if row["number"] % every == 0] or kept[:1]
            held = sum(len(row["token"]) for row in kept)
    if not kept:
        raise UserError(f"{path}: no sampled token in {rows} rows")
    optional = {"entropies": "entropy", "lags": "lag", "advantages": "advantage"}
    given = {key: [row[name] for row in kept] for key, name in optional.items() if getattr(columns, name)}
    if columns.reward:
        given["advantages"] = [_above_mean(float(row["reward"]), rewards[row["group"].item()]) for row in kept]
    pairs = make_pairs(*([row[name] for row in kept] for name in ("token", "train", "rollout")), **given)
    _check_whole(path, pairs, columns)
    return Recording(pairs, rows, every)


def _rows(path: Path, columns: Columns) -> Iterator[dict[str, Any]]:
    """The named cells of each row."""
    if path.suffix not in (".parquet", ".jsonl"):
        raise UserError(f"{path}: a recording is .parquet or .jsonl")
    if not path.is_file():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    if path.suffix == ".jsonl":
        yield from _json_rows(path, columns)
        return
    # pyarrow takes a while to import; only this needs it.
    import pyarrow
    import pyarrow.parquet

    wanted = columns.options()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require(path, wanted, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(wanted.values())):
                yield from batch.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: holds text that is not UTF-8 ({error})") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not readable as parquet ({shorten_name(str(error))})") from None


def _json_rows(path: Path, columns: Columns) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_Object)
            except UnicodeDecodeError as error:
                raise UserError(f"{where}: not UTF-8 ({error}); save the file in UTF-8") from None
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not valid JSON ({shorten_name(str(error))})") from None
            if not isinstance(row, _Object):
                raise UserError(f"{where}: {shorten(row)}, must be a JSON object")
            _require(where, columns.options(), row.names)
            yield row


class _Object(dict):
    """A JSON object that keeps all its names: of a name that comes twice, a dict drops the first value."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.names = [name for name, _ in pairs]


def _check_distinct(columns: Columns) -> None:
    options: dict[str, str] = {}
    for option, name in columns.options().items():
        if (other := options.setdefault(name, option)) != option:
            raise UserError(f"{other} and {option}: both are {shorten(name)}; name a column of its own for each")


def _require(where: str | Path, wanted: dict[str, str], found: list[str]) -> None:
    for option, name in wanted.items():
        if found.count(name) > 1:
            raise UserError(
                f"{where}: {found.count(name)} columns are named {shorten(name)} ({option}); rename all but one"
            )
        if name not in found:
            raise UserError(
                f"{where}: no column {shorten(name)} ({option}); found are {shorten_name(', '.join(map(str, found)))}"
            )


def _checked(where: str, cells: dict[str, Any], columns: Columns) -> dict[str, np.ndarray]:
    """The sampled tokens of a row as arrays, each cell checked."""
    row = _aligned(where, cells, columns)
    sampled = np.ones(len(row["token"]), bool)
    if "mask" in row:
        mask = row.pop("mask")
        _refuse(f"{where}: {columns.mask}", mask, (mask != 0) & (mask != 1), "a mask is 1 on sampled tokens, else 0")
        sampled = mask == 1
    for kind, values in row.items():
        row[kind] = _VALUES[kind](f"{where}: {getattr(columns, kind)}", values, sampled)
    return row | _of_completion(where, cells, columns)


def _aligned(where: str, cells: dict[str, Any], columns: Columns) -> dict[str, np.ndarray]:
    """The cells that have an entry for each token, as float64 arrays of one length; null is NaN."""
    row: dict[str, np.ndarray] = {"token": _numbers(where, columns.token, cells[columns.token])}
    length = len(row["token"])
    for kind in ("train", "rollout", "mask", "entropy", "lag"):
        if not (name := getattr(columns, kind)):
            continue
        cell = cells[name]
        if kind == "lag" and isinstance(cell, int | float):
            cell = [cell] * length
        row[kind] = _numbers(where, name, cell, truths=kind == "mask")
        if len(row[kind]) != length:
            raise UserError(
                f"{where}: {name} has {len(row[kind])} entries, {columns.token} has {length}; they must be aligned "
                "token by token (--mask-column takes out prompts and padding)"
            )
    return row


def _refuse(name: str, values: np.ndarray, wrong: np.ndarray, rule: str) -> None:
    if not wrong.any():
        return
    place = int(np.argmax(wrong))
    value = values[place]
    whole = abs(value) < 2**63 and value % 1 == 0
    said = "NaN or null" if np.isnan(value) else f"{value:.0f}" if whole else f"{value:g}"
    raise UserError(f"{name} is {said} at token {place}; {rule}")


def _whole(name: str, values: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    right = (values >= 0) & (values <= _LARGEST) & (values == np.floor(values))
    _refuse(name, values, sampled & ~right, f"must be a whole number from 0 to {_LARGEST:,}")
    return values[sampled].astype(np.int32)


def _finite(name: str, values: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    # In float32, which the columns are kept in: -1e300 is infinite there.
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    _refuse(name, values, sampled & ~np.isfinite(single), "every value must be finite in float32")
    return single[sampled]


def _logprobs(name: str, values: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    found = _finite(name, values, sampled)
    hint = ""
    if (found >= 0).all():
        probabilities = found.max(initial=0.0) <= 1
        hint = "; they look like probabilities: take the logarithm" if probabilities else "; they look negated"
    _refuse(name, values, sampled & (values > _ROUNDING), f"a log-prob is at most 0{hint}")
    return np.minimum(found, np.float32(0))


def _entropies(name: str, values: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    found = _finite(name, values, sampled)
    _refuse(name, values, sampled & (values < -_ROUNDING), "an entropy is at least 0")
    return np.maximum(found, np.float32(0))


# Kind of column -> check of its values on sampled tokens, which it returns.
_VALUES = {"token": _whole, "train": _logprobs, "rollout": _logprobs, "entropy": _entropies, "lag": _whole}


def _above_mean(reward: float, group: list[float]) -> float:
    """The reward less the mean of its group; exactly 0 where all are equal."""
    return 0.0 if min(group) == max(group) else reward - float(np.mean(group))


def _of_completion(where: str, cells: dict[str, Any], columns: Columns) -> dict[str, np.ndarray]:
    """Advantage, reward and group of a row, each an array of shape []."""
    found = {}
    for kind in ("advantage", "reward"):
        if not (name := getattr(columns, kind)):
            continue
        cell = cells[name]
        values = np.unique(_numbers(where, name, cell if isinstance(cell, list) else [cell], truths=kind == "reward"))
        values = values[values != 0] if len(values) > 1 else values  # 0 on prompt and padding
        if len(values) != 1 or not abs(values[0]) <= np.finfo(np.float32).max:
            raise UserError(f"{where}: {name} is {shorten(cell)}, must be one finite number for the completion")
        found[kind] = values[0]
    if columns.reward:
        cell = cells[columns.group]
        if not isinstance(cell, int | str) or isinstance(cell, bool):
            raise UserError(f"{where}: {columns.group} is {shorten(cell)}, must be a whole number or text")
        # An array of texts would drop a NUL at the end.
        found["group"] = np.array(cell, object)
    return found


def _numbers(where: str, name: str, cell: Any, *, truths: bool = False) -> np.ndarray:
    """[n] float64; null, which is how JSON may have NaN, is NaN. `truths` lets true and false be 1 and 0."""
    try:
        # NumPy would take "1" and true for numbers.
        kinds = {type(each) for each in cell} & {str, bytes, *(() if truths else (bool,))}
        values = None if kinds else np.array([np.nan if each is None else each for each in cell], np.float64)
    except (TypeError, ValueError, OverflowError):
        values = None
    if values is None or values.ndim != 1 or isinstance(cell, str | bytes | dict):
        raise UserError(f"{where}: {name} is {shorten(cell)}, must be a list of numbers")
    return values


def _check_whole(path: Path, pairs: TokenPairs, columns: Columns) -> None:
    """Check what only many tokens show: a column that was never filled, or one in another base."""
    values = {columns.train: pairs.train_logprobs, columns.rollout: pairs.rollout_logprobs}
    for name, column in values.items():
        other = next(each for each in values.values() if each is not column)
        if not column.any() and other.any():
            raise UserError(f"{path}: {name} is 0 on every token; it looks like it was never filled in")
    low = (pairs.train_logprobs < -0.1) & (pairs.rollout_logprobs < -0.1)
    if low.sum() < _OTHER_BASE_TOKENS:
        return
    quotient = pairs.rollout_logprobs[low] / pairs.train_logprobs[low].astype(np.float64)
    first, middle, third = np.quantile(quotient, (0.25, 0.5, 0.75))
    for base, factor in _BASES.items():
        for name, expected in ((columns.rollout, factor), (columns.train, 1 / factor)):
            if abs(middle / expected - 1) < 0.02 and third - first < 0.1 * middle:
                raise UserError(
                    f"{path}: {name} looks like logarithms in base {base}: its values are {factor:.4g} times those of "
                    f"the other column; multiply them by ln {base} = {1 / factor:.4g}"
                )
