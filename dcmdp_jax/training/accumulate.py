"""Run a function over the rows of a mini-batch, by bucket and device, and merge what it returns.

A function here is

    function(shared, rows of one micro-batch [R, ...]) -> (tree of statistics, tree of row outputs
    [R, ...])

Statistics (`algorithm/stats.py`) are merged by their type over micro-batches, buckets and devices;
row outputs come back in the layout of the rows. Each device runs its own rows: nothing travels
between the devices along the data axis but the statistics, once, after the last micro-batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dcmdp_jax.algorithm import stats
from dcmdp_jax.parallel.sharding import DATA, data_axis, shard_map_over_data
from dcmdp_jax.types import Array

RowFunction = Callable[[Any, Any], tuple[Any, Any]]
"""(shared, rows [R, ...]) -> (statistics, row outputs [R, ...])."""

_ROWS = P(None, DATA)

MICRO_BATCHES = "micro_batches"
"""Name scope of the work on micro-batches, by which benchmarks find their loop."""


def bucket_scope(bucket: int) -> str:
    """Name scope, inside `MICRO_BATCHES`, of the loop over the micro-batches of a bucket."""
    return f"bucket_{bucket}"


def accumulate(
    function: RowFunction,
    shared: Any,
    rows: tuple[Any, ...],
    micro_batches: Array,
    *,
    mesh: Mesh | None,
) -> tuple[Any, tuple[Any, ...]]:
    """Merge the statistics of all rows of a mini-batch.

    The pass that gives a gradient also gives row outputs. So where the gradient is taken at the
    weights that made the batch, its own forward pass yields p^Train, and no pass before it is
    needed.

    Args:
        function: a function of its arguments alone, without an array from around it.
        shared: tree, the same for all rows.
        rows: a tree for each bucket, leaves [A, R, ...].
        micro_batches: [buckets] int32, how many of the A micro-batches to run, counted from the
            first. A single micro-batch runs in any case, without a loop and without a start to add
            to.
        mesh: the devices; None for one.

    Returns:
        Merged statistics, sums in float32; and the row outputs, leaves [A, R, ...] for each bucket,
        0 where no micro-batch ran.
    """

    def on_device(
        shared: Any, rows: tuple[Any, ...], micro_batches: Array
    ) -> tuple[Any, tuple[Any, ...]]:
        if len(rows) > 1 or _count(rows) > 1:
            statistics, outputs = _loop(function, shared, rows, micro_batches)
        else:
            with jax.named_scope(MICRO_BATCHES):
                statistics, outputs = function(shared, _first(rows[0]))
            statistics = stats.merge(stats.empty(statistics), statistics)
            outputs = (jax.tree.map(lambda x: x[None], outputs),)
        return stats.across(statistics, data_axis(mesh)), outputs

    mapped = shard_map_over_data(
        on_device,
        mesh,
        in_specs=(P(), _ROWS, P()),
        out_specs=(P(), _ROWS),
    )
    return mapped(shared, rows, micro_batches)


def map_rows(
    function: Callable[[Any, Any], Any],
    shared: Any,
    rows: tuple[Any, ...],
    micro_batches: Array,
    *,
    mesh: Mesh | None,
) -> tuple[Any, ...]:
    """The row outputs of a function(shared, rows) -> outputs, as in `accumulate`.

    Always in a loop, which XLA compiles by itself: two programs that map the same function over the
    same shapes then get the same bits.
    """

    def on_rows(shared: Any, rows: Any) -> tuple[tuple[()], Any]:
        return (), function(shared, rows)

    def on_device(shared: Any, rows: tuple[Any, ...], micro_batches: Array) -> tuple[Any, ...]:
        _, outputs = _loop(on_rows, shared, rows, micro_batches)
        return outputs

    mapped = shard_map_over_data(on_device, mesh, in_specs=(P(), _ROWS, P()), out_specs=_ROWS)
    return mapped(shared, rows, micro_batches)


def _loop(
    function: RowFunction,
    shared: Any,
    rows: tuple[Any, ...],
    micro_batches: Array,
) -> tuple[Any, tuple[Any, ...]]:
    function = jax.jit(function, inline=True)  # traced once for its shapes and for the loop
    merged = None
    outputs = []
    for bucket, stacked in enumerate(rows):
        with jax.named_scope(f"{MICRO_BATCHES}/{bucket_scope(bucket)}"):
            merged, buffers = _loop_bucket(function, shared, stacked, micro_batches[bucket], merged)
        outputs.append(buffers)
    return merged, tuple(outputs)


def _loop_bucket(
    function: RowFunction,
    shared: Any,
    stacked: Any,
    micro_batches: Array,
    merged: Any,
) -> tuple[Any, Any]:
    """Add the statistics of a bucket to those `merged` of others; None before the first."""
    statistics, output = jax.eval_shape(function, shared, _first(stacked))
    if merged is None:
        merged = stats.empty(statistics)
    count = _count(stacked)
    buffers = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), output)

    def body(index: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        merged, buffers = carry
        micro = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)
        statistics, output = function(shared, micro)
        buffers = jax.tree.map(lambda buffer, x: buffer.at[index].set(x), buffers, output)
        return stats.merge(merged, statistics), buffers

    return lax.fori_loop(0, micro_batches, body, (merged, buffers))


def _count(stacked: Any) -> int:
    """The A of a tree of arrays [A, R, ...]."""
    return len(jax.tree.leaves(stacked)[0])


def _first(stacked: Any) -> Any:
    return jax.tree.map(lambda x: x[0], stacked)
