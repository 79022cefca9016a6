"""The layout of a mini-batch: rows of few lengths, chosen once for a run, and which of them its
completions need.

A micro-batch is R rows of L tokens; a program is compiled for each shape (R, L) of a run and for no
other. For every mini-batch the number of micro-batches of each shape is searched for that holds its
completions and computes least. The result is a function of the shapes and of the completions'
lengths alone.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

ANY_NUMBER = 2**31 - 1
"""Of sequences in a row."""
_MICRO_BATCH_COST = 32
"""Tokens of a device that take as long as a micro-batch by itself: parameters are read, gradients
added.
"""
_PROGRAM_SHARE = 0.02
_PROGRAM_TOKENS = 64
"""What a further shape, whose program has to be compiled, must save: a share of the computation,
and tokens of each device in a mini-batch.
"""
_MOST_SHAPES = 8
LOGNORMAL_SPREAD = 0.79
"""Standard deviation of the logarithm of a completion's length."""
_MEDIANS = (1 / 10, 1 / 7, 1 / 5, 1 / 4, 1 / 3, 1 / 2)
"""Of the lengths that shapes are chosen for, as shares of the longest."""
_MOST_TRIES = 32
_MOST_DRAWN = 256
_MOST_DRAWN_EACH = 8


class RowShapes(NamedTuple):
    """Static shapes of a batch.

    Attributes:
        row_lengths: length of the rows of each shape, rising, in tokens; the last holds the longest
            sequence.
        rows_per_micro_batch: R of each shape, a multiple of `row_shards`.
        micro_batches: A of each shape, the most that a mini-batch may need.
        mini_batches: M.
        completions: N of one mini-batch.
        segments_per_row: sequences in one row at most.
        row_shards: devices that the rows of a micro-batch are split over.
        longest: most tokens of a sequence.
    """

    row_lengths: tuple[int, ...]
    rows_per_micro_batch: tuple[int, ...]
    micro_batches: tuple[int, ...]
    mini_batches: int
    completions: int
    segments_per_row: int
    row_shards: int
    longest: int


class RowLayout(NamedTuple):
    """Where the n completions of a mini-batch lie.

    Attributes:
        micro_batches: how many of each shape are computed, counted from the first.
        shape, row, start, segment: of each completion the shape, the row among all rows of the
            shape, its first token in it, and which segment of the row it is, from 1.
    """

    micro_batches: Int[np.ndarray, " shapes"]
    shape: Int[np.ndarray, " n"]
    row: Int[np.ndarray, " n"]
    start: Int[np.ndarray, " n"]
    segment: Int[np.ndarray, " n"]


@functools.lru_cache(maxsize=64)
def make_row_shapes(
    *,
    micro_batch_tokens: int,
    mini_batches: int,
    completions: int,
    segments_per_row: int,
    row_shards: int,
    row_lengths: tuple[int, ...] = (),
    longest: int = 0,
    shortest: int = 1,
    length_multiple: int = 1,
) -> RowShapes:
    """The shapes for batches of `mini_batches` x `completions` sequences.

    Of the shapes within the limits those are taken that compute least for sequences of lognormal
    lengths, with medians of a tenth to a half of the longest: computed tokens over real ones, and
    for every micro-batch 32 tokens of each device.

    Args:
        micro_batch_tokens: most tokens, padding included, of one micro-batch on one device; at
            least one row.
        mini_batches: M.
        completions: N of a mini-batch.
        segments_per_row: sequences in one row at most.
        row_shards: devices that rows are split over; R is a multiple of it.
        row_lengths: rising row lengths in tokens; empty: chosen.
        longest: most tokens of a sequence; 0: as many as the longest row has.
        shortest: fewest tokens of a sequence. No row is chosen that is shorter: nothing would ever
            be in it.
        length_multiple: where they are chosen, what every length is a multiple of.
    """
    ladders = (
        [row_lengths]
        if row_lengths
        else list(_ladders(longest, length_multiple, packs=segments_per_row > 1))
    )
    if not row_lengths:
        ladders = [tuple(length for length in ladder if length >= shortest) for ladder in ladders]
    longest = longest or row_lengths[-1]
    rest = (mini_batches, completions, segments_per_row, row_shards, longest)
    # Of many completions for each device a part shows as much.
    count = min(completions, max(_MOST_DRAWN, _MOST_DRAWN_EACH * row_shards))
    typical = [
        lognormal_lengths(median * longest, longest, count, seed).clip(shortest)
        for seed, median in enumerate(_MEDIANS)
    ]

    def cost(shapes: RowShapes) -> float:
        further = len(shapes.row_lengths) - 1
        fixed = _PROGRAM_TOKENS * row_shards * further
        costs = (
            (_cost(shapes, lay_out(drawn, shapes).micro_batches) + fixed) / drawn.sum()
            for drawn in typical
        )
        return sum(costs) * (1 + _PROGRAM_SHARE * further)

    tried = []
    for lengths in dict.fromkeys(ladders):
        tokens = [
            int(micro_batch_tokens / 2 ** (step / 2))
            for step in range(2 * micro_batch_tokens.bit_length())
        ]
        sizes = [
            tuple(_even(limit // length, completions, row_shards) for length in lengths)
            for limit in tokens
        ]
        for rows in dict.fromkeys(sizes):
            most = _most(lengths, rows, completions, segments_per_row, longest)
            tried.append(RowShapes(lengths, rows, most, *rest))
    return min(tried, key=cost)


def lognormal_lengths(
    median: float, longest: int, count: int, seed: int
) -> Int[np.ndarray, " count"]:
    """Draw lengths, lognormal with a spread of 0.79, at most `longest`."""
    drawn = np.exp(
        np.random.default_rng(seed).normal(np.log(max(1.0, median)), LOGNORMAL_SPREAD, count)
    )
    return drawn.astype(np.int64).clip(1, longest)


def computed_tokens(shapes: RowShapes, micro_batches: Int[np.ndarray, " shapes"]) -> int:
    """Count the positions, padding included, of so many micro-batches of each shape."""
    return int(np.dot(micro_batches, np.multiply(shapes.rows_per_micro_batch, shapes.row_lengths)))


def lay_out(lengths: Int[np.ndarray, " n"], shapes: RowShapes) -> RowLayout:
    """Find the micro-batches that hold sequences and compute least, and a place for each sequence.

    With one sequence a row the numbers of micro-batches are the best there are (by dynamic
    programming over the shapes): the longest sequences go to the longest rows, and places left over
    there take shorter ones. With several they are the best of all numbers of the shorter shapes,
    each sequence going to the fullest row with room, longest first. The costliest rows of a
    micro-batch lie on different devices.

    Args:
        lengths: tokens of each sequence, at most the longest row; n is at most N.
        shapes: the shapes.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    falling = np.asarray(lengths, np.int64)[order].tolist()
    rows = (_packed_rows if shapes.segments_per_row > 1 else _single_rows)(falling, shapes)
    counts = np.zeros(len(shapes.row_lengths), np.int32)
    shape, row, start, segment = (np.zeros(len(falling), np.int64) for _ in range(4))
    for number, members in enumerate(rows):
        per_micro = shapes.rows_per_micro_batch[number]
        per_device = per_micro // shapes.row_shards
        counts[number] = -(-len(members) // per_micro)
        # Attention takes the squares of the lengths.
        members = sorted(members, key=lambda row: -sum(falling[i] ** 2 for i in row))
        for place, sequences in enumerate(members):
            micro, within = divmod(place, per_micro)
            slot, device = divmod(within, shapes.row_shards)
            begin = 0
            for which, i in enumerate(sequences, 1):
                at = order[i]
                shape[at], row[at] = number, micro * per_micro + device * per_device + slot
                start[at], segment[at] = begin, which
                begin += falling[i]
    return RowLayout(counts, shape, row, start, segment)


def _ladders(longest: int, multiple: int, *, packs: bool) -> Iterator[tuple[int, ...]]:
    """Row lengths to choose from."""

    def up(length: float, multiple: int = multiple) -> int:
        return multiple * max(1, -int(-length // multiple))

    if packs:
        # Rows of several of the longest sequences leave less of each empty; shorter ones hold what
        # is left at the end.
        for whole in sorted({up(longest), up(max(longest, 512))}):
            for count in (1, 2, 3):
                yield tuple(sorted({up(whole / 2**i) for i in range(count)}))
        return
    multiple = max(multiple, 8 if longest < 512 else 128)
    for count, span in (
        (1, 1),
        (2, 2),
        (3, 4),
        (4, 5),
        (5, 8),
        (6, 10),
        (_MOST_SHAPES, 10),
        (_MOST_SHAPES, 16),
    ):
        yield tuple(
            sorted(
                {up(length, multiple) for length in np.geomspace(longest, longest / span, count)}
            )
        )


def _even(wanted: int, completions: int, shards: int) -> int:
    """R of equal micro-batches that hold all completions: `wanted` on each device at most, at least
    one.
    """
    each = -(-completions // shards)
    largest = max(1, min(wanted, each))
    return shards * -(-each // -(-each // largest))


def _most(
    lengths: Sequence[int],
    rows: Sequence[int],
    completions: int,
    segments_per_row: int,
    longest: int,
) -> tuple[int, ...]:
    """The most micro-batches of each shape that a layout may have."""
    if segments_per_row == 1:
        return tuple(-(-completions // each) for each in rows)
    # A row that a sequence does not fit into, or that has no segment left, holds more than L -
    # longest tokens, or as many segments as it may.
    filled = (
        completions * longest // (lengths[-1] - longest + 1) + completions // segments_per_row + 1
    )
    all_of_them = [-(-min(completions, filled) // each) for each in rows]
    # Of a shorter shape no more than compute less than one of the next longer, which holds whatever
    # they hold.
    sizes = np.multiply(lengths, rows)
    fewer = [max(1, -int(-after // size) - 1) for size, after in itertools.pairwise(sizes)]
    return (*np.minimum(fewer, all_of_them[:-1]).tolist(), all_of_them[-1])


def _cost(shapes: RowShapes, micro_batches: Int[np.ndarray, " shapes"]) -> float:
    """Time of a mini-batch, in tokens."""
    return computed_tokens(shapes, micro_batches) + _MICRO_BATCH_COST * shapes.row_shards * int(
        micro_batches.sum()
    )


def _single_rows(falling: list[int], shapes: RowShapes) -> list[list[list[int]]]:
    """Rows of each shape, one sequence each: the numbers of micro-batches that cost least."""
    count = len(falling)
    kinds = len(shapes.row_lengths)
    costs = [_cost(shapes, row) for row in np.eye(kinds, dtype=np.int64)]
    # best[p]: the least cost of placing the p longest; p falls short of a shape's need while some
    # are too long for it.
    best = [0.0] + [np.inf] * count
    came: list[list[int]] = []
    for shape in reversed(range(kinds)):
        rows = shapes.rows_per_micro_batch[shape]
        below = shapes.row_lengths[shape - 1] if shape else 0
        need = bisect.bisect_left(falling, -below, key=lambda length: -length)
        used = [0] * (count + 1)
        for placed in range(count + 1):
            # One micro-batch more of this shape: from every number that it fills up to `placed`.
            before = max(0, placed - rows)
            sources = (
                range(before, placed) if placed == count else (before,) if placed >= rows else ()
            )
            for source in sources:
                if best[source] + costs[shape] < best[placed]:
                    best[placed], used[placed] = best[source] + costs[shape], placed - source
        for placed in range(min(need, count + 1)):
            best[placed] = np.inf
        came.append(used)
    found: list[list[list[int]]] = [[] for _ in range(kinds)]
    placed = count
    for shape, used in zip(range(kinds), reversed(came), strict=True):
        while used[placed]:
            found[shape] += [[i] for i in range(placed - used[placed], placed)]
            placed -= used[placed]
    return found


def _packed_rows(falling: list[int], shapes: RowShapes) -> list[list[list[int]]]:
    """Rows of each shape with several sequences: the best of all numbers of the shorter shapes."""
    shorter = [range(most + 1) for most in shapes.micro_batches[:-1]]

    def cost(rows: list[list[list[int]]]) -> float:
        used = [
            -(-len(each) // size)
            for each, size in zip(rows, shapes.rows_per_micro_batch, strict=True)
        ]
        return _cost(shapes, np.array(used))

    counts = itertools.islice(itertools.product(*shorter), _MOST_TRIES)
    return min((_best_fit(falling, shapes, each) for each in counts), key=cost)


def _best_fit(
    falling: list[int], shapes: RowShapes, counts: Sequence[int]
) -> list[list[list[int]]]:
    """Rows of each shape, given how many micro-batches of the shorter ones there are: longest
    first, into the fullest row with room, else into a new one of the longest.
    """
    rows: list[list[list[int]]] = [
        [[] for _ in range(count * size)]
        for count, size in zip((*counts, 0), shapes.rows_per_micro_batch, strict=True)
    ]
    # (room, shape, row) of all rows with room, rising.
    open_rows = sorted(
        (length, shape, row)
        for shape, length in enumerate(shapes.row_lengths)
        for row in range(len(rows[shape]))
    )
    for i, length in enumerate(falling):
        at = bisect.bisect_left(open_rows, (length, -1, -1))
        if at == len(open_rows):
            rows[-1].append([])
            room = shapes.row_lengths[-1]
            shape = len(rows) - 1
            row = len(rows[-1]) - 1
        else:
            room, shape, row = open_rows.pop(at)
        rows[shape][row].append(i)
        if room > length and len(rows[shape][row]) < shapes.segments_per_row:
            bisect.insort(open_rows, (room - length, shape, row))
    return [[row for row in each if row] for each in rows]
