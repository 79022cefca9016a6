"""Lengths of our programs' loops whose end is data, in the worst case, by the name scopes that they
have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.compiled_parts.hlo import TripCounts, in_scope
from dcmdp_jax.models.logprobs import CHUNKS, token_blocks
from dcmdp_jax.models.ops.blocks import BLOCKS
from dcmdp_jax.models.ops.blockwise import KEY_BLOCKS, QUERY_BLOCKS
from dcmdp_jax.models.row_logprobs import kernel_axes
from dcmdp_jax.plan.run_plan import PlannedRun, predicted_tokens
from dcmdp_jax.training.accumulate import MICRO_BATCHES, bucket_scope
from dcmdp_jax.training.step import RECOMPUTE


def attention_blocks(op_name: str) -> float | None:
    """Iterations of blockwise attention's loops where each row is one segment; None for another
    loop.

    A block of queries has half of its row's blocks of keys on average.

    Args:
        op_name: of the loop.
    """
    if found := re.search(rf"\b{KEY_BLOCKS}_(\d+)\b", op_name):
        return (int(found.group(1)) + 1) / 2
    found = re.search(rf"\b{QUERY_BLOCKS}_(\d+)\b", op_name)
    return int(found.group(1)) if found else None


def expert_blocks(op_name: str) -> int | None:
    """Iterations, at most, of a loop over blocks of rows of one expert each; None for another loop.

    Args:
        op_name: of the loop.
    """
    found = re.search(rf"\b{BLOCKS}_(\d+)\b", op_name)
    return int(found.group(1)) if found else None


def one_token(op_name: str) -> float:
    """Loops of the engine's programs: blocks of experts' rows, or tokens to decode, of which one is
    counted.
    """
    return expert_blocks(op_name) or 1


def blocks_at_most(op_name: str) -> float | None:
    """Iterations of a loop over blocks of experts' rows, at most, or of blockwise attention; None
    for another loop.

    Args:
        op_name: of the loop.
    """
    return attention_blocks(op_name) or expert_blocks(op_name)


def step_trip_counts(run: PlannedRun, micro_batches: Sequence[int] | None = None) -> TripCounts:
    """Lengths of a step's loops whose end is data.

    All tokens of a row count as wanted by the output layer, as they do for the model's operations.

    Args:
        run: what is planned.
        micro_batches: of a mini-batch, in each bucket; by default those of the worst case, in which
            every completion has the longest length, so that the bucket of the longest rows is full.
    """
    model = run.model
    mesh = run.placement.mesh
    packing = run.placement.packing
    counts = micro_batches or (*(0 for _ in packing.micro_batches[:-1]), packing.micro_batches[-1])
    tokens = predicted_tokens(packing, mesh)[-1]
    axes = kernel_axes(model, mesh)
    vocab = model.vocab_size // (1 if axes.vocab is None else mesh.shape[axes.vocab])
    blocks, _ = token_blocks(tokens, run.placement.compute.logprob_chunk, vocab, axes)

    def trips(op_name: str) -> float | None:
        if in_scope(op_name, CHUNKS):
            return blocks
        if (most := blocks_at_most(op_name)) is not None:
            return most
        if not in_scope(op_name, MICRO_BATCHES):
            return None
        # The first mini-batch's own update gives its p^Train.
        share = 1 - 1 / packing.mini_batches if in_scope(op_name, RECOMPUTE) else 1
        return share * sum(
            count for bucket, count in enumerate(counts) if in_scope(op_name, bucket_scope(bucket))
        )

    return trips
