"""Dynamic loss scale: the rule, and the limits."""

import jax.numpy as jnp
import pytest

from dcmdp_jax.training.optimizer import (
    GROWTH_INTERVAL,
    INITIAL_SCALE,
    initial_loss_scale,
    next_loss_scale,
)
from dcmdp_jax.types import LossScale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_with_the_range_of_float32_have_none(dtype):
    assert initial_loss_scale(dtype) is None


def test_float16_starts_at_2_to_the_10():
    state = initial_loss_scale("float16")
    assert (state.scale, state.finite_updates) == (2.0**10, 0) and INITIAL_SCALE == 2.0**10


@pytest.mark.parametrize(
    ("scale", "finite_updates", "finite", "expected"),
    [
        (8.0, 5, True, (8.0, 6)),
        (8.0, 5, False, (4.0, 0)),
        # The 2000th finite update in a row doubles it.
        (8.0, GROWTH_INTERVAL - 2, True, (8.0, GROWTH_INTERVAL - 1)),
        (8.0, GROWTH_INTERVAL - 1, True, (16.0, 0)),
        (8.0, GROWTH_INTERVAL - 1, False, (4.0, 0)),
        (1.0, 3, False, (1.0, 0)),
        (2.0**24, GROWTH_INTERVAL - 1, True, (2.0**24, 0)),
    ],
)
def test_the_rule(scale, finite_updates, finite, expected):
    state = next_loss_scale(
        LossScale(jnp.float32(scale), jnp.int32(finite_updates)), jnp.asarray(finite)
    )
    assert (float(state.scale), int(state.finite_updates)) == expected
    assert (state.scale.dtype, state.finite_updates.dtype) == (jnp.float32, jnp.int32)
