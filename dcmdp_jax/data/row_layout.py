"""Row layout: a few row lengths chosen once for a run, and the row of each completion.

A micro-batch is R rows of L tokens; the step has a loop for each shape (R, L) of a run. For every
mini-batch the number of micro-batches of each shape is searched for that holds its completions and
computes least. The result is a function of the shapes and of the completions' lengths alone.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

ANY_NUMBER = 2**31 - 1
"""`segments_per_row` without a limit."""
LOGNORMAL_SPREAD = 0.79
"""Standard deviation of the logarithm of a completion's length."""
# Tokens of a device that take as long as a micro-batch by itself: it reads parameters and adds
# gradients.
_MICRO_BATCH_COST = 32
# What a further shape, whose program has to be compiled, must save: a share of the computation, and
# tokens of each device in a mini-batch.
_PROGRAM_SHARE = 0.02
_PROGRAM_TOKENS = 64
_MOST_SHAPES = 8
# Medians of the lengths that shapes are chosen for, as shares of the longest.
_MEDIANS = (1 / 10, 1 / 7, 1 / 5, 1 / 4, 1 / 3, 1 / 2)
# Numbers of micro-batches that are compared for a packed mini-batch.
_MOST_TRIES = 32
# Lengths drawn for each median: in all, or of each device if that is more.
_MOST_DRAWN = 256
_MOST_DRAWN_EACH = 8
# Without packing: number of row lengths, and the longest over the shortest.
_SINGLE_LADDERS = (
    (1, 1),
    (2, 2),
    (3, 4),
    (4, 5),
    (5, 8),
    (6, 10),
    (_MOST_SHAPES, 10),
    (_MOST_SHAPES, 16),
)

_Rows = list[list[list[int]]]
"""Of each shape the rows, of each row its sequences, counted from the longest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShapes:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthChoice:
    """What row lengths are chosen from.

    Attributes:
        shortest: fewest tokens of a sequence. No row is chosen that is shorter: nothing would ever
            be in it.
        multiple: what every length is a multiple of.
    """

    shortest: int = 1
    multiple: int = 1


_ANY_LENGTH = LengthChoice()


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
    length_choice: LengthChoice = _ANY_LENGTH,
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
        length_choice: what they are chosen from where they are chosen.
    """
    shortest = length_choice.shortest
    ladders = [row_lengths]
    if not row_lengths:
        ladders = []
        for ladder in _ladders(longest, length_choice.multiple, packs=segments_per_row > 1):
            ladders.append(tuple(length for length in ladder if length >= shortest))
    longest = longest or row_lengths[-1]

    token_limits = [
        int(micro_batch_tokens / 2 ** (step / 2))
        for step in range(2 * micro_batch_tokens.bit_length())
    ]
    candidates = {}
    for lengths in ladders:
        for limit in token_limits:
            rows = tuple(_even(limit // length, completions, row_shards) for length in lengths)
            shapes = RowShapes(
                row_lengths=lengths,
                rows_per_micro_batch=rows,
                micro_batches=_most(lengths, rows, completions, segments_per_row, longest),
                mini_batches=mini_batches,
                completions=completions,
                segments_per_row=segments_per_row,
                row_shards=row_shards,
                longest=longest,
            )
            candidates[shapes] = None

    # Of many completions for each device some show as much.
    count = min(completions, max(_MOST_DRAWN, _MOST_DRAWN_EACH * row_shards))
    samples = [
        lognormal_lengths(median * longest, longest, count, seed).clip(shortest)
        for seed, median in enumerate(_MEDIANS)
    ]

    def cost(shapes: RowShapes) -> float:
        further = len(shapes.row_lengths) - 1
        fixed = _PROGRAM_TOKENS * row_shards * further
        total = 0.0
        for sample in samples:
            total += (_cost(shapes, lay_out(sample, shapes).micro_batches) + fixed) / sample.sum()
        return total * (1 + _PROGRAM_SHARE * further)

    return min(candidates, key=cost)


def lognormal_lengths(
    median: float,
    longest: int,
    count: int,
    seed: int,
) -> Int[np.ndarray, " count"]:
    """Draw lengths, lognormal with a spread of 0.79, at most `longest`."""
    generator = np.random.default_rng(seed)
    lengths = np.exp(generator.normal(np.log(max(1.0, median)), LOGNORMAL_SPREAD, count))
    return lengths.astype(np.int64).clip(1, longest)


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
    lengths = np.asarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order].tolist()
    if shapes.segments_per_row > 1:
        rows_of_shapes = _packed_rows(falling, shapes)
    else:
        rows_of_shapes = _single_rows(falling, shapes)

    layout = RowLayout(
        micro_batches=np.zeros(len(shapes.row_lengths), np.int32),
        shape=np.zeros_like(lengths),
        row=np.zeros_like(lengths),
        start=np.zeros_like(lengths),
        segment=np.zeros_like(lengths),
    )
    for shape, rows in enumerate(rows_of_shapes):
        per_micro = shapes.rows_per_micro_batch[shape]
        per_device = per_micro // shapes.row_shards
        layout.micro_batches[shape] = -(-len(rows) // per_micro)
        # Attention takes the squares of the lengths.
        costliest_first = sorted(rows, key=lambda row: -sum(falling[i] ** 2 for i in row))
        for position, sequences in enumerate(costliest_first):
            micro, within = divmod(position, per_micro)
            slot, device = divmod(within, shapes.row_shards)
            start = 0
            for segment, i in enumerate(sequences, 1):
                index = order[i]
                layout.shape[index] = shape
                layout.row[index] = micro * per_micro + device * per_device + slot
                layout.start[index] = start
                layout.segment[index] = segment
                start += falling[i]
    return layout


def _ladders(longest: int, multiple: int, *, packs: bool) -> Iterator[tuple[int, ...]]:
    """Row lengths to choose from."""
    if not packs:
        multiple = max(multiple, 8)
        if longest >= 512:
            multiple = max(multiple, 128)

    def up(length: float) -> int:
        return multiple * max(1, -int(-length // multiple))

    if packs:
        # Rows of several of the longest sequences leave less of each empty; shorter ones hold what
        # is left at the end.
        for longest_row in sorted({up(longest), up(max(longest, 512))}):
            for count in (1, 2, 3):
                yield tuple(sorted({up(longest_row / 2**i) for i in range(count)}))
        return
    for count, span in _SINGLE_LADDERS:
        lengths = np.geomspace(longest, longest / span, count)
        yield tuple(sorted({up(length) for length in lengths}))


def _even(limit: int, completions: int, shards: int) -> int:
    """R of equal micro-batches that hold all completions: at most `limit` rows of each device."""
    per_device = -(-completions // shards)
    largest = max(1, min(limit, per_device))
    return shards * -(-per_device // -(-per_device // largest))


def _most(
    lengths: Sequence[int],
    rows: Sequence[int],
    completions: int,
    segments_per_row: int,
    longest: int,
) -> tuple[int, ...]:
    """The most micro-batches of each shape that a layout may have."""
    if segments_per_row == 1:
        return tuple(-(-completions // count) for count in rows)
    # A row that a sequence does not fit into, or that has no segment left, holds more than L -
    # longest tokens, or as many segments as it may.
    filled = (
        completions * longest // (lengths[-1] - longest + 1) + completions // segments_per_row + 1
    )
    limits = [-(-min(completions, filled) // count) for count in rows]
    # Of a shorter shape no more than compute less than one of the next longer, which holds whatever
    # they hold.
    sizes = np.multiply(lengths, rows)
    for shape, (size, next_size) in enumerate(itertools.pairwise(sizes)):
        limits[shape] = min(limits[shape], max(1, -int(-next_size // size) - 1))
    return tuple(limits)


def _cost(shapes: RowShapes, micro_batches: Int[np.ndarray, " shapes"]) -> float:
    """Time of a mini-batch, in tokens."""
    count = int(micro_batches.sum())
    return computed_tokens(shapes, micro_batches) + _MICRO_BATCH_COST * shapes.row_shards * count


def _single_rows(falling: list[int], shapes: RowShapes) -> _Rows:
    """Rows of each shape, one sequence each: the numbers of micro-batches that cost least."""
    count = len(falling)
    kinds = len(shapes.row_lengths)
    # least_costs[p]: the least cost of placing the p longest; p falls short of a shape's need while
    # some are too long for it.
    least_costs = [0.0] + [np.inf] * count
    # Of each shape, how many of the p longest its last micro-batch takes.
    last_sizes = [[0] * (count + 1) for _ in range(kinds)]
    next_shorter = (0, *shapes.row_lengths)
    for shape in reversed(range(kinds)):
        rows = shapes.rows_per_micro_batch[shape]
        cost = _cost(shapes, np.eye(kinds, dtype=np.int64)[shape])
        for placed in range(count + 1):
            # One micro-batch more of this shape: from every number that it fills up to `placed`.
            sources = range(max(0, placed - rows), placed)
            if placed < count:
                if placed < rows:
                    continue
                sources = sources[:1]
            for source in sources:
                if least_costs[source] + cost < least_costs[placed]:
                    least_costs[placed] = least_costs[source] + cost
                    last_sizes[shape][placed] = placed - source
        need = bisect.bisect_left(falling, -next_shorter[shape], key=lambda length: -length)
        least_costs[:need] = [np.inf] * need

    rows_of_shapes = [[] for _ in range(kinds)]
    placed = count
    for shape, sizes in enumerate(last_sizes):
        while sizes[placed]:
            first = placed - sizes[placed]
            rows_of_shapes[shape] += [[i] for i in range(first, placed)]
            placed = first
    return rows_of_shapes


def _packed_rows(falling: list[int], shapes: RowShapes) -> _Rows:
    """Rows of each shape with several sequences: the best of all numbers of the shorter shapes."""

    def cost(rows_of_shapes: _Rows) -> float:
        sizes = zip(rows_of_shapes, shapes.rows_per_micro_batch, strict=True)
        return _cost(shapes, np.array([-(-len(rows) // per_micro) for rows, per_micro in sizes]))

    shorter = [range(limit + 1) for limit in shapes.micro_batches[:-1]]
    candidates = itertools.islice(itertools.product(*shorter), _MOST_TRIES)
    return min((_best_fit(falling, shapes, counts) for counts in candidates), key=cost)


def _best_fit(falling: list[int], shapes: RowShapes, counts: Sequence[int]) -> _Rows:
    """Rows of each shape, given how many micro-batches of the shorter ones there are.

    Sequences go longest first into the fullest row with room, else into a new one of the longest.
    """
    rows_of_shapes = []
    # (room, shape, row) of all rows with room, rising.
    open_rows = []
    for shape, length in enumerate(shapes.row_lengths[:-1]):
        count = counts[shape] * shapes.rows_per_micro_batch[shape]
        rows_of_shapes.append([[] for _ in range(count)])
        open_rows += [(length, shape, row) for row in range(count)]
    rows_of_shapes.append([])
    open_rows.sort()
    for i, length in enumerate(falling):
        position = bisect.bisect_left(open_rows, (length, -1, -1))
        if position < len(open_rows):
            room, shape, row = open_rows.pop(position)
        else:
            room = shapes.row_lengths[-1]
            shape = len(rows_of_shapes) - 1
            row = len(rows_of_shapes[shape])
            rows_of_shapes[shape].append([])
        sequences = rows_of_shapes[shape][row]
        sequences.append(i)
        if room > length and len(sequences) < shapes.segments_per_row:
            bisect.insort(open_rows, (room - length, shape, row))
    return [[row for row in rows if row] for rows in rows_of_shapes]
