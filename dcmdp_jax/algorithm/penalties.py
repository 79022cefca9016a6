"""Penalties on the advantages for the discrepancy: one pure function for each method.

A penalty is a remedy (`remedies`): from the tokens to their penalized advantages [R, L] in float32. To add one, write
it in a file of yours, or here and name it in `PENALTIES`; its multiplier then moves by dual ascent, unless
`FIXED_MULTIPLIERS` names a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from dcmdp_jax.algorithm.remedies import Tokens


def grpo(tokens: Tokens) -> jax.Array:
    """A_i: nothing is charged."""
    return tokens.advantages


def dual_grpo(tokens: Tokens) -> jax.Array:
    """A_i - delta_{i,t} (Eq. 4: lambda fixed at 1)."""
    return tokens.advantages - tokens.discrepancy


def threshold_grpo(tokens: Tokens) -> jax.Array:
    """A_i - delta_{i,t} where delta_{i,t} > c, else A_i (section 5, tolerance region). Strict: delta = c is free."""
    return tokens.advantages - jnp.where(tokens.discrepancy > tokens.tolerance, tokens.discrepancy, 0.0)


def dc_grpo(tokens: Tokens) -> jax.Array:
    """A_i - lambda_k delta_{i,t} (Eq. 8, the method). With multiplier 0 it is `grpo` bit for bit."""
    return tokens.advantages - tokens.multiplier * tokens.discrepancy


def excess_grpo(tokens: Tokens) -> jax.Array:
    """A_i - lambda_k max(delta_{i,t} - c, 0): what is within the tolerance is free. Ours, not in the paper.

    With `level="sequence"` delta is the completion's mean, and the charge is that of the constraint on each completion
    (Eq. 6). lambda still moves by Eq. 11.
    """
    return tokens.advantages - tokens.multiplier * jnp.maximum(tokens.discrepancy - tokens.tolerance, 0.0)


PENALTIES: Mapping[str, Callable[[Tokens], jax.Array]] = MappingProxyType(
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
