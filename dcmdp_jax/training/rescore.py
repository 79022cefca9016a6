"""Log-probs of a whole batch by the training stack, put into a column of it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from dcmdp_jax.algorithm import masked
from dcmdp_jax.algorithm.discrepancy import token_discrepancy
from dcmdp_jax.algorithm.stats import Mean
from dcmdp_jax.parallel.backend import compiler_options
from dcmdp_jax.run.row_logprobs import RowLogprobs
from dcmdp_jax.training.accumulate import map_rows
from dcmdp_jax.types import Batch, Params, Rows

OLD_LOGPROBS = "old_logprobs"
"""Column of rows that lag: p^Train of the weights that sampled them."""
START_LOGPROBS = "start_logprobs"
"""Column of rows in a step: p^Train at its start, where a pass of its own computed it."""


def batch_logprobs(params: Params, batch: Batch, row_logprobs: RowLogprobs, mesh: Mesh | None) -> tuple[jax.Array, ...]:
    """p^Train of the whole batch, no gradient: [M, A, R, L] float32 for each bucket, 0 outside completions."""

    def logprobs(params: Params, rows: Rows) -> jax.Array:
        return row_logprobs(params, rows).logprobs

    def mini_batch(_: None, xs: tuple[tuple[Rows, ...], jax.Array]) -> tuple[None, tuple[jax.Array, ...]]:
        return None, map_rows(logprobs, params, *xs, mesh=mesh)

    return lax.scan(mini_batch, None, (batch.rows, jnp.asarray(batch.micro_batches)))[1]


def with_column(batch: Batch, name: str, values: tuple[jax.Array, ...]) -> Batch:
    """The batch with a column of its rows added or replaced; `values` has an array for each bucket."""
    buckets = zip(batch.rows, values, strict=True)
    return batch._replace(rows=tuple(bucket.with_columns(**{name: column}) for bucket, column in buckets))


def make_rescore(row_logprobs: RowLogprobs, *, mesh: Mesh | None) -> Callable[[Params, Batch], tuple[Batch, jax.Array]]:
    """Jitted (params, batch) -> batch whose rollout log-probs are the training stack's own, on the step's own rows.

    This is precision "exact": the step computes the same numbers again, so the discrepancy is 0 to the last bit. The
    second result is a diagnostic: the mean |p_train - p_sampler| of the log-probs that were replaced.
    """

    @functools.partial(jax.jit, compiler_options=compiler_options(jax.default_backend()))
    def rescore(params: Params, batch: Batch) -> tuple[Batch, jax.Array]:
        logprobs = batch_logprobs(params, batch, row_logprobs, mesh)
        differences = Mean(jnp.float32(0), jnp.float32(0))
        for bucket, train in zip(batch.rows, logprobs, strict=True):
            delta = token_discrepancy(train, bucket.rollout_logprobs, measure="diff", sided="two")
            differences = differences.merge(masked.masked_sum(delta, bucket.completion_mask))
        return with_column(batch, "rollout_logprobs", logprobs), differences.value()

    return rescore


def make_old_logprobs(row_logprobs: RowLogprobs, *, mesh: Mesh | None) -> Callable[[Params, Batch], Batch]:
    """Jitted (params, batch) -> batch with the column `old_logprobs`, p^Train of the weights that sampled the batch.

    For batches that lag behind the policy. `params` are those weights: what they give is compared with the engine's
    log-probs, and what the policy moved since is staleness.
    """

    @functools.partial(jax.jit, compiler_options=compiler_options(jax.default_backend()))
    def old_logprobs(params: Params, batch: Batch) -> Batch:
        return with_column(batch, OLD_LOGPROBS, batch_logprobs(params, batch, row_logprobs, mesh))

    return old_logprobs


def lags(rows: Rows) -> bool:
    """True if the rows carry `old_logprobs`: they were sampled by older weights."""
    return OLD_LOGPROBS in rows.columns
