"""The least that a sharded step must communicate, to compare a compiled step with."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import logical_axes, param_shapes
from dcmdp_jax.parallel.sharding import PARAM_AXES


class LeastBytes(NamedTuple):
    """Bytes that each device receives in one step.

    Attributes:
        gathers: of parameters, in the compute dtype.
        reductions: of gradients.
    """

    gathers: float
    reductions: float


def least_bytes(
    model: ModelConfig, mesh: Mesh, *, compute_dtype: str, updates: float, recomputations: float, mini_batches: int
) -> LeastBytes:
    """Every parameter gathered once a forward and once a backward pass of a micro-batch, its gradient reduced once.

    Among n devices along fsdp each receives (n - 1) / n of a parameter's part on them. The gradient is reduced in
    float32, over fsdp (and expert, for parameters that it does not split) in each micro-batch and over data once a
    mini-batch. Along tensor and expert activations travel too, which this does not count.

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
        split = [PARAM_AXES[name] for name in names if name is not None and PARAM_AXES[name] is not None]
        ways = math.prod(mesh.shape[axis] for axis in split if axis != "fsdp")
        part, fsdp = leaf.size / ways, mesh.shape["fsdp"] if "fsdp" in split else 1
        gathered += part * (fsdp - 1) / fsdp
        reduced += part * (fsdp - 1) / fsdp * updates
        # Devices whose rows differ and whose part of the parameter does not.
        same = math.prod(mesh.shape[axis] for axis in ("fsdp", "expert") if axis not in split)
        reduced += 2 * part / fsdp * ((same - 1) / same * updates + (data - 1) / data * mini_batches)
    return LeastBytes(gathered * item * (2 * updates + recomputations), 4 * reduced)
