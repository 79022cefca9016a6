"""The Lagrange multiplier: projected gradient ascent on the mean discrepancy.

No optimizer, decay or gradient clipping touches it.
"""

from __future__ import annotations

import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from dcmdp_jax.algorithm.masked import masked_quantile
from dcmdp_jax.algorithm.require import require_integer, require_number, require_rank, require_scalars
from dcmdp_jax.types import Array, DualState

BUDGET_ROOM = 1.25
"""Ours: c is this times a measured discrepancy. Lambda rests while that stays, and rises when it grows by a quarter."""


def dual_init(multiplier: float, *, minimum: float, maximum: float, measured_steps: int = 0) -> DualState:
    """The state before the first step.

    Args:
        multiplier: lambda_0, within [minimum, maximum].
        minimum: lambda_min >= 0; a negative multiplier would reward discrepancy.
        maximum: lambda_max, finite.
        measured_steps: of `calibrated_update`, whose mean discrepancies the state keeps; 0 without it.

    Returns:
        `DualState` with an empty window.

    Raises:
        ValueError: if a value is out of its range or not finite.
    """
    require_number("minimum", minimum, minimum=0)
    require_number("maximum", maximum, minimum=minimum)
    require_number("multiplier", multiplier, minimum=minimum, maximum=maximum)
    require_integer("measured_steps", measured_steps, minimum=0)
    return DualState(
        multiplier=jnp.asarray(multiplier, jnp.float32),
        window=jnp.zeros(measured_steps + 1, jnp.float32),
        filled=jnp.zeros((), jnp.int32),
    )


def dual_update(
    multiplier: float | Array,
    mean_discrepancy: float | Array,
    *,
    tolerance: float | Array,
    learning_rate: float | Array = 1.0,
    minimum: float | Array = 0.0,
    maximum: float | Array = 1.0,
) -> jax.Array:
    """One step of projected dual ascent on the multiplier (Eq. 11; Algorithm 1, "Multiplier update").

        lambda_{k+1} = clip(lambda_k + eta (dbar_k - c), lambda_min, lambda_max)

    Call it once per training step, after the policy updates. A `mean_discrepancy` that is NaN or infinite leaves the
    multiplier as it was: one broken batch must not cost it its history.

    Args:
        multiplier: lambda_k, [] float.
        mean_discrepancy: dbar_k, [] float, sum(delta m) / sum(m) over the WHOLE batch, all mini-batches and hosts: a
            mean over tokens, not over completions.
        tolerance: c, in the discrepancy's unit.
        learning_rate: eta, multiplier units per unit of discrepancy. The paper's is 1.
        minimum: lambda_min.
        maximum: lambda_max. The paper names no range; [0, 1] is ours.

    Returns:
        [] float32 (float64 where multiplier or mean is, with x64): lambda of the next step. No gradient flows.

    Raises:
        ValueError: if multiplier or mean are no scalars, a number is negative or not finite (not seen under jit), or
            `maximum` is below `minimum`.
    """
    require_rank("multiplier", multiplier, 0)
    require_rank("mean_discrepancy", mean_discrepancy, 0)
    require_number("multiplier", multiplier, minimum=0)
    require_number("tolerance", tolerance, minimum=0)
    require_number("learning_rate", learning_rate, minimum=0)
    require_number("minimum", minimum, minimum=0)
    require_number("maximum", maximum, minimum=minimum if isinstance(minimum, numbers.Real) else 0)
    dtype = jnp.result_type(jnp.float32, multiplier, mean_discrepancy)
    multiplier, mean_discrepancy, tolerance, learning_rate = jax.lax.stop_gradient(
        tuple(jnp.asarray(x, dtype) for x in (multiplier, mean_discrepancy, tolerance, learning_rate))
    )
    moved = jnp.clip(multiplier + learning_rate * (mean_discrepancy - tolerance), minimum, maximum).astype(dtype)
    return jnp.where(jnp.isfinite(mean_discrepancy), moved, multiplier)


def next_dual_state(state: DualState, mean_discrepancy: float | Array, **options: Any) -> DualState:
    """The state of the next step: `dual_update` of its multiplier, the mean discrepancy put into its window.

    A mean that is not finite leaves the whole state as it was.

    Args:
        state: from `dual_init` or the step before.
        mean_discrepancy, options: of `dual_update`.
    """
    multiplier = dual_update(state.multiplier, mean_discrepancy, **options)
    mean_discrepancy = jnp.asarray(mean_discrepancy, jnp.float32)
    window = jnp.append(jnp.asarray(state.window, jnp.float32)[1:], mean_discrepancy)
    filled = jnp.minimum(jnp.asarray(state.filled, jnp.int32) + 1, window.shape[0])
    keep = functools.partial(jnp.where, jnp.isfinite(mean_discrepancy))
    return DualState(multiplier, keep(window, state.window), keep(filled, state.filled))


def calibrated_tolerance(
    state: DualState, before: float, *, steps: int, quantile: float, factor: float = 1.0
) -> jax.Array:
    """c measured on the run itself: a quantile over its first steps. Ours, not in the paper.

        c = factor quantile_k max(dbar_k, f_k)

    over the first steps k, with dbar_k the mean discrepancy and f_k the engine's noise floor: no policy meets a budget
    below that. A factor below 1 asks the policy for less than it began with, and may ask for less than the floor.

    Args:
        state: from `calibrated_update`, or `dual_init` with these measured steps.
        before: c until they are measured.
        steps: how many, at least 1.
        quantile: in [0, 1].
        factor: above 0.

    Returns:
        [] float32.
    """
    first = jnp.asarray(state.window, jnp.float32)[:steps]
    measured = masked_quantile(first, jnp.ones(steps, bool), quantile)
    # 1 leaves the program as it is.
    measured = measured if factor == 1 else measured * jnp.float32(factor)
    return jnp.where(state.filled < steps, jnp.float32(before), measured)


def calibrated_update(
    state: DualState,
    mean_discrepancy: float | Array,
    *,
    steps: int,
    quantile: float,
    factor: float = 1.0,
    noise_floor: float | Array = 0.0,
    **options: Any,
) -> DualState:
    """Keep the first mean discrepancies and leave lambda as it is; then dual ascent against their quantile.

    They stay at the front of the window, so that the tolerance never moves again and a resumed run has it.

    Args:
        state: as in `calibrated_tolerance`.
        mean_discrepancy: as in `dual_update`. One that is not finite changes nothing.
        steps, quantile, factor: as in `calibrated_tolerance`.
        noise_floor: f_k, [] or Python float; not used once c is measured.
        options: of `dual_update`, without its tolerance.
    """
    require_scalars(mean_discrepancy=mean_discrepancy, noise_floor=noise_floor)
    mean_discrepancy, window = jnp.asarray(mean_discrepancy, jnp.float32), jnp.asarray(state.window, jnp.float32)
    tolerance = calibrated_tolerance(state, 0.0, steps=steps, quantile=quantile, factor=factor)
    rest = DualState(state.multiplier, state.window[steps:], jnp.maximum(state.filled - steps, 0))
    moved = next_dual_state(rest, mean_discrepancy, tolerance=tolerance, **options)
    after = DualState(moved.multiplier, jnp.concatenate([window[:steps], moved.window]), moved.filled + steps)
    taken = jnp.isfinite(mean_discrepancy)
    level = jnp.maximum(mean_discrepancy, noise_floor)
    kept = window.at[jnp.minimum(state.filled, steps - 1)].set(jnp.where(taken, level, 0.0))
    during = DualState(state.multiplier, jnp.where(taken, kept, window), state.filled + taken.astype(jnp.int32))
    return jax.tree.map(lambda a, b: jnp.where(state.filled < steps, a, b), during, after)
