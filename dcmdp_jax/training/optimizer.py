"""AdamW with its schedule and gradient clipping, from optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dcmdp_jax.config.settings import OptimizerSettings
from dcmdp_jax.types import Params


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
