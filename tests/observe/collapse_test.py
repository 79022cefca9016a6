"""Signs that a mismatch explains a fall of the reward, and signs of another cause."""

import numpy as np

from dcmdp_jax.observe.collapse import collapse_signs

_STEPS = 20


def _signs(rewards, **columns):
    columns = {"reward/mean": rewards} | {
        name.replace("__", "/"): values for name, values in columns.items()
    }
    return collapse_signs(
        {name: (np.arange(1, _STEPS + 1), np.array(values)) for name, values in columns.items()}
    )


# Means of two steps: 0.8 up to step 12, 0.5 at 13, and 0.2, below half, from 14 on: the fall
# begins after step 12.
_FALLS = [0.8] * 12 + [0.2] * 8


def test_a_reward_that_holds_or_comes_back_has_no_signs():
    assert _signs([0.8] * _STEPS) is None
    assert _signs([0.8] * 5 + [0.1] * 10 + [0.8] * 5) is None
    assert _signs([0.0] * _STEPS) is None
    assert collapse_signs({}) is None


def test_a_discrepancy_that_doubles_first_speaks_for_the_mismatch():
    early = _signs(_FALLS, discrepancy__mean=[0.001] * 8 + [0.005] * 12)
    assert early.step == 12
    [sentence] = early.supporting
    assert sentence.startswith("The discrepancy had doubled before the reward fell")
    assert early.opposing == []
    late = _signs(_FALLS, discrepancy__mean=[0.001] * 13 + [0.005] * 7)
    assert late.supporting == []
    assert late.opposing[0].startswith("The discrepancy had not doubled when the reward fell")


def test_a_mismatch_that_rises_while_the_reward_falls_came_second():
    """The reward falls in steps 13 to 17 and is below half at 17; the discrepancy rises at 15."""
    falling = [0.68] * 12 + [0.6, 0.5, 0.4, 0.3, 0.25] + [0.25] * 3
    signs = _signs(falling, discrepancy__mean=[0.001] * 14 + [0.005] * 6)
    # Means of two steps: 0.64 at 13 is above 0.9 * 0.68 = 0.612, 0.55 at 14 is not.
    assert signs.step == 13
    assert signs.supporting == []
    assert signs.opposing[0].startswith("The discrepancy had not doubled when the reward fell")


def test_a_rise_while_it_is_unclear_whether_the_reward_falls_decides_nothing():
    """One high mean of two steps, at step 5, dates the fall too early: 0.9 * 0.8 = 0.72."""
    noisy = [0.6] * 3 + [0.8] * 2 + [0.6] * 7 + [0.1] * 8
    signs = _signs(noisy, discrepancy__mean=[0.001] * 8 + [0.005] * 12)
    assert signs.step == 5
    assert signs.supporting == signs.opposing == []
    assert signs.undecided == [
        "The discrepancy doubled between steps 5 and 12, in which the reward began to fall."
    ]
    after = _signs(noisy, discrepancy__mean=[0.001] * 13 + [0.005] * 7)
    assert after.opposing == ["The discrepancy had not doubled when the reward fell."]
    assert after.undecided == []


def test_a_mismatch_that_was_large_from_the_start_decides_nothing():
    columns = {"discrepancy__mean": [0.044] * _STEPS}
    large = _signs(_FALLS, mismatch__effective_sample_size=[0.81] * _STEPS, **columns)
    assert large.opposing == large.supporting == []
    [sentence] = large.undecided
    assert sentence.endswith("from the first step on: an effective sample size of 81%.")
    small = _signs(_FALLS, mismatch__effective_sample_size=[0.97] * _STEPS, **columns)
    assert small.undecided == []
    assert small.opposing == ["The discrepancy had not doubled when the reward fell."]


def test_a_negative_reward_is_measured_from_its_lowest_value():
    """From -3 to -0.2 is no fall; back to -3 is one, by 2.8 of 2.8."""
    rising = np.linspace(-3, -0.2, _STEPS)
    assert _signs(rising) is None
    # From -1 to 1 and to 0 is half of the way, not below it; to -0.2 is.
    assert _signs([-1.0] * 5 + [1.0] * 8 + [0.0] * 7) is None
    assert _signs([-1.0] * 5 + [1.0] * 8 + [-0.2] * 7).step == 13
    there_and_back = [*np.linspace(-3, -0.2, 13), *[-3.0] * 7]
    signs = _signs(there_and_back, discrepancy__mean=[0.001] * 8 + [0.005] * 12)
    assert signs.step == 13
    assert signs.supporting[0].startswith("The discrepancy had doubled before the reward fell")
    assert signs.opposing == []


def test_alerts_and_the_effective_sample_size_count_up_to_the_fall():
    raised = [0] * 10 + [1] * 10
    signs = _signs(
        _FALLS,
        alarm__mismatch=raised,
        alarm__truncation=raised,
        alarm__collapse=[0] * 14 + [1] * 6,
        mismatch__effective_sample_size=[0.99] * 11 + [0.6] * 9,
    )
    sample_size, alert = signs.supporting
    assert sample_size.startswith("The effective sample size was below 80%")
    assert alert == "The alert mismatch was raised before the reward fell."


def test_other_causes_are_named_with_what_to_do():
    signs = _signs(
        _FALLS,
        reward__all_equal_groups=[0.0] * 4 + [0.95] * 16,
        completion__truncated_fraction=[0.4] * _STEPS,
        policy__kl=[0.0] * 10 + [0.6] * 10,
        policy__entropy=[1.0] * 10 + [0.05] * 10,
    )
    assert [sentence.partition(":")[0] for sentence in signs.opposing] == [
        "Nearly all groups have one reward, so there is no signal",
        "The policy moved far from its start (policy/kl)",
        "The policy's entropy is nearly gone",
    ]
    calm = {"policy__kl": [0.0] * 10 + [0.4] * 10, "policy__entropy": [1.0] * 10 + [0.5] * 10}
    assert _signs(_FALLS, **calm).opposing == []


def test_what_was_nothing_at_first_has_not_grown_and_a_missing_reward_is_no_fall():
    # Both would divide by zero: no sign of either kind.
    signs = _signs(_FALLS, discrepancy__mean=[0.0] * 8 + [0.005] * 12, policy__entropy=[0.0] * 20)
    assert signs.supporting == signs.opposing == []
    # A NaN is no reward: 0.8 at 19 steps, which holds.
    assert _signs([0.8] * 12 + [np.nan] + [0.8] * 7) is None
    # Nineteen rewards, so means of one step: step 12 is the last high one.
    assert _signs([0.8] * 5 + [np.nan] + [0.8] * 6 + [0.2] * 8).step == 12
