"""Typed statistics: merged by hand, over scans and over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dcmdp_jax.algorithm import stats
from dcmdp_jax.algorithm.stats import Max, Mean, Min, Sum
from dcmdp_jax.parallel.mesh import make_mesh

# Three parts of different sizes, the second of nothing.
PARTS = ([2.0, 5.0, -1.0, 4.0], [], [8.0])


def _statistics(values, extreme=None):
    """Statistics of a list of numbers; `extreme` replaces the largest and the smallest."""
    values = np.asarray(values, np.float32)
    largest = np.max(values, initial=-np.inf) if extreme is None else extreme
    smallest = np.min(values, initial=np.inf) if extreme is None else extreme
    return {
        "sum": Sum(jnp.float32(values.sum())),
        "count": Sum(jnp.int32(values.size)),
        "mean": Mean(jnp.float32(values.sum()), jnp.float32(values.size)),
        "largest": Max(jnp.float32(largest)),
        "smallest": Min(jnp.float32(smallest)),
    }


# By hand: 2 + 5 - 1 + 4 + 8 = 18 of 5 numbers. Adding maxima gives 13, averaging means (2.5 + 0 +
# 8) / 3 = 3.5.
EXPECTED = {"sum": 18.0, "count": 5, "mean": 3.6, "largest": 8.0, "smallest": -1.0}


def _check(tree, expected):
    found = {name: np.asarray(value) for name, value in stats.values(tree).items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_merge_is_by_type():
    _check(functools.reduce(stats.merge, map(_statistics, PARTS)), EXPECTED)
    _check(functools.reduce(stats.merge, map(_statistics, reversed(PARTS))), EXPECTED)


def test_empty_is_neutral_and_has_value_zero():
    whole = _statistics([2.0, -3.0])
    nothing = stats.empty(jax.eval_shape(lambda: whole))
    _check(nothing, dict.fromkeys(EXPECTED, 0.0))
    _check(stats.merge(nothing, whole), stats.values(whole))
    _check(stats.merge(whole, nothing), stats.values(whole))
    assert nothing["count"].total.dtype == jnp.int32


def test_negative_maximum_and_positive_minimum_survive_an_empty_part():
    # A start of 0 would give 0 for both.
    assert float(stats.merge(_statistics([]), _statistics([-4.0, -2.0]))["largest"].value()) == -2.0
    assert float(stats.merge(_statistics([3.0]), _statistics([]))["smallest"].value()) == 3.0


def test_merge_over_devices_is_by_type():
    mesh = make_mesh(3, devices=jax.devices()[:3])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(_statistics, PARTS))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    def merged(tree):
        return stats.across(jax.tree.map(lambda x: x[0], tree), "data")

    _check(merged(stacked), EXPECTED)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_survives_a_merge_and_the_devices(place):
    parts = [_statistics([1.0], extreme=np.nan if i == place else 1.0) for i in range(3)]
    merged = functools.reduce(stats.merge, parts)
    assert np.isnan(merged["largest"].value())
    assert np.isnan(merged["smallest"].value())
    mesh = make_mesh(3, devices=jax.devices()[:3])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    over_devices = jax.shard_map(
        lambda tree: stats.across(jax.tree.map(lambda x: x[0], tree), "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    merged = jax.jit(over_devices)(stacked)
    assert np.isnan(merged["largest"].value())
    assert np.isnan(merged["smallest"].value())


def test_sum_of_a_tree_keeps_the_dtype_of_its_start():
    # 1 + 2^-9 needs 10 bits: a bfloat16 sum (8 bits) would lose the second part.
    parts = [Sum({"w": jnp.asarray([x], jnp.bfloat16)}) for x in (1.0, 2.0**-9)]
    total = functools.reduce(stats.merge, parts, stats.empty(parts[0])).value()["w"]
    assert total.dtype == jnp.float32
    assert float(total[0]) == 1 + 2.0**-9


def test_a_mean_of_broken_weights_stays_broken():
    assert np.isnan(Mean(jnp.float32(np.nan), jnp.float32(np.nan)).value())
    assert np.isnan(Mean(jnp.float32(1.0), jnp.float32(np.nan)).value())


def test_mean_of_no_weight_is_zero():
    assert float(Mean(jnp.float32(np.nan), jnp.float32(0)).value()) == 0.0
    np.testing.assert_array_equal(
        Mean(jnp.array([3.0, 5.0]), jnp.array([2, 0])).value(), [1.5, 0.0]
    )
