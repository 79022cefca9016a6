"""A `TrainState`: making it, where its leaves live on a mesh, and how lambda and c move."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from dcmdp_jax.algorithm.dual import dual_init, dual_update, measured_tolerance
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.lora import trained
from dcmdp_jax.models.params import declared_axes
from dcmdp_jax.parallel.sharding import state_shardings
from dcmdp_jax.types import Array, DualState, LossScale, Params, TrainState


def initial_dual(settings: AlgorithmSettings) -> DualState:
    """lambda_0 and c; of methods without a moving multiplier the constant that they use."""
    multiplier = settings.fixed_multiplier
    if multiplier is None:
        multiplier = settings.multiplier
    return dual_init(multiplier, tolerance=settings.tolerance)


def update_dual(
    settings: AlgorithmSettings,
    dual: DualState,
    step: Array,
    bounded: Array,
) -> DualState:
    """The dual state of the next step (Eq. 11).

    lambda does not move in methods with a fixed multiplier, nor in the steps that c is measured on.

    Args:
        settings: the method and its constants.
        dual: the state of this step.
        step: [] int32, finished steps before this one.
        bounded: dbar_k, or the quantile that c bounds.
    """
    if settings.fixed_multiplier is not None:
        return dual
    multiplier = dual_update(
        dual.multiplier,
        bounded,
        tolerance=dual.tolerance,
        dual_learning_rate=settings.dual_learning_rate,
        multiplier_min=0.0,
        multiplier_max=settings.multiplier_max,
    )
    if settings.measured_steps:
        multiplier = jnp.where(step < settings.measured_steps, dual.multiplier, multiplier)
    return dual._replace(multiplier=multiplier)


def measure_tolerance(
    settings: AlgorithmSettings, series: Mapping[str, tuple[Array, Array]]
) -> np.float32:
    """c from the first steps by `measured_tolerance`; `tolerance` without a finite discrepancy.

    Args:
        settings: the rule.
        series: metric -> steps, and its values. Of the noise floor the latest counts until the
            next, 0 before the first.
    """
    steps, means = series[settings.bounded_metric]
    if not np.any(np.isfinite(means)):
        return np.float32(settings.tolerance)
    floor_steps, floors = series.get("mismatch/noise_floor", ((), ()))
    measured_so_far = np.searchsorted(floor_steps, steps, side="right")
    latest_floors = np.append(0.0, floors)[measured_so_far]
    measure = jax.jit(functools.partial(measured_tolerance, factor=settings.tolerance_factor))
    return np.float32(measure(np.float32(means), np.float32(latest_floors)))


def train_state_shardings(
    state: TrainState,
    model: ModelConfig,
    mesh: Mesh,
    lora: Lora | None = None,
) -> TrainState:
    """Shardings of an abstract state: parameters and moments by the table, scalars replicated."""
    return state_shardings(state, state.params, declared_axes(trained(model, lora)), mesh)


def new_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    dual: DualState,
    loss_scale: LossScale | None = None,
) -> TrainState:
    """The state before the first step."""
    # Fresh arrays: the step donates the whole state, and no buffer may appear in it twice.
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        dual=jax.tree.map(jnp.array, dual),
        skipped_in_row=jnp.zeros((), jnp.int32),
        loss_scale=jax.tree.map(jnp.array, loss_scale),
    )
