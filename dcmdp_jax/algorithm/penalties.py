"""Penalties on the advantages and in the loss for the discrepancy, a function for each.

A penalty is a remedy (`remedies`): from the tokens to their penalized advantages [R, L] in float32.
To add one, write it in a file of yours, or here and name it in `PENALTIES`; its multiplier then
moves by dual ascent, unless `FIXED_MULTIPLIERS` names a constant.

The paper's penalty lowers the advantage of a sampled token by lambda delta and holds delta
constant: what that adds to the gradient is not the gradient of E_q[delta], and raises it where the
engine stays and there are two actions (docs/theory.md). With the engine's top-k tokens the
discrepancy of a state can be differentiated:

    loss = surrogate + lambda sum_t w_t D(s_t),    grad D(s) = sum_a (dD / dp_a) p_a grad log p_a

over the head H and the tail as one token more, q a constant and p the policy now. States are the
ones that the engine's tokens lead to, weighed as their tokens are (`algorithm.corrections`). Ours,
not in the paper.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Bool, Float

from dcmdp_jax.algorithm import masked, stats
from dcmdp_jax.algorithm.distribution import Head, require_head, with_tail
from dcmdp_jax.algorithm.remedies import Function, Tokens, require_tokens
from dcmdp_jax.algorithm.require import require_number, require_same_shape
from dcmdp_jax.types import Array, Scalar


def penalized_advantages(
    advantages: Float[Array, " *any"],
    discrepancy: Float[Array, "N T"],
    multiplier: Scalar,
) -> Float[jax.Array, "N T"]:
    """Penalize each token for its discrepancy (Eq. 8; Algorithm 1, "penalized advantage").

        A^DC_{i,t} = A_i - lambda_k delta_{i,t}

    Every sampled token is penalized, also one with delta below the tolerance. With multiplier 0 the
    result is A_i bit for bit: plain GRPO.

    Args:
        advantages: [N] or [N, 1] float, of each completion (`group_advantages`), or of each token,
            as `discrepancy`.
        discrepancy: >= 0, delta (`token_discrepancy`), 0 outside the completion.
        multiplier: lambda_k >= 0, in advantage units per unit of discrepancy.

    Returns:
        float32 (float64 where an input is, with x64); A_i outside the completion. No gradient
        flows.

    Raises:
        ValueError: if the shapes differ, or the multiplier is negative or not finite (not seen
            under jit).
    """
    require_number("multiplier", multiplier, minimum=0)
    advantages = stats.as_float(advantages)
    discrepancy = stats.as_float(discrepancy)
    if advantages.ndim == discrepancy.ndim - 1:
        advantages = advantages[..., None]
    if advantages.shape[-1:] == (1,):
        advantages = jnp.broadcast_to(advantages, (*advantages.shape[:-1], *discrepancy.shape[-1:]))
    require_same_shape(advantages=advantages, discrepancy=discrepancy)
    return stop_gradient(advantages - multiplier * discrepancy)


def grpo(tokens: Tokens) -> Float[Array, "R L"]:
    """A_i: nothing is penalized."""
    return tokens.advantages


def dual_grpo(tokens: Tokens) -> Float[Array, "R L"]:
    """A_i - delta_{i,t} (Eq. 4: lambda fixed at 1)."""
    require_tokens(tokens)
    return tokens.advantages - tokens.discrepancy


def threshold_grpo(tokens: Tokens) -> Float[Array, "R L"]:
    """A_i - delta_{i,t} where delta_{i,t} > c, else A_i (section 5, tolerance region).

    Strict: delta = c is free.
    """
    require_tokens(tokens)
    above = tokens.discrepancy > tokens.tolerance
    return tokens.advantages - jnp.where(above, tokens.discrepancy, 0.0)


def dc_grpo(tokens: Tokens) -> Float[Array, "R L"]:
    """A_i - lambda_k delta_{i,t} (Eq. 8, the method); with multiplier 0 `grpo` bit for bit."""
    require_tokens(tokens)
    return penalized_advantages(tokens.advantages, tokens.discrepancy, tokens.multiplier)


PENALTIES: Mapping[str, Function] = {
    "grpo": grpo,
    "dual_grpo": dual_grpo,
    "threshold_grpo": threshold_grpo,
    "dc_grpo": dc_grpo,
}
"""Method name -> penalty."""

FIXED_MULTIPLIERS: Mapping[str, float] = {"grpo": 0.0, "dual_grpo": 1.0, "threshold_grpo": 1.0}
"""The constant factor of the discrepancy in methods without dual ascent."""


def total_variation(
    log_p: Float[Array, "*s k"],
    log_q: Float[Array, "*s k"],
) -> Float[jax.Array, "*s"]:
    """1/2 sum_a |p_a - q_a|; dD / dp_a = sign(p_a - q_a) / 2."""
    require_same_shape(log_p=log_p, log_q=log_q)
    return jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1) / 2


def kl_engine(
    log_p: Float[Array, "*s k"],
    log_q: Float[Array, "*s k"],
) -> Float[jax.Array, "*s"]:
    """KL(q || p) = sum_a q_a log(q_a / p_a), nats; dD / dp_a = -q_a / p_a: the engine is taught."""
    return -jnp.sum(jnp.exp(log_q) * stats.clamped_log_ratio(log_p, log_q), axis=-1)


def expected_delta(
    log_p: Float[Array, "*s k"],
    log_q: Float[Array, "*s k"],
) -> Float[jax.Array, "*s"]:
    """E_q[delta] = sum_a q_a |p_a - q_a|; dD / dp_a = q_a sign(p_a - q_a), delta's own gradient."""
    require_same_shape(log_p=log_p, log_q=log_q)
    return jnp.sum(jnp.exp(log_q) * jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1)


STATE_PENALTIES: Mapping[str, Callable[[Array, Array], jax.Array]] = {
    "state_tv": total_variation,
    "state_kl": kl_engine,
    "state_delta": expected_delta,
}
"""Name in `algorithm.method` -> the discrepancy of a state, of log-probs of the head and the
tail.
"""


def penalty_length(
    head: Head,
    mask: Bool[Array, "R L"],
    penalty: str,
) -> Float[jax.Array, "R L"]:
    """Length of a penalty's gradient in the logits.

    It is 1/2 sum_a |g_a - p_a sum_b g_b| with g_a = dD / d log p_a. Over the head and the tail as
    one token, 0 outside `mask`. By the same norm the gradient of log p_y has the length 1 - p_y.
    """
    require_head(head, mask)
    present = head.present & jnp.asarray(mask, bool)[..., None]
    log_p = with_tail(head.train_logprobs, present)
    log_q = with_tail(head.rollout_logprobs, present)
    # Where the engine has fewer tokens both log-probs are 0, which is no probability of 1.
    counted = jnp.concatenate([present, jnp.ones_like(present[..., :1])], axis=-1)
    slopes = jax.grad(lambda x: jnp.sum(STATE_PENALTIES[penalty](x, log_q)))(log_p)
    slopes = jnp.where(counted, slopes, 0.0)
    policy = jnp.where(counted, jnp.exp(log_p), 0.0)
    logit_slopes = slopes - policy * jnp.sum(slopes, axis=-1, keepdims=True)
    return jnp.where(mask, jnp.sum(jnp.abs(logit_slopes), axis=-1) / 2, 0.0)


def penalty_loss(
    tokens: Tokens,
    weights: Float[Array, "R L"],
    head: Head,
    penalty: str,
) -> Float[jax.Array, ""]:
    """lambda sum_t w_t D(s_t), to be added to the sum of the loss.

    Args:
        tokens: with lambda.
        weights: float32 >= 0, w, corrections in it.
        head: the engine's top-k tokens; the gradient reaches its `train_logprobs`.
        penalty: key of `STATE_PENALTIES`.

    Raises:
        ValueError: if the shapes of tokens, weights or head differ.
    """
    require_tokens(tokens)
    require_same_shape(weights=weights, completion_mask=tokens.completion_mask)
    require_head(head, tokens.completion_mask)
    active = jnp.asarray(tokens.completion_mask, bool) & (weights != 0)
    present = head.present & active[..., None]

    # Where the engine has fewer tokens both log-probs are 0: no penalty differs from 0 there.
    log_p = with_tail(head.train_logprobs, present)
    log_q = with_tail(head.rollout_logprobs, present)
    values = STATE_PENALTIES[penalty](log_p, stop_gradient(log_q))
    constant_weights = stop_gradient(jnp.where(active, weights, 0.0))
    return tokens.multiplier * masked.weighted_sum(values, constant_weights).total
