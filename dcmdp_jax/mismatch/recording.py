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
from dcmdp_jax.mismatch.pairs import TokenPairs, make_pairs

_BATCH_ROWS = 64
# Log-softmax in half precision may end a little above 0.
_ABOVE_ZERO = 1e-3
_BASES = {"2": 1 / math.log(2), "10": 1 / math.log(10)}
_OTHER_BASE_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of a recording's columns; each cell is a list with one entry for each token.

    Attributes:
        tokens: token ids.
        train, rollout: log-probs in nats, training stack's and engine's.
        mask: 1 on sampled tokens, 0 on prompt and padding; "" if every token was sampled.
        entropy: of the training stack, nats; "" if there is none.
        lag: age of the weights that sampled a token in training steps, a list or one number; "" if there is none.
        advantage: of the completion, a number, or a list with the same number for each token; "" if there is none.
        reward: of the completion, a number; "" if there is none. Less its group's mean it has the advantage's sign.
        group: prompt that a completion answers, a number or text; needed with `reward`.
    """

    tokens: str
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
            are), cells of different lengths, NaN, log-probs above 0, in base 2 or 10, never filled in.
        FileNotFoundError: if there is no such file.
    """
    path = Path(path)
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
        if number % every or not len(row["tokens"]):
            continue
        kept.append(row | {"number": np.array(number)})
        held += len(row["tokens"])
        while held > max_tokens and len(kept) > 1:
            every *= 2
            kept = [row for row in kept if row["number"] % every == 0] or kept[:1]
            held = sum(len(row["tokens"]) for row in kept)
    if not kept:
        raise UserError(f"{path}: no sampled token in {rows} rows")
    optional = {"entropies": "entropy", "lags": "lag", "advantages": "advantage"}
    given = {key: [row[name] for row in kept] for key, name in optional.items() if getattr(columns, name)}
    if columns.reward:
        given["advantages"] = [_above_mean(float(row["reward"]), rewards[row["group"].item()]) for row in kept]
    pairs = make_pairs(*([row[name] for row in kept] for name in ("tokens", "train", "rollout")), **given)
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
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(dict.fromkeys(wanted.values()))):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not readable as parquet ({shorten_name(str(error))})") from None


def _json_rows(path: Path, columns: Columns) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not valid JSON ({shorten_name(str(error))})") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number}: {shorten(row)}, must be a JSON object")
            _require(f"{path}, line {number}", columns.options(), list(row))
            yield row


def _require(where: str | Path, wanted: dict[str, str], found: list[str]) -> None:
    for option, name in wanted.items():
        if name not in found:
            raise UserError(
                f"{where}: no column {shorten(name)} ({option}); found are {shorten_name(', '.join(map(str, found)))}"
            )


def _checked(where: str, cells: dict[str, Any], columns: Columns) -> dict[str, np.ndarray]:
    """The sampled tokens of a row as arrays, each cell checked."""
    row: dict[str, np.ndarray] = {"tokens": _numbers(where, columns.tokens, cells[columns.tokens])}
    length = len(row["tokens"])
    for kind in ("train", "rollout", "mask", "entropy", "lag"):
        if not (name := getattr(columns, kind)):
            continue
        cell = cells[name]
        if kind == "lag" and isinstance(cell, int | float):
            cell = [cell] * length
        row[kind] = _numbers(where, name, cell)
        if len(row[kind]) != length:
            raise UserError(
                f"{where}: {name} has {len(row[kind])} entries, {columns.tokens} has {length}; they must be aligned "
                "token by token (--mask-column takes out prompts and padding)"
            )
    if "mask" in row:
        sampled = row.pop("mask").astype(bool)
        row = {kind: values[sampled] for kind, values in row.items()}
    for kind, values in row.items():
        name = getattr(columns, kind)
        if (broken := np.flatnonzero(~np.isfinite(values))).size:
            raise UserError(f"{where}: {name} has {values[broken[0]]} at token {broken[0]}; every value must be finite")
        if kind in ("train", "rollout"):
            _check_signs(where, name, values)
            row[kind] = np.minimum(values, 0.0)
    row |= _of_completion(where, cells, columns)
    ids = row["tokens"]
    if (ids < 0).any() or (ids != np.floor(ids)).any():
        raise UserError(f"{where}: {columns.tokens} holds {ids[(ids < 0) | (ids != np.floor(ids))][0]:g}, no token id")
    row["tokens"] = ids.astype(np.int32)
    return {kind: values if kind in ("tokens", "group") else values.astype(np.float32) for kind, values in row.items()}


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
        values = np.unique(_numbers(where, name, cell if isinstance(cell, list) else [cell]))
        values = values[values != 0] if len(values) > 1 else values  # 0 on prompt and padding
        if len(values) != 1 or not np.isfinite(values[0]):
            raise UserError(f"{where}: {name} is {shorten(cell)}, must be one finite number for the completion")
        found[kind] = values[0]
    if columns.reward:
        cell = cells[columns.group]
        if not isinstance(cell, int | str):
            raise UserError(f"{where}: {columns.group} is {shorten(cell)}, must be a whole number or text")
        found["group"] = np.array(cell)
    return found


def _numbers(where: str, name: str, cell: Any) -> np.ndarray:
    try:
        # Numbers of JSON's own and None, which is how NaN is written there.
        values = np.array([np.nan if each is None else each for each in cell], np.float64)
    except (TypeError, ValueError):
        values = None
    if values is None or values.ndim != 1 or isinstance(cell, str | bytes | dict):
        raise UserError(f"{where}: {name} is {shorten(cell)}, must be a list of numbers")
    return values


def _check_signs(where: str, name: str, values: np.ndarray) -> None:
    above = values > _ABOVE_ZERO
    if not above.any():
        return
    place = int(np.argmax(above))
    hint = ""
    if (values >= 0).all():
        hint = "; they look like probabilities: take the logarithm" if values.max() <= 1 else "; they look negated"
    raise UserError(f"{where}: {name} is {values[place]:.4g} at token {place}; a log-prob is at most 0{hint}")


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
