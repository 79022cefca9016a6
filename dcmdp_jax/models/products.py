"""Precision of matrix products: float32 operands are multiplied in float32 everywhere."""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from dcmdp_jax.types import Array, Params

_T = TypeVar("_T")

PRECISE = jax.lax.Precision.HIGHEST
"""`precision` of float32 products in a program whose other products are in the compute dtype."""


def products_in(dtype: jax.typing.DTypeLike) -> AbstractContextManager[object]:
    """Within it, a program that computes in `dtype` is traced: forward, backward, kernels.

    XLA's default for float32 operands is TensorFloat-32 on NVIDIA GPUs and bfloat16 on TPUs, which
    leaves 10 or 7 bits of their 23. Products of bfloat16 and float16 operands are exact by default,
    and kernels for TPUs refuse any other precision for them.

    Args:
        dtype: dtype of activations and products.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()


def in_compute_dtype(function: Callable[..., _T]) -> Callable[..., _T]:
    """Trace a function in `products_in` the `compute_dtype` of its keyword `program`."""

    @functools.wraps(function)
    def traced(*arguments: Any, **names: Any) -> _T:
        with products_in(names["program"].compute_dtype):
            return function(*arguments, **names)

    return traced


def precision_of(dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
    """`precision` of a product in `dtype`, for code that is traced outside of `products_in`."""
    if jnp.dtype(dtype) == jnp.float32:
        return PRECISE
    return None


def euclidean_norm(tree: Params) -> Array:
    """The norm of all leaves together.

    By dot products: a sum of squares would write the squares first.
    """

    def squared(leaf: Array) -> Array:
        axes = tuple(range(leaf.ndim))
        return jax.lax.dot_general(leaf, leaf, ((axes, axes), ((), ())), precision=PRECISE)

    return jnp.sqrt(sum(squared(leaf) for leaf in jax.tree.leaves(tree)))
