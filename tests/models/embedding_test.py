"""The lookup in a table that is split over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dcmdp_jax.models.decoder import look_up_split
from dcmdp_jax.models.logprobs import KernelAxes
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import MODEL_AXES, shard_map_over

pytestmark = pytest.mark.skipif(
    jax.device_count() < 8, reason="needs eight devices, see XLA_FLAGS in BUILD.md"
)


def _look_up(fsdp, tensor, dtype):
    mesh = make_mesh(1, fsdp, tensor, devices=jax.devices()[: fsdp * tensor])
    axes = KernelAxes(embed="fsdp", vocab="tensor" if tensor > 1 else None)
    rows = P(("fsdp", "expert"))
    mapped = functools.partial(look_up_split, dtype=dtype, axes=axes)
    return jax.jit(
        shard_map_over(
            MODEL_AXES, mapped, mesh, in_specs=(P(axes.vocab, "fsdp"), rows), out_specs=rows
        )
    )


@pytest.mark.parametrize(("fsdp", "tensor"), [(8, 1), (4, 2), (2, 4)])
def test_values_and_gradient_are_those_of_the_whole_table(fsdp, tensor):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(12, 16)).astype(np.float32)
    ids = rng.integers(0, 12, (8, 5))
    bar = rng.normal(size=(8, 5, 16)).astype(np.float32)
    found, pull = jax.vjp(
        lambda table: _look_up(fsdp, tensor, jnp.float32)(table, jnp.asarray(ids)),
        jnp.asarray(table),
    )
    np.testing.assert_array_equal(found, table[ids])
    gradient = np.zeros((12, 16))
    np.add.at(gradient, ids, bar)
    np.testing.assert_allclose(pull(jnp.asarray(bar))[0], gradient, atol=1e-5)


def test_the_gradient_is_summed_in_float32():
    """The gradient of a token a thousand times is summed in float32.

    Each has a cotangent of 1: a bfloat16 sum stays at 256, as 256 + 1 rounds to 256.
    """
    ids = jnp.ones((8, 125), jnp.int32)

    def total(table):
        return jnp.sum(_look_up(8, 1, jnp.bfloat16)(table, ids).astype(jnp.float32))

    gradient = jax.grad(total)(jnp.zeros((3, 16), jnp.float32))
    np.testing.assert_array_equal(gradient, np.outer([0, 1000, 0], np.ones(16)))
