"""Reductions: nothing under a mask leaks, empty masks give 0, layouts and orders do not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcmdp_jax.algorithm import masked, stats
from dcmdp_jax.algorithm.stats import Mean

VALUES = np.array([[1.0, 2.0, np.nan], [4.0, np.inf, np.nan]], np.float32)
MASK = np.array([[True, True, False], [True, False, False]])


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("to_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_masked_sum_counts_only_true_entries(transform, to_array):
    # 1 + 2 + 4 = 7 over 3 entries. Multiplying by a 0/1 float mask instead of selecting would give
    # NaN.
    total, weight = transform(masked.masked_sum)(to_array(VALUES), to_array(MASK))
    assert (float(total), float(weight)) == (7.0, 3.0)
    assert total.dtype == weight.dtype == jnp.float32


def test_masked_mean_gradient_has_no_nan():
    # d/dx of (x1 + x2 + x4) / 3 is 1/3 at those and 0 elsewhere.
    gradient = jax.grad(lambda values: masked.masked_mean(values, MASK))(jnp.asarray(VALUES))
    np.testing.assert_array_equal(gradient, np.where(MASK, np.float32(1 / 3), 0))


def test_weighted_sum_ignores_what_has_no_weight():
    # 2*1 + 0.5*4 = 4, weight 2.5; NaN and inf have weight 0.
    weights = np.array([[2.0, 0.0, 0.0], [0.5, 0.0, 0.0]], np.float32)
    assert [float(x) for x in masked.weighted_sum(VALUES, weights)] == [4.0, 2.5]
    gradient = jax.grad(lambda values: masked.weighted_sum(values, weights).total)(
        jnp.asarray(VALUES)
    )
    np.testing.assert_array_equal(gradient, weights)


def test_empty_mask_is_zero_with_zero_gradient():
    nothing = np.zeros_like(MASK)
    for reduce in (
        masked.masked_mean,
        masked.masked_max,
        lambda v, m: masked.masked_quantile(v, m, 0.5),
    ):
        assert float(reduce(VALUES, nothing)) == 0.0
    gradient = jax.grad(lambda values: masked.masked_mean(values, nothing))(jnp.asarray(VALUES))
    np.testing.assert_array_equal(gradient, np.zeros_like(VALUES))
    assert float(Mean(jnp.float32(np.nan), jnp.float32(0)).value()) == 0.0


def test_arrays_without_elements_are_empty_masks():
    none = np.zeros((0, 4), np.float32)
    no_mask = np.zeros((0, 4), bool)
    assert float(masked.masked_mean(none, no_mask)) == 0.0
    assert float(masked.masked_max(none, no_mask)) == 0.0
    assert float(masked.masked_quantile(none, no_mask, 0.5)) == 0.0


def test_add_then_divide_is_not_a_mean_of_means():
    # (1 + 2 + 4) / 3 = 2.333; the mean of the means 1.5 and 4 would be 2.75.
    first = masked.masked_sum(VALUES[:1], MASK[:1])
    second = masked.masked_sum(VALUES[1:], MASK[1:])
    assert float(stats.merge(first, second).value()) == pytest.approx(7 / 3, rel=1e-6)


def test_sums_of_a_large_batch_keep_float32_precision():
    # Four million times 0.99; one running float32 sum ends 0.9% off.
    values = np.full((8, 500_000), 0.99, np.float32)
    mean = float(masked.masked_mean(values, np.ones_like(values, bool)))
    assert mean == pytest.approx(float(np.float32(0.99)), rel=1e-6)


@pytest.mark.parametrize("shape", [(8,), (4, 8192)])
def test_the_largest_of_many_values_with_a_nan_is_nan(shape):
    values = np.zeros(shape, np.float32)
    values.reshape(-1)[3] = np.nan
    assert np.isnan(jax.jit(masked.masked_max)(values, np.ones(shape, bool)))


def test_masked_max():
    assert float(masked.masked_max(VALUES, MASK)) == 4.0  # not inf, not NaN
    assert float(masked.masked_max(-VALUES, MASK)) == -1.0  # a fill of 0 would win here
    assert np.isnan(float(masked.masked_max(VALUES, np.ones_like(MASK))))


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30),
    st.integers(0, 2**30 - 1),
    st.sampled_from([0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 1.0, 1 / 3]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_quantile_equals_numpy(values, bits, q):
    values = np.array(values, np.float32)
    mask = np.array([bits >> k & 1 for k in range(len(values))], bool)
    expected = np.quantile(values[mask].astype(np.float64), q) if mask.any() else 0.0
    assert float(masked.masked_quantile(values, mask, q)) == pytest.approx(
        expected, rel=1e-5, abs=1e-5
    )


def test_quantile_by_hand_and_under_jit():
    # 0..10 kept: position 0.99 * 10 = 9.9, so 9 + 0.9 * (10 - 9) = 9.9. Over all 12 entries it
    # would be 10.89 or NaN.
    values = np.array([3, 1, 2, 0, 10, 9, 8, 7, 6, 5, 4, np.nan], np.float32)
    mask = np.arange(12) < 11
    jitted = jax.jit(masked.masked_quantile, static_argnames="q")
    assert float(jitted(values, mask, q=0.99)) == pytest.approx(9.9, rel=1e-6)
    assert float(masked.masked_quantile(np.array([np.inf, 1, 2]), np.ones(3, bool), 0.25)) == 1.5
    assert (
        float(masked.masked_quantile(np.array([np.inf, np.inf, 1]), np.ones(3, bool), 0.75))
        == np.inf
    )
    assert np.isnan(float(masked.masked_quantile(values, np.ones(12, bool), 0.5)))


def test_quantile_position_is_exact_in_a_large_array():
    # h = 0.999 * 1,500,050 = 1,498,549.95 between a 0 and a 1: 0.95. A float32 product has spacing
    # 0.125 there: 1.0.
    count = 1_500_051
    values = (np.arange(count)[::-1] > 1_498_549).astype(np.float32)
    quantile = masked.masked_quantile(values, np.ones(count, bool), 0.999)
    assert float(quantile) == pytest.approx(0.95, rel=1e-6)


PACKED_VALUES = np.array([[np.nan, 1, 2, np.nan, 10], [3, np.nan, np.nan, 20, 30]], np.float32)
PACKED_MASK = ~np.isnan(PACKED_VALUES)
PACKED_INDEX = np.array([[0, 1, 1, 0, 0], [3, 0, 0, 0, 0]], np.int32)


def test_completion_sums_and_means_over_packed_rows():
    # completion 0: 10 + 20 + 30 = 60 over three tokens in two rows; 1: 1 + 2; 2: none; 3: 3 (a
    # single token).
    where = masked.CompletionIndex(PACKED_MASK, PACKED_INDEX, 4)
    np.testing.assert_array_equal(masked.completion_sums(PACKED_VALUES, where), [60, 3, 0, 3])
    np.testing.assert_array_equal(masked.completion_means(PACKED_VALUES, where), [20, 1.5, 0, 3])
    np.testing.assert_array_equal(masked.completion_counts(where), [3, 2, 0, 1])
    gradient = jax.grad(lambda values: masked.completion_means(values, where)[1])(
        jnp.asarray(PACKED_VALUES)
    )
    np.testing.assert_array_equal(gradient, np.where(PACKED_INDEX == 1, 0.5, 0.0))


def test_completion_sums_drop_tokens_of_no_completion():
    index = np.array([[-1, 0, 2]], np.int32)
    values = np.array([[5.0, 7.0, 9.0]])
    mask = np.ones((1, 3), bool)
    np.testing.assert_array_equal(
        masked.completion_sums(values, masked.CompletionIndex(mask, index, 2)), [7, 0]
    )


def test_completion_sums_of_long_completions_keep_precision():
    # 100,000 tokens of 0.99: XLA's sequential scatter-add alone is off by 2.4e-4.
    values = np.full((2, 100_000), 0.99, np.float32)
    index = np.indices(values.shape)[0]
    sums = masked.completion_sums(
        values, masked.CompletionIndex(np.ones_like(values, bool), index, 2)
    )
    np.testing.assert_allclose(sums, values.astype(np.float64).sum(axis=1), rtol=3e-6)


def test_gather_to_tokens():
    tokens = masked.gather_to_tokens(np.array([5.0, 6.0]), np.array([[0, 1, 1], [1, 0, 7]]))
    np.testing.assert_array_equal(
        tokens, [[5, 6, 6], [6, 5, np.nan]]
    )  # out of range is NaN, not completion 1


REWARDS = np.array([1.0, 0.3, 0.0, 0.3, np.nan, 0.3, 5.0])
GROUPS = np.array([0, 2, 0, 2, 2, 2, 4])
VALID = np.array([True, True, True, True, False, True, True])


def test_group_statistics_by_hand():
    # group 0: (1, 0): mean 0.5, std sqrt(0.5 / 1) = 0.7071 unbiased, 0.5 biased; group 2: three
    # times 0.3 and a dropped NaN; group 4: one member; the other ids are not in use.
    table = masked.group_statistics(REWARDS, GROUPS, VALID, ddof=1)
    np.testing.assert_array_equal(table.deviation, np.float32([0.5, 0, -0.5, 0, 0, 0, 0]))
    np.testing.assert_array_equal(table.std, np.array([np.sqrt(0.5), 0, 0, 0, 0, 0, 0], np.float32))
    np.testing.assert_array_equal(table.size, [2, 0, 3, 0, 1, 0, 0])
    np.testing.assert_array_equal(table.all_equal, [False, False, True, False, True, False, False])
    assert float(masked.group_statistics(REWARDS, GROUPS, VALID, ddof=0).std[0]) == 0.5
    # two of three groups have equal rewards; over all seven slots it would be 2/7.
    assert [float(x) for x in masked.masked_sum(table.all_equal, table.size > 0)] == [2.0, 3.0]


def test_group_std_survives_a_large_offset():
    # 1e4 + (0, 1, 2, 3): std sqrt(5/3). E[r^2] - E[r]^2 in float32 gives 0 or worse: 1e8 has
    # spacing 8.
    rewards = 1e4 + np.arange(4.0)
    std = masked.group_statistics(rewards, np.zeros(4, int), np.ones(4, bool), ddof=1).std
    assert float(std[0]) == pytest.approx(np.sqrt(5 / 3), rel=1e-6)


def test_one_broken_reward_is_not_called_equal():
    table = masked.group_statistics(
        np.array([np.nan, 1.0, 1.0]), np.zeros(3, int), np.ones(3, bool), ddof=1
    )
    assert not bool(table.all_equal[0])
    assert np.isnan(table.deviation).all()


def test_mismatched_shapes_and_values_are_refused():
    with pytest.raises(ValueError, match=r"values \(2, 3\), mask \(3, 2\)"):
        jax.jit(masked.masked_sum)(
            VALUES, MASK.T
        )  # would broadcast-fail late, or sum the wrong entries
    with pytest.raises(ValueError, match=r"weights \(3,\)"):
        masked.weighted_sum(VALUES, np.ones(3))  # would broadcast
    with pytest.raises(ValueError, match=r"q=1.5"):
        masked.masked_quantile(VALUES, MASK, 1.5)
    with pytest.raises(ValueError, match=r"ddof=2; must be 0 or 1"):
        masked.group_statistics(REWARDS, GROUPS, VALID, ddof=2)
    with pytest.raises(ValueError, match=r"num_completions=0"):
        masked.completion_sums(PACKED_VALUES, masked.CompletionIndex(PACKED_MASK, PACKED_INDEX, 0))
    with pytest.raises(ValueError, match=r"per_completion has shape \(1, 1\)"):
        masked.gather_to_tokens(np.ones((1, 1)), PACKED_INDEX)
    with pytest.raises(ValueError, match=r"rewards has shape \(1, 2\)"):
        masked.group_statistics(np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2)), ddof=1)
