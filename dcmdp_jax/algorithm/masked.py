"""Weighted and masked reductions, sums over completions, statistics over groups.

Nothing under a mask leaks: a NaN or an infinity where the mask is false (or the weight is 0)
changes neither a result nor its gradient. Every function works on the padded layout ([N, T], one
completion a row) and on packed rows ([R, L], several completions a row, `completion_index` says
which) and returns float32; sums, means and group statistics of float64 stay in it
(`stats.as_float`).
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from dcmdp_jax.algorithm.require import (
    require_integer,
    require_number,
    require_rank,
    require_same_shape,
)
from dcmdp_jax.algorithm.stats import Max, Mean, as_float
from dcmdp_jax.types import Array

_SUM_BLOCK = 256
"""Tokens a segment sum adds one after the other. XLA's scatter-add is sequential: 1e5 equal float32
terms in one run end 2.4e-4 off; in blocks of 256 the error stays near 1e-6.
"""


def masked_values(
    values: Shaped[Array, "*s"],
    mask: Shaped[Array, "*s"],
) -> Float[jax.Array, "*s"]:
    """`values` in float32 where `mask` is true, 0 elsewhere.

    Args:
        values: float. The gradient flows where `mask` is true.
        mask: bool (or 0/1).

    Raises:
        ValueError: if the shapes differ.
    """
    require_same_shape(values=values, mask=mask)
    return jnp.where(jnp.asarray(mask, bool), jnp.asarray(values, jnp.float32), 0.0)


def masked_sum(values: Shaped[Array, "*s"], mask: Shaped[Array, "*s"]) -> Mean:
    """Sum of `values` where `mask` is true, with their count, left unreduced.

    Args:
        values: float.
        mask: bool (or 0/1).

    Returns:
        The sum and the number of true entries; (0, 0) on an empty mask. Exact counts up to 2^24.

    Raises:
        ValueError: if the shapes differ.
    """
    require_same_shape(values=values, mask=mask)
    mask = jnp.asarray(mask, bool)
    total = jnp.sum(jnp.where(mask, as_float(values), 0.0))
    return Mean(total, jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32))


def weighted_sum(
    values: Shaped[Array, "*s"],
    weights: Float[Array, "*s"],
) -> Mean:
    """Sum of `weights * values` with the sum of the weights, left unreduced.

    Args:
        values: float.
        weights: non-negative. A value of weight 0 is ignored, NaN or not.

    Returns:
        (sum of weights * values, sum of weights).

    Raises:
        ValueError: if the shapes differ.
    """
    require_same_shape(values=values, weights=weights)
    weights = as_float(weights)
    values = jnp.where(weights != 0, as_float(values), 0.0)
    return Mean(jnp.sum(weights * values), jnp.sum(weights))


def masked_mean(
    values: Shaped[Array, "*s"],
    mask: Shaped[Array, "*s"],
) -> Float[jax.Array, ""]:
    """Mean of `values` where `mask` is true, 0 on an empty mask.

    Never average two of these: merge two `masked_sum`s and take their value.

    Args:
        values: float.
        mask: bool (or 0/1).

    Raises:
        ValueError: if the shapes differ.
    """
    return masked_sum(values, mask).value()


def masked_max(
    values: Shaped[Array, "*s"],
    mask: Shaped[Array, "*s"],
) -> Float[jax.Array, ""]:
    """Largest of `values` where `mask` is true, 0 on an empty mask; NaN if one of them is NaN.

    Args:
        values: float.
        mask: bool (or 0/1).

    Raises:
        ValueError: if the shapes differ.
    """
    require_same_shape(values=values, mask=mask)
    values = jnp.where(
        jnp.asarray(mask, bool),
        jnp.asarray(values, jnp.float32),
        -jnp.inf,
    )
    # XLA's reduction on a CPU loses a NaN among 4,096 values and more (jaxlib 0.10 and 0.12).
    largest = jnp.where(
        jnp.any(jnp.isnan(values)),
        jnp.nan,
        jnp.max(values, initial=-jnp.inf),
    )
    return Max(largest).value()


def masked_quantile(
    values: Shaped[Array, "*s"],
    mask: Shaped[Array, "*s"],
    q: float,
) -> Float[jax.Array, ""]:
    """The q-quantile of `values` where `mask` is true, by a full sort and linear interpolation.

    With the n kept values sorted, the quantile sits at position h = q (n - 1) and is
    x[floor h] + (h - floor h) (x[floor h + 1] - x[floor h]), as in NumPy's method "linear". h is
    formed from q as a fraction of integers: a float32 product would miss the position from a few
    million tokens on.

    Args:
        values: float.
        mask: bool (or 0/1).
        q: a Python float in [0, 1], taken to the nearest fraction with a denominator of at most
            10,000.

    Returns:
        0 on an empty mask; NaN if an entry under a true mask is NaN.

    Raises:
        ValueError: if the shapes differ or `q` is outside [0, 1].
    """
    require_same_shape(values=values, mask=mask)
    require_number("q", q, minimum=0, maximum=1)
    values = jnp.asarray(values, jnp.float32).ravel()
    mask = jnp.asarray(mask, bool).ravel()
    if values.size == 0:
        return jnp.zeros((), jnp.float32)
    ordered = jnp.sort(jnp.where(mask, values, jnp.inf))
    last = jnp.maximum(jnp.sum(mask, dtype=jnp.int32) - 1, 0)

    # last * share without overflow of int32.
    share = Fraction(float(q)).limit_denominator(10_000)
    quotient, remainder = jnp.divmod(last, share.denominator)
    numerator = remainder * share.numerator
    position = quotient * share.numerator + numerator // share.denominator
    fraction = (numerator % share.denominator).astype(jnp.float32) / share.denominator

    low = ordered[position]
    high = ordered[jnp.minimum(position + 1, last)]
    # Else inf - inf or 0 * inf, which are NaN.
    between = (fraction > 0) & (low != high)
    quantile = jnp.where(between, low + fraction * jnp.where(between, high - low, 0.0), low)
    quantile = jnp.where(jnp.any(mask & jnp.isnan(values)), jnp.nan, quantile)
    return jnp.where(jnp.any(mask), quantile, 0.0)


class CompletionIndex(NamedTuple):
    """Which completion each sampled token belongs to.

    Attributes:
        mask: true on sampled tokens.
        index: the completion of a token, all of whose tokens must be in one call.
        num_completions: N, static.
    """

    mask: Bool[Array, "R L"]
    index: Int[Array, "R L"]
    num_completions: int


def completion_sums(
    token_values: Float[Array, "R L"],
    where: CompletionIndex,
) -> Float[jax.Array, " N"]:
    """Sum of the token values of each completion, wherever its tokens lie; 0 without tokens.

    Tokens of an index outside 0 .. N-1 are left out.

    Raises:
        ValueError: if the shapes differ or `num_completions` is not a positive integer.
    """
    mask, index = _checked(where, token_values=token_values)
    values = masked_values(token_values, mask)

    count = where.num_completions
    length = index.shape[-1]
    blocks = max(1, -(-length // _SUM_BLOCK))
    slot = jnp.where(
        index >= 0,
        index * blocks + jnp.arange(length) // _SUM_BLOCK,
        count * blocks,
    )
    sums = jax.ops.segment_sum(
        values.ravel(),
        slot.ravel(),
        num_segments=count * blocks,
    )
    return jnp.sum(sums.reshape(count, blocks), axis=1)


def completion_counts(where: CompletionIndex) -> Int[jax.Array, " N"]:
    """Number of sampled tokens of each completion.

    Raises:
        ValueError: if the shapes differ or `num_completions` is not a positive integer.
    """
    mask, index = _checked(where)
    return jax.ops.segment_sum(
        mask.astype(jnp.int32).ravel(),
        index.ravel(),
        num_segments=where.num_completions,
    )


def completion_means(
    token_values: Float[Array, "R L"],
    where: CompletionIndex,
) -> Float[jax.Array, " N"]:
    """Mean of the token values of each completion, 0 for a completion without tokens.

    Raises:
        ValueError: if the shapes differ or `num_completions` is not a positive integer.
    """
    return Mean(completion_sums(token_values, where), completion_counts(where)).value()


def completion_maxima(
    token_values: Float[Array, "R L"],
    where: CompletionIndex,
) -> Float[jax.Array, " N"]:
    """Largest of the token values of each completion, 0 without tokens; NaN if one of them is NaN.

    Raises:
        ValueError: if the shapes differ or `num_completions` is not a positive integer.
    """
    mask, index = _checked(where, token_values=token_values)
    values = jnp.where(mask, jnp.asarray(token_values, jnp.float32), -jnp.inf)
    largest = jax.ops.segment_max(
        values.ravel(),
        index.ravel(),
        num_segments=where.num_completions,
    )
    # A backend's maximum may skip a NaN; a sum never does.
    poison = completion_sums(jnp.where(jnp.isnan(values), jnp.nan, 0.0), where)
    return jnp.where(completion_counts(where) > 0, largest, 0.0) + poison


def _checked(
    where: CompletionIndex, **values: Array
) -> tuple[Bool[jax.Array, "R L"], Int[jax.Array, "R L"]]:
    """Mask and index as JAX arrays; raise unless shapes are one, and N is a positive integer."""
    require_same_shape(**values, completion_mask=where.mask, completion_index=where.index)
    require_integer("num_completions", where.num_completions, minimum=1)
    return jnp.asarray(where.mask, bool), jnp.asarray(where.index, jnp.int32)


def gather_to_tokens(
    per_completion: Shaped[Array, " N"],
    completion_index: Int[Array, "*s"],
) -> Float[jax.Array, "*s"]:
    """Give each token its completion's value: out[r, l] = per_completion[completion_index[r, l]].

    Tokens outside the mask carry some completion's value too (index 0 as a rule): mask before use.

    Args:
        per_completion: of each completion.
        completion_index: in 0 .. N-1; a larger index gives NaN rather than another's value.

    Raises:
        ValueError: if `per_completion` has not one axis.
    """
    require_rank("per_completion", per_completion, 1)
    values = jnp.asarray(per_completion, jnp.float32)
    return jnp.take(
        values,
        jnp.asarray(completion_index, jnp.int32),
        mode="fill",
    )


class GroupStatistics(NamedTuple):
    """Statistics of each group, indexed by group id; slots of unused ids are 0 and false.

    Attributes:
        deviation: of each completion, not of each group: r_i - mean_g; 0 where it is not valid.
        std: exactly 0 when all valid members are equal, and when there are not more than `ddof`.
        size: valid members.
        all_equal: by comparing smallest and largest exactly; true for a group of one valid member.
    """

    deviation: Float[jax.Array, " N"]
    std: Float[jax.Array, " N"]
    size: Int[jax.Array, " N"]
    all_equal: Bool[jax.Array, " N"]


def group_statistics(
    rewards: Float[Array, " N"],
    group_ids: Int[Array, " N"],
    valid: Bool[Array, " N"],
    *,
    ddof: int,
) -> GroupStatistics:
    """Deviations from the mean, standard deviation, size and equality of the rewards of each group.

        mean_g = sum r / n,  std_g = sqrt(sum (r - mean_g)^2 / (n - ddof)),  over valid members.

    The smallest reward of a group is subtracted first and the variance takes two passes, so that a
    large common offset costs no precision. Members need not be adjacent.

    Args:
        rewards: a NaN under `valid` makes its group's deviations and std NaN.
        group_ids: in 0 .. N-1.
        valid: false: padding or dropped, ignored.
        ddof: 0 divides by n, 1 by n - 1.

    Returns:
        `GroupStatistics`, indexed by group id. `table.std[group_ids]` is that of each completion's
        group.

    Raises:
        ValueError: if the shapes differ, are not [N], or `ddof` is neither 0 nor 1.
    """
    require_same_shape(rewards=rewards, group_ids=group_ids, valid=valid)
    require_rank("rewards", rewards, 1)
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof!r}; must be 0 or 1")
    group_ids = jnp.asarray(group_ids, jnp.int32)
    valid = jnp.asarray(valid, bool)
    rewards = jnp.where(valid, as_float(rewards), 0.0)

    def over_groups(
        reduce: Callable[..., jax.Array],
        values: jax.Array,
    ) -> jax.Array:
        return reduce(values, group_ids, num_segments=len(rewards))

    size = over_groups(jax.ops.segment_sum, valid.astype(jnp.int32))
    smallest = over_groups(jax.ops.segment_min, jnp.where(valid, rewards, jnp.inf))
    largest = over_groups(jax.ops.segment_max, jnp.where(valid, rewards, -jnp.inf))
    above = jnp.where(valid, rewards - smallest[group_ids], 0.0)
    average = over_groups(jax.ops.segment_sum, above) / jnp.maximum(size, 1)
    # A minimum may skip a NaN on some backends; a sum never does.
    all_equal = (size > 0) & (smallest == largest) & ~jnp.isnan(average)
    deviation = jnp.where(
        valid & ~all_equal[group_ids],
        above - average[group_ids],
        0.0,
    )
    squares = over_groups(jax.ops.segment_sum, deviation**2)
    std = jnp.sqrt(squares / jnp.maximum(size - ddof, 1))
    return GroupStatistics(
        deviation=deviation,
        std=std,
        size=size,
        all_equal=all_equal,
    )
