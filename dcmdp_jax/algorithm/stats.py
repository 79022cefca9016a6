"""Statistics that carry their reduction as a type, so that no caller can merge them wrongly.

Rows are computed in micro-batches and on several devices. A statistic of part of them is one of four types; `merge`
joins two parts, `across` joins the devices, `value` gives the number, once, at the end. Every type works on arrays
of any one shape, under jit too.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dcmdp_jax.algorithm.numerics import as_float
from dcmdp_jax.algorithm.require import require_same_shape
from dcmdp_jax.types import Array


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
        """total / weight, 0 where the weight is 0 (an empty mask)."""
        weight = as_float(self.weight)
        filled = weight > 0
        return jnp.where(filled, self.total, 0.0) / jnp.where(filled, weight, 1.0)


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

    def join(kind: type, one: Array, other: Array) -> jax.Array:
        require_same_shape(one=one, other=other)
        return _JOIN[kind](one, jnp.asarray(other).astype(jnp.result_type(one)))

    return _map(lambda x, y: jax.tree.map(functools.partial(join, type(x)), x, y), a, b)


def merge_stacked(tree: Any) -> Any:
    """Merge statistics that are stacked along the leading axis of their arrays, first to last."""
    count = len(jax.tree.leaves(tree)[0])
    parts = (jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count))
    return functools.reduce(merge, parts)


def across(tree: Any, axis_name: str | None) -> Any:
    """Merge a tree of statistics over the devices along a mesh axis; call it inside `jax.shard_map`.

    All sums and means travel in one `psum`. Extremes are gathered: a backend's own maximum may skip a NaN.

    Args:
        tree: a tree of statistics.
        axis_name: the mesh axis; None where there is none to merge over.
    """
    if axis_name is None:
        return tree
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_statistic)
    summed = iter(lax.psum([x for x in leaves if type(x) not in _EXTREME], axis_name))
    merged = [
        type(x)(_EXTREME[type(x)](lax.all_gather(x[0], axis_name), axis=0)) if type(x) in _EXTREME else next(summed)
        for x in leaves
    ]
    return jax.tree.unflatten(structure, merged)


def empty(tree: Any) -> Any:
    """Return the neutral element of each statistic, from which a loop starts; floats in float32.

    Args:
        tree: a tree of statistics, whose arrays may be `jax.ShapeDtypeStruct`s.
    """
    return _map(lambda x: jax.tree.map(functools.partial(_filled, _EMPTY.get(type(x), 0)), x), tree)


def values(tree: Any) -> Any:
    """The number of every statistic of a tree."""
    return _map(lambda x: x.value(), tree)


def _filled(start: float, leaf: Any) -> jax.Array:
    return jnp.full(
        jnp.shape(leaf), start, jnp.float32 if start or jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
    )


def _is_statistic(node: Any) -> bool:
    return isinstance(node, Statistic)


_map = functools.partial(jax.tree.map, is_leaf=_is_statistic)
