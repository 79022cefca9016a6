"""The terms of the loss beside the surrogate: the divergence from the reference policy, and the experts' balance.

    loss = S / W + kl_coefficient K / V + router_aux_loss B

S is the surrogate summed over the tokens that corrections keep and W their weight; K is the sum of the divergence and V
the weight of its tokens; B is the load-balancing loss of the mini-batch. Micro-batches add one sum that is divided by W
at the end, so K / V and B enter it times W. W is therefore known before the pass that takes the gradient: the terms
weigh the same however many tokens a correction drops.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcmdp_jax.algorithm.stats import Mean
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.models.moe import Aux, load_balancing_loss

SURROGATE, KL, ROUTER = "policy/surrogate", "policy/kl", "policy/router_loss"
"""Metrics: S / W, K / V and B, means of the updates that were made."""


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


def make_terms(settings: AlgorithmSettings, planned: jax.Array, kept: jax.Array, router: Aux | None) -> Terms:
    """The constants from the weight of all tokens, that of the kept ones, and the router's sums."""
    return Terms(jnp.where(kept > 0, kept, 1.0), planned if settings.kl_correction == "none" else kept, router)


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
