"""Group-relative advantages, and what is done to rewards before them."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from dcmdp_jax.algorithm.masked import group_statistics
from dcmdp_jax.algorithm.require import (
    concrete,
    require_integer,
    require_number,
    require_rank,
    require_same_shape,
)
from dcmdp_jax.types import Array, Scalar


def group_advantages(
    rewards: Float[Array, " N"],
    group_ids: Int[Array, " N"],
    valid: Bool[Array, " N"] | None = None,
    *,
    ddof: int = 1,
    epsilon: Scalar = 1e-6,
    normalize_std: bool = True,
) -> Float[jax.Array, " N"]:
    """Advantage of each completion in its group (Eq. 8; Algorithm 1, "Rewards & GRPO advantage").

        A_i = (r_i - mean_g r) / (std_g r + epsilon),    over the valid members of i's group g.

    The paper does not say which standard deviation: the unbiased one is our choice, and so is
    epsilon = 1e-6, the setting `algorithm.std_epsilon`. `normalize_std=False` leaves r_i - mean_g r
    (Dr. GRPO, Liu et al. 2025).

    A group whose rewards are all equal has A exactly 0, and so has a group with one valid member.
    Such a group's tokens still carry the penalty. A constant added to a group's rewards changes
    nothing but the rounding of the rewards.

    Args:
        rewards: of each of N completions; below 1e18 in size, as their squares are summed.
        group_ids: in 0 .. N-1, which prompt a completion answers; members need not be adjacent.
        valid: false: padding or dropped, gets 0 and does not enter its group's statistics. None:
            all are.
        ddof: 1 for the unbiased standard deviation, 0 for the population's.
        epsilon: added to the standard deviation, in reward units.
        normalize_std: false: leave the division out.

    Returns:
        float32, float64 for float64 rewards with x64. No gradient flows. A NaN reward under `valid`
        makes its group NaN; so is a completion whose group id is outside 0 .. N-1, where its value
        is not seen.

    Raises:
        ValueError: if the shapes differ, `group_ids` are not integers in 0 .. N-1 (their values are
            not seen under jit), `ddof` is neither 0 nor 1, or `epsilon` is negative.
    """
    require_number("epsilon", epsilon, minimum=0)
    require_rank("rewards", rewards, 1)
    require_same_shape(rewards=rewards, group_ids=group_ids)
    _require_group_ids(group_ids)
    if valid is None:
        valid = jnp.ones(np.shape(rewards), bool)
    valid = jnp.asarray(valid, bool)
    table = group_statistics(rewards, group_ids, valid, ddof=ddof)

    group_ids = jnp.asarray(group_ids)
    # Of 8 and 16 bits as well: N may be beyond them.
    group_ids = group_ids.astype(jnp.promote_types(group_ids.dtype, jnp.int32))
    outside = valid & ((group_ids < 0) | (group_ids >= len(table.size)))
    group_ids = group_ids.astype(jnp.int32)
    scale = 1.0
    if normalize_std:
        signal = valid & ~table.all_equal[group_ids]
        scale = jnp.where(signal, table.std[group_ids] + epsilon, 1.0)
    return jax.lax.stop_gradient(jnp.where(outside, jnp.nan, table.deviation / scale))


def _require_group_ids(group_ids: Array) -> None:
    """Raise unless they are integers in 0 .. N-1, as far as their values are known."""
    dtype = group_ids.dtype if isinstance(group_ids, jax.Array) else np.asarray(group_ids).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"group_ids has dtype {dtype}; must be integers: numpy.unique(ids, "
            "return_inverse=True)[1]"
        )
    ids = concrete(group_ids)
    if ids is None:
        return
    outside = ids[(ids < 0) | (ids >= ids.size)]
    if outside.size:
        raise ValueError(
            f"group_ids has {outside[0]}; must be in 0 .. {ids.size - 1}: numpy.unique(ids, "
            "return_inverse=True)[1]"
        )


def overlong_penalty(
    completion_lengths: Int[Array, "*s"],
    *,
    max_completion_tokens: int,
    buffer: int,
    penalty: float = 1.0,
) -> Float[jax.Array, "*s"]:
    """Soft overlong punishment, to be subtracted from the reward (DAPO, Yu et al. 2025, Eq. 13).

        penalty * clip((|o_i| - (T_max - buffer)) / buffer, 0, 1)

    0 up to T_max - buffer tokens, `penalty` at T_max. verl (`overlong_buffer`) and AReaL
    (`overlong_tokens`) alike.

    Args:
        completion_lengths: sampled tokens.
        max_completion_tokens: T_max, the sampling limit.
        buffer: in 1 .. T_max, tokens.
        penalty: in units of the reward.

    Returns:
        float32, >= 0.

    Raises:
        ValueError: if `buffer` is not a positive integer or `penalty` is a negative Python number.
    """
    require_integer("buffer", buffer, minimum=1)
    require_number("penalty", penalty, minimum=0)
    over = jnp.asarray(completion_lengths, jnp.float32) - (max_completion_tokens - buffer)
    return penalty * jnp.clip(over / buffer, 0.0, 1.0)


def has_signal(
    rewards: Float[Array, " N"], group_ids: Int[Array, " N"], valid: Bool[Array, " N"]
) -> Bool[jax.Array, " N"]:
    """Whether a completion's group has rewards that differ.

    This is dynamic sampling as a mask (DAPO, Yu et al. 2025). The others are left out of the loss;
    `refill_rounds` samples further groups in their place, as DAPO does. Arguments as in
    `group_advantages`; a group without a valid member counts as one whose rewards differ.
    """
    table = group_statistics(rewards, group_ids, valid, ddof=0)
    return ~table.all_equal[jnp.asarray(group_ids, jnp.int32)]
