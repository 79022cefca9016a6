"""Statistics that carry their reduction as a type, and finite differences of log-probabilities.

Rows are computed in micro-batches and on several devices. A statistic of part of them is one of
four types; `merge` joins two parts, `across` joins the devices, `value` gives the number, once, at
the end. Every type works on arrays of any one shape, under jit too.
"""

import functools
import operator
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Shaped

from dcmdp_jax.algorithm.require import require_option, require_same_shape
from dcmdp_jax.types import Array

KlEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Nats at which a log-ratio is clamped: e^20 = 4.85e8, whose square still sums in float32 (max
3.4e38).
"""

LEAST_REST = 1e-6
"""Probability left to all other tokens, at least, where a binary KL divides by it."""

LOGPROB_LIMIT = 1e4
"""Nats at which a log-probability is clamped, so that -inf against -inf is a difference of 0 and
not NaN.
"""


def as_float(x: Shaped[Array, "*s"]) -> Float[jax.Array, "*s"]:
    """The array in float32, or float64 if it is and `jax_enable_x64` is on; integers in default."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(float)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def clamp(x: Float[Array, "*s"], limit: float) -> Float[jax.Array, "*s"]:
    """clip(x, -limit, limit) per element, with gradient 1 at the limits themselves.

    At a limit the derivative is 1 from inside and 0 from outside. We take the one from inside: the
    value there is still x. `jnp.clip` takes their average, 1/2, which is the derivative of neither
    side. NaN stays NaN, in the gradient too.

    Args:
        x: float32.
        limit: above 0.
    """
    outside = (x < -limit) | (x > limit)
    bound = jnp.clip(x, -limit, limit)
    return jnp.where(outside, lax.stop_gradient(bound), x)


def clamped_log_ratio(
    numerator_logprobs: Float[Array, "*s"],
    denominator_logprobs: Float[Array, "*s"],
) -> Float[jax.Array, "*s"]:
    """log(p / q) from log-probabilities, per element, clamped to [-20, 20].

        d = clip(clip(log p, -1e4, 1e4) - clip(log q, -1e4, 1e4), -20, 20)

    Finite for every input but NaN, which stays NaN so that a broken token is seen. The difference
    is taken in the dtype of `as_float`. The gradient is 1 and -1 inside the clamps, their ends
    included, and 0 outside: see `clamp`.

    Args:
        numerator_logprobs: log p in nats.
        denominator_logprobs: log q in nats.

    Returns:
        float32; -inf in both gives 0, -inf in one gives -20 or 20.

    Raises:
        ValueError: if the shapes differ.
    """
    difference = log_difference(numerator_logprobs, denominator_logprobs)
    return clamp(difference, MAX_LOG_RATIO)


def log_difference(
    numerator_logprobs: Float[Array, "*s"],
    denominator_logprobs: Float[Array, "*s"],
) -> Float[jax.Array, "*s"]:
    """log p - log q per element, each log-prob clamped at 1e4 nats, their difference not.

    For sums over a completion. Finite for every input but NaN: a sum of a million such differences
    is below float32's maximum.

    Args:
        numerator_logprobs: log p in nats.
        denominator_logprobs: log q in nats.

    Raises:
        ValueError: if the shapes differ.
    """
    require_same_shape(
        numerator_logprobs=numerator_logprobs, denominator_logprobs=denominator_logprobs
    )
    numerator = clamp(as_float(numerator_logprobs), LOGPROB_LIMIT)
    denominator = clamp(as_float(denominator_logprobs), LOGPROB_LIMIT)
    return numerator - denominator


def exp_minus_linear(x: Float[Array, "*s"]) -> Float[jax.Array, "*s"]:
    """exp(x) - 1 - x per element, never negative, to float32's relative precision near 0.

    Computed as written it is rounding noise below |x| = 1e-3, where training and inference usually
    sit; below 0.5 the Taylor series to x^8 is used instead (truncated at 4e-8 of the value).

    Args:
        x: float32, at most 88 (beyond that float32 overflows to inf).
    """
    x = jnp.asarray(x, jnp.float32)
    series = 1.0
    for order in range(8, 2, -1):
        series = 1.0 + series * x / order
    is_small = jnp.abs(x) < 0.5
    return jnp.where(is_small, x * x / 2 * series, jnp.expm1(x) - x)


def kl_estimate(
    log_ratio: Float[Array, "*s"],
    estimator: KlEstimator,
) -> Float[jax.Array, "*s"]:
    """Estimate KL(a || b), in nats, from x = log b - log a of each token that a sampled.

        k1 = -x            unbiased, either sign
        k2 = x^2 / 2       biased, >= 0
        k3 = e^x - 1 - x   unbiased, >= 0, small variance

    after J. Schulman, "Approximating KL divergence" (2020).

    Raises:
        ValueError: if `estimator` is unknown.
    """
    require_option("estimator", estimator, get_args(KlEstimator))
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    return exp_minus_linear(log_ratio)


def binary_kl(
    x: Float[Array, "*s"],
    y: Float[Array, "*s"],
) -> Float[jax.Array, "*s"]:
    """KL(Bernoulli(e^x) || Bernoulli(e^y)) of log-probabilities, per element, in nats.

        e^x (x - y) + (1 - e^x) log((1 - e^x) / (1 - e^y))

    x - y is clamped at 20 nats, and both probabilities are held below 1 - 1e-6.
    """
    rest_y = jnp.maximum(-jnp.expm1(y), LEAST_REST)
    rest_x = jnp.maximum(-jnp.expm1(x), LEAST_REST)
    log_ratio = clamped_log_ratio(x, y)
    log_ratio_of_rests = jnp.log(rest_x) - jnp.log(rest_y)
    return jnp.exp(x) * log_ratio + rest_x * log_ratio_of_rests


class Sum(NamedTuple):
    """A sum of arrays, or of trees of arrays (a gradient).

    Attributes:
        total: array or tree of arrays.
    """

    total: Any

    def value(self) -> Any:
        """The total."""
        return self.total


class Mean(NamedTuple):
    """A weighted mean, left unreduced: totals and weights add, `value` divides once.

    Attributes:
        total: sum of weight * value.
        weight: sum of weights, a count where every weight is 1.
    """

    total: Array
    weight: Array

    def value(self) -> jax.Array:
        """total / weight, 0 where the weight is 0 (an empty mask); NaN stays NaN."""
        weight = as_float(self.weight)
        filled = weight != 0
        total = jnp.where(filled, self.total, 0.0)
        divisor = jnp.where(filled, weight, 1.0)
        return total / divisor


class Max(NamedTuple):
    """The largest of values above -inf; a NaN among them stays NaN.

    Attributes:
        largest: -inf before any value.
    """

    largest: Array

    def value(self) -> jax.Array:
        """The largest; 0 without any value."""
        return jnp.where(self.largest == -jnp.inf, 0.0, self.largest)


class Min(NamedTuple):
    """The smallest of values below inf; a NaN among them stays NaN.

    Attributes:
        smallest: inf before any value.
    """

    smallest: Array

    def value(self) -> jax.Array:
        """The smallest; 0 without any value."""
        return jnp.where(self.smallest == jnp.inf, 0.0, self.smallest)


Statistic = Sum | Mean | Max | Min

# What joins two parts, and an array of parts.
_JOIN = {Sum: jnp.add, Mean: jnp.add, Max: jnp.maximum, Min: jnp.minimum}
_EXTREME = {Max: jnp.max, Min: jnp.min}
_EMPTY = {Max: -jnp.inf, Min: jnp.inf}


def merge(a: Any, b: Any) -> Any:
    """Merge two trees of statistics, leaf by leaf, each by its type.

    In the dtype of `a`, so that a float32 sum of bfloat16 parts stays float32.

    Raises:
        ValueError: if the shapes differ.
    """

    def join(kind: type, a: Array, b: Array) -> jax.Array:
        require_same_shape(one=a, other=b)
        b = jnp.asarray(b).astype(jnp.result_type(a))
        return _JOIN[kind](a, b)

    return _map(lambda x, y: jax.tree.map(functools.partial(join, type(x)), x, y), a, b)


def merge_stacked(tree: Any) -> Any:
    """Merge statistics that are stacked along the leading axis of their arrays, first to last."""
    merged = jax.tree.map(operator.itemgetter(0), tree)
    for i in range(1, len(jax.tree.leaves(tree)[0])):
        merged = merge(merged, jax.tree.map(operator.itemgetter(i), tree))
    return merged


def across(tree: Any, axis_name: str | None) -> Any:
    """Merge a tree of statistics over a mesh axis; call it inside `jax.shard_map`.

    All sums and means travel in one `psum`. Extremes are gathered: a backend's own maximum may skip
    a NaN.

    Args:
        tree: a tree of statistics.
        axis_name: the mesh axis; None where there is none to merge over.
    """
    if axis_name is None:
        return tree
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_statistic)
    summed_leaves = [leaf for leaf in leaves if type(leaf) not in _EXTREME]
    sums = iter(lax.psum(summed_leaves, axis_name))
    merged = []
    for leaf in leaves:
        kind = type(leaf)
        if kind in _EXTREME:
            gathered = lax.all_gather(leaf[0], axis_name)
            extreme = _EXTREME[kind](gathered, axis=0)
            merged.append(kind(extreme))
        else:
            merged.append(next(sums))
    return jax.tree.unflatten(structure, merged)


def empty(tree: Any) -> Any:
    """Return the neutral element of each statistic, from which a loop starts; floats in float32.

    Args:
        tree: a tree of statistics, whose arrays may be `jax.ShapeDtypeStruct`s.
    """

    def neutral(statistic: Statistic) -> Statistic:
        start = _EMPTY.get(type(statistic), 0)

        def filled(leaf: Any) -> jax.Array:
            dtype = leaf.dtype
            if start or jnp.issubdtype(dtype, jnp.floating):
                dtype = jnp.float32
            return jnp.full(leaf.shape, start, dtype)

        return jax.tree.map(filled, statistic)

    return _map(neutral, tree)


def values(tree: Any) -> Any:
    """The number of every statistic of a tree."""
    return _map(lambda x: x.value(), tree)


def _is_statistic(node: Any) -> bool:
    return isinstance(node, Statistic)


_map = functools.partial(jax.tree.map, is_leaf=_is_statistic)
