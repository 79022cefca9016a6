"""Charges in the loss for the discrepancy of a state, whose gradient is that of the discrepancy itself.

The paper's charge lowers the advantage of a sampled token by lambda delta and holds delta constant: what that adds to
the gradient is not the gradient of E_q[delta], and raises it where the engine stays and there are two actions
(docs/theory.md). With the engine's k likeliest tokens the discrepancy of a state can be differentiated:

    loss = surrogate + lambda sum_t w_t D(s_t),    grad D(s) = sum_a (dD / dp_a) p_a grad log p_a

over the head H and the tail as one token more, q a constant and p the policy now. States are the ones that the engine's
tokens lead to, weighed as their tokens are (`algorithm.corrections`). Ours, not in the paper.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dcmdp_jax.algorithm.distribution import Head, require_head, with_tail
from dcmdp_jax.algorithm.masked import weighted_sum
from dcmdp_jax.algorithm.remedies import Tokens, require_tokens
from dcmdp_jax.algorithm.require import require_same_shape
from dcmdp_jax.algorithm.stats import clamped_log_ratio
from dcmdp_jax.types import Array


def total_variation(log_p: Float[Array, "*s k"], log_q: Float[Array, "*s k"]) -> Float[jax.Array, "*s"]:
    """1/2 sum_a |p_a - q_a|; dD / dp_a = sign(p_a - q_a) / 2."""
    require_same_shape(log_p=log_p, log_q=log_q)
    return jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1) / 2


def kl_engine(log_p: Float[Array, "*s k"], log_q: Float[Array, "*s k"]) -> Float[jax.Array, "*s"]:
    """KL(q || p) = sum_a q_a log(q_a / p_a), nats; dD / dp_a = -q_a / p_a: the engine is taught."""
    return -jnp.sum(jnp.exp(log_q) * clamped_log_ratio(log_p, log_q), axis=-1)


def expected_delta(log_p: Float[Array, "*s k"], log_q: Float[Array, "*s k"]) -> Float[jax.Array, "*s"]:
    """E_q[delta] = sum_a q_a |p_a - q_a|; dD / dp_a = q_a sign(p_a - q_a), delta's own gradient."""
    require_same_shape(log_p=log_p, log_q=log_q)
    return jnp.sum(jnp.exp(log_q) * jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1)


STATE_CHARGES: Mapping[str, Callable[[Array, Array], jax.Array]] = {
    "state_tv": total_variation,
    "state_kl": kl_engine,
    "state_delta": expected_delta,
}
"""Name in `algorithm.method` -> the discrepancy of a state, of log-probs of the head and the tail."""


def charge_length(head: Head, mask: Bool[Array, "R L"], charge: str) -> Float[jax.Array, "R L"]:
    """Length of a charge's gradient in the logits, 1/2 sum_a |g_a - p_a sum_b g_b| with g_a = dD / d log p_a.

    Over the head and the tail as one token, 0 outside `mask`. By the same norm the gradient of log p_y has the
    length 1 - p_y.
    """
    require_head(head, mask)
    present = head.present & jnp.asarray(mask, bool)[..., None]
    log_p, log_q = (with_tail(values, present) for values in (head.train_logprobs, head.rollout_logprobs))
    slopes = jax.grad(lambda x: jnp.sum(STATE_CHARGES[charge](x, log_q)))(log_p)
    moved = slopes - jnp.exp(log_p) * jnp.sum(slopes, axis=-1, keepdims=True)
    return jnp.where(mask, jnp.sum(jnp.abs(moved), axis=-1) / 2, 0.0)


def charge_loss(tokens: Tokens, weights: Float[Array, "R L"], head: Head, charge: str) -> Float[jax.Array, ""]:
    """lambda sum_t w_t D(s_t), to be added to the sum of the loss.

    Args:
        tokens: with lambda.
        weights: float32 >= 0, w, corrections in it.
        head: the engine's likeliest tokens; the gradient reaches its `train_logprobs`.
        charge: key of `STATE_CHARGES`.

    Raises:
        ValueError: if the shapes of tokens, weights or head differ.
    """
    require_tokens(tokens)
    require_same_shape(weights=weights, completion_mask=tokens.completion_mask)
    require_head(head, tokens.completion_mask)
    active = jnp.asarray(tokens.completion_mask, bool) & (jnp.asarray(weights) != 0)
    present = head.present & active[..., None]

    # Where the engine has fewer tokens both log-probs are 0: no charge differs from 0 there.
    log_p, log_q = (with_tail(values, present) for values in (head.train_logprobs, head.rollout_logprobs))
    values = STATE_CHARGES[charge](log_p, jax.lax.stop_gradient(log_q))
    return tokens.multiplier * weighted_sum(values, jax.lax.stop_gradient(jnp.where(active, weights, 0.0))).total
