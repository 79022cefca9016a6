"""Log-probs of a whole batch by the training stack, put into a column of it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from dcmdp_jax.algorithm import masked, stats
from dcmdp_jax.algorithm.discrepancy import token_discrepancy
from dcmdp_jax.data.episode import OLD_TOP_LOGPROBS, TOP_LOGPROBS
from dcmdp_jax.models.row_logprobs import RowLogprobs
from dcmdp_jax.parallel.backend import compiler_options
from dcmdp_jax.training.accumulate import map_rows
from dcmdp_jax.types import Array, Batch, Params, Rows

OLD_LOGPROBS = "old_logprobs"
"""Column of rows that lag: p^Train of the weights that sampled them."""
START_LOGPROBS = "start_logprobs"
"""Column of rows in a step: p^Train at its start, where a pass of its own computed it."""
START_TOP_LOGPROBS = "start_top_logprobs"
"""The same of the engine's top-k tokens, in rows that have them."""


def with_logprobs(
    params: Params,
    batch: Batch,
    row_logprobs: RowLogprobs,
    *,
    mesh: Mesh | None,
    names: Sequence[str],
) -> Batch:
    """The batch with p^Train of its tokens, and of the engine's top-k tokens, as columns `names`.

    No gradient; [M, A, R, L] float32 for each bucket, 0 outside completions.
    """

    def logprobs(params: Params, rows: Rows) -> dict[str, Array]:
        outputs = row_logprobs(params, rows)
        columns = {names[0]: outputs.logprobs}
        if outputs.top_logprobs is not None and len(names) > 1:
            columns[names[1]] = outputs.top_logprobs
        return columns

    def map_mini_batch(mini_batch: tuple[tuple[Rows, ...], Array]) -> tuple[Any, ...]:
        rows, micro_batches = mini_batch
        return map_rows(logprobs, params, rows, micro_batches, mesh=mesh)

    columns = lax.map(map_mini_batch, (batch.rows, jnp.asarray(batch.micro_batches)))
    buckets = zip(batch.rows, columns, strict=True)
    return batch._replace(rows=tuple(rows.with_columns(**added) for rows, added in buckets))


def make_rescore(
    row_logprobs: RowLogprobs, *, mesh: Mesh | None
) -> Callable[[Params, Batch], tuple[Batch, Array]]:
    """Jitted (params, batch) -> batch whose rollout log-probs are the training stack's own.

    This is precision "exact": the step computes the same numbers again, on the same rows, so the
    discrepancy is 0 to the last bit. The second result is a diagnostic: the mean |p_train -
    p_sampler| of the log-probs that were replaced.
    """

    @functools.partial(jax.jit, compiler_options=compiler_options(jax.default_backend()))
    def rescore(params: Params, batch: Batch) -> tuple[Batch, Array]:
        names = "rollout_logprobs", TOP_LOGPROBS
        rescored = with_logprobs(params, batch, row_logprobs, mesh=mesh, names=names)
        differences = []
        for rows, train in zip(batch.rows, rescored.rows, strict=True):
            delta = token_discrepancy(train.rollout_logprobs, rows.rollout_logprobs)
            differences.append(masked.masked_sum(delta, rows.completion_mask))
        return rescored, functools.reduce(stats.merge, differences).value()

    return rescore


def make_old_logprobs(
    row_logprobs: RowLogprobs,
    *,
    mesh: Mesh | None,
    names: Sequence[str] = (OLD_LOGPROBS, OLD_TOP_LOGPROBS),
) -> Callable[[Params, Batch], Batch]:
    """Jitted (params, batch) -> batch with `old_logprobs`, p^Train of the weights that sampled it.

    For batches that lag behind the policy. `params` are those weights: what they give is compared
    with the engine's log-probs, and what the policy moved since is staleness. `names` has other
    columns, for the parameters of a teacher.
    """

    def old_logprobs(params: Params, batch: Batch) -> Batch:
        return with_logprobs(params, batch, row_logprobs, mesh=mesh, names=names)

    return jax.jit(old_logprobs, compiler_options=compiler_options(jax.default_backend()))


def lags(rows: Rows) -> bool:
    """True if the rows carry `old_logprobs`: they were sampled by older weights."""
    return OLD_LOGPROBS in rows.columns
