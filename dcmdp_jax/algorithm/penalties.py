"""Penalties on the advantages for the discrepancy: one pure function for each method.

A penalty is a remedy (`remedies`): from the tokens to their penalized advantages [R, L] in float32. To add one, write
it in a file of yours, or here and name it in `PENALTIES`; its multiplier then moves by dual ascent, unless
`FIXED_MULTIPLIERS` names a constant.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Float

from dcmdp_jax.algorithm.remedies import Function, Tokens, require_tokens
from dcmdp_jax.algorithm.require import require_number, require_same_shape
from dcmdp_jax.algorithm.stats import as_float
from dcmdp_jax.types import Array, Scalar


def penalized_advantages(
    advantages: Float[Array, " *any"], discrepancy: Float[Array, "N T"], multiplier: Scalar
) -> Float[jax.Array, "N T"]:
    """Charge each token for its discrepancy (Eq. 8; Algorithm 1, "penalized advantage").

        A^DC_{i,t} = A_i - lambda_k delta_{i,t}

    Every sampled token is charged, also one with delta below the tolerance. With multiplier 0 the result is A_i bit for
    bit: plain GRPO.

    Args:
        advantages: [N] or [N, 1] float, of each completion (`group_advantages`), or of each token, as `discrepancy`.
        discrepancy: >= 0, delta (`token_discrepancy`), 0 outside the completion.
        multiplier: lambda_k >= 0, in advantage units per unit of discrepancy.

    Returns:
        float32 (float64 where an input is, with x64); A_i outside the completion. No gradient flows.

    Raises:
        ValueError: if the shapes differ, or the multiplier is negative or not finite (not seen under jit).
    """
    require_number("multiplier", multiplier, minimum=0)
    advantages, discrepancy = as_float(advantages), as_float(discrepancy)
    if advantages.ndim == discrepancy.ndim - 1:
        advantages = advantages[..., None]
    if advantages.shape[-1:] == (1,):
        advantages = jnp.broadcast_to(advantages, (*advantages.shape[:-1], *discrepancy.shape[-1:]))
    require_same_shape(advantages=advantages, discrepancy=discrepancy)
    return jax.lax.stop_gradient(advantages - multiplier * discrepancy)


def grpo(tokens: Tokens) -> Float[Array, "R L"]:
    """A_i: nothing is charged."""
    return tokens.advantages


def dual_grpo(tokens: Tokens) -> Float[Array, "R L"]:
    """A_i - delta_{i,t} (Eq. 4: lambda fixed at 1)."""
    require_tokens(tokens)
    return tokens.advantages - tokens.discrepancy


def threshold_grpo(tokens: Tokens) -> Float[Array, "R L"]:
    """A_i - delta_{i,t} where delta_{i,t} > c, else A_i (section 5, tolerance region). Strict: delta = c is free."""
    require_tokens(tokens)
    return tokens.advantages - jnp.where(tokens.discrepancy > tokens.tolerance, tokens.discrepancy, 0.0)


def dc_grpo(tokens: Tokens) -> Float[Array, "R L"]:
    """A_i - lambda_k delta_{i,t} (Eq. 8, the method). With multiplier 0 it is `grpo` bit for bit."""
    require_tokens(tokens)
    return penalized_advantages(tokens.advantages, tokens.discrepancy, tokens.multiplier)


_OURS = grpo, dual_grpo, threshold_grpo, dc_grpo
PENALTIES: Mapping[str, Function] = {penalty.__name__: penalty for penalty in _OURS}
"""Method name -> penalty."""

FIXED_MULTIPLIERS: Mapping[str, float] = {"grpo": 0.0, "dual_grpo": 1.0, "threshold_grpo": 1.0}
"""The constant factor of the discrepancy in methods without dual ascent."""
