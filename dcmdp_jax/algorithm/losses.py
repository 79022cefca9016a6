"""The surrogate with its trust regions, its three normalizations as weights, and the divergence from a reference.

Ratios here are policy drift, new weights over old, both on the training stack, unless the denominator is chosen to be
the inference engine's. Engine mismatch is `discrepancy.py`, its corrections are `corrections.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from dcmdp_jax.algorithm.discrepancy import Level
from dcmdp_jax.algorithm.masked import completion_means, gather_to_tokens, masked_sum, weighted_sum
from dcmdp_jax.algorithm.numerics import (
    MAX_LOG_RATIO,
    as_float,
    clamp,
    clamped_log_ratio,
    exp_minus_linear,
    log_difference,
)
from dcmdp_jax.algorithm.remedies import Function, Region, Tokens, require_tokens, split
from dcmdp_jax.algorithm.require import (
    require_integer,
    require_number,
    require_option,
    require_rank,
    require_same_shape,
)
from dcmdp_jax.algorithm.stats import Max, Mean, Min, Statistic
from dcmdp_jax.types import Array

Aggregation = Literal["seq_mean_token_mean", "token_mean", "fixed_length"]
KlEstimator = Literal["k1", "k2", "k3"]

_LEAST_REST = 1e-6
"""Probability left to all other tokens, at least, where a binary KL divides by it."""


def importance_ratio(train_logprobs: Array, old_logprobs: Array) -> jax.Array:
    """gamma, the importance ratio of each token: the policy now over the one that made the batch (below Eq. 1).

        gamma_{i,t} = pi_theta(o_t) / pi_theta_old^Train(o_t) = exp(clip(log pi_theta - log p^Train, -20, 20))

    Both are the training stack's: the engine's p^Inf is not in it. Beyond 20 nats gamma is held at e^20 = 4.85e8
    (e^-20) without gradient, so that A = 0 gives 0 and not 0 * inf.

    Args:
        train_logprobs: any shape, nats, log pi_theta of the sampled tokens, weights now. The gradient, gamma, flows
            here alone.
        old_logprobs: same shape, nats, training stack, weights that made the batch: log p^Train. A constant.

    Returns:
        Same shape, float32 (float64 for float64 with x64), finite for every input but NaN, which stays.

    Raises:
        ValueError: if the shapes differ.
    """
    require_same_shape(train_logprobs=train_logprobs, old_logprobs=old_logprobs)
    return jnp.exp(clamped_log_ratio(train_logprobs, lax.stop_gradient(as_float(old_logprobs))))


def clipped_surrogate(ratio: Array, advantages: Array, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Region:
    """The clipped objective of each token, to be maximized (Eq. 9-10; Eq. 1 and 4 with their own A).

        min(gamma A, clip(gamma, 1 - clip_low, 1 + clip_high) A)

    The gradient in log pi_theta is gamma A where the clip does not bite and 0 strictly beyond a bound. At gamma equal
    to a bound it is that of the unclipped side, so that with a clip of 0 the first update on a batch, where gamma = 1,
    is the plain policy gradient. The loss of a batch is the negated mean over completions of their means over tokens.

    Args:
        ratio: any shape, gamma (`importance_ratio`). The gradient flows here alone.
        advantages: same shape, penalized (`penalized_advantages`) or not. A constant.
        clip_low: eps_low in [0, 1).
        clip_high: eps_high >= 0; the paper's runs have 0.24.

    Returns:
        `Region`: `objective`, in the dtype of the inputs, and bool `low` and `high`, the tokens where a bound bites.

    Raises:
        ValueError: if the shapes differ or a clip is outside its range.
    """
    require_same_shape(ratio=ratio, advantages=advantages)
    require_number("clip_low", clip_low, minimum=0, maximum=1, open_maximum=True)
    require_number("clip_high", clip_high, minimum=0)
    ratio, advantages = as_float(ratio), lax.stop_gradient(as_float(advantages))
    # The minimum of Eq. 9 as a choice: autodiff splits the gradient of min() and clip() where their arguments tie.
    low = (advantages < 0) & (ratio < 1.0 - clip_low)
    high = (advantages > 0) & (ratio > 1.0 + clip_high)
    bound = jnp.where(low, 1.0 - clip_low, 1.0 + clip_high)
    return Region(jnp.where(low | high, bound, ratio) * advantages, low, high)


def clip(
    tokens: Tokens, *, low: float = 0.2, high: float = 0.24, dual: float = 0.0
) -> Region | tuple[Region, dict[str, Statistic]]:
    """PPO's pessimistic clip: `clipped_surrogate` as a trust region.

    `dual` c > 1 (Ye et al. 2020; 0 is off): where A < 0 and gamma > c the objective is c A, without gradient;
    `policy/dual_clip_fraction` is the share of these tokens. verl (`clip_ratio_c`, 3 by default), NeMo-RL
    (`ratio_clip_c`), slime (`eps_clip_c`), AReaL (`c_clip`), Tunix (`epsilon_c`) and TRL (`delta`) do the same; off by
    default in all but verl.
    """
    require_number("low", low, minimum=0, maximum=1, open_maximum=True)
    require_number("high", high, minimum=0)
    require_tokens(tokens)
    region = clipped_surrogate(tokens.ratio, tokens.advantages, clip_low=low, clip_high=high)
    if dual == 0:
        return region
    require_number("dual", dual, minimum=1, open_minimum=True)
    capped = (tokens.advantages < 0) & (tokens.ratio > dual)
    objective = jnp.where(capped, dual * tokens.advantages, region.objective)
    capped_share = masked_sum(capped, tokens.completion_mask)
    return region._replace(objective=objective), {"policy/dual_clip_fraction": capped_share}


def dppo_tv(tokens: Tokens, *, low: float = 0.2, high: float = 0.2) -> Region:
    """DPPO's binary total variation (Qi et al. 2026, arXiv:2602.04879): gamma A while |pi - mu| is within bounds.

        stopped:   A > 0 and pi - mu > high,   or   A < 0 and pi - mu < -low,      in probability, 0 to 1

    A stopped token has objective 0 and counts in the denominator. mu is the policy in the ratio's denominator: the
    paper's is the engine's (`ratio_denominator="rollout"`). prime-rl (`dppo_mask_low`, `dppo_mask_high`, 0.2) has the
    same and adds 1e-3 log(gamma)^2 (`examples/remedies.py`). verl: `dppo_tv`.
    """
    require_number("low", low, minimum=0)
    require_number("high", high, minimum=0)
    require_tokens(tokens)
    shift = jnp.exp(_policy(tokens)) - jnp.exp(tokens.anchor_logprobs)
    return _masked(tokens, (tokens.advantages < 0) & (shift < -low), (tokens.advantages > 0) & (shift > high))


def dppo_kl(tokens: Tokens, *, low: float = 0.05, high: float = 0.05) -> Region:
    """DPPO's binary KL: gamma A while KL(Bernoulli(mu) || Bernoulli(pi)) is within bounds, in nats.

        D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))
        stopped:   A > 0, gamma > 1 and D > high,   or   A < 0, gamma < 1 and D > low

    pi and mu are held below 1 - 1e-6 in D. Otherwise as `dppo_tv`. verl: `dppo_kl`.
    """
    require_number("low", low, minimum=0)
    require_number("high", high, minimum=0)
    require_tokens(tokens)
    policy, anchor, advantages = _policy(tokens), tokens.anchor_logprobs, tokens.advantages
    mu = jnp.exp(anchor)
    rest_pi, rest_mu = (jnp.maximum(-jnp.expm1(x), _LEAST_REST) for x in (policy, anchor))
    divergence = mu * clamped_log_ratio(anchor, policy) + rest_mu * (jnp.log(rest_mu) - jnp.log(rest_pi))
    falls = (advantages < 0) & (policy < anchor) & (divergence > low)
    return _masked(tokens, falls, (advantages > 0) & (policy > anchor) & (divergence > high))


def drpo(tokens: Tokens, *, low: float = 0.2, high: float = 0.2) -> Region:
    """DRPO, the smooth form of `dppo_tv` (Yao et al. 2026, arXiv:2606.09821).

        gamma A - |A| / (2 c) mu (gamma - 1)^2,    c = high where A > 0, low where A < 0

    Its gradient is gamma A (1 - sign(A) (pi - mu) / c): at |pi - mu| = c it is 0, as where `dppo_tv` begins to stop
    it, and beyond it leads back. Nothing is stopped. The paper has one c for both signs.
    """
    require_number("low", low, minimum=0, open_minimum=True)
    require_number("high", high, minimum=0, open_minimum=True)
    require_tokens(tokens)
    ratio, advantages = tokens.ratio, tokens.advantages
    bound = jnp.where(advantages > 0, high, low)
    quadratic = jnp.exp(tokens.anchor_logprobs) * (ratio - 1.0) ** 2
    return Region(ratio * advantages - jnp.abs(advantages) / (2.0 * bound) * quadratic)


TRUST_REGIONS: Mapping[str, Function] = {"clip": clip, "dppo_tv": dppo_tv, "dppo_kl": dppo_kl, "drpo": drpo}
"""Name -> trust region, a remedy (`remedies`): from the tokens to `Region`."""


def surrogate(tokens: Tokens, *, trust_region: Function = clip) -> tuple[jax.Array, dict[str, Statistic]]:
    """The negated objective of each token. By default that of Eq. 9-10 (Eq. 1 and 4 with their own A).

        l_t = -min(gamma_t A_t, clip(gamma_t, 1 - low, 1 + high) A_t)

    The gradient in log pi_theta is -gamma A where the clip does not bite, 0 where it does; see `clip`.

    Args:
        tokens: with the ratio, as `policy_loss` gives them.
        trust_region: bounds the update.

    Returns:
        Losses [R, L], and by metric name the shares of the tokens where a bound bites, so that no gradient flows:
        `policy/clip_low_fraction` and `policy/clip_high_fraction`.

    Raises:
        ValueError: if a parameter is outside its range.
    """
    (objective, low, high), statistics = split(trust_region(tokens))
    losses = -objective
    stopped = {"low": low, "high": high}
    return losses, statistics | {
        f"policy/clip_{side}_fraction": masked_sum(jnp.broadcast_to(bites, losses.shape), tokens.completion_mask)
        for side, bites in stopped.items()
    }


def policy_loss(
    tokens: Tokens, token_weights: Array, *, loss: Function = surrogate, ratio_level: Level = "token"
) -> tuple[Mean, dict[str, Statistic]]:
    """The loss of the policy on packed rows, left unreduced: sum_t w_t l_t. On arrays [N, T] it is `dc_grpo_loss`.

    gamma_t is the `importance_ratio` of log pi_theta and log pi_anchor. A NaN on a token that takes part stays NaN,
    for the step to see; what lies outside the mask or has weight 0 is ignored. The gradient reaches `train_logprobs`
    alone.

    With `ratio_level="sequence"` the ratio is that of GSPO (Zheng et al. 2025), s_i = exp(mean_t (log pi_theta -
    log pi_anchor)) on every token of completion i, dropped ones included in the mean; token t's gradient is -w s_i A_t
    ("GSPO-token", the same as GSPO where all tokens of a completion have one A). verl and Tunix alike; they clamp at 10
    nats above. Clips are of another order there (3e-4 and 4e-4 in the paper).

    Args:
        tokens: rows [R, L]; `advantages` penalized or not; `anchor_logprobs` equal to `train_logprobs` when the batch
            is used once: the ratio is then 1 and only its gradient matters. At the level of the sequence all tokens of
            a completion must be in this call.
        token_weights: [R, L] float32 >= 0, from `aggregation_weights`, gathered to tokens; a constant.
        loss: function from these tokens, with `ratio`, the mask of those that take part, and 0 outside it, to losses
            [R, L].
        ratio_level: "token" or "sequence".

    Returns:
        (loss, statistics). `loss.total` adds over micro-batches; divide the sum once, by the total weight that
        `aggregation_weights` gives. `loss.weight` is the sum of the token weights seen here: the same number for
        sequence and token means, but NOT for `fixed_length`, where it counts tokens in units of the maximum.

        The statistics are those of `loss` and, of the tokens that took part, `policy/ratio_mean`, `policy/ratio_max`,
        `policy/ratio_min`, by metric name.

    Raises:
        ValueError: if the shapes differ, or the loss refuses a parameter.
    """
    require_tokens(tokens)
    require_same_shape(completion_mask=tokens.completion_mask, token_weights=token_weights)
    mask = jnp.asarray(tokens.completion_mask, bool)
    weights = lax.stop_gradient(jnp.where(mask, jnp.asarray(token_weights, jnp.float32), 0.0))
    active = weights != 0

    def inside(values: Array) -> jax.Array:
        return jnp.where(active, jnp.asarray(values, jnp.float32), 0.0)

    given = {name: getattr(tokens, name) for name in _CONSTANTS}
    constants = {name: None if x is None else lax.stop_gradient(inside(x)) for name, x in given.items()}
    train = inside(tokens.train_logprobs)
    if ratio_level == "token":
        ratio = importance_ratio(train, constants["anchor_logprobs"])
    else:
        where = mask, tokens.completion_index, tokens.num_completions
        ratio = jnp.exp(inside(_sequence_log_ratio(tokens.train_logprobs, tokens.anchor_logprobs, *where)))
    seen = tokens._replace(train_logprobs=train, completion_mask=active, ratio=ratio, **constants)
    token_losses, statistics = split(loss(seen))

    ratio = lax.stop_gradient(ratio)
    return weighted_sum(token_losses, weights), lax.stop_gradient(statistics) | {
        "policy/ratio_mean": masked_sum(ratio, active),
        "policy/ratio_max": Max(jnp.max(jnp.where(active, ratio, -jnp.inf), initial=-jnp.inf)),
        "policy/ratio_min": Min(jnp.min(jnp.where(active, ratio, jnp.inf), initial=jnp.inf)),
    }


_CONSTANTS = ("old_logprobs", "rollout_logprobs", "advantages", "discrepancy", "anchor_logprobs")
"""Fields of `Tokens` that no gradient reaches in a loss."""


def _policy(tokens: Tokens) -> jax.Array:
    """log pi now, where a bound looks at it: a constant."""
    return lax.stop_gradient(tokens.train_logprobs)


def _masked(tokens: Tokens, low: jax.Array, high: jax.Array) -> Region:
    return Region(jnp.where(low | high, 0.0, tokens.ratio * tokens.advantages), low, high)


def _sequence_log_ratio(
    train_logprobs: Array, old_logprobs: Array, mask: jax.Array, completion_index: Array, num_completions: int
) -> jax.Array:
    """The mean log-ratio of each token's completion in value, that of the token alone in gradient; [R, L], clamped."""
    train = jnp.where(mask, jnp.asarray(train_logprobs, jnp.float32), 0.0)
    old = lax.stop_gradient(jnp.where(mask, jnp.asarray(old_logprobs, jnp.float32), 0.0))
    difference = log_difference(train, old)
    means = completion_means(lax.stop_gradient(difference), mask, completion_index, num_completions)
    # difference - stop_gradient(difference) is 0 with gradient 1.
    drift = difference - lax.stop_gradient(difference)
    return clamp(gather_to_tokens(means, completion_index) + drift, MAX_LOG_RATIO)


def aggregation_weights(
    completion_lengths: Array,
    loss_mask: Array,
    *,
    mode: Aggregation,
    max_completion_tokens: int | None = None,
    dropped_tokens: Array | None = None,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """The normalization of the loss as one weight for each completion.

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
        dtype: dtype of the results.

    Returns:
        ([N] weights, [] total). An empty completion has weight 0 and is not counted. When nothing
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
    if dropped_tokens is not None:
        require_same_shape(completion_lengths=completion_lengths, dropped_tokens=dropped_tokens)
    lengths = jnp.asarray(completion_lengths, jnp.int32)
    kept = lengths if dropped_tokens is None else lengths - jnp.asarray(dropped_tokens, jnp.int32)
    counted = jnp.asarray(loss_mask, bool) & (lengths > 0)
    if mode == "token_mean":
        tokens = jnp.sum(jnp.where(counted, kept, 0), dtype=jnp.int32).astype(dtype)
        return counted.astype(dtype), tokens
    if mode == "fixed_length":
        weights = jnp.where(counted, 1.0 / max_completion_tokens, 0.0).astype(dtype)
        return weights, jnp.sum(counted, dtype=jnp.int32).astype(dtype)
    lengths = jnp.maximum(lengths, 1)
    # x / x is exactly 1: without dropped tokens the total is a whole number.
    shares = jnp.where(counted, kept / lengths, 0.0).astype(dtype)
    return jnp.where(counted, 1.0 / lengths, 0.0).astype(dtype), jnp.sum(shares)


def reference_kl(
    train_logprobs: Array, ref_logprobs: Array, *, estimator: KlEstimator, completion_mask: Array | None = None
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
