"""Statistics that carry their reduction as a type, so that no caller can merge them wrongly.

Rows are computed in micro-batches and on several devices. A statistic of part of them is one of four types; `merge`
joins two parts, `across` joins the devices, `value` gives the number, once, at the end. Every type works on arrays
of any one shape, under jit too.
"""

from __future__ import annotations

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

    def merge(self, other: Sum) -> Sum:
        """The sum over both. Added in the dtype of `self`, so that a float32 sum of bfloat16 parts stays float32."""
        _require_alike(self, other)
        return Sum(jax.tree.map(lambda a, b: a + jnp.asarray(b).astype(jnp.result_type(a)), self.total, other.total))

    def empty(self) -> Sum:
        """Return zeros, floats in float32."""
        return Sum(jax.tree.map(_zeros, self.total))

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

    def merge(self, other: Mean) -> Mean:
        """The mean over both."""
        _require_alike(self, other)
        return Mean(self.total + other.total, self.weight + other.weight)

    def empty(self) -> Mean:
        """Return zeros."""
        return Mean(_zeros(self.total), _zeros(self.weight))

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

    def merge(self, other: Max) -> Max:
        """The largest of both."""
        _require_alike(self, other)
        return Max(jnp.maximum(self.largest, other.largest))

    def across(self, axis_name: str) -> Max:
        """The largest of the devices along a mesh axis. Gathered: a backend's own maximum may skip a NaN."""
        return Max(jnp.max(lax.all_gather(self.largest, axis_name), axis=0))

    def empty(self) -> Max:
        """Return -inf, below every value."""
        return Max(jnp.full(jnp.shape(self.largest), -jnp.inf, jnp.float32))

    def value(self) -> jax.Array:
        """The largest; 0 without any value."""
        return jnp.where(self.largest == -jnp.inf, 0.0, self.largest)


class Min(NamedTuple):
    """The smallest of values below inf; a NaN among them stays NaN.

    Attributes:
        smallest: inf before any value.
    """

    smallest: Array

    def merge(self, other: Min) -> Min:
        """The smallest of both."""
        _require_alike(self, other)
        return Min(jnp.minimum(self.smallest, other.smallest))

    def across(self, axis_name: str) -> Min:
        """The smallest of the devices along a mesh axis."""
        return Min(jnp.min(lax.all_gather(self.smallest, axis_name), axis=0))

    def empty(self) -> Min:
        """Return inf, above every value."""
        return Min(jnp.full(jnp.shape(self.smallest), jnp.inf, jnp.float32))

    def value(self) -> jax.Array:
        """The smallest; 0 without any value."""
        return jnp.where(self.smallest == jnp.inf, 0.0, self.smallest)


Statistic = Sum | Mean | Max | Min


def merge(a: Any, b: Any) -> Any:
    """Merge two trees of statistics, leaf by leaf, each by its type."""
    return jax.tree.map(lambda x, y: x.merge(y), a, b, is_leaf=_is_statistic)


def merge_stacked(tree: Any) -> Any:
    """Merge statistics that are stacked along the leading axis of their arrays, first to last."""
    count = len(jax.tree.leaves(tree)[0])
    parts = (jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count))
    return functools.reduce(merge, parts)


def across(tree: Any, axis_name: str | None) -> Any:
    """Merge a tree of statistics over the devices along a mesh axis; call it inside `jax.shard_map`.

    All sums and means travel in one `psum`.

    Args:
        tree: a tree of statistics.
        axis_name: the mesh axis; None where there is none to merge over.
    """
    if axis_name is None:
        return tree
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_statistic)
    summed = iter(lax.psum([x for x in leaves if isinstance(x, Sum | Mean)], axis_name))
    merged = [next(summed) if isinstance(x, Sum | Mean) else x.across(axis_name) for x in leaves]
    return jax.tree.unflatten(structure, merged)


def empty(tree: Any) -> Any:
    """Return the neutral element of each statistic, from which a loop starts.

    Args:
        tree: a tree of statistics, whose arrays may be `jax.ShapeDtypeStruct`s.
    """
    return jax.tree.map(lambda x: x.empty(), tree, is_leaf=_is_statistic)


def values(tree: Any) -> Any:
    """The number of every statistic of a tree."""
    return jax.tree.map(lambda x: x.value(), tree, is_leaf=_is_statistic)


def _require_alike(a: Any, b: Any) -> None:
    """Raise unless two statistics have the same shapes, leaf by leaf."""
    jax.tree.map(lambda x, y: require_same_shape(one=x, other=y), a, b)


def _is_statistic(node: Any) -> bool:
    return isinstance(node, Statistic)


def _zeros(leaf: Any) -> jax.Array:
    dtype = jnp.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
    return jnp.zeros(leaf.shape, dtype)
