"""The loss as the settings have it; beside the surrogate the divergence from the reference policy and experts' balance.

    loss = S / W + kl_coefficient K / V + router_aux_loss B

S is the surrogate summed over the tokens that corrections keep and W their weight; K is the sum of the divergence over
all tokens and V their weight; B is the load-balancing loss of the mini-batch. Micro-batches add one sum that is divided
by W at the end, so K / V and B enter it times W. W is therefore known before the pass that takes the gradient: the
terms weigh the same however many tokens a correction drops.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcmdp_jax.algorithm.discrepancy import token_discrepancy
from dcmdp_jax.algorithm.losses import policy_loss
from dcmdp_jax.algorithm.masked import completion_means
from dcmdp_jax.algorithm.numerics import clamped_log_ratio
from dcmdp_jax.algorithm.remedies import Function, Statistics, Tokens, split
from dcmdp_jax.algorithm.signals import Signals, row_signals
from dcmdp_jax.algorithm.stats import Mean
from dcmdp_jax.config.algorithm import AlgorithmSettings, Remedies
from dcmdp_jax.models.moe import Aux, load_balancing_loss
from dcmdp_jax.types import Array, DualState, Rows

SURROGATE, KL, ROUTER = "policy/surrogate", "policy/kl", "policy/router_loss"
"""Metrics: S / W, K / V and B, means of the updates that were made."""


def signals_of(settings: AlgorithmSettings, remedies: Remedies, tokens: Tokens, weights: Array) -> Signals:
    """The constants of rows as the settings have them; see `row_signals`."""
    measure = {"measure": settings.measure, "sided": settings.sided, "ratio_limit": settings.ratio_limit}
    return row_signals(
        tokens, weights, measure=measure, level=settings.level, penalty=remedies.penalty,
        corrections=remedies.corrections, count_dropped=settings.correction_denominator == "all",
    )  # fmt: skip


def loss_of(
    settings: AlgorithmSettings, remedies: Remedies, signals: Signals, train_logprobs: Array
) -> tuple[Mean, Statistics]:
    """The loss of rows as the settings have it, left unreduced; see `policy_loss`."""
    tokens, weights = signals.tokens, signals.weights
    anchors = {"train": tokens.old_logprobs, "proximal": tokens.start_logprobs}
    anchor = anchors.get(settings.ratio_denominator, tokens.rollout_logprobs)
    if settings.ratio_denominator == "proximal":
        weights = weights * proximal_weights(tokens)
    tokens = tokens._replace(train_logprobs=train_logprobs, anchor_logprobs=anchor)
    return policy_loss(tokens, weights, loss=remedies.loss, ratio_level=settings.ratio_level)


def proximal_weights(tokens: Tokens) -> jax.Array:
    """pi_prox / pi_old of the tokens, the weight of the decoupled objective (`ratio_denominator="proximal"`).

        l_t = -(pi_prox / pi_old) min(r_t A_t, clip(r_t) A_t),    r_t = pi_theta / pi_prox

    pi_prox is the policy at the start of the step and pi_old the one that sampled, both on the training stack: the
    clip bounds what this step changes, and the weight corrects for what changed since sampling (Hilton et al. 2022,
    arXiv:2110.00641; AReaL, Fu et al. 2025, arXiv:2505.24298, whose pi_old is the engine's). 1 without a lag.

    Returns:
        [R, L] float32, a constant; 1 outside the mask; e^20 at most.
    """
    moved = jnp.where(tokens.completion_mask, clamped_log_ratio(tokens.start_logprobs, tokens.old_logprobs), 0.0)
    return jax.lax.stop_gradient(jnp.exp(moved))


class Terms(NamedTuple):
    """Constants of an update with terms beside the surrogate.

    Attributes:
        divisor: [] float32, W; 1 where nothing is kept, so that the other terms remain.
        kl_weight: [] float32, V.
        router: `moe.router_sums` of the whole mini-batch; None without the load-balancing loss.
    """

    divisor: jax.Array
    kl_weight: jax.Array
    router: Aux | None


def has_terms(settings: AlgorithmSettings) -> bool:
    """Whether the loss has a term beside the surrogate."""
    return bool(settings.kl_coefficient or settings.router_aux_loss)


def scaled_terms(settings: AlgorithmSettings, terms: Terms, kl: jax.Array, router: Aux) -> jax.Array:
    """Part of a micro-batch in a sum that is to be divided by `divisor`; the gradient flows through.

    Args:
        settings: the coefficients.
        terms: of the update.
        kl: [] float32, the micro-batch's part of K.
        router: `moe.router_sums` of the micro-batch.
    """
    total = settings.kl_coefficient * terms.divisor * Mean(kl, terms.kl_weight).value()
    if terms.router is not None:
        own = terms.router | {"router_probability": router["router_probability"]}
        total += settings.router_aux_loss * terms.divisor * load_balancing_loss(own)
    return total


def term_metrics(
    settings: AlgorithmSettings, terms: Terms, surrogate: jax.Array, kl: jax.Array
) -> dict[str, jax.Array]:
    """Each term of an update before its coefficient: loss = surrogate + kl_coefficient kl + router_aux_loss router."""
    metrics = {SURROGATE: surrogate / terms.divisor}
    if settings.kl_coefficient:
        metrics[KL] = Mean(kl, terms.kl_weight).value()
    if terms.router is not None:
        metrics[ROUTER] = load_balancing_loss(terms.router)
    return metrics


def charged_rewards(
    settings: AlgorithmSettings,
    penalty: Function,
    dual: DualState,
    rewards: jax.Array,
    rows: tuple[Rows, ...],
    old_logprobs: tuple[jax.Array, ...],
) -> jax.Array:
    """Rewards with the charge inside, before their group's mean and deviation are taken (`level="reward"`).

        r_i - lambda mean_t delta_{i,t},    or as `method` has it for an advantage,

    so that a completion is compared with the others of its prompt in both. The group's deviation is that of the
    charged rewards: in a group of equal rewards the discrepancy alone decides, and lambda, above 0, cancels.

    Args:
        settings: measure, sided, ratio_limit.
        penalty: how the discrepancy is charged; it sees advantages, discrepancy, multiplier and tolerance alone.
        dual: lambda_k and c.
        rewards: [N] float32 of a mini-batch.
        rows, old_logprobs: its buckets, [A, R, L] each.

    Returns:
        [N] float32; completions without a token keep their reward.
    """

    def flat(arrays: Iterable[jax.Array]) -> jax.Array:
        return jnp.concatenate([array.reshape(-1) for array in arrays])[None]

    delta = flat(_delta(bucket, old, settings) for bucket, old in zip(rows, old_logprobs, strict=True))
    mask, index = flat(bucket.completion_mask for bucket in rows), flat(bucket.completion_index for bucket in rows)
    means = completion_means(delta, mask, index, len(rewards))
    tokens = Tokens(
        advantages=rewards[None], discrepancy=means[None], completion_mask=jnp.ones((1, len(rewards)), bool),
        completion_index=jnp.arange(len(rewards))[None], num_completions=len(rewards),
        multiplier=dual.multiplier, tolerance=dual.tolerance,
    )  # fmt: skip
    return split(penalty(tokens))[0][0]


def _delta(rows: Rows, old_logprobs: jax.Array, settings: AlgorithmSettings) -> jax.Array:
    values = token_discrepancy(
        old_logprobs, rows.rollout_logprobs,
        measure=settings.measure, sided=settings.sided, ratio_limit=settings.ratio_limit,
    )  # fmt: skip
    return jnp.where(rows.completion_mask, values, 0.0)
