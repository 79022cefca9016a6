"""Measures of a state's two whole distributions, from the engine's k likeliest tokens and the trainer's own.

p is the training stack's distribution of the next token, q the engine's. H, the head, are the engine's k likeliest
tokens; what is left, 1 - p_H and 1 - q_H, is the tail. A measure is computed on the head and the tail as one token
more; its bound says how much larger the true value can be. With k = V there is no tail, and the value is exact.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from dcmdp_jax.algorithm.discrepancy import RATIO_LIMIT, Measure, Sided, token_discrepancy
from dcmdp_jax.algorithm.masked import masked_sum
from dcmdp_jax.algorithm.remedies import Statistics
from dcmdp_jax.algorithm.require import require_same_shape
from dcmdp_jax.algorithm.stats import MAX_LOG_RATIO, clamped_log_ratio
from dcmdp_jax.types import Array

LEAST_TAIL = 1e-6
"""Smallest mass of a tail: below it float32's rounding of the head's sum decides."""


class Head(NamedTuple):
    """The engine's k likeliest tokens in the place of each sampled token.

    Attributes:
        ids: int32; -1 where the engine has fewer, whose other entries are 0.
        rollout_logprobs: nats, log q.
        train_logprobs: nats, log p under the weights now.
        old_logprobs: nats, log p under the weights that made the batch.
        start_logprobs: nats, log p under the weights at the start of the step.
    """

    ids: Int[Array, "R L k"]
    rollout_logprobs: Float[Array, "R L k"]
    train_logprobs: Float[Array, "R L k"]
    old_logprobs: Float[Array, "R L k"]
    start_logprobs: Float[Array, "R L k"]

    @property
    def present(self) -> Bool[jax.Array, "*s k"]:
        """False where the engine has fewer tokens."""
        return jnp.asarray(self.ids) >= 0


def require_head(head: Head, mask: Array) -> None:
    """Raise ValueError unless the head's arrays have one shape, [R, L, k], for a mask [R, L]."""
    require_same_shape(**head._asdict())
    require_same_shape(mask=mask, head=head.ids[..., 0])


def tail_logprobs(logprobs: Float[Array, "*s k"], present: Bool[Array, "*s k"]) -> Float[jax.Array, "*s"]:
    """log(1 - sum_H e^x), at least log `LEAST_TAIL`; the gradient flows while it is above that."""
    require_same_shape(logprobs=logprobs, present=present)
    mass = jnp.sum(jnp.where(present, jnp.exp(jnp.asarray(logprobs, jnp.float32)), 0.0), axis=-1)
    return jnp.log(jnp.maximum(1.0 - mass, LEAST_TAIL))


def with_tail(logprobs: Float[Array, "*s k"], present: Bool[Array, "*s k"]) -> Float[jax.Array, "*s k+1"]:
    """The head, 0 where no token is present, and the tail as one token more."""
    require_same_shape(logprobs=logprobs, present=present)
    inside = jnp.where(present, logprobs, 0.0)
    return jnp.concatenate([inside, tail_logprobs(inside, present)[..., None]], axis=-1)


def state_measures(
    train_logprobs: Float[Array, "*s k"],
    rollout_logprobs: Float[Array, "*s k"],
    present: Bool[Array, "*s k"],
    *,
    measure: Measure = "diff",
    sided: Sided = "two",
) -> dict[str, Float[jax.Array, "*s"]]:
    """How far p is from q in each state: exact on the head, the tail as one token, and bounds of what that leaves out.

        total_variation        1/2 sum |p - q|             bound  min(1 - p_H, 1 - q_H)
        kl_engine              KL(q || p), nats            bound  q_T (20 - log(q_T / p_T)),  q_T = 1 - q_H
        kl_trainer             KL(p || q), nats            bound  p_T (20 - log(p_T / q_T)),  p_T = 1 - p_H
        expected_discrepancy   sum_H q delta(p, q)         bound  q_T times the largest delta of a tail token
        head_mass              q_H

    As one token the tail gives no more than its tokens would (log-sum and triangle inequalities), so that the true
    value lies between the value and the value plus its bound. That of a KL holds if no tail token has a log-ratio above
    20, where this package clamps them. The largest delta of a tail token is max(p_T, min(q_T, q_k)) for
    `diff`, q_k the last of the head, and its limit for the other measures. The expected discrepancy is what the mean of
    `token_discrepancy` over sampled tokens estimates; its variance under q is `discrepancy_variance`.

    Args:
        train_logprobs: nats, log p of the head.
        rollout_logprobs: nats, log q, likeliest first.
        present: false on entries that hold no token.
        measure, sided: delta's, see `token_discrepancy`.

    Returns:
        float32 by these names after `distribution/`, and `NAME_bound` of the first four. No gradient flows.

    Raises:
        ValueError: if the shapes differ.
    """
    require_same_shape(train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs, present=present)
    train, rollout = (
        jax.lax.stop_gradient(jnp.where(present, jnp.asarray(x, jnp.float32), 0.0))
        for x in (train_logprobs, rollout_logprobs)
    )
    p, q = (jnp.where(present, jnp.exp(x), 0.0) for x in (train, rollout))
    log_p, log_q = (tail_logprobs(x, present) for x in (train, rollout))
    p_tail, q_tail = jnp.exp(log_p), jnp.exp(log_q)
    log_ratio, log_tail = clamped_log_ratio(train, rollout), clamped_log_ratio(log_p, log_q)
    differences = token_discrepancy(train, rollout, completion_mask=present)
    delta = token_discrepancy(train, rollout, completion_mask=present, measure=measure, sided=sided)
    expected = jnp.sum(q * delta, axis=-1)
    last = jnp.min(jnp.where(present, q, 1.0), axis=-1)
    limits = {"diff": jnp.maximum(p_tail, jnp.minimum(q_tail, last)), "ratio": RATIO_LIMIT}
    return {
        "distribution/total_variation": (jnp.sum(differences, axis=-1) + jnp.abs(p_tail - q_tail)) / 2,
        "distribution/total_variation_bound": jnp.minimum(p_tail, q_tail),
        "distribution/kl_engine": jnp.maximum(-jnp.sum(q * log_ratio, axis=-1) - q_tail * log_tail, 0.0),
        "distribution/kl_engine_bound": q_tail * (MAX_LOG_RATIO + log_tail),
        "distribution/kl_trainer": jnp.maximum(jnp.sum(p * log_ratio, axis=-1) + p_tail * log_tail, 0.0),
        "distribution/kl_trainer_bound": p_tail * (MAX_LOG_RATIO - log_tail),
        "distribution/expected_discrepancy": expected,
        "distribution/expected_discrepancy_bound": q_tail * limits.get(measure, MAX_LOG_RATIO),
        "distribution/discrepancy_variance": jnp.maximum(jnp.sum(q * delta**2, axis=-1) - expected**2, 0.0),
        "distribution/head_mass": jnp.sum(q, axis=-1),
    }


def distribution_statistics(head: Head, mask: Bool[Array, "R L"], how: Mapping[str, Any]) -> Statistics:
    """Means of `state_measures` over the states of sampled tokens, left unreduced, by metric name.

    p is that of the weights that made the batch, as for the discrepancy.

    Args:
        head: the engine's likeliest tokens.
        mask: true on sampled tokens.
        how: measure and sided of the discrepancy.
    """
    require_head(head, mask)
    measures = state_measures(head.old_logprobs, head.rollout_logprobs, head.present, **how)
    return {name: masked_sum(values, mask) for name, values in measures.items()}
