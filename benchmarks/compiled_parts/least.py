"""What a step needs at least, by arithmetic: operations and received bytes; and what a token of
decode must read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.compiled_parts.flops import PARTS, step_flops
from benchmarks.compiled_parts.lengths import forward_flops
from dcmdp_jax.engines.local.weights import engine_shapes
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import logical_axes, param_shapes
from dcmdp_jax.parallel.sharding import PARAM_AXES
from dcmdp_jax.plan.run_plan import CompiledRun


class Least(NamedTuple):
    """The least of one step.

    Attributes:
        flops: operations of the products, all devices together.
        parts: the same by `flops.PARTS`.
        gathers: bytes of parameters that each device receives, in the compute dtype.
        reductions: bytes of gradients that each device receives.
    """

    flops: float
    parts: dict[str, float]
    gathers: float
    reductions: float

    def flops_ratio(self, plan: CompiledRun) -> float:
        """Compiled operations of the step over those that the model needs."""
        return plan.programs["step"].account.flops.total * plan.run.placement.mesh.size / self.flops

    def traffic_ratio(self, plan: CompiledRun) -> float:
        """Received bytes of the step's collectives over the least; infinite where nothing has to be
        communicated.
        """
        moved = sum(one.received_bytes for one in plan.programs["step"].account.collectives)
        least = self.gathers + self.reductions
        return moved / least if least else float("inf" if moved else 1)


def least_of(plan: CompiledRun) -> Least:
    """The least of a run's step, when every completion has the longest length."""
    packing = plan.run.placement.packing
    updates = packing.mini_batches * packing.micro_batches[-1]
    recomputed = updates - packing.micro_batches[-1]
    tokens = packing.rows_per_micro_batch[-1] * packing.row_lengths[-1]
    flops = step_flops(
        plan.run.model,
        length=packing.row_lengths[-1],
        tokens=updates * tokens,
        recomputed_tokens=recomputed * tokens,
    )
    passes = tokens * (updates + recomputed)
    head = 2.0 * passes * plan.run.model.hidden_size * plan.run.model.vocab_size
    layers = passes * forward_flops(plan.run.model, packing.row_lengths[-1]) - head
    back = 2 * updates / (updates + recomputed)
    return Least(
        flops,
        dict(zip(PARTS, (layers, 0.0, back * layers, head, back * head, 0.0), strict=True)),
        *_least_bytes(
            plan.run.model,
            plan.run.placement.mesh,
            compute_dtype=plan.run.config.model.compute_dtype,
            updates=updates,
            recomputations=recomputed,
            mini_batches=packing.mini_batches,
        ),
    )


def decode_bytes(plan: CompiledRun) -> float:
    """Bytes that a token of all rows reads on a device: the engine's weights and the whole cache,
    once.

    An embedding that is no output matrix is left out: a row of it is read for each token.
    """
    arguments = plan.run.placement.engine.arguments
    shapes = engine_shapes(plan.run.model, arguments.precision, arguments.param_dtype)
    sizes = {
        name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
        for name, part in shapes.items()
    }
    looked_up = sizes.get("embedding", 0) / sum(sizes.values())
    return plan.engine.weights_bytes * (1 - looked_up) + plan.engine.cache_bytes


def _least_bytes(
    model: ModelConfig,
    mesh: Mesh,
    *,
    compute_dtype: str,
    updates: float,
    recomputations: float,
    mini_batches: int,
) -> tuple[float, float]:
    """Every parameter gathered once a forward and once a backward pass of a micro-batch, its
    gradient reduced once.

    Among n devices along fsdp each receives (n - 1) / n of a parameter's part on them. The gradient
    is reduced in float32, over fsdp (and expert, for parameters that it does not split) in each
    micro-batch and over data once a mini-batch. Along tensor and expert activations travel too,
    which this does not count.

    Args:
        model: the model.
        mesh: the training devices.
        compute_dtype: what is gathered.
        updates: micro-batches with a gradient, of the whole step.
        recomputations: micro-batches of the pass for p^Train.
        mini_batches: optimizer updates.
    """
    item = jnp.dtype(compute_dtype).itemsize
    shapes = jax.tree.leaves(param_shapes(model))
    axes = jax.tree.leaves(logical_axes(model), is_leaf=lambda leaf: isinstance(leaf, tuple))
    gathered = reduced = 0.0
    data = mesh.shape["data"]
    for leaf, names in zip(shapes, axes, strict=True):
        split = [
            PARAM_AXES[name] for name in names if name is not None and PARAM_AXES[name] is not None
        ]
        ways = math.prod(mesh.shape[axis] for axis in split if axis != "fsdp")
        part = leaf.size / ways
        fsdp = mesh.shape["fsdp"] if "fsdp" in split else 1
        gathered += part * (fsdp - 1) / fsdp
        reduced += part * (fsdp - 1) / fsdp * updates
        # Devices whose rows differ and whose part of the parameter does not.
        same = math.prod(mesh.shape[axis] for axis in ("fsdp", "expert") if axis not in split)
        reduced += (
            2 * part / fsdp * ((same - 1) / same * updates + (data - 1) / data * mini_batches)
        )
    return gathered * item * (2 * updates + recomputations), 4 * reduced
