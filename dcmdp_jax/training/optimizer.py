"""AdamW with its schedule and gradient clipping, from optax; the scale of a float16 loss."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dcmdp_jax.config.settings import OptimizerSettings
from dcmdp_jax.models.products import euclidean_norm
from dcmdp_jax.types import Array, LossScale, Params, TrainState

INITIAL_SCALE = 2.0**10
"""First loss scale, for a loss that is a sum over completions; see `next_loss_scale`."""
GROWTH_INTERVAL = 2000
"""Finite updates in a row after which the loss scale doubles; PyTorch's."""
_SMALLEST_SCALE = 1.0
_LARGEST_SCALE = 2.0**24


def make_schedule(settings: OptimizerSettings, *, updates: int) -> optax.Schedule:
    """Learning rate by update: a linear rise, then constant, or linear or cosine decay to 0.

    Args:
        settings: peak rate, shape, and length of the rise in updates.
        updates: optimizer updates in the whole run, where the decay ends.
    """
    peak = settings.learning_rate
    rise = settings.schedule_warmup_steps
    decay = max(updates - rise, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, decay),
        "cosine": optax.cosine_decay_schedule(peak, decay),
    }[settings.schedule]
    if not rise:
        return after
    # The first update has a rate above 0: rate k + 1 of `rise`.
    start = optax.linear_schedule(peak / rise, peak, max(rise - 1, 1))
    return optax.join_schedules([start, after], [rise])


def make_optimizer(
    settings: OptimizerSettings, schedule: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm (when above 0), then AdamW. The multiplier never passes through it.

    `update` takes the gradient's norm as `grad_norm` from a caller who has it already.
    """
    adamw = optax.adamw(
        schedule,
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )
    if not settings.max_grad_norm:
        return optax.with_extra_args_support(adamw)
    return optax.chain(_clip_by_norm(settings.max_grad_norm), adamw)


def apply_update(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    gradient: Params,
    *,
    divisor: Array,
    finite: Array,
) -> tuple[TrainState, Array, Array]:
    """Make one optimizer update by gradient / divisor, unless that or `finite` says it is broken.

    Returns:
        The state after it, the gradient's norm, and whether the update was made.
    """
    divisor = jnp.where(divisor > 0, divisor, 1.0)
    grad_norm = euclidean_norm(gradient) / divisor
    finite &= jnp.isfinite(grad_norm)

    grads = jax.tree.map(lambda g, p: (g / divisor).astype(p.dtype), gradient, state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params, grad_norm=grad_norm)
    params = optax.apply_updates(state.params, updates)
    # Chosen number by number, in place: the results of `lax.cond` are copied into the state.
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (params, opt_state),
        (state.params, state.opt_state),
    )

    loss_scale = state.loss_scale
    if loss_scale is not None:
        loss_scale = next_loss_scale(loss_scale, finite)
    skipped = jnp.where(finite, 0, state.skipped_in_row + 1)
    state = state._replace(
        params=params,
        opt_state=opt_state,
        skipped_in_row=skipped,
        loss_scale=loss_scale,
    )
    return state, grad_norm, finite


def updates_made(opt_state: optax.OptState) -> Array:
    """Number of updates that were made; skipped ones don't count, for the schedule either."""
    return optax.tree.get_all_with_path(opt_state, "count")[0][1]


def _clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """g min(1, max_norm / |g|): `optax.clip_by_global_norm` would compute |g| a second time."""

    def update(
        updates: Params,
        state: Any,
        _: Any = None,
        *,
        grad_norm: Array | None = None,
        **__: Any,
    ) -> Any:
        norm = optax.tree.norm(updates) if grad_norm is None else grad_norm
        factor = max_norm / jnp.maximum(norm, max_norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def initial_loss_scale(compute_dtype: str) -> LossScale | None:
    """The scale before the first update; None for a dtype that needs none."""
    if compute_dtype != "float16":
        return None
    return LossScale(jnp.float32(INITIAL_SCALE), jnp.zeros((), jnp.int32))


def next_loss_scale(state: LossScale, finite: Array) -> LossScale:
    """The scale after an update (Micikevicius et al. 2018, 3.2), with PyTorch's constants.

        S / 2      after an update with a gradient that is not finite, which was skipped; at least 1
        2 S        after 2000 finite ones in a row; at most 2^24
        S          else

    Powers of two, so scaling and dividing again is exact. PyTorch starts at 2^16, for a loss that
    is a mean; ours is a sum over completions, divided after the pass, and starts at 2^10.

    Args:
        state: S of the update and the finite ones before it.
        finite: [] bool, whether the gradient of the update is finite.
    """
    count = jnp.where(finite, state.finite_updates + 1, 0)
    grows = count >= GROWTH_INTERVAL
    scale = jnp.where(finite, jnp.where(grows, 2 * state.scale, state.scale), state.scale / 2)
    scale = jnp.clip(scale, _SMALLEST_SCALE, _LARGEST_SCALE)
    return LossScale(scale, jnp.where(grows, 0, count))
