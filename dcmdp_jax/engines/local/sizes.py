"""Shapes of batches and caches, for the scheduler, the memory plan and `dcmdp plan`."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

# Max attention scores in memory during a forward pass over whole rows: 1 GiB in float32.
ATTENTION_ELEMENTS = 2**28
PREEMPTED_CACHES = 2
"""Max caches of preempted rows, in caches of a full batch of the longest rows."""
_SMALLEST_BUCKET = 16


def default_cache_block(platform: str) -> int:
    """First completion slots of a cache, doubled as rows fill them; each length is a program.

    Few on a CPU, where a step's time is proportional to the cache.
    """
    return 32 if platform == "cpu" else 128


def smallest_batch(platform: str) -> int:
    """Rows that a batch shrinks to as its rows finish.

    Few on a CPU, where a step's time is proportional to its rows. Elsewhere a step of fewer rows
    takes as long: the weights are read once for all.
    """
    return 16 if platform == "cpu" else 32


def cache_capacities(block: int, limit: int) -> list[int]:
    """Completion tokens that the cache of each level holds, for completions of up to `limit`."""
    # One doubling is not worth a second program and the copy.
    capacities = [block if limit > 2 * block else limit]
    # A row of n tokens holds n - 1 of them in the cache.
    while capacities[-1] < limit - 1:
        capacities.append(min(2 * capacities[-1], limit))
    return capacities


def batch_rows(
    max_rows: int,
    group: int,
    completions: int,
    devices: int,
) -> int:
    """Rows of a full batch: whole groups, if they fit, on every device."""
    return round_up(min(max_rows // group * group or max_rows, completions), devices)


def prefill_shape(
    heads: int,
    prompts: int,
    bucket: int,
    devices: int,
) -> tuple[int, int]:
    """Padded prompts of a prefill, and the chunks that it runs them in, so that attention fits."""
    chunks = min(prompts, -(-prompts * heads * bucket**2 // ATTENTION_ELEMENTS))
    return round_up(prompts, chunks * devices), chunks


def score_rows(
    heads: int,
    length: int,
    max_rows: int,
    devices: int,
) -> int:
    """Rows of `length` tokens that are scored at a time."""
    return round_up(max(1, min(max_rows, ATTENTION_ELEMENTS // (heads * length**2))), devices)


def length_bucket(tokens: int) -> int:
    """The length that a prompt, or a row to score, is padded to: 16, 32, 64, ..."""
    return max(_SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


def padded_rows(
    sequences: Sequence[np.ndarray],
    rows: int,
    length: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Right-pad sequences to [rows, length] int32; also return their lengths, 1 for no sequence."""
    padded = np.zeros((rows, length), np.int32)
    lengths = np.ones(rows, np.int32)
    for row, sequence in enumerate(sequences):
        padded[row, : sequence.size] = sequence
        lengths[row] = sequence.size
    return padded, lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Batch shapes of a call.

    Attributes:
        rows: rows of a full batch; a multiple of `devices`.
        min_rows: batches do not shrink below this.
        cache_block: completion slots in the cache of new rows. The cache doubles as rows grow; if
            the first doubling would reach `limit`, it has `limit` slots from the start.
        limit: max tokens of a completion.
        devices: devices of the engine.
    """

    rows: int
    min_rows: int
    cache_block: int
    limit: int
    devices: int

    @property
    def capacities(self) -> list[int]:
        """Completion tokens that the cache of each level holds."""
        return cache_capacities(self.cache_block, self.limit)

    def half(self, rows: int) -> int:
        """Half the rows, on every device."""
        return round_up(-(-rows // 2), self.devices)

    def shrunk(self, rows: int, live: int) -> int:
        """Halve the row count while the live rows fit and it stays at or above `min_rows`."""
        while max(live, self.min_rows) <= self.half(rows) < rows:
            rows = self.half(rows)
        return rows

    def batches(self, bucket: int) -> tuple[tuple[int, int, int], ...]:
        """Rows, cache slots and prefix slots of all batches that prompts of the bucket can reach.

        A call begins with the first.
        """
        row_counts = [self.rows]
        while self.min_rows <= self.half(row_counts[-1]) < row_counts[-1]:
            row_counts.append(self.half(row_counts[-1]))
        slots = [bucket, *(bucket + capacity for capacity in self.capacities)]
        shapes = []
        for prefix, cache_slots in itertools.pairwise(slots):
            shapes += [(rows, cache_slots, prefix) for rows in row_counts]
        return tuple(shapes)
