"""The Lagrange multiplier: projected gradient ascent on the mean discrepancy, nothing else.

No optimizer, decay or gradient clipping touches it.
"""

from __future__ import annotations

import numbers

import jax
import jax.numpy as jnp

from dcmdp_jax.algorithm.checks import require_integer, require_number
from dcmdp_jax.types import Array, DualState


def dual_init(multiplier: float, *, minimum: float, maximum: float, window: int = 1) -> DualState:
    """The state before the first step.

    Args:
        multiplier: lambda_0, within [minimum, maximum].
        minimum: lambda_min >= 0; a negative multiplier would reward discrepancy.
        maximum: lambda_max, finite.
        window: n >= 1, how many of the last steps' mean discrepancies each update averages. 1 is the paper's Eq. 11;
            more is our reading of its "dynamic buffer".

    Returns:
        `DualState` with an empty window.

    Raises:
        ValueError: if a value is out of its range or not finite.
    """
    require_number("minimum", minimum, minimum=0)
    require_number("maximum", maximum, minimum=minimum)
    require_number("multiplier", multiplier, minimum=minimum, maximum=maximum)
    require_integer("window", window, minimum=1)
    return DualState(
        multiplier=jnp.asarray(multiplier, jnp.float32),
        window=jnp.zeros(window, jnp.float32),
        filled=jnp.zeros((), jnp.int32),
    )


def dual_update(
    state: DualState,
    mean_discrepancy: float | Array,
    *,
    tolerance: float | Array,
    learning_rate: float | Array,
    minimum: float | Array,
    maximum: float | Array,
) -> DualState:
    """One step of projected dual ascent (Eq. 11; Algorithm 1, "Multiplier update").

        lambda_{k+1} = clip(lambda_k + eta (dbar - c), lambda_min, lambda_max)

    dbar is the mean of the last n values of `mean_discrepancy`, this one included, n the length of the state's
    window; during the first n - 1 steps the mean of those there are. With n = 1 dbar is `mean_discrepancy`.

    Call it once per training step, after the policy updates. A `mean_discrepancy` that is NaN or infinite leaves the
    whole state as it was: one broken batch must not cost the multiplier its history.

    Args:
        state: from `dual_init` or the step before.
        mean_discrepancy: [] float, sum(delta m) / sum(m) over the WHOLE batch, all mini-batches and hosts: a mean
            over tokens, not over completions.
        tolerance: c, in the discrepancy's unit.
        learning_rate: eta, multiplier units per unit of discrepancy.
        minimum: lambda_min.
        maximum: lambda_max.

    Returns:
        The state of the next step.

    Raises:
        ValueError: if a Python number is negative or not finite, or `maximum` is below `minimum`.
    """
    require_number("tolerance", tolerance, minimum=0)
    require_number("learning_rate", learning_rate, minimum=0)
    require_number("minimum", minimum, minimum=0)
    require_number("maximum", maximum, minimum=minimum if isinstance(minimum, numbers.Real) else 0)
    mean_discrepancy = jnp.asarray(mean_discrepancy, jnp.float32)
    window = jnp.append(jnp.asarray(state.window, jnp.float32)[1:], mean_discrepancy)
    filled = jnp.minimum(jnp.asarray(state.filled, jnp.int32) + 1, window.shape[0])
    moved = DualState(state.multiplier, window, filled)
    step = jnp.asarray(learning_rate, jnp.float32) * violation(moved, tolerance)
    moved = moved._replace(multiplier=jnp.clip(state.multiplier + step, minimum, maximum).astype(jnp.float32))
    finite = jnp.isfinite(mean_discrepancy)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state)


def effective_discrepancy(state: DualState) -> jax.Array:
    """dbar as the last update used it: the mean of the window's filled entries, [] float32; 0 before any update."""
    window = jnp.asarray(state.window, jnp.float32)
    recent = jnp.arange(window.shape[0]) >= window.shape[0] - state.filled
    return jnp.sum(jnp.where(recent, window, 0.0)) / jnp.maximum(state.filled, 1)


def violation(state: DualState, tolerance: float | Array) -> jax.Array:
    """dbar - c as the last update used it, [] float32; positive when the constraint is violated."""
    return effective_discrepancy(state) - jnp.asarray(tolerance, jnp.float32)
