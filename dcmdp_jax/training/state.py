"""Making a `TrainState`, where its leaves live on a mesh, and the dual state as the settings have it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from dcmdp_jax.algorithm.dual import calibrated_tolerance, calibrated_update, dual_init, dual_update
from dcmdp_jax.algorithm.penalties import FIXED_MULTIPLIERS
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import logical_axes, param_shapes
from dcmdp_jax.parallel.sharding import replicated, shard_rows, state_shardings
from dcmdp_jax.types import Batch, DualState, LossScale, Params, Rows, TrainState


def initial_dual(settings: AlgorithmSettings) -> DualState:
    """lambda_0 and an empty window; for methods without a moving multiplier the constant they use, for the record."""
    fixed = FIXED_MULTIPLIERS.get(settings.method)
    if fixed is not None:
        return dual_init(fixed, minimum=fixed, maximum=fixed)
    return dual_init(
        settings.multiplier,
        minimum=settings.multiplier_min,
        maximum=settings.multiplier_max,
        measured_steps=settings.tolerance_steps,
    )


def measures_tolerance(settings: AlgorithmSettings, dual: DualState) -> bool:
    """Whether a step that starts with `dual`, an array on the host, is one of those that c is measured on."""
    return settings.method not in FIXED_MULTIPLIERS and int(dual.filled) < settings.tolerance_steps


def update_dual(
    settings: AlgorithmSettings, dual: DualState, mean_discrepancy: jax.Array, noise_floor: jax.Array | None = None
) -> DualState:
    """The dual state of the next step (Eq. 11); the same one for methods without a moving multiplier.

    Args:
        settings: of the algorithm.
        dual: of this step.
        mean_discrepancy: dbar_k.
        noise_floor: the engine's, where c is being measured and it is known.
    """
    if settings.method in FIXED_MULTIPLIERS:
        return dual
    options = {
        "learning_rate": settings.dual_learning_rate, "minimum": settings.multiplier_min,
        "maximum": settings.multiplier_max,
    }  # fmt: skip
    if settings.tolerance_steps:
        measured = {"steps": settings.tolerance_steps, "quantile": settings.tolerance_quantile}
        if noise_floor is not None:
            measured["noise_floor"] = noise_floor
        return calibrated_update(dual, mean_discrepancy, **measured, **options)
    return dual_update(dual, mean_discrepancy, tolerance=settings.tolerance, **options)


def tolerance_of(settings: AlgorithmSettings, dual: DualState) -> float | jax.Array:
    """c of a step that starts with `dual`. It is measured on the first steps if the method has a moving multiplier."""
    if not settings.tolerance_steps or settings.method in FIXED_MULTIPLIERS:
        return settings.tolerance
    return calibrated_tolerance(
        dual, settings.tolerance, steps=settings.tolerance_steps, quantile=settings.tolerance_quantile
    )


def train_state_shardings(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    dual: DualState,
    param_dtype: str,
    mesh: Mesh,
    loss_scale: LossScale | None = None,
) -> TrainState:
    """A `TrainState` of shardings: parameters and moments by the table, scalars replicated."""
    shapes = param_shapes(model, param_dtype)
    abstract = jax.eval_shape(lambda params: new_state(params, optimizer, dual, loss_scale), shapes)
    return state_shardings(abstract, shapes, logical_axes(model), mesh)


def new_state(
    params: Params, optimizer: optax.GradientTransformation, dual: DualState, loss_scale: LossScale | None = None
) -> TrainState:
    """The state before the first step."""
    # Fresh arrays for every leaf: the step donates the whole state, and no buffer may appear in it twice.
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        dual=jax.tree.map(jnp.array, dual),
        skipped_in_row=jnp.zeros((), jnp.int32),
        loss_scale=jax.tree.map(jnp.array, loss_scale),
    )


def batch_shardings(mesh: Mesh, *, buckets: int) -> Batch:
    """A `Batch` of shardings: rows split over data, fsdp and expert, what is per completion replicated."""
    rows = Rows(*[shard_rows(mesh)] * len(Rows._fields))
    rest = dict.fromkeys(Batch._fields, replicated(mesh))
    return Batch(**{**rest, "rows": (rows,) * buckets})
