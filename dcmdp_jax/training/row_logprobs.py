"""Log-probs of packed rows by the training stack's forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dcmdp_jax.algorithm import masked
from dcmdp_jax.algorithm.discrepancy import token_discrepancy
from dcmdp_jax.algorithm.stats import Mean
from dcmdp_jax.models import decoder, logprobs, quantize
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.moe import Aux
from dcmdp_jax.models.ops import choose_ops
from dcmdp_jax.models.params import quantized_leaves
from dcmdp_jax.models.products import products_in
from dcmdp_jax.models.scheme import FULL, Scheme
from dcmdp_jax.parallel.backend import compiler_options
from dcmdp_jax.parallel.sharding import PARAM_AXES, constrain, data_parallel_only, shard_map_over_model_axes
from dcmdp_jax.training.accumulate import map_rows
from dcmdp_jax.types import Batch, Params, Rows

OLD_LOGPROBS = "old_logprobs"
"""Column of rows that lag: p^Train of the weights that sampled them."""
START_LOGPROBS = "start_logprobs"
"""Column of rows in a step: p^Train at its start, where a pass of its own computed it."""


class RowOutputs(NamedTuple):
    """Result of a forward pass on rows.

    Attributes:
        logprobs, entropy: [R, L] float32 nats, of the completion tokens.
        router: `moe.router_sums` of each layer over the positions that predict a completion token, stacked; empty of a
            dense model.
    """

    logprobs: jax.Array
    entropy: jax.Array
    router: Aux


RowLogprobs = Callable[[Params, Rows], RowOutputs]
"""(params, rows [R, L]) -> `RowOutputs`."""


def make_row_logprobs(
    model: ModelConfig,
    compute: Compute,
    *,
    temperature: float,
    mesh: Mesh | None,
    scheme: Scheme = FULL,
    head_dtype: str = "compute",
) -> RowLogprobs:
    """The training stack's forward pass on rows. Every log-prob of training comes from here.

    A mixture of experts uses the experts that the rows name, if they do (column `routed_experts`).

    Args:
        model: the model.
        compute: dtype, rematerialization, kernel and chunk.
        temperature: the one that completions are sampled at.
        mesh: the run's, or None for one device. The result is for `accumulate` and `map_rows` on this mesh.
        scheme: roundings of the engine that the forward pass repeats; gradients pass straight through.
        head_dtype: "compute", or "float32" for the product of the output layer.
    """
    pin: dict[str, Any] = {"mesh": mesh}
    if not data_parallel_only(mesh):
        pin |= {"constrain": constrain(mesh), "look_up": _lookup_over_model_axes(model, compute, mesh)}
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    token_logprobs = functools.partial(
        logprobs.token_logprobs, temperature=temperature, chunk=compute.logprob_chunk, ops=choose_ops(platform)
    )
    if not data_parallel_only(mesh):
        token_logprobs = _over_model_axes(token_logprobs, model, mesh)

    def row_logprobs(params: Params, rows: Rows) -> RowOutputs:
        with products_in(compute.dtype):
            return forward(params, rows)

    def forward(params: Params, rows: Rows) -> RowOutputs:
        output = decoder.output_kernel(params)
        if scheme.weights:
            output = quantize.straight_through(output, True, scheme.weights)
            layers = quantize.straight_through(params["layers"], quantized_leaves(model)["layers"], scheme.weights)
            params = {**params, "layers": layers}
        hidden, router = decoder.hidden_states_and_aux(
            params, model, rows.input_ids, rows.position_ids, rows.segment_ids, compute,
            counted=logprobs.predicting(rows.completion_mask) if model.num_experts else None,
            replayed=rows.columns.get("routed_experts"), scheme=scheme, **pin,
        )  # fmt: skip
        if head_dtype != "compute":
            hidden = hidden.astype(head_dtype)
        return RowOutputs(*token_logprobs(hidden, output, rows.input_ids, rows.completion_mask), router)

    return row_logprobs


def without_replay(rows: Rows) -> Rows:
    """Rows whose experts are the router's choice: those of another policy than the one that sampled."""
    return rows.without_columns("routed_experts")


def kernel_axes(model: ModelConfig, mesh: Mesh) -> logprobs.KernelAxes:
    """The mesh axes that split the output matrix; a size that its axis does not divide is whole."""
    sizes = {"embed": model.hidden_size, "vocab": model.vocab_size}
    split = {
        name: PARAM_AXES[name]
        for name, size in sizes.items()
        if mesh.shape[PARAM_AXES[name]] > 1 and size % mesh.shape[PARAM_AXES[name]] == 0
    }
    return logprobs.KernelAxes(split.get("embed"), split.get("vocab"))


def _lookup_over_model_axes(model: ModelConfig, compute: Compute, mesh: Mesh) -> decoder.LookUp | None:
    """The embedding's lookup with rows split over fsdp and expert; None where the embedding's width is whole."""
    axes = kernel_axes(model, mesh)
    if axes.embed is None:
        return None
    rows = P(("fsdp", "expert"))
    look_up = functools.partial(decoder.look_up_split, dtype=compute.dtype, axes=axes)
    return shard_map_over_model_axes(look_up, mesh, in_specs=(P(axes.vocab, axes.embed), rows), out_specs=rows)


def _over_model_axes(token_logprobs: Callable[..., Any], model: ModelConfig, mesh: Mesh) -> Callable[..., Any]:
    """The output layer with rows split over fsdp and expert, the vocabulary over tensor.

    Each part of the output matrix is gathered once a pass and its gradient reduced once. Left to the compiler, both
    would happen in each chunk of tokens.
    """
    axes = kernel_axes(model, mesh)
    rows = P(("fsdp", "expert"))
    return shard_map_over_model_axes(
        functools.partial(token_logprobs, kernel_axes=axes), mesh,
        in_specs=(rows, P(*axes), rows, rows), out_specs=(rows, rows),
    )  # fmt: skip


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
