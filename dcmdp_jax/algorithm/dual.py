"""The Lagrange multiplier: projected gradient ascent on the mean discrepancy.

No optimizer, decay or gradient clipping touches it.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Float

from dcmdp_jax.algorithm import masked
from dcmdp_jax.algorithm.require import (
    concrete,
    require_multiplier_range,
    require_rank,
    require_same_shape,
    require_sizes,
)
from dcmdp_jax.types import Array, DualState, Scalar

QUANTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
"""Quantiles of the tokens' discrepancy that a budget may be on."""

BUDGET_ROOM = 1.25
"""Ours: c is this times a measured discrepancy. Lambda rests while that stays, and rises when it
grows by a quarter.
"""

MULTIPLIER_MAX = 1.0
"""Upper end of lambda where none is given. The paper states none, and its lambda rises above its
lambda_0 of 0.1.
"""


def dual_init(multiplier: float, *, tolerance: float) -> DualState:
    """The state before the first step.

    Args:
        multiplier: lambda_0 >= 0; a negative multiplier would reward discrepancy.
        tolerance: c >= 0.

    Raises:
        ValueError: if a value is out of its range or not finite.
    """
    require_sizes(multiplier=multiplier, tolerance=tolerance)
    return DualState(jnp.asarray(multiplier, jnp.float32), jnp.asarray(tolerance, jnp.float32))


def dual_update(
    multiplier: Scalar,
    mean_discrepancy: Scalar,
    *,
    tolerance: Scalar,
    dual_learning_rate: Scalar = 1.0,
    multiplier_min: Scalar = 0.0,
    multiplier_max: Scalar = MULTIPLIER_MAX,
) -> Float[jax.Array, ""]:
    """Do one step of projected dual ascent (Eq. 11; Algorithm 1, "Multiplier update").

        lambda_{k+1} = clip(lambda_k + eta (dbar_k - c), lambda_min, lambda_max)

    Call it once per training step, after the policy updates. A `mean_discrepancy` that is NaN or
    infinite leaves the multiplier as it was: one broken batch must not cost it its history.

    Args:
        multiplier: lambda_k.
        mean_discrepancy: dbar_k, sum(delta m) / sum(m) over the WHOLE batch, all mini-batches and
            hosts: a mean over tokens, not over completions. Or another statistic that c bounds
            (`QUANTILES`).
        tolerance: c, in the discrepancy's unit.
        dual_learning_rate: eta, multiplier units per unit of discrepancy. The paper's is 1.
        multiplier_min: lambda_min.
        multiplier_max: lambda_max.

    Returns:
        float32 (float64 where multiplier or mean is, with x64): lambda of the next step. No
            gradient flows.

    Raises:
        ValueError: if an argument is no scalar number, another than the mean is negative or not
            finite (not seen under jit), or `multiplier_max` is below `multiplier_min`.
    """
    require_rank("mean_discrepancy", mean_discrepancy, 0)
    mean = concrete(mean_discrepancy)
    if mean is not None and not jnp.issubdtype(mean.dtype, jnp.number):
        raise ValueError(f"mean_discrepancy={mean_discrepancy!r}; must be a number")
    require_sizes(
        multiplier=multiplier,
        tolerance=tolerance,
        dual_learning_rate=dual_learning_rate,
    )
    require_multiplier_range(multiplier_min, multiplier_max)

    dtype = jnp.result_type(jnp.float32, multiplier, mean_discrepancy)
    multiplier, mean_discrepancy, tolerance, dual_learning_rate = (
        jax.lax.stop_gradient(jnp.asarray(x, dtype))
        for x in (multiplier, mean_discrepancy, tolerance, dual_learning_rate)
    )
    moved = multiplier + dual_learning_rate * (mean_discrepancy - tolerance)
    projected = jnp.clip(moved, multiplier_min, multiplier_max).astype(dtype)
    return jnp.where(jnp.isfinite(mean_discrepancy), projected, multiplier)


def measured_tolerance(
    mean_discrepancies: Float[Array, " n"], noise_floors: Float[Array, " n"], *, factor: float = 1.0
) -> Float[jax.Array, ""]:
    """c measured on the run itself: the median over its first steps. Ours, not in the paper.

        c = factor median_k max(dbar_k, f_k)

    over the first steps k, with dbar_k the mean discrepancy and f_k the engine's noise floor: no
    policy meets a budget below that. A factor below 1 asks the policy for less than it began with,
    and may ask for less than the floor.

    Args:
        mean_discrepancies: dbar_k; values that are not finite are left out.
        noise_floors: f_k as last measured; 0 where it was not.
        factor: above 0.

    Returns:
        float32; 0 if no mean is finite.

    Raises:
        ValueError: if the shapes differ.
    """
    require_same_shape(mean_discrepancies=mean_discrepancies, noise_floors=noise_floors)
    means = jnp.asarray(mean_discrepancies, jnp.float32)
    floors = jnp.asarray(noise_floors, jnp.float32)
    median = masked.masked_quantile(jnp.maximum(means, floors), jnp.isfinite(means), 0.5)
    return median * jnp.float32(factor)
