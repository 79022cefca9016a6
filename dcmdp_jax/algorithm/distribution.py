"""Measures of a state's two whole distributions, and score centering (arXiv:2609.20807).

Score centering is by Marek and Ryabinin (2026). p is the training stack's distribution of the next
token, q the engine's. H, the head, are the engine's top-k tokens; what is left, 1 - p_H and
1 - q_H, is the tail. A measure is computed on the head and the tail as one token more; its bound
says how much larger the true value can be. With k = V there is no tail, and the value is exact.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Bool, Float, Int

from dcmdp_jax.algorithm import losses, masked, stats
from dcmdp_jax.algorithm.corrections import Correction, chain
from dcmdp_jax.algorithm.discrepancy import RATIO_LIMIT, Level, Measure, Sided, token_discrepancy
from dcmdp_jax.algorithm.remedies import (
    Corrected,
    Function,
    Statistics,
    Tokens,
    require_tokens,
    split,
)
from dcmdp_jax.algorithm.require import require_gradient, require_option, require_same_shape
from dcmdp_jax.types import Array

LEAST_TAIL = 1e-6
"""Smallest mass of a tail: below it float32's rounding of the head's sum decides."""


class Head(NamedTuple):
    """The engine's k top-k tokens in the place of each sampled token.

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
    """Raise ValueError unless all arrays are [R, L, k] for a mask [R, L], and none in float16."""
    require_gradient("train_logprobs", head.train_logprobs)
    require_same_shape(**head._asdict())
    require_same_shape(mask=mask, head=head.ids[..., 0])


def tail_logprobs(
    logprobs: Float[Array, "*s k"], present: Bool[Array, "*s k"]
) -> Float[jax.Array, "*s"]:
    """log(1 - sum_H e^x), at least log `LEAST_TAIL`; the gradient flows while it is above that."""
    require_same_shape(logprobs=logprobs, present=present)
    mass = jnp.sum(jnp.where(present, jnp.exp(jnp.asarray(logprobs, jnp.float32)), 0.0), axis=-1)
    return jnp.log(jnp.maximum(1.0 - mass, LEAST_TAIL))


def with_tail(
    logprobs: Float[Array, "*s k"], present: Bool[Array, "*s k"]
) -> Float[jax.Array, "*s k+1"]:
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
    """Measure how far p is from q in each state, with bounds of what lies in the tail.

    Exact on the head; the tail counts as one token, and the bounds are of what that leaves out.

        total_variation       1/2 sum |p - q|      bound  min(1 - p_H, 1 - q_H)
        kl_engine             KL(q || p), nats     bound  q_T (20 - log(q_T / p_T)),  q_T = 1 - q_H
        kl_trainer            KL(p || q), nats     bound  p_T (20 - log(p_T / q_T)),  p_T = 1 - p_H
        expected_discrepancy  sum_H q delta(p, q)  bound  q_T times the largest delta of a tail
                                                          token
        head_mass             q_H

    As one token the tail gives no more than its tokens would (log-sum and triangle inequalities),
    so that the true value lies between the value and the value plus its bound. The bound of a KL
    holds if no tail token has a log-ratio above 20, where this package clamps them. The largest
    delta of a tail token is max(p_T, min(q_T, q_k)) for `diff`, q_k the last of the head, and its
    limit for the other measures. The expected discrepancy is what the mean of `token_discrepancy`
    over sampled tokens estimates; its variance under q is `discrepancy_variance`.

    Args:
        train_logprobs: nats, log p of the head.
        rollout_logprobs: nats, log q, most probable first.
        present: false on entries that hold no token.
        measure, sided: delta's, see `token_discrepancy`.

    Returns:
        float32 by these names after `distribution/`, and `NAME_bound` of the first four. No
        gradient flows.

    Raises:
        ValueError: if the shapes differ.
    """
    require_same_shape(
        train_logprobs=train_logprobs,
        rollout_logprobs=rollout_logprobs,
        present=present,
    )
    train = stop_gradient(masked.masked_values(train_logprobs, present))
    rollout = stop_gradient(masked.masked_values(rollout_logprobs, present))
    p = masked.masked_values(jnp.exp(train), present)
    q = masked.masked_values(jnp.exp(rollout), present)
    log_ratio = stats.clamped_log_ratio(train, rollout)

    log_p_tail = tail_logprobs(train, present)
    log_q_tail = tail_logprobs(rollout, present)
    p_tail = jnp.exp(log_p_tail)
    q_tail = jnp.exp(log_q_tail)
    log_tail_ratio = stats.clamped_log_ratio(log_p_tail, log_q_tail)

    abs_differences = token_discrepancy(train, rollout, completion_mask=present)
    twice_variation = jnp.sum(abs_differences, axis=-1) + jnp.abs(p_tail - q_tail)
    kl_engine = -jnp.sum(q * log_ratio, axis=-1) - q_tail * log_tail_ratio
    kl_trainer = jnp.sum(p * log_ratio, axis=-1) + p_tail * log_tail_ratio

    delta = token_discrepancy(train, rollout, completion_mask=present, measure=measure, sided=sided)
    expected = jnp.sum(q * delta, axis=-1)
    variance = jnp.sum(q * delta**2, axis=-1) - expected**2
    if measure == "diff":
        least_q = jnp.min(jnp.where(present, q, 1.0), axis=-1)
        largest_delta = jnp.maximum(p_tail, jnp.minimum(q_tail, least_q))
    elif measure == "ratio":
        largest_delta = RATIO_LIMIT
    else:
        largest_delta = stats.MAX_LOG_RATIO

    return {
        "distribution/total_variation": twice_variation / 2,
        "distribution/total_variation_bound": jnp.minimum(p_tail, q_tail),
        "distribution/kl_engine": jnp.maximum(kl_engine, 0.0),
        "distribution/kl_engine_bound": q_tail * (stats.MAX_LOG_RATIO + log_tail_ratio),
        "distribution/kl_trainer": jnp.maximum(kl_trainer, 0.0),
        "distribution/kl_trainer_bound": p_tail * (stats.MAX_LOG_RATIO - log_tail_ratio),
        "distribution/expected_discrepancy": expected,
        "distribution/expected_discrepancy_bound": q_tail * largest_delta,
        "distribution/discrepancy_variance": jnp.maximum(variance, 0.0),
        "distribution/head_mass": jnp.sum(q, axis=-1),
    }


def distribution_statistics(
    head: Head, mask: Bool[Array, "R L"], measure_options: Mapping[str, Any]
) -> Statistics:
    """Means of `state_measures` over the states of sampled tokens, left unreduced, by metric name.

    p is that of the weights that made the batch, as for the discrepancy.

    Args:
        head: the engine's top-k tokens.
        mask: true on sampled tokens.
        measure_options: measure and sided of the discrepancy.
    """
    require_head(head, mask)
    measures = state_measures(
        head.old_logprobs,
        head.rollout_logprobs,
        head.present,
        **measure_options,
    )
    return {name: masked.masked_sum(values, mask) for name, values in measures.items()}


def score_centering(tokens: Tokens) -> Corrected:
    """Weigh and drop nothing, under a name of `algorithm.corrections`: see `centering_loss`."""
    require_tokens(tokens)
    mask = tokens.completion_mask
    return Corrected(jnp.ones(jnp.shape(mask)), jnp.ones_like(mask))


def centering_loss(
    tokens: Tokens,
    weights: Float[Array, "R L"],
    head: Head,
    *,
    anchor: str = "old_logprobs",
    loss: Function,
    corrections: Sequence[Correction] = (),
    ratio_level: Level = "token",
) -> Float[jax.Array, ""]:
    """Baseline of score centering, sum_t w_t E_q[f l]: the loss that other tokens would have.

    Where p and q differ, E_q[A f(r) s] of the score s = grad log p has a part E_q[A] E_q[f(r) s]
    that teaches the trainer the bias of its own engine. Subtracting A E_q[f(r) s] leaves the
    covariance of A and f(r) s. With the plain surrogate, gamma = 1 and the engine's top k
    tokens H, the gradient of the loss is

        -A (f(r_y) grad log p_y - sum_H (q f(p / q) - alpha p) grad log p),  alpha = rho f(1 / rho),
        rho = (1 - q_H) / (1 - p_H),

    in which the tail counts as if q were rho p there. That is one token of log-probs log(1 - p_H)
    and log(1 - q_H): its score is -sum_H p grad log p / (1 - p_H).

    The expectation therefore has k + 1 outcomes: the tokens of H and the tail. l_j is the loss at
    outcome j minus the same loss with A = 0, so that terms without the advantage, such as the
    square of the log-ratio, are not centred. This holds for every loss. The gradient flows through
    log p_j only; q_j f_j is a constant. A is the advantage of the sampled token at every outcome,
    its penalty included. With q = p, f = 1 and H the vocabulary the expectation is 0 in gradient.

    Args:
        tokens: [R, L] as `losses.policy_loss` gets them.
        weights: w, float32 >= 0, without the corrections of single tokens.
        head: the engine's top-k tokens.
        anchor: field of `Head` whose policy is in the ratio's denominator.
        loss: function from tokens to losses, as in `policy_loss`.
        corrections: corrections that weigh or drop single tokens, f.
        ratio_level: "sequence": each token's ratio is its completion's in value.

    Returns:
        To be subtracted from the sum of the loss. Through it the gradient reaches
        `head.train_logprobs`.

    Raises:
        ValueError: if the shapes of tokens, weights or head differ, or `ratio_level` is unknown.
    """
    require_tokens(tokens)
    require_option("ratio_level", ratio_level, get_args(Level))
    require_same_shape(weights=weights, completion_mask=tokens.completion_mask)
    require_head(head, tokens.completion_mask)
    active = jnp.asarray(tokens.completion_mask, bool) & (weights != 0)
    sequence_ratio = None
    if ratio_level == "sequence":
        log_ratio = losses.sequence_log_ratio(tokens)
        sequence_ratio = stop_gradient(jnp.exp(jnp.where(active, log_ratio, 0.0)))

    def constant_inside(array: Array) -> Array:
        if jnp.ndim(array) != active.ndim:
            return array
        return stop_gradient(jnp.where(active, array, 0))

    sampled = jax.tree.map(constant_inside, tokens)._replace(completion_mask=active)

    def centered_loss(
        present: Array,
        train_logprobs: Array,
        old_logprobs: Array,
        start_logprobs: Array,
        rollout_logprobs: Array,
        anchor_logprobs: Array,
    ) -> jax.Array:
        """q_j f_j l_j of one outcome j in the place of each sampled token, [R, L]."""
        if sequence_ratio is None:
            ratio = losses.importance_ratio(train_logprobs, anchor_logprobs)
        else:
            ratio = sequence_ratio * jnp.exp(train_logprobs - stop_gradient(train_logprobs))
        outcome = sampled._replace(
            train_logprobs=train_logprobs,
            old_logprobs=old_logprobs,
            start_logprobs=start_logprobs,
            rollout_logprobs=rollout_logprobs,
            anchor_logprobs=anchor_logprobs,
            ratio=ratio,
        )
        mass = jnp.where(present, jnp.exp(rollout_logprobs), 0.0)
        if corrections:
            corrected, _ = chain(outcome, corrections)
            mass = mass * jnp.where(corrected.keep, corrected.weights, 0.0)

        no_advantage = outcome._replace(advantages=jnp.zeros_like(outcome.advantages))
        with_advantage, _ = split(loss(outcome))
        without_advantage, _ = split(loss(no_advantage))
        difference = with_advantage - without_advantage
        return stop_gradient(mass) * difference

    present = head.present & active[..., None]

    def outcomes(values: Float[Array, "R L k"]) -> Float[jax.Array, "k+1 R L"]:
        """The head and the tail, along the first axis."""
        return jnp.moveaxis(jnp.where(active[..., None], with_tail(values, present), 0.0), -1, 0)

    outcome_present = jnp.concatenate([present, active[..., None]], axis=-1)
    expected = jax.vmap(centered_loss)(
        jnp.moveaxis(outcome_present, -1, 0),
        outcomes(head.train_logprobs),
        outcomes(head.old_logprobs),
        outcomes(head.start_logprobs),
        outcomes(head.rollout_logprobs),
        outcomes(getattr(head, anchor)),
    )
    constant_weights = stop_gradient(jnp.where(active, weights, 0.0))
    return masked.weighted_sum(jnp.sum(expected, axis=0), constant_weights).total
