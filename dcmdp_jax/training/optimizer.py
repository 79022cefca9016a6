"""AdamW with its schedule and gradient clipping, from optax."""

from __future__ import annotations

import optax

from dcmdp_jax.config import OptimizerSettings


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


def make_optimizer(settings: OptimizerSettings, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clip by global norm (when above 0), then AdamW. The multiplier never passes through it."""
    adamw = optax.adamw(
        schedule, b1=settings.beta1, b2=settings.beta2, eps=settings.epsilon, weight_decay=settings.weight_decay
    )
    if not settings.max_grad_norm:
        return adamw
    return optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), adamw)
