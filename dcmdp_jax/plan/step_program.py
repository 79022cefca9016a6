"""The training step of a run, with abstract arguments, ready to be compiled for any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.batch_shapes import abstract_batch
from dcmdp_jax.data.columns import columns_of_run
from dcmdp_jax.data.row_layout import RowShapes
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.logprobs import CHUNKS, token_blocks
from dcmdp_jax.models.ops.blocks import expert_blocks
from dcmdp_jax.models.ops.blockwise import attention_blocks
from dcmdp_jax.models.params import param_shapes
from dcmdp_jax.parallel.mesh import row_shards
from dcmdp_jax.parallel.sharding import Lowerable, TripCounts, bytes_per_device, sharded
from dcmdp_jax.plan.hlo import in_scope
from dcmdp_jax.training.accumulate import MICRO_BATCHES, bucket_scope
from dcmdp_jax.training.build import make_step_programs
from dcmdp_jax.training.row_logprobs import kernel_axes
from dcmdp_jax.training.setup import layout
from dcmdp_jax.training.state import batch_shardings, new_state
from dcmdp_jax.training.step import OLD_LOGPROBS
from dcmdp_jax.types import TrainState


class StepPlan(NamedTuple):
    """A training step to compile.

    Attributes:
        program: the step.
        compute, packing: how it computes, and the shapes of a batch.
        params_bytes, optimizer_bytes: on each device.
        micro_batches: of one mini-batch in the worst case: all completions of the longest length.
    """

    program: Lowerable
    compute: Compute
    packing: RowShapes
    params_bytes: int
    optimizer_bytes: int
    micro_batches: int


def plan_step(config: Config, model: ModelConfig, mesh: Mesh) -> StepPlan:
    """The step that `dcmdp train` would run on that mesh. Nothing is allocated.

    Args:
        config: the settings.
        model: the model.
        mesh: the training devices.
    """
    compute, packing = layout(config, mesh)
    # The worst case: every completion has the longest length, so the bucket of the longest rows is full.
    longest = (*(0 for _ in packing.micro_batches[:-1]), packing.micro_batches[-1])
    programs = make_step_programs(config, model, compute, mesh)
    shapes = param_shapes(model, config.model.param_dtype)
    state = jax.eval_shape(
        lambda params: new_state(params, programs.optimizer, programs.dual, programs.loss_scale), shapes
    )
    state: TrainState = sharded(state, programs.shardings)
    batch = abstract_batch(packing, columns_of_run(config, model))
    if config.algorithm.tolerance_steps:
        batch = batch._replace(noise_floor=jax.ShapeDtypeStruct((), jnp.float32))
    batch = sharded(batch, batch_shardings(mesh, buckets=len(packing.row_lengths)))
    reference = state.params if config.algorithm.kl_coefficient else None
    params, optimizer = bytes_per_device(state.params), bytes_per_device(state.opt_state)
    held = {"parameters": params, "optimizer": optimizer}
    if reference is not None:
        held["reference policy"] = params
    return StepPlan(
        program=Lowerable(
            "step", lambda: programs.train_step.trace(state, batch, reference),
            step_trip_counts(model, compute, packing, mesh, longest), held, packing.row_lengths,
            min(_predicted(packing, mesh)),
        ),
        compute=compute,
        packing=packing,
        params_bytes=params,
        optimizer_bytes=optimizer,
        micro_batches=packing.micro_batches[-1],
    )  # fmt: skip


def _predicted(packing: RowShapes, mesh: Mesh) -> list[int]:
    """Tokens of a device that a micro-batch predicts, of each bucket: all of a row but the first."""
    shapes = zip(packing.rows_per_micro_batch, packing.row_lengths, strict=True)
    return [rows // row_shards(mesh) * (length - 1) for rows, length in shapes]


def blocks_at_most(op_name: str) -> float | None:
    """Iterations of a loop over blocks of experts' rows, at most, or of blockwise attention; None for another loop.

    Args:
        op_name: of the loop.
    """
    return attention_blocks(op_name) or expert_blocks(op_name)


def step_trip_counts(
    model: ModelConfig, compute: Compute, packing: RowShapes, mesh: Mesh, micro_batches: Sequence[int]
) -> TripCounts:
    """Lengths of a step's loops whose end is data.

    All tokens of a row count as wanted by the output layer, as they do for the model's operations.

    Args:
        model, compute, packing, mesh: of the step.
        micro_batches: of a mini-batch, in each bucket.
    """
    tokens = _predicted(packing, mesh)[-1]
    axes = kernel_axes(model, mesh)
    vocab = model.vocab_size // (1 if axes.vocab is None else mesh.shape[axes.vocab])
    blocks, _ = token_blocks(tokens, compute.logprob_chunk, vocab, axes)

    def trips(op_name: str) -> float | None:
        if in_scope(op_name, CHUNKS):
            return blocks
        if (most := blocks_at_most(op_name)) is not None:
            return most
        if not in_scope(op_name, MICRO_BATCHES):
            return None
        # The first mini-batch's own update gives its p^Train.
        share = 1 - 1 / packing.mini_batches if in_scope(op_name, OLD_LOGPROBS) else 1
        return share * sum(
            count for bucket, count in enumerate(micro_batches) if in_scope(op_name, bucket_scope(bucket))
        )

    return trips
