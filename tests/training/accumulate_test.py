"""Sums over buckets, micro-batches and devices of a function that knows no RL."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.algorithm.stats import Max, Mean, Min, Sum, values
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.training.accumulate import accumulate, map_rows


def _function(scale, rows):
    """Statistics of rows of numbers, NaN where there is none.

    The weight is a parameter, differentiated.
    """
    x = rows["x"]
    present = ~jnp.isnan(x)
    x = jnp.where(present, x, 0.0)
    value, gradient = jax.value_and_grad(lambda scale: jnp.sum((scale * x) ** 2))(scale)
    statistics = {
        "gradient": Sum({"scale": gradient}),
        "loss": Mean(value, jnp.sum(present, dtype=jnp.float32)),
        "largest": Max(jnp.max(jnp.where(present, x, -jnp.inf))),
        "smallest": Min(jnp.min(jnp.where(present, x, jnp.inf))),
        "rows": Sum(jnp.int32(len(x))),
    }
    return statistics, {"double": 2 * x}


def _buckets(seed=0):
    """Two buckets [A, R, L] of 3 and 2 micro-batches of 4 rows.

    The last micro-batch of each is empty and must not run.
    """
    rng = np.random.default_rng(seed)
    buckets = []
    for count, length in ((3, 5), (2, 7)):
        x = rng.normal(size=(count, 4, length)).astype(np.float32) - 3.0
        x[:, 0, 2:] = np.nan
        x[-1] = 1e9
        buckets.append({"x": x})
    return tuple(buckets), np.array([2, 1], np.int32)


def _expected(buckets, counts, scale):
    used = np.concatenate(
        [b["x"][:n].ravel() for b, n in zip(buckets, counts, strict=True)]
    ).astype(np.float64)
    used = used[~np.isnan(used)]
    return {
        "gradient": {"scale": 2 * scale * np.sum(used**2)},
        "loss": np.sum((scale * used) ** 2) / used.size,
        "largest": used.max(),
        "smallest": used.min(),
        "rows": 4 * sum(counts),
    }


@pytest.mark.parametrize(
    "shape", [None, (1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2)]
)
def test_sums_are_those_of_all_rows_on_every_mesh(shape):
    mesh = make_mesh(*shape, devices=jax.devices()[: np.prod(shape)]) if shape else None
    buckets, counts = _buckets()
    placed = buckets
    if mesh:
        placed = jax.device_put(buckets, NamedSharding(mesh, P(None, ("data", "fsdp"))))
    run = jax.jit(functools.partial(accumulate, _function, mesh=mesh))
    sums, outputs = run(jnp.float32(0.5), placed, counts)
    # "rows" is counted by each call: one for each index of the data axis, none for fsdp and tensor.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6),
        values(sums),
        _expected(buckets, counts, 0.5),
    )
    for bucket, output, count in zip(buckets, outputs, counts, strict=True):
        wanted = np.where(np.isnan(bucket["x"]), 0, 2 * bucket["x"])
        wanted[count:] = 0.0
        np.testing.assert_array_equal(output["double"], wanted)


def test_a_single_micro_batch_is_the_function_itself():
    rows = {"x": np.array([[[1.0, 2.0], [4.0, np.nan]]], np.float32)}
    sums, (output,) = accumulate(_function, jnp.float32(1.0), (rows,), np.array([1]), mesh=None)
    assert float(sums["loss"].value()) == 7.0  # (1 + 4 + 16) / 3
    assert float(sums["gradient"].value()["scale"]) == 42.0
    np.testing.assert_array_equal(output["double"], [[[2.0, 4.0], [8.0, 0.0]]])
    program = jax.make_jaxpr(functools.partial(accumulate, _function, mesh=None))(
        jnp.float32(1), (rows,), np.array([1])
    )
    assert "while" not in str(program)


def test_nothing_runs_on_an_empty_mini_batch():
    buckets, _ = _buckets()
    sums, outputs = accumulate(_function, jnp.float32(1.0), buckets, np.array([0, 0]), mesh=None)
    assert {float(x) for x in jax.tree.leaves(values(sums))} == {0.0}
    assert not any(np.any(output["double"]) for output in outputs)


def test_bfloat16_gradients_add_in_float32():
    # 256 + 1 + ... + 1: bfloat16 has 8 bits, in which 256 + 1 is 256.
    rows = {"x": np.array([[[256.0]]] + [[[1.0]]] * 4, np.float32)}

    def gradient(weight, rows):
        return Sum(jax.grad(lambda w: jnp.sum(w * rows["x"].astype(jnp.bfloat16)))(weight)), ()

    total, _ = accumulate(gradient, jnp.bfloat16(1), (rows,), np.array([5]), mesh=None)
    assert total.value().dtype == jnp.float32
    assert float(total.value()) == 260.0


def test_map_rows_gives_the_outputs_alone():
    buckets, counts = _buckets()
    mapped = map_rows(
        lambda scale, rows: scale * rows["x"], jnp.float32(2), buckets, counts, mesh=None
    )
    for bucket, output, count in zip(buckets, mapped, counts, strict=True):
        np.testing.assert_array_equal(output[:count], 2 * bucket["x"][:count])
        np.testing.assert_array_equal(output[count:], 0.0)
