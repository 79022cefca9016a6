"""The checksum of an array: by hand, by NumPy, and by what it must detect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.models.array_checksum import array_checksum


def test_by_hand():
    # bytes 5, 0, 255 (two's complement of -1) times 1, 3, 5: 5 + 0 + 1275
    assert int(array_checksum(jnp.array([5, 0, -1], jnp.int8))) == 1280


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_any_shape_is_its_row_major_order(dtype):
    x = jax.random.normal(jax.random.key(0), (7, 3, 5)).astype(dtype)
    bits = np.asarray(x).view(f"uint{8 * x.dtype.itemsize}").reshape(-1).astype(object)
    expected = sum(int(b) * (2 * i + 1) for i, b in enumerate(bits)) % 2**32
    assert int(array_checksum(x)) == int(array_checksum(x.reshape(-1))) == expected


def test_a_change_and_a_swap_are_detected():
    x = jnp.arange(6.0).reshape(2, 3)
    others = [x.at[1, 2].set(5.5), x[::-1], x[:, ::-1]]
    assert int(array_checksum(x)) not in [int(array_checksum(each)) for each in others]
