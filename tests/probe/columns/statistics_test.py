"""Statistics, groups and the recommended budget by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm.discrepancy import displacement_statistics, mismatch_statistics
from dcmdp_jax.probe.columns import analysis
from dcmdp_jax.probe.columns.pairs import make_pairs, measure, recommend


def _pairs(p, q, lengths, ids=None, **columns):
    bounds = np.cumsum(lengths)[:-1]
    split = lambda x: np.split(np.asarray(x, np.float64), bounds)  # noqa: E731 - used three times in place
    ids = range(len(p)) if ids is None else ids
    logs = [split(np.log(np.asarray(x))) for x in (p, q)]
    return make_pairs(
        split(ids), *logs, **{name: split(values) for name, values in columns.items()}
    )


# |p - q|: 0.25, 0, 0.25 | 0.1, 0.3: means 1/6 and 0.2.
_FIVE = _pairs([0.5, 0.5, 0.25, 0.6, 0.2], [0.25, 0.5, 0.5, 0.5, 0.5], [3, 2])


def test_statistics_by_hand():
    found = measure(_FIVE, tolerance=0.18)
    assert (found.tokens, found.completions) == (5, 2)
    assert found.mean == pytest.approx((0.25 + 0 + 0.25 + 0.1 + 0.3) / 5, rel=1e-6)
    # Sorted 0, .1, .25, .25, .3: the third, and 0.96 of the way from the fourth to the fifth.
    assert found.p50 == pytest.approx(0.25, rel=1e-6)
    assert found.p99 == pytest.approx(0.25 + 0.96 * 0.05, rel=1e-6)
    assert found.max == pytest.approx(0.3, rel=1e-6)
    d = np.log([2, 1, 0.5, 1.2, 0.4])
    assert found.k1 == pytest.approx(-d.mean(), abs=1e-7)
    # e^d - 1 - d: the ratios add to 5.1, less five ones, less the sum of d.
    assert found.k3 == pytest.approx((5.1 - 5 - d.sum()) / 5, rel=1e-6)
    assert found.median_log_ratio == pytest.approx(math.log(2), rel=1e-6)
    # Weights 2, 1, .5, 1.2, .4: 5.1^2 / (5 (4 + 1 + .25 + 1.44 + .16)).
    assert found.effective_sample_size == pytest.approx(26.01 / (5 * 6.85), rel=1e-6)
    # The second completion alone: its mean is 0.2. Over tokens it would be 3 of 5.
    assert found.completions_over == 0.5
    # Odds 1, 1, 1/3, 1.5, 1/4 over 1/3, 1, 1, 1, 1: eps is log 3, 0, -log 3, log 1.5, -log 4; |eps|
    # sorted 0, log 1.5, log 3, log 3, log 4, of which 95% is 0.8 of the way from the fourth to the
    # fifth.
    assert found.displacement_mean == pytest.approx((math.log(1.5) - math.log(4)) / 5, abs=1e-6)
    assert found.displacement_abs_mean == pytest.approx(
        (2 * math.log(3) + math.log(1.5) + math.log(4)) / 5, rel=1e-6
    )
    assert found.displacement_abs_p50 == pytest.approx(math.log(3), rel=1e-6)
    assert found.displacement_abs_p95 == pytest.approx(
        math.log(3) + 0.8 * math.log(4 / 3), rel=1e-6
    )
    assert math.isnan(measure(_FIVE).completions_over)


def test_statistics_are_those_of_the_training_step():
    rng = np.random.default_rng(0)
    train = -rng.exponential(2.0, 500)
    rollout = -rng.exponential(2.0, 500)
    found = measure(make_pairs([np.arange(500)], [train], [rollout]))
    other = mismatch_statistics(jnp.asarray(train), jnp.asarray(rollout), np.ones(500, bool))
    ours = {name: getattr(found, name.removeprefix("mismatch/")) for name in other}
    assert ours == pytest.approx(
        {name: float(value) for name, value in other.items()}, rel=1e-3, abs=1e-5
    )
    # A certain token has finite log-odds: 16.6 where float32 calls it 1.
    train[0], rollout[0] = 0.0, -0.5
    found = measure(make_pairs([np.arange(500)], [train], [rollout]))
    other = displacement_statistics(jnp.asarray(train), jnp.asarray(rollout), np.ones(500, bool))
    ours = {name: getattr(found, name.replace("/", "_")) for name in other}
    assert ours == pytest.approx(
        {name: float(value) for name, value in other.items()}, rel=1e-3, abs=1e-4
    )


def test_equal_columns_disagree_nowhere():
    found = measure(make_pairs([[1, 2]], [[-1.0, -2.0]], [[-1.0, -2.0]]), tolerance=0.0)
    assert (found.mean, found.max, found.k1, found.k3, found.effective_sample_size) == (
        0,
        0,
        0,
        0,
        1,
    )
    assert found.pearson == pytest.approx(1) and found.completions_over == 0


def test_ragged_columns_must_be_aligned():
    with pytest.raises(ValueError, match="rollout_logprobs: lengths differ"):
        make_pairs([[1, 2]], [[-1.0, -2.0]], [[-1.0]])
    with pytest.raises(ValueError, match="an empty one"):
        make_pairs([[]], [[]], [[]])


def test_groups_by_hand():
    groups = {
        group.label: group
        for group in analysis.by_probability(_pairs([0.6, 0.8, 0.4], [0.3, 0.7, 0.6], [3]))
    }
    # 0.3 of 0.6 in all is the first's; the bin is that of q, not of p.
    assert {label: group.tokens for label, group in groups.items()} == {
        "0.25 - 0.5": 1,
        "0.5 - 0.75": 2,
    }
    assert groups["0.25 - 0.5"].mean == pytest.approx(0.3, rel=1e-6)
    assert groups["0.25 - 0.5"].share == pytest.approx(0.5, rel=1e-6)
    assert groups["0.25 - 0.5"].mean_log_ratio == pytest.approx(math.log(2), rel=1e-6)
    places = {
        group.label: (group.tokens, round(group.mean, 6)) for group in analysis.by_position(_FIVE)
    }
    # First tokens .25 and .1, second 0 and .3, third .25.
    assert places == {"1": (2, 0.175), "2": (2, 0.15), "3 - 4": (1, 0.25)}
    assert analysis.by_entropy(_FIVE) == [] and analysis.by_lag(_FIVE) == []
    known = _pairs([0.5, 0.5], [0.25, 0.5], [2], entropies=[0.05, 9.0], lags=[0, 3])
    assert [group.label for group in analysis.by_entropy(known)] == ["0 - 0.1", "over 4"]
    assert [(group.label, round(group.mean, 6)) for group in analysis.by_lag(known)] == [
        ("0 steps", 0.25),
        ("3 steps", 0),
    ]


def test_the_tokens_with_the_largest_part_come_first():
    texts = {0: "12", 1: " the", 2: "\n", 3: "<|im_end|>", 4: "x2"}
    pairs = _pairs([0.5] * 6, [0.4, 0.5, 0.5, 0.5, 0.3, 0.2], [6], ids=[0, 1, 2, 3, 4, 0])
    first = analysis.by_token(pairs, texts.get)[0]
    assert (first.label, first.tokens) == ("0 '12'", 2) and first.share == pytest.approx(
        0.4 / 0.6, rel=1e-6
    )


def test_worst_tokens_stay_within_their_completion():
    worst = analysis.worst_tokens(_FIVE, str)[0]
    assert (worst.completion, worst.position, worst.token_id) == (1, 1, 4)
    assert (worst.before, worst.text, worst.after) == ("3", "4", "")
    assert (worst.train, worst.rollout) == pytest.approx((0.2, 0.5), rel=1e-6)


def test_completions_that_are_alike_up_to_a_token_show_it_once():
    p = [0.5, 0.5, 0.5, 0.5, 0.5, 0.9]
    q = [0.5, 0.2, 0.5, 0.2, 0.5, 0.2]
    pairs = _pairs(p, q, [2, 2, 2], ids=[7, 8, 7, 8, 7, 8])
    # The third has the same tokens and another probability, so another prompt.
    worst = analysis.worst_tokens(pairs, str)
    assert [(each.completion, each.position) for each in worst if each.token_id == 8] == [
        (2, 1),
        (0, 1),
    ]


@pytest.mark.parametrize(
    ("mean", "floor", "expected"),
    [
        (0.004, 0.001, 0.005),  # 1.25 x 0.004, above 2 x 0.001
        (0.001, 0.002, 0.004),  # 2 x 0.002, above 1.25 x 0.001
        (0.00101, None, 0.0013),  # 0.0012625, rounded up
    ],
)
def test_recommended_tolerance_by_hand(mean, floor, expected):
    assert recommend(mean, floor, None).tolerance == pytest.approx(expected, rel=1e-9)


def test_no_tolerance_is_recommended_for_a_defect_or_for_equal_engines():
    assert math.isnan(recommend(0.1, None, "stale weights").tolerance)
    assert "stale weights" in recommend(0.1, None, "stale weights").reasoning
    assert math.isnan(recommend(0.0, None, None).tolerance)
