"""Group-normalized advantages against a hand computation."""

import jax
import numpy as np
import pytest

from dcmdp_jax.algorithm.advantages import group_advantages, has_signal, overlong_penalty

ALL = np.ones(4, bool)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_unbiased_by_default(transform):
    # (1, 0, 0, 1): mean 0.5, std sqrt(4 * 0.25 / 3) = 0.57735, A = +-0.866; with ddof 0 it would be
    # +-1.
    advantages = transform(group_advantages)(np.array([1.0, 0.0, 0.0, 1.0]), np.zeros(4, int), ALL)
    np.testing.assert_allclose(
        advantages, np.array([1, -1, -1, 1]) * (0.5 / (np.sqrt(1 / 3) + 1e-6)), rtol=1e-6
    )
    assert advantages.dtype == np.float32


def test_settings():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    biased = group_advantages(rewards, np.zeros(4, int), ALL, ddof=0, epsilon=0.5)
    np.testing.assert_array_equal(biased, [0.5, -0.5, -0.5, 0.5])  # 0.5 / (0.5 + 0.5)
    plain = group_advantages(rewards, np.zeros(4, int), ALL, normalize_std=False)
    np.testing.assert_array_equal(plain, [0.5, -0.5, -0.5, 0.5])


def test_interleaved_groups():
    # group 0: (3, 1) -> +-1/sqrt(2); group 3: (0, 10) the same. One group of four would give other
    # values.
    advantages = group_advantages(
        np.array([3.0, 0.0, 1.0, 10.0]), np.array([0, 3, 0, 3]), ALL, epsilon=0.0
    )
    np.testing.assert_allclose(advantages, np.array([1, -1, -1, 1]) / np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, -1 / 3, 1.0, 0.0])
def test_all_equal_group_is_exactly_zero(reward, normalize_std):
    # Eight times 0.3 in float32 has the mean 0.29999998: (r - mean) / (std + 1e-6) would be 0.029.
    rewards = np.full(8, reward)
    group = np.zeros(8, int)
    for epsilon in (1e-6, 0.0):
        advantages = group_advantages(
            rewards, group, np.ones(8, bool), epsilon=epsilon, normalize_std=normalize_std
        )
        np.testing.assert_array_equal(advantages, np.zeros(8))


@pytest.mark.parametrize("offset", [1e5, 1e6, 1e7, -1e7])
def test_a_constant_added_to_rewards_changes_no_advantage(offset):
    # (1, 0, 0): 2/3, -1/3, -1/3 over sqrt(1/3): 1.1547, -0.5774. The mean formed at 1e5 gives
    # 1.1502.
    for rewards in ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]):
        shifted = np.float32(np.add(rewards, offset))
        group = np.zeros(len(rewards), int)
        advantages = group_advantages(shifted, group, epsilon=0.0)
        np.testing.assert_allclose(
            advantages, (rewards - np.mean(rewards)) / np.std(rewards, ddof=1), rtol=1e-6
        )
        plain = group_advantages(shifted, group, normalize_std=False)
        np.testing.assert_allclose(plain, rewards - np.mean(rewards), rtol=1e-6)


def test_single_valid_member_is_zero_and_invalid_ones_are_ignored():
    # group 1 has one valid member (n - 1 = 0), group 0 lost its NaN: (2, 0) -> +-0.7071, not a mean
    # over three.
    rewards = np.array([2.0, np.nan, 0.0, 5.0, np.inf])
    groups = np.array([0, 0, 0, 1, 1])
    valid = np.array([True, False, True, True, False])
    for ddof, unit in ((1, np.sqrt(0.5)), (0, 1.0)):
        advantages = group_advantages(rewards, groups, valid, ddof=ddof, epsilon=0.0)
        np.testing.assert_allclose(advantages, [unit, 0, -unit, 0, 0], rtol=1e-6, atol=0)


def test_no_valid_member_at_all():
    advantages = group_advantages(np.full(3, np.nan), np.zeros(3, int), np.zeros(3, bool))
    np.testing.assert_array_equal(advantages, np.zeros(3))


def test_broken_valid_reward_is_not_hidden():
    assert np.isnan(
        group_advantages(np.array([np.nan, 1.0]), np.zeros(2, int), np.ones(2, bool))
    ).all()


@pytest.mark.parametrize(("dtype", "groups"), [(np.int8, 16), (np.int16, 4096)])
def test_the_number_of_completions_may_be_beyond_the_dtype_of_group_ids(dtype, groups):
    # Groups of 8 with rewards 0 and 1 by turns: +-0.5 over a deviation of sqrt(8 x 0.25 / 7).
    ids = np.repeat(np.arange(groups), 8).astype(dtype)
    advantages = group_advantages(np.arange(8 * groups) % 2.0, ids)
    np.testing.assert_allclose(advantages[:16], [-0.9354, 0.9354] * 8, atol=1e-4)
    assert not np.isnan(advantages).any()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"group_ids \(3,\)"):
        jax.jit(group_advantages)(np.ones(4), np.zeros(3, int), ALL)
    with pytest.raises(ValueError, match=r"epsilon=-1"):
        group_advantages(np.ones(4), np.zeros(4, int), ALL, epsilon=-1)
    with pytest.raises(ValueError, match=r"group_ids has dtype <U1; must be integers: numpy.uniq"):
        group_advantages(np.ones(4), list("aabb"), ALL)
    with pytest.raises(ValueError, match=r"ddof=3"):
        group_advantages(np.ones(4), np.zeros(4, int), ALL, ddof=3)


def test_soft_overlong_punishment_by_hand():
    # T_max 20, buffer 8: free up to 12 tokens, then 1/8 a token.
    found = overlong_penalty(
        np.array([0, 12, 13, 16, 20]), max_completion_tokens=20, buffer=8, penalty=0.5
    )
    np.testing.assert_allclose(found, [0, 0, 0.0625, 0.25, 0.5])
    with pytest.raises(ValueError, match="buffer=0"):
        overlong_penalty(np.array([1]), max_completion_tokens=20, buffer=0)


def test_groups_without_a_signal():
    rewards = np.array([1.0, 1.0, 0.0, 1.0, 3.0, 2.0])
    groups = np.array([0, 0, 1, 1, 2, 2])
    # The second member of group 2 is dropped: one valid member is no signal.
    valid = np.array([True, True, True, True, True, False])
    found = has_signal(rewards, groups, valid)
    np.testing.assert_array_equal(found, [False, False, True, True, False, False])
