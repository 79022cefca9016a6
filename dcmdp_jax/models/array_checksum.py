"""A checksum of an array that is the same for every sharding."""

import jax
import jax.numpy as jnp


def array_checksum(x: jax.Array) -> jax.Array:
    """sum_i bits_i (2 i + 1) mod 2^32 over the elements in row-major order, [] uint32.

    The odd factors detect elements that changed places. Equal arrays have equal checksums on every
    device layout.

    Args:
        x: array with elements of 1, 2 or 4 bytes.
    """
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    bits = bits.astype(jnp.uint32)
    # The flat index without flattening, which would gather a sharded array onto every device.
    index = jnp.zeros((), jnp.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        position = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        index += position * jnp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    odd_factors = 2 * index + 1
    return jnp.sum(bits * odd_factors, dtype=jnp.uint32)
