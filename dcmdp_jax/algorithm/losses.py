"""The clipped surrogate, its three normalisations as weights, and the divergence from a reference policy.

Ratios here are policy drift, new weights over old, both on the training stack. Engine mismatch is `discrepancy.py`.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from dcmdp_jax.algorithm.checks import require_integer, require_number, require_option, require_rank, require_same_shape
from dcmdp_jax.algorithm.masked import masked_sum, weighted_sum
from dcmdp_jax.algorithm.numerics import clamped_log_ratio, exp_minus_linear
from dcmdp_jax.algorithm.stats import Max, Mean, Min, Statistic
from dcmdp_jax.types import Array

Aggregation = Literal["seq_mean_token_mean", "token_mean", "fixed_length"]
KlEstimator = Literal["k1", "k2", "k3"]


def clipped_surrogate(
    train_logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    completion_mask: Array,
    token_weights: Array,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Mean, dict[str, Statistic]]:
    """Negated clipped surrogate (Eq. 9-10; Eq. 1 and 4 with their own advantages), left unreduced.

        gamma_t = exp(clip(log pi_theta - log pi_old, -20, 20))
        l_t     = -min(gamma_t A_t, clip(gamma_t, 1 - clip_low, 1 + clip_high) A_t),    total = sum_t w_t l_t

    The gradient reaches `train_logprobs` alone: -w gamma A where the clip does not bite, 0 where it does. The clip
    bites strictly beyond a bound: A > 0 and gamma > 1 + clip_high, or A < 0 and gamma < 1 - clip_low. At gamma equal to
    the bound the gradient is that of the unclipped side, so that with a clip of 0 the first update on a batch, where
    gamma = 1, is the plain policy gradient.

    Beyond 20 nats the ratio is held at e^20 = 4.85e8 (e^-20), a finite value without gradient, so A = 0 gives 0 and not
    0 * inf; at exactly 20 nats the gradient still flows (`numerics.clamp`). A NaN on a token that takes part stays NaN,
    for the step to see; what lies outside the mask or has weight 0 is ignored.

    Args:
        train_logprobs: [R, L] nats, log pi_theta now.
        old_logprobs: [R, L] nats, same stack, weights that made the batch. Equal to `train_logprobs` when the batch is
            used once: the ratio is then 1 and only its gradient matters.
        advantages: [R, L] float, penalised or not; a constant.
        completion_mask: [R, L] bool, true on sampled tokens.
        token_weights: [R, L] float >= 0, from `aggregation_weights`, gathered to tokens; a constant.
        clip_low: in [0, 1).
        clip_high: at least 0.

    Returns:
        (loss, statistics). `loss.total` adds over micro-batches; divide the sum once, by the total weight that
        `aggregation_weights` gives. `loss.weight` is the sum of the token weights seen here: the same number for
        sequence and token means, but NOT for `fixed_length`, where it counts tokens in units of the maximum.

        The statistics are of the tokens that took part: `clip_low_fraction` and `clip_high_fraction`, the shares where
        a bound bites, so that no gradient flows; `ratio_mean`, `ratio_max`, `ratio_min` of the importance ratio.

    Raises:
        ValueError: if the shapes differ or a clip is outside its range.
    """
    require_same_shape(
        train_logprobs=train_logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        completion_mask=completion_mask,
        token_weights=token_weights,
    )
    require_number("clip_low", clip_low, minimum=0, maximum=1, open_maximum=True)
    require_number("clip_high", clip_high, minimum=0)
    weights = jnp.where(jnp.asarray(completion_mask, bool), jnp.asarray(token_weights, jnp.float32), 0.0)
    weights = jax.lax.stop_gradient(weights)
    active = weights != 0

    def constant(values: Array) -> jax.Array:
        return jax.lax.stop_gradient(jnp.where(active, jnp.asarray(values, jnp.float32), 0.0))

    advantages = constant(advantages)
    train_logprobs = jnp.where(active, jnp.asarray(train_logprobs, jnp.float32), 0.0)
    ratio = jnp.exp(clamped_log_ratio(train_logprobs, constant(old_logprobs)))
    # The minimum of Eq. 9 as a choice: autodiff splits the gradient of min() and clip() where their arguments tie.
    bites_low = (advantages < 0) & (ratio < 1.0 - clip_low)
    bites_high = (advantages > 0) & (ratio > 1.0 + clip_high)
    bound = jnp.where(bites_low, 1.0 - clip_low, 1.0 + clip_high)
    loss = weighted_sum(-jnp.where(bites_low | bites_high, bound, ratio) * advantages, weights)

    ratio = jax.lax.stop_gradient(ratio)
    statistics = {
        "clip_low_fraction": masked_sum(bites_low, active),
        "clip_high_fraction": masked_sum(bites_high, active),
        "ratio_mean": masked_sum(ratio, active),
        "ratio_max": Max(jnp.max(jnp.where(active, ratio, -jnp.inf), initial=-jnp.inf)),
        "ratio_min": Min(jnp.min(jnp.where(active, ratio, jnp.inf), initial=jnp.inf)),
    }
    return loss, statistics


def aggregation_weights(
    completion_lengths: Array,
    loss_mask: Array,
    *,
    mode: Aggregation,
    max_completion_tokens: int | None = None,
    dropped_tokens: Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The normalisation of the loss as one weight for each completion.

        loss = sum_i w_i sum_t l_{i,t} / total

        mode                   w_i          total
        seq_mean_token_mean    1 / |o_i|    completions    mean of completions' means, Eq. 1, 4, 9-10
        token_mean             1            tokens         every token alike (DAPO, Yu et al. 2025)
        fixed_length           1 / T_max    completions    no length in the weight (Dr. GRPO, Liu et al. 2025)

    counting completions that are in the loss and have a token. A mini-batch's `total` serves all its micro-batches: sum
    first, divide once, and any split gives the same loss.

    Where a correction drops tokens, the total counts what remains: for the first two modes the weights w_i of the kept
    tokens, so that the loss is their weighted mean; the total of `fixed_length` depends on no length and stays. The
    weights w_i never change.

    Args:
        completion_lengths: [N] int, |o_i| in sampled tokens, end-of-sequence included.
        loss_mask: [N] bool; false: w_i = 0 (padding, dropped, or truncated when a setting says so).
        mode: one of the three names.
        max_completion_tokens: T_max, the sampling limit; needed by `fixed_length`.
        dropped_tokens: [N] int, tokens of each completion that are left out of the loss; None: none.

    Returns:
        ([N] float32 weights, [] float32 total). An empty completion has weight 0 and is not counted. When nothing
        is left the total is 0: `Mean(sum, total).value()` then gives loss 0.

    Raises:
        ValueError: if the shapes differ or are not [N], `mode` is unknown, or `max_completion_tokens` is missing for
            `fixed_length` or not a positive integer.
    """
    require_same_shape(completion_lengths=completion_lengths, loss_mask=loss_mask)
    require_rank("completion_lengths", completion_lengths, 1)
    require_option("mode", mode, get_args(Aggregation))
    if max_completion_tokens is not None or mode == "fixed_length":
        require_integer("max_completion_tokens", max_completion_tokens, minimum=1)
    lengths = jnp.asarray(completion_lengths, jnp.int32)
    kept = lengths if dropped_tokens is None else lengths - jnp.asarray(dropped_tokens, jnp.int32)
    counted = jnp.asarray(loss_mask, bool) & (lengths > 0)
    if mode == "token_mean":
        tokens = jnp.sum(jnp.where(counted, kept, 0), dtype=jnp.int32).astype(jnp.float32)
        return counted.astype(jnp.float32), tokens
    if mode == "fixed_length":
        weights = jnp.where(counted, 1.0 / max_completion_tokens, 0.0).astype(jnp.float32)
        return weights, jnp.sum(counted, dtype=jnp.int32).astype(jnp.float32)
    lengths = jnp.maximum(lengths, 1)
    # x / x is exactly 1: without dropped tokens the total is a whole number.
    shares = jnp.where(counted, kept / lengths, 0.0).astype(jnp.float32)
    return jnp.where(counted, 1.0 / lengths, 0.0).astype(jnp.float32), jnp.sum(shares)


def reference_kl(
    train_logprobs: Array,
    ref_logprobs: Array,
    *,
    estimator: KlEstimator,
    completion_mask: Array | None = None,
) -> jax.Array:
    """Estimate of KL(pi_theta || pi_ref) from each sampled token, to be added to the loss with a coefficient.

    With x = log pi_ref - log pi_theta clamped to [-20, 20], for tokens sampled from pi_theta:

        k1 = -x            unbiased, either sign
        k2 = x^2 / 2       biased, >= 0
        k3 = e^x - 1 - x   unbiased, >= 0, small variance (GRPO's choice)

    after J. Schulman, "Approximating KL divergence" (2020). As a LOSS they differ from what they are as estimates,
    because the gradient is taken through log pi_theta and not through the sampling: in expectation k1's gradient is
    0 (do not use it as a loss), k2's is that of KL(pi_theta || pi_ref), k3's is that of KL(pi_ref || pi_theta).

    Args:
        train_logprobs: any shape, nats, log pi_theta of the sampled tokens; the gradient flows here alone, and
            vanishes beyond the clamp.
        ref_logprobs: same shape, nats, frozen reference.
        estimator: "k1", "k2" or "k3".
        completion_mask: same shape, bool: tokens outside cost 0 and are ignored. None: all count.

    Returns:
        Same shape, float32, finite for every input but NaN: k3 is at most e^20 - 21 = 4.85e8.

    Raises:
        ValueError: if the shapes differ or `estimator` is unknown.
    """
    mask = jnp.ones(jnp.shape(train_logprobs), bool) if completion_mask is None else completion_mask
    require_same_shape(train_logprobs=train_logprobs, ref_logprobs=ref_logprobs, completion_mask=mask)
    require_option("estimator", estimator, get_args(KlEstimator))
    mask = jnp.asarray(mask, bool)
    train = jnp.where(mask, jnp.asarray(train_logprobs, jnp.float32), 0.0)
    reference = jax.lax.stop_gradient(jnp.where(mask, jnp.asarray(ref_logprobs, jnp.float32), 0.0))
    log_ratio = clamped_log_ratio(reference, train)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    return exp_minus_linear(log_ratio)
