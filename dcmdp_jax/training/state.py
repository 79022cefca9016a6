"""Making a `TrainState`, and where its leaves live on a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from dcmdp_jax.algorithm.dual import PID_WINDOW, dual_init
from dcmdp_jax.algorithm.penalties import FIXED_MULTIPLIERS
from dcmdp_jax.config_algorithm import AlgorithmSettings
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import logical_axes, param_shapes
from dcmdp_jax.parallel.sharding import replicated, shard_rows, state_shardings
from dcmdp_jax.types import Batch, DualState, Params, Rows, TrainState


def initial_dual(settings: AlgorithmSettings) -> DualState:
    """lambda_0 and an empty window; for methods without a moving multiplier the constant they use, for the record."""
    fixed = FIXED_MULTIPLIERS.get(settings.method)
    if fixed is not None:
        return dual_init(fixed, minimum=fixed, maximum=fixed)
    return dual_init(
        settings.multiplier,
        minimum=settings.multiplier_min,
        maximum=settings.multiplier_max,
        window=max(settings.dual_window, PID_WINDOW if settings.pid else 1),
    )


def train_state_shardings(
    model: ModelConfig, optimizer: optax.GradientTransformation, dual: DualState, param_dtype: str, mesh: Mesh
) -> TrainState:
    """A `TrainState` of shardings: parameters and moments by the table, scalars replicated."""
    shapes = param_shapes(model, param_dtype)
    abstract = jax.eval_shape(lambda params: new_state(params, optimizer, dual), shapes)
    return state_shardings(abstract, shapes, logical_axes(model), mesh)


def new_state(params: Params, optimizer: optax.GradientTransformation, dual: DualState) -> TrainState:
    """The state before the first step."""
    # Fresh arrays for every leaf: the step donates the whole state, and no buffer may appear in it twice.
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        dual=jax.tree.map(jnp.array, dual),
        skipped_in_row=jnp.zeros((), jnp.int32),
    )


def batch_shardings(mesh: Mesh, *, buckets: int) -> Batch:
    """A `Batch` of shardings: rows split over data and fsdp, what is per completion replicated."""
    rows = Rows(*[shard_rows(mesh)] * len(Rows._fields))
    rest = dict.fromkeys(Batch._fields, replicated(mesh))
    return Batch(**{**rest, "rows": (rows,) * buckets})
