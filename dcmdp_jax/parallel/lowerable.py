"""Programs with abstract, sharded arguments, ready to be compiled for devices that are not here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

TripCounts = Callable[[str], float | None]
"""Name scope of a loop whose end is data -> its trip count in the worst case; None for another loop."""


class Lowerable(NamedTuple):
    """A program of the run, not compiled yet.

    Attributes:
        name: "step", "prefill", ...
        trace: gives the traced program.
        trip_counts: of loops whose end is data, in the worst case.
        held: bytes on each device of its arguments that live longer than it, by kind.
        row_lengths: lengths of the rows that attention runs over; empty where each row has one query.
        tokens: of one device at least, in a forward pass.
    """

    name: str
    trace: Callable[[], jax.stages.Traced]
    trip_counts: TripCounts
    held: dict[str, int]
    row_lengths: tuple[int, ...]
    tokens: int


def sharded(tree: Any, shardings: Any) -> Any:
    """Shapes with shardings, of which `shardings` has one for each leaf or for a whole subtree."""

    def attach(sharding: Any, part: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part)

    return jax.tree.map(attach, shardings, tree)


def bytes_per_device(tree: Any) -> int:
    """Bytes that each device holds of arrays with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
