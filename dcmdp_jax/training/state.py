"""A `TrainState`: making it, where its leaves live on a mesh, and the parts that move it.

AdamW with its schedule and gradient clipping, from optax; the scale of a float16 loss; lambda as the settings have it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from dcmdp_jax.algorithm.dual import calibrated_tolerance, calibrated_update, dual_init, next_dual_state
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.config.settings import OptimizerSettings
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import logical_axes, param_shapes
from dcmdp_jax.parallel.sharding import replicated, shard_rows, state_shardings
from dcmdp_jax.types import Batch, DualState, LossScale, Params, Rows, TrainState


def initial_dual(settings: AlgorithmSettings) -> DualState:
    """lambda_0 and an empty window; for methods without a moving multiplier the constant they use, for the record."""
    if (fixed := settings.fixed_multiplier) is not None:
        return dual_init(fixed, minimum=fixed, maximum=fixed)
    return dual_init(
        settings.multiplier,
        minimum=settings.multiplier_min,
        maximum=settings.multiplier_max,
        measured_steps=settings.tolerance_steps,
    )


def measures_tolerance(settings: AlgorithmSettings, dual: DualState) -> bool:
    """Whether a step that starts with `dual`, an array on the host, is one of those that c is measured on."""
    return settings.fixed_multiplier is None and int(dual.filled) < settings.tolerance_steps


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
    if settings.fixed_multiplier is not None:
        return dual
    options = {
        "learning_rate": settings.dual_learning_rate, "minimum": settings.multiplier_min,
        "maximum": settings.multiplier_max,
    }  # fmt: skip
    if settings.tolerance_steps:
        measured = _measured(settings)
        if noise_floor is not None:
            measured["noise_floor"] = noise_floor
        return calibrated_update(dual, mean_discrepancy, **measured, **options)
    return next_dual_state(dual, mean_discrepancy, tolerance=settings.tolerance, **options)


def tolerance_of(settings: AlgorithmSettings, dual: DualState) -> float | jax.Array:
    """c of a step that starts with `dual`. It is measured on the first steps if the method has a moving multiplier."""
    if not settings.tolerance_steps or settings.fixed_multiplier is not None:
        return settings.tolerance
    return calibrated_tolerance(dual, settings.tolerance, **_measured(settings))


def _measured(settings: AlgorithmSettings) -> dict[str, Any]:
    """How c is measured."""
    return {
        "steps": settings.tolerance_steps, "quantile": settings.tolerance_quantile,
        "factor": settings.tolerance_factor,
    }  # fmt: skip


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


def make_schedule(settings: OptimizerSettings, *, updates: int) -> optax.Schedule:
    """Learning rate by optimizer update: a linear rise, then constant, or linear or cosine decay to 0.

    Args:
        settings: peak rate, shape, and length of the rise in updates.
        updates: optimizer updates in the whole run, where the decay ends.
    """
    rise = settings.schedule_warmup_steps
    rest = max(updates - rise, 1)
    after = {
        "constant": optax.constant_schedule(settings.learning_rate),
        "linear": optax.linear_schedule(settings.learning_rate, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(settings.learning_rate, rest),
    }[settings.schedule]
    if not rise:
        return after
    # The first update has a rate above 0: rate k + 1 of `rise`.
    start = optax.linear_schedule(settings.learning_rate / rise, settings.learning_rate, max(rise - 1, 1))
    return optax.join_schedules([start, after], [rise])


def make_optimizer(settings: OptimizerSettings, schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm (when above 0), then AdamW. The multiplier never passes through it.

    `update` takes the gradient's norm as `grad_norm` from a caller who has it already.
    """
    adamw = optax.adamw(
        schedule, b1=settings.beta1, b2=settings.beta2, eps=settings.epsilon, weight_decay=settings.weight_decay
    )
    if not settings.max_grad_norm:
        return optax.with_extra_args_support(adamw)
    return optax.chain(_clip_by_norm(settings.max_grad_norm), adamw)


def _clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """g min(1, max_norm / |g|): `optax.clip_by_global_norm` would compute |g| a second time."""

    def update(
        updates: Params,
        state: optax.OptState,
        params: Params | None = None,
        *,
        grad_norm: jax.Array | None = None,
        **_: Any,
    ) -> tuple[Params, optax.OptState]:
        del params
        norm = optax.tree.norm(updates) if grad_norm is None else grad_norm
        factor = max_norm / jnp.maximum(norm, max_norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


INITIAL_SCALE = 2.0**10
GROWTH_INTERVAL = 2000
_LARGEST = 2.0**24
_SMALLEST = 1.0
WARMUP_SCALE = 2.0**10
"""Fixed, for the supervised warm-up, whose loss is a mean over tokens."""


def initial_loss_scale(compute_dtype: str) -> LossScale | None:
    """The scale before the first update; None for a dtype that needs none."""
    if compute_dtype != "float16":
        return None
    return LossScale(jnp.float32(INITIAL_SCALE), jnp.zeros((), jnp.int32))


def next_loss_scale(state: LossScale, finite: jax.Array) -> LossScale:
    """The scale after an update (Micikevicius et al. 2018, section 3.2), with the constants of PyTorch's GradScaler.

        S / 2      after an update with a gradient that is not finite, which was skipped; at least 1
        2 S        after 2000 finite ones in a row; at most 2^24
        S          else

    Powers of two, so scaling and dividing again is exact. PyTorch starts at 2^16, for a loss that is a mean;
    ours is a sum over completions, divided after the pass, and starts at 2^10.

    Args:
        state: S of the update and the finite ones before it.
        finite: [] bool, whether the gradient of the update is finite.
    """
    count = jnp.where(finite, state.finite_updates + 1, 0)
    grown = count >= GROWTH_INTERVAL
    scale = jnp.where(finite, jnp.where(grown, 2 * state.scale, state.scale), state.scale / 2)
    return LossScale(jnp.clip(scale, _SMALLEST, _LARGEST), jnp.where(grown, 0, count))
