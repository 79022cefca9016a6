"""Discrepancy of training stack and inference engine on the sampled tokens, on the same weights.

`train_logprobs` here are the training stack's under the weights that made the batch, p^Train in the
paper; `rollout_logprobs` are the engine's, p^Inf. Policy drift (new weights against old) is another
matter: `losses.py`. Everything here is a constant to the gradient.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Bool, Float, Shaped

from dcmdp_jax.algorithm import masked
from dcmdp_jax.algorithm.require import (
    require_logprobs,
    require_number,
    require_option,
    require_same_shape,
)
from dcmdp_jax.algorithm.stats import (
    LOGPROB_LIMIT,
    MAX_LOG_RATIO,
    Mean,
    as_float,
    clamped_log_ratio,
    exp_minus_linear,
)
from dcmdp_jax.types import Array, Scalar

Measure = Literal["diff", "ratio", "log", "logit"]
Sided = Literal["two", "one"]
Level = Literal["token", "sequence"]
PenaltyLevel = Literal["token", "sequence", "reward"]
"""What is penalized; see `signals.row_signals`."""

RATIO_LIMIT = 10.0
"""Largest |p / q - 1| of a token. Ours: the paper has no bound; its measure, diff, is at most 1."""


def token_discrepancy(
    train_logprobs: Float[Array, "*s"],
    rollout_logprobs: Float[Array, "*s"],
    *,
    completion_mask: Shaped[Array, "*s"] | None = None,
    measure: Measure = "diff",
    sided: Sided = "two",
) -> Float[jax.Array, "*s"]:
    """delta_{i,t}, discrepancy of each token, elementwise (Eq. 2, 3; Algorithm 1, "Discrepancy").

    With p = exp(train), q = exp(rollout) and d = log p - log q clamped to [-20, 20],

        diff   |p - q|        ratio   min(|p / q - 1|, 10)        log   |log p - log q|,

    the distance from agreement of the three signals of Eq. 2; `diff` is Eq. 3, the paper's choice.
    Ours is

        logit  min(|logit p - logit q|, 20),        logit p = log(p / (1 - p)),

    the size of the `displacement`, which confidence does not shrink. Clamped as in `log_odds`: p
    and q are held at 1 - 2^-24 at most, so that a token that float32 calls certain on both sides
    costs 0, and on one side at most 20. One-sided penalizes only tokens the training stack finds
    likelier, p > q: d is replaced by max(d, 0).

    Finite for every input but NaN: `diff` is at most 1 (log-probs above 0 count as 0), `log` and
    `logit` at most 20, `ratio` at most `RATIO_LIMIT`, without which one token of q near 0 would be
    penalized up to e^20 - 1 = 4.85e8. So q = 0 (-inf) gives p, 10, 20, 20; -inf in both gives 0.
    NaN stays NaN. `diff` is formed as max(p, q) (1 - e^-|d|), which keeps float32's relative
    precision when p and q nearly agree.

    Args:
        train_logprobs: nats, training stack, weights that made the batch: log p^Train.
        rollout_logprobs: nats, inference engine: log p^Inf.
        completion_mask: true (or 1) on sampled tokens; elsewhere the result is 0 and what is given
            is ignored. None: all are.
        measure: "diff", "ratio", "log" or "logit".
        sided: "two" or "one".

    Returns:
        float32 (float64 for float64 with x64), >= 0, exactly 0 where the two log-probs are equal.
        No gradient flows.

    Raises:
        ValueError: if the shapes differ, an option is unknown, or probabilities are given (not seen
            under jit).
    """
    if completion_mask is None:
        require_same_shape(train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs)
    else:
        require_same_shape(
            train_logprobs=train_logprobs,
            rollout_logprobs=rollout_logprobs,
            completion_mask=completion_mask,
        )
    require_logprobs("train_logprobs", train_logprobs, completion_mask)
    require_logprobs("rollout_logprobs", rollout_logprobs, completion_mask)
    require_option("measure", measure, get_args(Measure))
    require_option("sided", sided, get_args(Sided))

    train_logprobs = as_float(train_logprobs)
    rollout_logprobs = as_float(rollout_logprobs)
    if measure == "diff":
        train_logprobs = jnp.minimum(train_logprobs, 0.0)
        rollout_logprobs = jnp.minimum(rollout_logprobs, 0.0)
    if measure == "logit":
        train_logprobs = log_odds(train_logprobs)
        rollout_logprobs = log_odds(rollout_logprobs)

    log_ratio = clamped_log_ratio(train_logprobs, rollout_logprobs)
    if sided == "one":
        log_ratio = jnp.maximum(log_ratio, 0.0)
    if measure == "diff":
        larger = jnp.exp(jnp.maximum(train_logprobs, rollout_logprobs))
        values = larger * -jnp.expm1(-jnp.abs(log_ratio))
    elif measure == "ratio":
        values = jnp.minimum(jnp.abs(jnp.expm1(log_ratio)), RATIO_LIMIT)
    else:
        values = jnp.abs(log_ratio)
    if completion_mask is not None:
        values = jnp.where(jnp.asarray(completion_mask, bool), values, 0.0)
    return stop_gradient(values)


def sequence_discrepancy(
    discrepancy_tokens: Float[Array, "R L"], where: masked.CompletionIndex
) -> Float[jax.Array, "R L"]:
    """Give every token the mean discrepancy of its completion (`algorithm.level=sequence`).

    The coarser choice, which the paper argues against (section 4, granularity). The sum over a
    completion is that of its tokens' own values, so the mean discrepancy of a batch is the same.

    Args:
        discrepancy_tokens: of each token; what lies outside the mask is ignored.
        where: the completions.

    Returns:
        float32, 0 outside the mask.

    Raises:
        ValueError: if the shapes differ.
    """
    means = masked.completion_means(discrepancy_tokens, where)
    token_means = masked.gather_to_tokens(means, where.index)
    return masked.masked_values(token_means, where.mask)


def completions_over_tolerance(
    discrepancy_tokens: Float[Array, "R L"], where: masked.CompletionIndex, *, tolerance: Scalar
) -> Mean:
    """Number of completions whose own mean discrepancy exceeds c, over the number of completions.

    The constraint in its per-trajectory form (Eq. 6 asks it of every trajectory), which the dual
    update does not use. Strict: a mean of exactly c is within tolerance.

    Args:
        discrepancy_tokens: from `token_discrepancy`.
        where: the completions.
        tolerance: c, in the measure's unit.

    Returns:
        Unreduced; completions without a token in this call are not counted, and a mean that is NaN
        does not exceed c. Calls on different rows add.

    Raises:
        ValueError: if the shapes differ or `tolerance` is a negative Python number.
    """
    require_number("tolerance", tolerance, minimum=0)
    return masked.masked_sum(
        masked.completion_means(discrepancy_tokens, where) > tolerance,
        masked.completion_counts(where) > 0,
    )


def log_odds(logprobs: Float[Array, "*s"]) -> Float[jax.Array, "*s"]:
    """log(p / (1 - p)) = x - log1p(-exp(x)) of each log-prob x, elementwise.

    p is held at 1 - 2^-24 at most, the largest float32 below 1, where the log-odds are 16.6: a
    token that float32 calls certain has finite ones. At the other end x is held at -1e4 nats. NaN
    stays NaN.

    Args:
        logprobs: nats.

    Returns:
        float32 (float64 for float64 with x64), finite but for NaN. No gradient flows.
    """
    x = jnp.clip(stop_gradient(as_float(logprobs)), -LOGPROB_LIMIT, -(2.0**-24))
    # -expm1(x) is 1 - p to float32's precision where exp(x) rounds to 1.
    return x - jnp.log(-jnp.expm1(x))


def displacement(
    train_logprobs: Float[Array, "*s"], rollout_logprobs: Float[Array, "*s"]
) -> Float[jax.Array, "*s"]:
    """eps = logit p - logit q of each token, elementwise.

    It is the distance of the engines whatever the policy's confidence.

        |p - q| = p (1 - p) |eps| + O(eps^2)

    An error eps of a token's logit moves its probability most where p is 1/2 and hardly where the
    policy is certain. So the discrepancy falls as a policy grows confident with the engine as it
    was; eps does not. Ours, not in the paper.

    Args:
        train_logprobs: nats, p^Train.
        rollout_logprobs: nats, p^Inf.

    Returns:
        float32, in logits (nats), either sign; see `log_odds` for its ends. No gradient flows.

    Raises:
        ValueError: if the shapes differ.
    """
    require_same_shape(train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs)
    return log_odds(train_logprobs) - log_odds(rollout_logprobs)


def displacement_statistics(
    train_logprobs: Float[Array, "*s"],
    rollout_logprobs: Float[Array, "*s"],
    mask: Bool[Array, "*s"],
) -> dict[str, Float[jax.Array, ""]]:
    """Means of eps and |eps|, quantiles of |eps| (see `displacement`), over all tokens at once.

    Quantiles are exact, by a sort, and no sums: give the whole batch in one call.

    Args:
        train_logprobs, rollout_logprobs: nats.
        mask: true on sampled tokens.

    Returns:
        float32: `mean`, `abs_mean`, `abs_p50`, `abs_p95`, `abs_p99`, after `displacement/`; 0 on an
        empty mask.

    Raises:
        ValueError: if the shapes differ.
    """
    eps = displacement(train_logprobs, rollout_logprobs)
    sizes = jnp.abs(eps)
    return {
        "displacement/mean": masked.masked_mean(eps, mask),
        "displacement/abs_mean": masked.masked_mean(sizes, mask),
        "displacement/abs_p50": masked.masked_quantile(sizes, mask, 0.5),
        "displacement/abs_p95": masked.masked_quantile(sizes, mask, 0.95),
        "displacement/abs_p99": masked.masked_quantile(sizes, mask, 0.99),
    }


def mismatch_statistics(
    train_logprobs: Float[Array, "*s"],
    rollout_logprobs: Float[Array, "*s"],
    mask: Bool[Array, "*s"],
) -> dict[str, Float[jax.Array, ""]]:
    """Differences between the two engines as distributions, over all tokens at once.

    The tokens were sampled by the rollout engine q; p is the training stack; d = log p - log q
    clamped to [-20, 20].

        k1                     mean of -d           unbiased estimate of KL(q || p), may be negative
        k3                     mean of e^d - 1 - d  the same KL, never negative, smaller variance
        pearson                correlation of p and q over tokens; 0 where it is undefined
        effective_sample_size  (sum w)^2 / (n sum w^2) with w = p / q, in (0, 1]: the share of the
                               tokens that importance weights to p would leave; 1 on agreement

    k1 and k3 after J. Schulman, "Approximating KL divergence" (2020). These are not sums: give the
    whole batch in one call, arrays of different shape raveled and concatenated.

    Args:
        train_logprobs: nats, training stack, weights that made the batch.
        rollout_logprobs: nats, the engine that sampled.
        mask: true on sampled tokens.

    Returns:
        The four float32 values, by these names after `mismatch/`. All 0 on an empty mask. `pearson`
        is undefined, hence 0, when either side's probabilities are all equal (one token, greedy
        sampling). No gradient flows.

    Raises:
        ValueError: if the shapes differ.
    """
    require_same_shape(train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    mask = jnp.asarray(mask, bool)
    train = stop_gradient(masked.masked_values(train_logprobs, mask))
    rollout = stop_gradient(masked.masked_values(rollout_logprobs, mask))
    log_ratio = clamped_log_ratio(train, rollout)

    # Scaled by the largest weight, which cancels: squares and sums stay near 1.
    largest = jnp.max(jnp.where(mask, log_ratio, -MAX_LOG_RATIO), initial=-MAX_LOG_RATIO)
    weights = jnp.where(mask, jnp.exp(log_ratio - largest), 0.0)
    count = jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)
    square_sum = jnp.sum(weights**2)
    size = jnp.sum(weights) ** 2 / jnp.where(count > 0, count * square_sum, 1.0)
    return {
        "mismatch/k1": masked.masked_mean(-log_ratio, mask),
        "mismatch/k3": masked.masked_mean(exp_minus_linear(log_ratio), mask),
        "mismatch/pearson": _pearson(
            jnp.exp(jnp.minimum(train, 0.0)), jnp.exp(jnp.minimum(rollout, 0.0)), mask
        ),
        "mismatch/effective_sample_size": jnp.minimum(size, 1.0),
    }


def _pearson(x: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    """Correlation over the mask in two passes; 0 where either side is exactly constant."""

    def constant(values: jax.Array) -> jax.Array:
        smallest = jnp.min(jnp.where(mask, values, jnp.inf), initial=jnp.inf)
        return smallest >= jnp.max(jnp.where(mask, values, -jnp.inf), initial=-jnp.inf)

    def centered(values: jax.Array) -> jax.Array:
        deviations = jnp.where(mask, values - masked.masked_mean(values, mask), 0.0)
        # The scale cancels; without it squares of tiny probabilities underflow.
        largest = jnp.max(jnp.abs(deviations), initial=0.0)
        return deviations / jnp.where(largest == 0, 1.0, largest)

    undefined = constant(x) | constant(y)
    x = centered(x)
    y = centered(y)
    scale = jnp.sqrt(jnp.sum(x * x) * jnp.sum(y * y))
    undefined |= scale == 0
    correlation = jnp.sum(x * y) / jnp.where(undefined, 1.0, scale)
    return jnp.where(undefined, 0.0, jnp.clip(correlation, -1.0, 1.0))
