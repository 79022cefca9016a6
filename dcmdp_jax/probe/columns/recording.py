"""Recorded token ids with two log-prob columns: each cell checked, kept in bounded memory."""

import dataclasses
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.data.top_logprobs import list_problems
from dcmdp_jax.errors import UserError, naming, shorten
from dcmdp_jax.probe.columns.pairs import TokenPairs, make_pairs, measure_states
from dcmdp_jax.probe.columns.recording_files import LeftOut
from dcmdp_jax.record import unpacked_top

_ROUNDING = 1e-3
"""Nats by which half precision may leave a log-prob above 0, and an entropy below."""
_HALF_PRECISION = 0.02
"""Nats; the rounding of half-precision differences of up to 20 nats."""
_LARGEST = np.iinfo(np.int32).max
LISTS = ("top_ids", "top_train", "top_rollout")
"""Top-k tokens of a row: ids, -1 for none, and log-probs of both sides."""
_BASES = {"2": 1 / math.log(2), "10": 1 / math.log(10)}
"""Base of a logarithm -> its values in multiples of natural ones."""
_OTHER_BASE_TOKENS = 16
"""Tokens whose log-probs have one quotient, for a column to be in another base."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of a recording's columns; each cell is a list with one entry for each token.

    Attributes:
        token: token ids, whole numbers that int32 holds.
        train, rollout: log-probs in nats, training stack's and engine's.
        mask: 1 on sampled tokens, 0 on prompt and padding; "" if every token was sampled.
        entropy: the training stack's entropy, nats, at least 0; "" if there is none.
        lag: age of the weights that sampled a token in training steps, whole numbers from 0, a list
            or one number; "" if there is none.
        top: the engine's top-k tokens as `record.packed_top` has them, or that as JSON; "" if
            there is none.
    """

    token: str
    train: str
    rollout: str
    mask: str = ""
    entropy: str = ""
    lag: str = ""
    top: str = ""

    def options(self) -> dict[str, str]:
        """Option of `dcmdp probe` -> column, of the given ones."""
        return {
            f"--{name}-column": value for name, value in dataclasses.asdict(self).items() if value
        }


Cells = dict[str, Any]
"""Column name -> cell, as it was read."""
Row = dict[str, np.ndarray]
"""Kind of column -> the sampled tokens' values; from `checked_row`."""


def checked_row(
    where: str,
    cells: Cells,
    columns: Columns,
    left_out: LeftOut,
    *,
    keep_lists: bool = False,
) -> Row:
    """The sampled tokens of a row as arrays, each cell checked.

    A token without a finite log-prob on either side is left out: an engine reports none for some
    tokens, and writers of JSON make null of NaN. So is one without an entropy, unless the row has
    none at all.

    Args:
        where: file and row, for errors.
        cells: the row as it was read.
        columns: names of the columns.
        left_out: counts the tokens that are left out.
        keep_lists: also return the top-k tokens, where the row has them: `LISTS`, [n, k] each.

    Returns:
        The values: [n] int32 or float32 of the n sampled tokens.

    Raises:
        UserError: in one line, what is wrong with which cell.
    """
    row = _aligned(where, cells, columns)
    sampled = np.ones(len(row["token"]), bool)
    if "mask" in row:
        mask = row.pop("mask")
        sampled = mask == 1
        refuse(
            f"{where}: {columns.mask}",
            mask,
            ~sampled & (mask != 0),
            "a mask is 1 on sampled tokens, else 0",
        )
    if "entropy" in row and np.isnan(row["entropy"][sampled]).all():
        del row["entropy"]
    finite = np.ones(len(sampled), bool)
    for kind in ("train", "rollout", "entropy"):
        if kind in row:
            finite &= np.isfinite(row[kind])
            if not left_out.first and not finite[sampled].all():
                left_out.first = f"{where}: {getattr(columns, kind)}"
    left_out.tokens += int((sampled & ~finite).sum())
    sampled &= finite

    for kind, values in row.items():
        row[kind] = _VALUES[kind](f"{where}: {getattr(columns, kind)}", values, sampled)
    if columns.top:
        lists = _top_tokens(f"{where}: {columns.top}", cells[columns.top], sampled, row)
        row["states"] = measure_states(*lists)
        if keep_lists:
            row |= zip(LISTS, lists, strict=True)
    return row


def _aligned(where: str, cells: Cells, columns: Columns) -> Row:
    """The cells that have an entry for each token, as float64 arrays of one length; null is NaN."""
    with naming(where):
        row: Row = {"token": numbers(columns.token, cells[columns.token])}
    length = len(row["token"])
    for kind in ("train", "rollout", "mask", "entropy", "lag"):
        name = getattr(columns, kind)
        if not name:
            continue
        cell = cells[name]
        if kind == "lag" and isinstance(cell, int | float):
            cell = [cell] * length
        with naming(where):
            row[kind] = numbers(name, cell, truths=kind == "mask")
        if len(row[kind]) != length:
            raise UserError(
                f"{where}: {name} has {len(row[kind])} entries, {columns.token} has {length}; "
                "they must be aligned token by token (--mask-column takes out prompts and "
                "padding)"
            )
    return row


def refuse(name: str, values: np.ndarray, wrong: np.ndarray, rule: str) -> None:
    """Raise UserError with the first of the wrong values, its token and the rule."""
    if not wrong.any():
        return
    token = int(np.argmax(wrong))
    value = values[token]
    text = f"{value:g}"
    if np.isnan(value):
        text = "NaN or null"
    elif abs(value) < 2**63 and value % 1 == 0:
        text = f"{value:.0f}"
    raise UserError(f"{name} is {text} at token {token}; {rule}")


def _whole(name: str, values: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    right = (values >= 0) & (values <= _LARGEST) & (values == np.floor(values))
    refuse(name, values, sampled & ~right, f"must be a whole number from 0 to {_LARGEST:,}")
    return values[sampled].astype(np.int32)


def _finite(name: str, values: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    # In float32, which the columns are kept in: -1e300 is infinite there.
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    refuse(name, values, sampled & ~np.isfinite(single), "every value must be finite in float32")
    return single[sampled]


def _logprobs(name: str, values: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    logprobs = _finite(name, values, sampled)
    hint = ""
    if (logprobs >= 0).all():
        hint = "; they look negated"
        if logprobs.max(initial=0.0) <= 1:
            hint = "; they look like probabilities: take the logarithm"
    refuse(name, values, sampled & (values > _ROUNDING), f"a log-prob is at most 0{hint}")
    return np.minimum(logprobs, np.float32(0))


def _entropies(name: str, values: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    entropies = _finite(name, values, sampled)
    refuse(name, values, sampled & (values < -_ROUNDING), "an entropy is at least 0")
    return np.maximum(entropies, np.float32(0))


_VALUES = {
    "token": _whole,
    "train": _logprobs,
    "rollout": _logprobs,
    "entropy": _entropies,
    "lag": _whole,
}
"""Kind of column -> check of its values on sampled tokens, which it returns."""


def _top_tokens(where: str, cell: Any, sampled: np.ndarray, row: Row) -> tuple[np.ndarray, ...]:
    """The lists of the sampled tokens, in the order of `LISTS`."""
    try:
        packed = cell
        if isinstance(cell, str):
            packed = json.loads(cell)
        lists = unpacked_top(packed)
    except (ValueError, KeyError, TypeError, zlib.error):
        raise UserError(
            f"{where} is {shorten(cell)}, must be lists as dcmdp_jax.record.packed_top packs them"
        ) from None
    if len(lists[0]) != len(sampled):
        raise UserError(f"{where} has {len(lists[0])} entries, there are {len(sampled)} tokens")
    ids, train, rollout = (values[sampled] for values in lists)
    mass = np.where(ids >= 0, np.exp(np.stack([train, rollout])), 0).sum(axis=-1)
    if not (mass <= 1 + _HALF_PRECISION).all():
        raise UserError(
            f"{where}: listed tokens have a probability of {mass.max():.3g} together, at most 1 "
            "is possible"
        )
    tolerance = _HALF_PRECISION
    if np.array_equal(row["train"], row["rollout"]):
        # A run with precision=exact has the trainer's values in the engine's place, whose order
        # may be another.
        tolerance = math.inf
    for problem, tokens in list_problems(
        ids,
        rollout,
        row["token"],
        row["rollout"],
        _LARGEST,
        tolerance,
    ):
        if tokens.any():
            token = np.flatnonzero(sampled)[np.argmax(tokens)]
            raise UserError(f"{where}, token {token}: {problem}; record what the engine gave")
    return ids, train, rollout


def numbers(name: str, cell: Any, *, truths: bool = False) -> np.ndarray:
    """[n] float64; null, which is how JSON may have NaN, is NaN.

    Args:
        name: the column.
        cell: its cell.
        truths: whether true and false are 1 and 0; else they are no numbers.

    Raises:
        UserError: it is no list of numbers, with the first entry that is none.
    """
    refused = {str, bytes} if truths else {str, bytes, bool}
    if isinstance(cell, np.ndarray) and cell.dtype.kind in ("iufb" if truths else "iuf"):
        values = cell.astype(np.float64)
    elif isinstance(cell, str | bytes | dict):
        values = None
    else:
        values = _listed_numbers(cell, refused)
    if values is not None and values.ndim == 1:
        return values
    if isinstance(cell, list | np.ndarray):
        for token, entry in enumerate(cell):
            single = _listed_numbers([entry], refused)
            if single is None or single.ndim != 1:
                raise UserError(f"{name} is {shorten(entry)} at token {token}, must be a number")
    raise UserError(f"{name} is {shorten(cell)}, must be a list of numbers")


def _listed_numbers(cell: Any, refused: set[type]) -> np.ndarray | None:
    """A list of numbers as float64, null as NaN; None if a value is of another type.

    NumPy alone would take "1" and true for numbers.

    Args:
        cell: the list.
        refused: types that are no numbers.
    """
    try:
        if not refused.isdisjoint(map(type, cell)):
            return None
        return np.array([np.nan if value is None else value for value in cell], np.float64)
    except (TypeError, ValueError, OverflowError):
        return None


def _check_whole(path: str | Path, pairs: TokenPairs, columns: Columns) -> None:
    """Check what only many tokens show: a column that was never filled, or one in another base."""
    values = {columns.train: pairs.train_logprobs, columns.rollout: pairs.rollout_logprobs}
    for name, column in values.items():
        if not column.any() and any(other.any() for other in values.values()):
            raise UserError(
                f"{path}: {name} is 0 on every token; it looks like it was never filled in"
            )
    low = (pairs.train_logprobs < -0.1) & (pairs.rollout_logprobs < -0.1)
    if low.sum() < _OTHER_BASE_TOKENS:
        return
    quotient = pairs.rollout_logprobs[low] / pairs.train_logprobs[low].astype(np.float64)
    first, middle, third = np.quantile(quotient, (0.25, 0.5, 0.75))
    for base, factor in _BASES.items():
        for name, expected in ((columns.rollout, factor), (columns.train, 1 / factor)):
            if abs(middle / expected - 1) < 0.02 and third - first < 0.1 * middle:
                raise UserError(
                    f"{path}: {name} looks like logarithms in base {base}: its values are "
                    f"{factor:.4g} times the other column's; multiply them by ln {base} = "
                    f"{1 / factor:.4g}"
                )


class RowSample:
    """Rows in bounded memory, spread evenly over all that come.

    While there are more than `max_tokens` tokens, every second row is dropped and half as many are
    taken from there on. One row is always kept.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._sample: dict[int, Row] = {}
        self._has_entropy: bool | None = None
        self.rows = 0
        self.stride = 1

    def add(self, row: Row, where: str) -> None:
        """Take the next row, or leave it out.

        Raises:
            UserError: naming `where`: it has entropies and earlier rows have none, or the other way
                round.
        """
        number = self.rows
        self.rows += 1
        if not len(row["token"]):
            return
        has_entropy = "entropy" in row
        if self._has_entropy not in (None, has_entropy):
            difference = "entropies are given, those of the rows before are null or NaN"
            if not has_entropy:
                difference = "each entropy is null or NaN, the rows before have them"
            raise UserError(f"{where}: {difference}; give them to every row or to none")
        self._has_entropy = has_entropy
        if number % self.stride:
            return
        self._sample[number] = row
        self._tokens += len(row["token"])
        while self._tokens > self._max_tokens and len(self._sample) > 1:
            self.stride *= 2
            spread = {n: row for n, row in self._sample.items() if n % self.stride == 0}
            first = min(self._sample)
            self._sample = spread or {first: self._sample[first]}
            self._tokens = sum(len(row["token"]) for row in self._sample.values())

    def pairs(self, source: str | Path, columns: Columns, left_out: LeftOut) -> TokenPairs:
        """The tokens kept.

        Raises:
            UserError: naming `source`: there is none, with what was left out, or they show that a
                column is wrong.
        """
        if not self._sample:
            raise UserError(
                f"{source}: no sampled token in {self.rows} rows{left_out.after('; left out: ')}"
            )
        pairs = pairs_of(list(self._sample.values()))
        if pairs.states is not None:
            sizes = np.unique(pairs.states[:, -1]).astype(int).tolist()
            if len(sizes) > 1:
                raise UserError(
                    f"{source}: lists of {' and '.join(map(str, sizes))} top-k tokens; a "
                    "recording has one k, probe each alone"
                )
        _check_whole(source, pairs, columns)
        return pairs


def pairs_of(rows: list[Row]) -> TokenPairs:
    """Concatenate the tokens of rows; a column that a row lacks is left out."""

    def column(kind: str) -> list[np.ndarray] | None:
        return [row[kind] for row in rows] if all(kind in row for row in rows) else None

    return make_pairs(
        column("token"),
        column("train"),
        column("rollout"),
        entropies=column("entropy"),
        lags=column("lag"),
        states=column("states"),
    )
