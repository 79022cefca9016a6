"""Weights of an inference engine in int8 or float8, one scale per output channel."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class QuantizedKernel(NamedTuple):
    """A matrix stored as W ~ values * scale.

    Attributes:
        values: [in, out] int8 or float8_e4m3fn.
        scale: [out] float32, positive.
    """

    values: jax.Array
    scale: jax.Array


def quantized_matmul(x: jax.Array, kernel: QuantizedKernel) -> jax.Array:
    """x (values * scale), the scale applied after the product. Returns the dtype of `x`."""
    product = jnp.matmul(x, kernel.values.astype(x.dtype), preferred_element_type=jnp.float32)
    return (product * kernel.scale).astype(x.dtype)
