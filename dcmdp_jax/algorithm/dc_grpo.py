"""The method in one call on padded arrays: the loss of DC-GRPO, and the next multiplier."""

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int, Shaped

from dcmdp_jax.algorithm import discrepancy, dual, losses, masked, stats, trust_regions
from dcmdp_jax.algorithm.advantages import group_advantages
from dcmdp_jax.algorithm.penalties import penalized_advantages
from dcmdp_jax.algorithm.require import (
    LOGPROB_ROUNDING,
    concrete,
    require_gradient,
    require_logprobs,
    require_multiplier_range,
    require_option,
    require_rank,
    require_same_shape,
)
from dcmdp_jax.types import Array, Scalar


class DcGrpoAux(NamedTuple):
    """Intermediate values of `dc_grpo_loss`. No gradient flows through any of it.

    Attributes:
        delta: >= 0, discrepancy of each token (Eq. 3); 0 outside the mask.
        mean_delta: sum(delta m) / sum(m), the mean over all tokens.
        advantages: A_i (Eq. 8).
        penalized_advantages: A_i - lambda_k delta_{i,t} (Eq. 8); 0 outside the mask.
        ratio: gamma_{i,t}; 1 outside the mask.
        next_multiplier: lambda_{k+1} (Eq. 11), from the mean of this call.
    """

    delta: Float[jax.Array, "N T"]
    mean_delta: Float[jax.Array, ""]
    advantages: Float[jax.Array, " N"]
    penalized_advantages: Float[jax.Array, "N T"]
    ratio: Float[jax.Array, "N T"]
    next_multiplier: Float[jax.Array, ""]


def dc_grpo_loss(
    train_logprobs: Float[Array, "N T"] | Sequence,
    old_logprobs: Float[Array, "N T"] | Sequence,
    rollout_logprobs: Float[Array, "N T"] | Sequence,
    completion_mask: Shaped[Array, "N T"] | Sequence,
    rewards: Shaped[Array, " N"] | Sequence,
    group_ids: Int[Array, " N"] | Sequence,
    *,
    multiplier: Scalar,
    tolerance: Scalar,
    clip_low: Scalar = trust_regions.CLIP_LOW,
    clip_high: Scalar = trust_regions.CLIP_HIGH,
    dual_learning_rate: Scalar = 1.0,
    multiplier_min: Scalar = 0.0,
    multiplier_max: Scalar = dual.MULTIPLIER_MAX,
    aggregation: losses.Aggregation = "seq_mean_token_mean",
    max_completion_tokens: int | None = None,
    measure: discrepancy.Measure = "diff",
    sided: discrepancy.Sided = "two",
    ddof: int = 1,
    epsilon: Scalar = 1e-6,
) -> tuple[Float[jax.Array, ""], DcGrpoAux]:
    """The loss of DC-GRPO on a padded batch, and the next multiplier.

    This is Algorithm 1 after sampling and rewards.

        delta_{i,t} = |p^Train - p^Inf|                            Eq. 3   token_discrepancy
        A_i         = (r_i - mean_g r) / (std_g r + epsilon)       Eq. 8   group_advantages
        A^DC_{i,t}  = A_i - lambda_k delta_{i,t}                   Eq. 8   penalized_advantages
        gamma_{i,t} = pi_theta(o_t) / p^Train                              importance_ratio
        s_{i,t}     = min(gamma A^DC, clip(gamma) A^DC)            Eq. 10  clipped_surrogate
        loss        = -1/N sum_i 1/|o_i| sum_t s_{i,t}             Eq. 9
        lambda_k+1  = clip(lambda_k + eta (mean delta - c), min, max)  Eq. 11  dual_update

    The functions on the right are public: this one is their composition. The gradient flows into
    `train_logprobs` and nowhere else. In the first update on a batch `train_logprobs` and
    `old_logprobs` have the same values and gamma is 1: pass the differentiated ones first.

    One call is one mini-batch, with all completions of its groups. With several in a step, or
    several hosts, pass the step's own lambda_k to each of them, ignore their `next_multiplier`, and
    call `dual_update` once, after the last, with the sum of delta over the number of tokens of the
    whole batch.

    Computes in float32, or in float64 where `jax_enable_x64` is on and the log-probs or rewards are
    float64. NumPy or JAX arrays or lists; eagerly or under jit, grad and vmap. Outside the mask
    log-probs are ignored, NaN or not. Options and T_max are Python values: `jax.jit(dc_grpo_loss,
    static_argnames=("aggregation", "measure", "sided", "ddof", "max_completion_tokens"))`, or bind
    them with functools.partial before jit.

    Args:
        train_logprobs: nats, log pi_theta of the sampled tokens, training stack, weights now.
        old_logprobs: nats, log p^Train: training stack, weights that made the batch.
        rollout_logprobs: nats, log p^Inf: the inference engine that sampled; -inf counts as q = 0.
        completion_mask: bool or 0/1, true on sampled tokens, end-of-sequence included, prompt and
            padding not.
        rewards: of each of N completions.
        group_ids: in 0 .. N-1, which prompt a completion answers; members need not be adjacent.
        multiplier: lambda_k >= 0.
        tolerance: c >= 0, in the unit of delta.
        clip_low, clip_high: eps_low in [0, 1), eps_high >= 0.
        dual_learning_rate: eta of the multiplier (not of the policy).
        multiplier_min, multiplier_max: range of lambda_{k+1}.
        aggregation: "seq_mean_token_mean" (the paper's), "token_mean" (equal weight per token,
            DAPO) or "fixed_length" (sum over T_max, Dr. GRPO); see
            `dcmdp_jax.algorithm.losses.aggregation_weights`.
        max_completion_tokens: T_max, the sampling limit; needed by "fixed_length" alone.
        measure, sided: options of `token_discrepancy`: "diff", "ratio", "log" or "logit"; "two" or
            "one".
        ddof, epsilon: options of `group_advantages`: the unbiased deviation and 1e-6 by default.

    Returns:
        (loss, aux): a scalar to be minimized, and a `DcGrpoAux` with delta, mean_delta, advantages,
            penalized_advantages, ratio and next_multiplier.

    Raises:
        ValueError: in one line that names the argument. Always: shapes or ranks that disagree,
            log-probs that are no floats, `train_logprobs` in float16, whose gradient would
            overflow, group ids that are no integers, unknown options. Of values only where they are
            known, so not of arguments traced by jit or vmap: numbers out of range, a NaN or
            +inf in a log-prob under the mask, a reward that is not finite or 1e18 and more,
            probabilities in place of log-probs, a mask with other values than 0 and 1, a completion
            without a token, a group of one, a group id outside 0 .. N-1, a negative multiplier.
            Where they are not known NaN, or a group id outside, makes the loss NaN, a completion
            without a token is left out of it, and a group of one has A = 0.
    """
    logprobs = {
        "train_logprobs": _numbers("train_logprobs", train_logprobs),
        "old_logprobs": _numbers("old_logprobs", old_logprobs),
        "rollout_logprobs": _numbers("rollout_logprobs", rollout_logprobs),
    }
    completion_mask = _numbers("completion_mask", completion_mask)
    rewards = _numbers("rewards", rewards)
    group_ids = _numbers("group_ids", group_ids)
    require_option("aggregation", aggregation, get_args(losses.Aggregation))
    require_multiplier_range(multiplier_min, multiplier_max)
    _require_arrays(logprobs, completion_mask, rewards, group_ids)
    _require_values(logprobs, completion_mask, rewards, group_ids)

    mask = jnp.asarray(completion_mask, bool)
    dtype = jnp.result_type(*map(stats.as_float, (*logprobs.values(), rewards)))
    train, old, rollout = (jnp.where(mask, jnp.asarray(x, dtype), 0.0) for x in logprobs.values())
    delta = discrepancy.token_discrepancy(
        old,
        rollout,
        completion_mask=mask,
        measure=measure,
        sided=sided,
    )
    advantages = group_advantages(
        jnp.asarray(rewards, dtype),
        group_ids,
        ddof=ddof,
        epsilon=epsilon,
    )
    penalized = jnp.where(mask, penalized_advantages(advantages, delta, multiplier), 0.0)
    ratio = losses.importance_ratio(train, old)
    objective = trust_regions.clipped_surrogate(
        ratio,
        penalized,
        clip_low=clip_low,
        clip_high=clip_high,
    ).objective

    lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
    weights, total = losses.aggregation_weights(
        lengths,
        lengths > 0,
        mode=aggregation,
        max_completion_tokens=max_completion_tokens,
        dtype=dtype,
    )
    token_weights = jnp.where(mask, weights[:, None], 0.0)
    loss = stats.Mean(masked.weighted_sum(-objective, token_weights).total, total).value()

    mean_delta = masked.masked_mean(delta, mask)
    next_multiplier = dual.dual_update(
        multiplier,
        mean_delta,
        tolerance=tolerance,
        dual_learning_rate=dual_learning_rate,
        multiplier_min=multiplier_min,
        multiplier_max=multiplier_max,
    )
    aux = DcGrpoAux(
        delta=delta,
        mean_delta=mean_delta,
        advantages=advantages,
        penalized_advantages=penalized,
        ratio=ratio,
        next_multiplier=next_multiplier,
    )
    return loss, lax.stop_gradient(aux)


def _numbers(name: str, value: Any) -> Array:
    """The argument as an array; ragged lists, and what holds no real numbers, are refused."""
    try:
        array = value
        if not isinstance(value, jax.Array):
            array = np.asarray(value)
    except ValueError:
        raise ValueError(
            f"{name} is a list of lists that differ in length; pad them, and mask the padding"
        ) from None
    except TypeError as error:
        raise ValueError(f"{name} can't be read by NumPy: {error}") from None
    except RuntimeError:
        raise ValueError(
            f"{name} is a torch tensor with a gradient, which jax can't follow; use "
            "dcmdp_jax.integrations.dc_grpo_torch"
        ) from None
    if value is None:
        raise ValueError(f"{name} is None; must be real numbers")
    # Group ids must be integers: `group_advantages` says how to number texts.
    if array.dtype.kind in "cOSUMmV" and array.dtype != jnp.bfloat16 and name != "group_ids":
        raise ValueError(f"{name} has dtype {array.dtype}; must be real numbers")
    return array


def _require_arrays(
    logprobs: dict[str, Array],
    completion_mask: Array,
    rewards: Array,
    group_ids: Array,
) -> None:
    """Raise for ranks, shapes and dtypes that do not fit; these are known under jit too."""
    for name, array in (*logprobs.items(), ("completion_mask", completion_mask)):
        require_rank(name, array, 2)
    require_same_shape(**logprobs, completion_mask=completion_mask)
    shape = np.shape(completion_mask)
    if 0 in shape:
        raise ValueError(
            f"completion_mask has shape {shape}; must hold at least one completion of one token"
        )
    for name, array in {"rewards": rewards, "group_ids": group_ids}.items():
        if np.shape(array) != shape[:1]:
            raise ValueError(
                f"{name} has shape {np.shape(array)}; must be {shape[:1]}, one for each row of "
                f"{shape}"
            )
    for name, array in logprobs.items():
        dtype = jnp.asarray(array).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {dtype}; must be floats, log-probs in nats")
    require_gradient("train_logprobs", logprobs["train_logprobs"])


def _require_values(
    logprobs: dict[str, Array],
    completion_mask: Array,
    rewards: Array,
    group_ids: Array,
) -> None:
    """Raise for values that are wrong, as far as they are known."""
    rewards = concrete(rewards)
    if rewards is not None:
        # The squares of larger ones overflow float32.
        fits = np.abs(rewards.astype(float)) < 1e18
        _require_each("rewards", rewards, fits, "finite, below 1e+18")

    ids = concrete(group_ids)
    if ids is not None and np.issubdtype(ids.dtype, np.integer):
        unique_ids, counts = np.unique(ids, return_counts=True)
        if counts.min() < 2:
            raise ValueError(
                f"group_ids has a group of one, id {unique_ids[counts.argmin()]}; a group needs "
                "two completions"
            )

    mask = concrete(completion_mask)
    if mask is None:
        return
    _require_each("completion_mask", mask, (mask == 0) | (mask == 1), "0 or 1")
    sampled = mask.astype(bool)
    empty_rows = np.flatnonzero(~sampled.any(axis=1))
    if empty_rows.size:
        raise ValueError(
            f"completion_mask is 0 in row {empty_rows[0]}, a completion without a token: leave it "
            "out"
        )

    for name, array in logprobs.items():
        values = concrete(array)
        if values is not None:
            values = values.astype(float)
            require_logprobs(name, values, sampled)
            # NaN is not below.
            below = ~sampled | (values <= LOGPROB_ROUNDING)
            _require_each(name, values, below, "a log-prob in nats, at most 0")


def _require_each(name: str, array: np.ndarray, good: np.ndarray, allowed: str) -> None:
    if not good.all():
        position = np.argwhere(~good)[0].tolist()
        raise ValueError(f"{name} is {array[tuple(position)]} at {position}; must be {allowed}")
