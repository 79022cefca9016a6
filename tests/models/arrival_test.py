"""The share of an update that an engine's rounding lets through."""

import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.models.quantize import arrival, watched_columns

STEP = 2.0**-7  # of bfloat16 from 1 to 2


def _measured(before, after, precision):
    before, after = (
        {"kernel": jnp.array(x, jnp.float32)[:, None], "norm": jnp.ones(2)} for x in (before, after)
    )
    marks = {"kernel": True, "norm": False}
    found = arrival(watched_columns(before, marks), after, marks, precision)
    return float(found["mismatch/sync_changed"]), float(found["mismatch/sync_rounding"])


@pytest.mark.parametrize(
    ("before", "after", "precision", "changed", "rounding"),
    [
        # A third of the distance of two numbers: nothing arrives, the engine goes on with what it
        # had.
        ([1.0, 1.0], [1 + STEP / 3, 1 - STEP / 6], "bfloat16", 0.0, 1.0),
        # One of the two crosses the middle and jumps a whole step: off by (0, 2/3) where the update
        # is (1/3, 1/3).
        ([1.0, 1 + STEP / 3], [1 + STEP / 3, 1 + STEP * 2 / 3], "bfloat16", 0.5, np.sqrt(5 / 2)),
        ([1.0, 1.0], [1 + STEP, 1 + 2 * STEP], "bfloat16", 1.0, 0.0),
        ([1.0, 1.0], [1 + STEP / 3, 1 + STEP / 3], "float32", 1.0, 0.0),
        ([1.0, 1.0], [1 + STEP / 3, 1.0], "exact", 0.5, 0.0),
        # The largest of the column makes the scale 1: 10.3 stays 10, 10.75 becomes 11.
        ([127.0, 10.0], [127.0, 10.3], "int8", 0.0, 1.0),
        ([127.0, 10.0], [127.0, 10.75], "int8", 0.5, 1 / 3),
        ([1.0, 1.0], [1.0, 1.0], "bfloat16", 0.0, 0.0),
    ],
)
def test_what_arrives_of_an_update_by_hand(before, after, precision, changed, rounding):
    assert _measured(before, after, precision) == pytest.approx((changed, rounding), abs=1e-4)


def test_some_columns_say_what_all_do():
    # 2^19 numbers, of which every second column is watched; an update of a tenth of a step from
    # anywhere in it.
    rng = np.random.default_rng(0)
    before = {"kernel": jnp.asarray(1 + rng.random((1024, 512)) / 2, jnp.float32)}
    after = {"kernel": before["kernel"] + jnp.float32(STEP / 10)}
    watched = watched_columns(before, {"kernel": True})
    assert [x.shape for x in watched] == [(1024, 256)]
    found = arrival(watched, after, {"kernel": True}, "bfloat16")
    # A number crosses a middle with probability 1 / 10, and then jumps 10 updates: 0.9 x 1 + 0.1 x
    # 9^2 = 9.
    assert float(found["mismatch/sync_changed"]) == pytest.approx(0.1, abs=0.003)
    assert float(found["mismatch/sync_rounding"]) == pytest.approx(3.0, abs=0.05)
