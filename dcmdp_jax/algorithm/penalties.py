"""Penalties on the advantages for the discrepancy: one pure function for each method.

A penalty is a function

    (advantages [R, L], discrepancy [R, L], multiplier [], tolerance []) -> penalized advantages [R, L]

in float32. To add one, write it here and name it in `PENALTIES`; its multiplier then moves by dual ascent, unless
`FIXED_MULTIPLIERS` names a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

Penalty = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def grpo(advantages: jax.Array, discrepancy: jax.Array, multiplier: jax.Array, tolerance: jax.Array) -> jax.Array:
    """A_i: nothing is charged."""
    del discrepancy, multiplier, tolerance
    return advantages


def dual_grpo(advantages: jax.Array, discrepancy: jax.Array, multiplier: jax.Array, tolerance: jax.Array) -> jax.Array:
    """A_i - delta_{i,t} (Eq. 4)."""
    del multiplier, tolerance
    return advantages - discrepancy


def threshold_grpo(
    advantages: jax.Array, discrepancy: jax.Array, multiplier: jax.Array, tolerance: jax.Array
) -> jax.Array:
    """A_i - delta_{i,t} where delta_{i,t} > c, else A_i (section 5, tolerance region)."""
    del multiplier
    return advantages - jnp.where(discrepancy > tolerance, discrepancy, 0.0)


def dc_grpo(advantages: jax.Array, discrepancy: jax.Array, multiplier: jax.Array, tolerance: jax.Array) -> jax.Array:
    """A_i - lambda_k delta_{i,t} (Eq. 8)."""
    del tolerance
    return advantages - multiplier * discrepancy


def excess_grpo(
    advantages: jax.Array, discrepancy: jax.Array, multiplier: jax.Array, tolerance: jax.Array
) -> jax.Array:
    """A_i - lambda_k max(delta_{i,t} - c, 0): what is within the tolerance is free. Ours, not in the paper.

    With `level="sequence"` delta is the completion's mean, and the charge is that of the constraint on each completion
    (Eq. 6). lambda still moves by Eq. 11.
    """
    return advantages - multiplier * jnp.maximum(discrepancy - tolerance, 0.0)


PENALTIES: Mapping[str, Penalty] = MappingProxyType(
    {
        "grpo": grpo,
        "dual_grpo": dual_grpo,
        "threshold_grpo": threshold_grpo,
        "dc_grpo": dc_grpo,
        "excess_grpo": excess_grpo,
    }
)
"""Method name -> penalty."""

FIXED_MULTIPLIERS: Mapping[str, float] = MappingProxyType({"grpo": 0.0, "dual_grpo": 1.0, "threshold_grpo": 1.0})
"""The constant factor of the discrepancy in methods without dual ascent."""
