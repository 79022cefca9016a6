"""The constants of rows by hand, and a correction that drops tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm import losses, penalties, signals, stats
from dcmdp_jax.algorithm.penalties import FIXED_MULTIPLIERS, PENALTIES
from dcmdp_jax.algorithm.remedies import Corrected, Tokens

# Completion 0 has tokens 0, 1, 2 of row 0, completion 1 tokens 0, 1 of row 1; the rest is padding.
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
INDEX = np.array([[0, 0, 0, 0], [1, 1, 0, 0]], np.int32)
OLD = np.log([[0.5, 0.5, 0.5, 0.9], [0.25, 0.5, 0.9, 0.9]]).astype(np.float32)
ROLLOUT = np.log([[0.5, 0.25, 0.1, 0.1], [0.5, 0.5, 0.1, 0.1]]).astype(np.float32)
DELTA = [
    [0.0, 0.25, 0.4, 0.0],
    [0.25, 0.0, 0.0, 0.0],
]  # |p - q|; 0 outside the mask, where it would be 0.8
ADVANTAGES = np.array([1.0, -1.0], np.float32)
WEIGHTS = np.array([1 / 3, 1 / 2], np.float32)
OPTIONS = {
    "measure": {"measure": "diff", "sided": "two"},
    "level": "token",
    "penalty": penalties.dc_grpo,
}


def _signals(old=OLD, rows=slice(0, 2), tolerance=0.3, **changes):
    tokens = Tokens(
        train_logprobs=old[rows],
        old_logprobs=old[rows],
        rollout_logprobs=ROLLOUT[rows],
        advantages=ADVANTAGES[INDEX[rows]],
        completion_mask=MASK[rows],
        completion_index=INDEX[rows],
        num_completions=2,
        multiplier=0.5,
        tolerance=tolerance,
    )
    return signals.row_signals(tokens, WEIGHTS, **(OPTIONS | changes))


def test_signals_by_hand():
    found = _signals()
    np.testing.assert_allclose(found.discrepancy, DELTA, atol=1e-6)
    # A - 0.5 delta on the tokens of each completion
    np.testing.assert_allclose(
        found.tokens.advantages[MASK], [1.0, 0.875, 0.8, -1.125, -1.0], atol=1e-6
    )
    np.testing.assert_allclose(
        found.weights, [[1 / 3, 1 / 3, 1 / 3, 0], [0.5, 0.5, 0, 0]], rtol=1e-6
    )
    np.testing.assert_array_equal(found.dropped_tokens, [0, 0])
    # 0.9 over 5 tokens; the mean of the completions' means would be (0.65 / 3 + 0.125) / 2 = 0.171
    assert float(found.mean_discrepancy.total) == pytest.approx(0.9, rel=1e-6)
    assert float(found.mean_discrepancy.weight) == 5.0


def test_sequence_level_penalizes_the_mean_and_reports_the_same_mean():
    token = _signals()
    sequence = _signals(level="sequence")
    # completion 0 pays 0.5 * 0.65 / 3 on every token, completion 1 pays 0.5 * 0.125
    expected = [1 - 0.325 / 3] * 3 + [-1.0625] * 2
    np.testing.assert_allclose(sequence.tokens.advantages[MASK], expected, rtol=1e-6)
    assert float(sequence.mean_discrepancy.value()) == float(token.mean_discrepancy.value())


def test_share_of_the_update_that_is_penalty_by_hand():
    # 1 - p = .5 .5 .5 and .75 .5; penalizes lambda delta = 0 .125 .2 and .125 0; |A| = 1; weights
    # 1/3 and 1/2.
    found = _signals()
    share = signals.penalty_share(found.tokens, ADVANTAGES[INDEX], found.weights)
    penalty = (0.5 * 0.125 + 0.5 * 0.2) / 3 + 0.75 * 0.125 / 2
    plain = 3 * 0.5 / 3 + (0.75 + 0.5) / 2
    assert float(share.value()) == pytest.approx(penalty / (penalty + plain), rel=1e-6)
    parts = [_signals(rows=slice(r, r + 1)) for r in range(2)]
    halves = [
        signals.penalty_share(part.tokens, ADVANTAGES[INDEX[r : r + 1]], part.weights)
        for r, part in enumerate(parts)
    ]
    assert float(stats.merge(*halves).value()) == pytest.approx(float(share.value()), rel=1e-6)
    # Nothing penalized, and nothing but the penalty; the NaN outside the mask is ignored.
    assert (
        float(signals.penalty_share(found.tokens, found.tokens.advantages, found.weights).value())
        == 0
    )
    assert float(signals.penalty_share(found.tokens, np.zeros((2, 4)), found.weights).value()) == 1


def test_rows_add():
    whole = _signals()
    parts = [_signals(rows=slice(r, r + 1)) for r in range(2)]
    merged = stats.merge(parts[0].mean_discrepancy, parts[1].mean_discrepancy)
    assert float(merged.value()) == pytest.approx(float(whole.mean_discrepancy.value()), rel=1e-6)
    for of in (lambda x: x.discrepancy, lambda x: x.tokens.advantages, lambda x: x.weights):
        np.testing.assert_array_equal(np.concatenate([of(part) for part in parts]), of(whole))


def test_no_gradient_flows_through_any_signal():
    def total(old):
        found = _signals(old)
        return sum(jnp.sum(x) for x in jax.tree.leaves(found) if jnp.result_type(x) == jnp.float32)

    np.testing.assert_array_equal(jax.grad(total)(jnp.asarray(OLD)), np.zeros(OLD.shape))


def _keep_close(tokens):
    """Tokens whose p and q differ by a factor above 3 are dropped, the others weighed by p / q."""
    apart = tokens.old_logprobs - tokens.rollout_logprobs
    return Corrected(jnp.exp(apart), jnp.abs(apart) <= np.log(3), jnp.zeros(apart.shape, bool))


def test_correction_drops_tokens_and_the_total_counts_the_rest():
    found = _signals(corrections=[_keep_close])
    # p / q is 1, 2, 5 (dropped) and 0.5, 1
    np.testing.assert_allclose(found.weights, [[1 / 3, 2 / 3, 0, 0], [0.25, 0.5, 0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(found.dropped_tokens, [1, 0])
    # The constraint is on all tokens, dropped or not.
    assert float(found.mean_discrepancy.weight) == 5.0
    lengths = np.array([3, 2])
    in_loss = np.ones(2, bool)
    for mode, full_total, kept_total in (
        ("seq_mean_token_mean", 2, 2 / 3 + 1),
        ("token_mean", 5, 4),
        ("fixed_length", 2, 2),
    ):
        weights, total = losses.aggregation_weights(
            lengths, in_loss, mode=mode, max_completion_tokens=8
        )
        assert float(total) == full_total
        kept_weights, total = losses.aggregation_weights(
            lengths,
            in_loss,
            mode=mode,
            max_completion_tokens=8,
            dropped_tokens=found.dropped_tokens,
        )
        assert float(total) == pytest.approx(kept_total, rel=1e-6)
        np.testing.assert_array_equal(weights, kept_weights)


@pytest.mark.parametrize("length", [1, 3, 7, 11, 8191, 1_000_003])
def test_total_without_dropped_tokens_is_a_whole_number(length):
    _, total = losses.aggregation_weights(
        np.full(3, length),
        np.ones(3, bool),
        mode="seq_mean_token_mean",
        dropped_tokens=np.zeros(3, int),
    )
    assert float(total) == 3.0


def test_methods_with_a_fixed_multiplier_are_penalties():
    assert set(FIXED_MULTIPLIERS) < set(PENALTIES)
    assert set(PENALTIES) - set(FIXED_MULTIPLIERS) == {"dc_grpo"}
