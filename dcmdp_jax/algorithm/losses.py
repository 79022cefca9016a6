"""The surrogate of a trust region, its normalizations as weights, and the KL from a reference.

Ratios here are policy drift, new weights over old, both on the training stack, unless the
denominator is chosen to be the inference engine's. Engine mismatch is `discrepancy.py`, its
corrections are `corrections.py`.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Bool, Float, Int, Shaped

from dcmdp_jax.algorithm import discrepancy, stats
from dcmdp_jax.algorithm.masked import (
    completion_means,
    gather_to_tokens,
    masked_sum,
    masked_values,
    weighted_sum,
)
from dcmdp_jax.algorithm.remedies import Function, Statistics, Tokens, require_tokens, split
from dcmdp_jax.algorithm.require import (
    concrete,
    require_gradient,
    require_integer,
    require_logprobs,
    require_number,
    require_option,
    require_rank,
    require_same_shape,
)
from dcmdp_jax.algorithm.trust_regions import clip
from dcmdp_jax.types import Array

Aggregation = Literal["seq_mean_token_mean", "token_mean", "fixed_length"]


def importance_ratio(
    train_logprobs: Float[Array, "*s"], old_logprobs: Float[Array, "*s"]
) -> Float[jax.Array, "*s"]:
    """gamma, the importance ratio of each token: policy now over that of the batch (below Eq. 1).

        gamma_{i,t} = pi_theta(o_t) / pi_theta_old^Train(o_t) = exp(clip(log pi_theta - log p^Train,
        -20, 20))

    Both are the training stack's: the engine's p^Inf is not in it. Beyond 20 nats gamma is held at
    e^20 = 4.85e8 (e^-20) without gradient, so that A = 0 gives 0 and not 0 * inf.

    Args:
        train_logprobs: nats, log pi_theta of the sampled tokens, weights now. The gradient, gamma,
            flows here alone.
        old_logprobs: nats, training stack, weights that made the batch: log p^Train. A constant.

    Returns:
        float32 (float64 for float64 with x64), finite for every input but NaN, which stays.

    Raises:
        ValueError: if the shapes differ, `train_logprobs` is float16, or probabilities are given
            (not seen under jit).
    """
    require_same_shape(train_logprobs=train_logprobs, old_logprobs=old_logprobs)
    require_gradient("train_logprobs", train_logprobs)
    require_logprobs("train_logprobs", train_logprobs)
    require_logprobs("old_logprobs", old_logprobs)
    old = stop_gradient(stats.as_float(old_logprobs))
    return jnp.exp(stats.clamped_log_ratio(train_logprobs, old))


TokenLosses = tuple[Float[jax.Array, "R L"], Statistics]
"""Losses of the tokens, and statistics by metric name."""


def surrogate(tokens: Tokens, *, trust_region: Function = clip) -> TokenLosses:
    """The negated objective of each token; by default Eq. 9-10 (Eq. 1 and 4 with their own A).

        l_t = -min(gamma_t A_t, clip(gamma_t, 1 - low, 1 + high) A_t)

    The gradient in log pi_theta is -gamma A where the clip does not bite, 0 where it does; see
    `clip`.

    Args:
        tokens: with the ratio, as `policy_loss` gives them.
        trust_region: bounds the update.

    Returns:
        Losses, and by metric name the shares of the tokens where a bound bites, so that no gradient
        flows: `policy/clip_low_fraction` and `policy/clip_high_fraction`.

    Raises:
        ValueError: if a parameter is outside its range.
    """
    region, statistics = split(trust_region(tokens))
    shape = region.objective.shape
    low = jnp.broadcast_to(region.low, shape)
    high = jnp.broadcast_to(region.high, shape)
    return -region.objective, statistics | {
        "policy/clip_low_fraction": masked_sum(low, tokens.completion_mask),
        "policy/clip_high_fraction": masked_sum(high, tokens.completion_mask),
    }


def log_ratio_squared(
    tokens: Tokens, *, tau: float = 1e-3, trust_region: Function = clip
) -> TokenLosses:
    """The surrogate plus tau (log pi - log q)^2 of every token in the loss, stopped ones included.

    The gradient in log pi is that of the surrogate plus 2 tau (log pi - log q): it pulls the policy
    to the engine's on sampled tokens. Kimi k1.5, Kimi-K2.5 (arXiv:2602.02276) and prime-rl
    (`kl_tau`, 1e-3 until 2026-09-18, none since) have it. The difference is clamped at 20 nats.
    """
    require_number("tau", tau, minimum=0)
    losses, statistics = surrogate(tokens, trust_region=trust_region)
    log_ratio = stats.clamped_log_ratio(tokens.train_logprobs, tokens.rollout_logprobs)
    return losses + tau * log_ratio**2, statistics


def likelihood(tokens: Tokens, *, trust_region: Function = clip) -> TokenLosses:
    """-log pi of each token, whatever its advantage: supervised fine-tuning (`dcmdp sft`)."""
    require_tokens(tokens)
    return -tokens.train_logprobs, {}


LOSSES: Mapping[str, Function] = {
    "surrogate": surrogate,
    "log_ratio_squared": log_ratio_squared,
    "likelihood": likelihood,
}
"""Name -> loss around a trust region, a remedy (`remedies`): from the tokens to token losses [R,
L].
"""


def policy_loss(
    tokens: Tokens,
    token_weights: Float[Array, "R L"],
    *,
    loss: Function = surrogate,
    ratio_level: discrepancy.Level = "token",
) -> tuple[stats.Mean, Statistics]:
    """The loss of the policy on packed rows, left unreduced: sum_t w_t l_t.

    On arrays [N, T] it is `dc_grpo_loss`. gamma_t is the `importance_ratio` of log pi_theta and log
    pi_anchor. A NaN on a token that takes part stays NaN, for the step to see; what lies outside
    the mask or has weight 0 is ignored. The gradient reaches `train_logprobs` alone.

    With `ratio_level="sequence"` the ratio is that of GSPO (Zheng et al. 2025), s_i = exp(mean_t
    (log pi_theta - log pi_anchor)) on every token of completion i, dropped ones included in the
    mean; token t's gradient is -w s_i A_t ("GSPO-token", the same as GSPO where all tokens of a
    completion have one A). verl and Tunix alike; they clamp at 10 nats above. Clips are of another
    order there (3e-4 and 4e-4 in the paper).

    Args:
        tokens: rows [R, L]; `advantages` penalized or not; `anchor_logprobs` equal to
            `train_logprobs` when the batch is used once: the ratio is then 1 and only its gradient
            matters. At the level of the sequence all tokens of a completion must be in this call.
        token_weights: float32 >= 0, from `aggregation_weights`, gathered to tokens; a constant.
        loss: function from these tokens, with `ratio`, the mask of the active ones, and 0 outside
            it, to losses [R, L].
        ratio_level: "token" or "sequence".

    Returns:
        (loss, statistics). `loss.total` adds over micro-batches; divide the sum once, by the total
        weight that `aggregation_weights` gives. `loss.weight` is the sum of the token weights seen
        here: the same number for sequence and token means, but NOT for `fixed_length`, where it
        counts tokens in units of the maximum.

        The statistics of `loss` and, of the active tokens, `policy/ratio_mean`, `policy/ratio_max`,
        `policy/ratio_min`, by metric name.

    Raises:
        ValueError: if the shapes differ, `ratio_level` is unknown, or the loss refuses a parameter.
    """
    require_tokens(tokens)
    require_option("ratio_level", ratio_level, get_args(discrepancy.Level))
    require_same_shape(completion_mask=tokens.completion_mask, token_weights=token_weights)
    weights = stop_gradient(masked_values(token_weights, tokens.completion_mask))
    active = weights != 0

    def constant(values: Array | None) -> jax.Array | None:
        if values is None:
            return None
        return stop_gradient(masked_values(values, active))

    train = masked_values(tokens.train_logprobs, active)
    anchor = constant(tokens.anchor_logprobs)
    if ratio_level == "token":
        ratio = importance_ratio(train, anchor)
    else:
        # The mean of a completion is over its dropped tokens too.
        ratio = jnp.exp(masked_values(sequence_log_ratio(tokens), active))
    active_tokens = tokens._replace(
        train_logprobs=train,
        old_logprobs=constant(tokens.old_logprobs),
        rollout_logprobs=constant(tokens.rollout_logprobs),
        advantages=constant(tokens.advantages),
        discrepancy=constant(tokens.discrepancy),
        completion_mask=active,
        anchor_logprobs=anchor,
        ratio=ratio,
        start_logprobs=constant(tokens.start_logprobs),
    )
    token_losses, statistics = split(loss(active_tokens))

    ratio = stop_gradient(ratio)
    largest = jnp.max(jnp.where(active, ratio, -jnp.inf), initial=-jnp.inf)
    smallest = jnp.min(jnp.where(active, ratio, jnp.inf), initial=jnp.inf)
    statistics = stop_gradient(statistics) | {
        "policy/ratio_mean": masked_sum(ratio, active),
        "policy/ratio_max": stats.Max(largest),
        "policy/ratio_min": stats.Min(smallest),
    }
    return weighted_sum(token_losses, weights), statistics


def sequence_log_ratio(tokens: Tokens) -> Float[jax.Array, "R L"]:
    """Mean log-ratio of each token's completion, with the gradient of the token's own; clamped.

    The ratio is that of `train_logprobs` and `anchor_logprobs`.
    """
    require_tokens(tokens)
    train = masked_values(tokens.train_logprobs, tokens.completion_mask)
    anchor = masked_values(tokens.anchor_logprobs, tokens.completion_mask)
    difference = stats.log_difference(train, stop_gradient(anchor))
    means = completion_means(stop_gradient(difference), tokens.where)
    # The value is 0, the gradient is that of `difference`.
    gradient_only = difference - stop_gradient(difference)
    token_means = gather_to_tokens(means, tokens.completion_index)
    return stats.clamp(token_means + gradient_only, stats.MAX_LOG_RATIO)


def aggregation_weights(
    completion_lengths: Int[Array, " N"],
    loss_mask: Bool[Array, " N"],
    *,
    mode: Aggregation,
    max_completion_tokens: int | None = None,
    dropped_tokens: Int[Array, " N"] | None = None,
    dtype: Any = jnp.float32,
) -> tuple[Float[jax.Array, " N"], Float[jax.Array, ""]]:
    """The normalization of the loss as one weight for each completion.

        loss = sum_i w_i sum_t l_{i,t} / total

        mode                 w_i        total
        seq_mean_token_mean  1 / |o_i|  completions  mean of completions' means, Eq. 1, 4, 9-10
        token_mean           1          tokens       equal weight per token (DAPO, Yu et al. 2025)
        fixed_length         1 / T_max  completions  no length in the weight (Dr. GRPO, Liu et al.
                                                     2025)

    counting completions that are in the loss and have a token. A mini-batch's `total` serves all
    its micro-batches: sum first, divide once, and any split gives the same loss.

    Where a correction drops tokens, the total counts what remains: for the first two modes the
    weights w_i of the kept tokens, so that the loss is their weighted mean; the total of
    `fixed_length` depends on no length and stays. The weights w_i never change.

    Args:
        completion_lengths: |o_i| in sampled tokens, end-of-sequence included.
        loss_mask: false: w_i = 0 (padding, dropped, or truncated when a setting says so).
        mode: one of the three names.
        max_completion_tokens: T_max, the sampling limit; needed by `fixed_length`.
        dropped_tokens: tokens of each completion that are left out of the loss; None: none.
        dtype: dtype of the results.

    Returns:
        (weights, total). An empty completion has weight 0 and is not counted. When nothing is left
        the total is 0: `Mean(sum, total).value()` then gives loss 0.

    Raises:
        ValueError: if the shapes differ or are not [N], `mode` is unknown, or
            `max_completion_tokens` is missing for `fixed_length`, not a positive integer, or less
            than a length (not seen under jit).
    """
    require_same_shape(completion_lengths=completion_lengths, loss_mask=loss_mask)
    require_rank("completion_lengths", completion_lengths, 1)
    require_option("mode", mode, get_args(Aggregation))
    if max_completion_tokens is not None or mode == "fixed_length":
        require_integer("max_completion_tokens", max_completion_tokens, minimum=1)
    if dropped_tokens is not None:
        require_same_shape(completion_lengths=completion_lengths, dropped_tokens=dropped_tokens)

    lengths = jnp.asarray(completion_lengths, jnp.int32)
    kept_lengths = lengths
    if dropped_tokens is not None:
        kept_lengths = lengths - jnp.asarray(dropped_tokens, jnp.int32)
    counted = jnp.asarray(loss_mask, bool) & (lengths > 0)
    if mode == "token_mean":
        num_tokens = jnp.sum(jnp.where(counted, kept_lengths, 0), dtype=jnp.int32)
        return counted.astype(dtype), num_tokens.astype(dtype)
    if mode == "fixed_length":
        known_lengths = concrete(lengths)
        if known_lengths is not None and known_lengths.max(initial=0) > max_completion_tokens:
            raise ValueError(
                f"max_completion_tokens={max_completion_tokens}; a completion has "
                f"{known_lengths.max()} tokens"
            )
        weights = jnp.where(counted, 1.0 / max_completion_tokens, 0.0).astype(dtype)
        return weights, jnp.sum(counted, dtype=jnp.int32).astype(dtype)
    lengths = jnp.maximum(lengths, 1)
    # x / x is exactly 1: without dropped tokens the total is a whole number.
    shares = jnp.where(counted, kept_lengths / lengths, 0.0).astype(dtype)
    return jnp.where(counted, 1.0 / lengths, 0.0).astype(dtype), jnp.sum(shares)


def reference_kl(
    train_logprobs: Float[Array, "*s"],
    ref_logprobs: Float[Array, "*s"],
    *,
    estimator: stats.KlEstimator,
    completion_mask: Shaped[Array, "*s"] | None = None,
) -> Float[jax.Array, "*s"]:
    """Estimate of KL(pi_theta || pi_ref) from each sampled token, a term for the loss.

    `kl_estimate` of x = log pi_ref - log pi_theta clamped to [-20, 20]; k3 is GRPO's choice. As a
    LOSS the estimators differ from what they are as estimates, because the gradient is taken
    through log pi_theta and not through the sampling: in expectation k1's gradient is 0 (do not use
    it as a loss), k2's is that of KL(pi_theta || pi_ref), k3's is that of KL(pi_ref || pi_theta).

    Args:
        train_logprobs: nats, log pi_theta of the sampled tokens; the gradient flows here alone, and
            vanishes beyond the clamp.
        ref_logprobs: nats, frozen reference.
        estimator: "k1", "k2" or "k3".
        completion_mask: tokens outside cost 0 and are ignored. None: all count.

    Returns:
        float32, finite for every input but NaN: k3 is at most e^20 - 21 = 4.85e8.

    Raises:
        ValueError: if the shapes differ, `train_logprobs` is float16, or `estimator` is unknown.
    """
    require_gradient("train_logprobs", train_logprobs)
    if completion_mask is None:
        completion_mask = jnp.ones(np.shape(train_logprobs), bool)
    require_same_shape(
        train_logprobs=train_logprobs,
        ref_logprobs=ref_logprobs,
        completion_mask=completion_mask,
    )
    train = masked_values(train_logprobs, completion_mask)
    reference = stop_gradient(masked_values(ref_logprobs, completion_mask))
    return stats.kl_estimate(stats.clamped_log_ratio(reference, train), estimator)
