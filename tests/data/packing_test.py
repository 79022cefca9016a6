"""Rollout -> Batch: every token where it belongs, whatever the shapes."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcmdp_jax.data.episode import Episode, OpenGroups, collect
from dcmdp_jax.data.packing import one_a_row, pack, staleness_metrics
from dcmdp_jax.data.row_layout import RowShapes, make_row_shapes
from tests.support.sampling import counted_rollout


def _unpack(batch):
    """Read completions back from the rows.

    (mini-batch, completion) -> (prompt and completion ids, completion ids, log-probs).
    """
    found = {}
    for rows in batch.rows:
        for m, a, r in np.ndindex(rows.input_ids.shape[:3]):
            segments = rows.segment_ids[m, a, r]
            for segment in np.unique(segments[segments > 0]):
                place = segments == segment
                mask = rows.completion_mask[m, a, r] & place
                (index,) = np.unique(rows.completion_index[m, a, r][mask])
                np.testing.assert_array_equal(
                    rows.position_ids[m, a, r][place], np.arange(place.sum())
                )
                assert (m, index) not in found
                found[m, int(index)] = (
                    rows.input_ids[m, a, r][place],
                    rows.input_ids[m, a, r][mask],
                    rows.rollout_logprobs[m, a, r][mask],
                )
                assert a < batch.micro_batches[m, _bucket(batch, rows)]
    return found


def _bucket(batch, rows):
    return next(b for b, candidate in enumerate(batch.rows) if candidate is rows)


def test_two_buckets_by_hand():
    # Lengths with prompt: 3 + 2 = 5, 3 + 6 = 9 | 2 + 1 = 3, 2 + 8 = 10. Rows of 6 and 10: 0 and 2
    # are short.
    rollout = counted_rollout([(3, 2), (3, 6), (2, 1), (2, 8)], group_size=2)
    plan = RowShapes(
        row_lengths=(6, 10),
        rows_per_micro_batch=(1, 1),
        micro_batches=(2, 2),
        mini_batches=2,
        completions=2,
        segments_per_row=1,
        row_shards=1,
        longest=10,
    )
    batch, (tokens, computed) = pack(
        rollout.episodes, np.array([1, 0, 0, 1], np.float32), plan, mask_truncated=False
    )
    np.testing.assert_array_equal(batch.micro_batches, [[1, 1], [1, 1]])
    short, long = batch.rows
    np.testing.assert_array_equal(short.input_ids[0, 0, 0], [100, 101, 102, 1000, 1001, 0])
    np.testing.assert_array_equal(
        short.completion_mask[0, 0, 0], [False, False, False, True, True, False]
    )
    np.testing.assert_array_equal(short.segment_ids[0, 0, 0], [1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(short.segment_ids[0, 1], 0)
    np.testing.assert_array_equal(long.completion_index[1, 0, 0], [0, 0] + [1] * 8)
    np.testing.assert_array_equal(long.rollout_logprobs[1, 0, 0][:4], [0, 0, -0.125, -0.25])
    # Tokens 5 + 9 + 3 + 10 = 27; computed: each mini-batch one row of 6 and one of 10.
    assert (tokens, computed) == (27, 32)
    np.testing.assert_array_equal(batch.rewards, [[1, 0], [0, 1]])
    # Group ids restart in each mini-batch: 2 of the rollout is 0 of the second mini-batch.
    np.testing.assert_array_equal(batch.group_ids, [[0, 0], [0, 0]])


def _routed(rollout, layers=2, k=2):
    """Experts of token t of completion i: 100 i + t, in all layers; of all tokens but the last."""
    sizes = [
        len(p) + len(c) - 1 for p, c in zip(rollout.prompt_ids, rollout.completion_ids, strict=True)
    ]
    return [
        np.tile((100 * i + np.arange(n))[:, None, None], (1, layers, k))
        for i, n in enumerate(sizes)
    ]


def test_routed_experts_lie_with_the_tokens_that_were_read():
    # As the test above: rows of 6 and 10; -1 for what was not read, the last token of each and
    # padding.
    rollout = counted_rollout([(3, 2), (3, 6), (2, 1), (2, 8)], group_size=2)
    rollout.routed_experts = _routed(rollout)
    plan = RowShapes(
        row_lengths=(6, 10),
        rows_per_micro_batch=(1, 1),
        micro_batches=(2, 2),
        mini_batches=2,
        completions=2,
        segments_per_row=1,
        row_shards=1,
        longest=10,
    )
    batch, _ = pack(rollout.episodes, np.zeros(4, np.float32), plan, mask_truncated=False)
    short, long = (rows.columns["routed_experts"] for rows in batch.rows)
    assert short.shape == (2, 2, 1, 6, 2, 2) and short.dtype == np.int16
    np.testing.assert_array_equal(short[0, 0, 0, :, 1, 0], [0, 1, 2, 3, -1, -1])
    np.testing.assert_array_equal(short[0, 1], -1)
    np.testing.assert_array_equal(long[1, 0, 0, :, 0, 1], [*range(300, 309), -1])


def test_refuses_experts_of_some_completions_alone():
    rollout = counted_rollout([(3, 2), (3, 3)], group_size=2)
    plan = make_row_shapes(
        row_lengths=(6,),
        micro_batch_tokens=12,
        mini_batches=1,
        completions=2,
        segments_per_row=1,
        row_shards=1,
    )
    routed = _routed(rollout)
    for wrong, message in (
        ([routed[0], None], r"completion 1: routed experts of shape None, expected \(6, 2, 2\)"),
        ([None, routed[1]], r"completion 1: routed experts of shape \(6, 2, 2\), expected None"),
        (
            [routed[0], routed[1][:, :1]],
            r"completion 1: routed experts of shape \(6, 1, 2\), expected \(6, 2, 2\)",
        ),
    ):
        rollout.routed_experts = wrong
        with pytest.raises(ValueError, match=message):
            pack(rollout.episodes, np.zeros(2, np.float32), plan, mask_truncated=False)


def test_segments_first_fit_longest_first():
    # Lengths 7, 5, 4, 3 in rows of 8 with at most 2 segments: 7 alone; 5 + 3; 4.
    rollout = counted_rollout([(1, 6), (1, 4), (1, 3), (1, 2)], group_size=4)
    plan = make_row_shapes(
        row_lengths=(8,),
        micro_batch_tokens=8,
        mini_batches=1,
        completions=4,
        segments_per_row=2,
        row_shards=1,
    )
    batch, (_, computed) = pack(
        rollout.episodes, np.zeros(4, np.float32), plan, mask_truncated=False
    )
    assert batch.micro_batches.tolist() == [[3]]
    np.testing.assert_array_equal(batch.rows[0].segment_ids[0, 1, 0], [1, 1, 1, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(batch.rows[0].position_ids[0, 1, 0], [0, 1, 2, 3, 4, 0, 1, 2])
    np.testing.assert_array_equal(batch.rows[0].completion_index[0, 1, 0], [0, 1, 1, 1, 1, 0, 3, 3])
    assert computed == 24


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 23)), min_size=8, max_size=8),
    segments=st.sampled_from([1, 2, 100]),
    buckets=st.sampled_from([(32,), (8, 32), (8, 16, 24, 32)]),
    tokens=st.integers(1, 200),
    shards=st.sampled_from([1, 2, 4]),
)
def test_every_completion_comes_back_whole(lengths, segments, buckets, tokens, shards):
    rollout = counted_rollout(lengths, group_size=2)
    plan = make_row_shapes(
        row_lengths=buckets,
        micro_batch_tokens=tokens,
        mini_batches=2,
        completions=4,
        segments_per_row=segments,
        row_shards=shards,
    )
    batch, (tokens, computed) = pack(
        rollout.episodes, np.arange(8, dtype=np.float32), plan, mask_truncated=False
    )
    assert all(rows % shards == 0 for rows in plan.rows_per_micro_batch)
    found = _unpack(batch)
    assert sorted(found) == [(m, i) for m in range(2) for i in range(4)]
    for (m, i), (ids, completion, logprobs) in found.items():
        source = 4 * m + i
        np.testing.assert_array_equal(ids, np.concatenate([rollout.prompt_ids[source], completion]))
        np.testing.assert_array_equal(completion, rollout.completion_ids[source])
        np.testing.assert_array_equal(logprobs, rollout.rollout_logprobs[source])
    assert tokens == sum(p + c for p, c in lengths) <= computed


def test_dropped_and_truncated():
    rollout = counted_rollout(
        [(1, 2), (1, 3), (1, 2), (1, 4)], 2, finish=["stop", "length", "stop", "stop"]
    )
    plan = make_row_shapes(
        row_lengths=(8,),
        micro_batch_tokens=64,
        mini_batches=1,
        completions=4,
        segments_per_row=1,
        row_shards=1,
    )
    dropped = np.array([False, False, True, False])
    rollout.rollout_logprobs[2][:] = np.nan
    batch, (tokens, _) = pack(
        rollout.episodes, np.ones(4, np.float32), plan, mask_truncated=True, dropped=dropped
    )
    np.testing.assert_array_equal(batch.valid, [[True, True, False, True]])
    np.testing.assert_array_equal(batch.loss_mask, [[True, False, False, True]])
    # The dropped completion's tokens and numbers are nowhere; the truncated one still counts in the
    # discrepancy.
    assert np.isfinite(batch.rows[0].rollout_logprobs).all()
    assert sorted(np.unique(batch.rows[0].completion_index[batch.rows[0].completion_mask])) == [
        0,
        1,
        3,
    ]
    assert tokens == 3 + 4 + 5


def test_too_long_is_named():
    plan = make_row_shapes(
        row_lengths=(8,),
        micro_batch_tokens=64,
        mini_batches=1,
        completions=2,
        segments_per_row=1,
        row_shards=1,
    )
    with pytest.raises(ValueError, match=r"completion 1 has 9 tokens with its prompt, rows 8"):
        pack(
            counted_rollout([(1, 2), (3, 6)], 2).episodes,
            np.ones(2, np.float32),
            plan,
            mask_truncated=False,
        )
    with pytest.raises(ValueError, match="3 completions"):
        pack(
            counted_rollout([(1, 2)] * 3, 1).episodes,
            np.ones(3, np.float32),
            plan,
            mask_truncated=False,
        )


def _tool_episode(group, member, start, versions=(4, 6)):
    """An episode of several turns and versions.

    A prompt of 2 tokens, two sampled, two of a tool's output, one sampled two versions later, its
    end.
    """
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 0], bool)
    policy_versions = np.array(
        [-1, -1, versions[0], versions[0], -1, -1, versions[1], -1], np.int32
    )
    logprobs = np.where(mask, -np.arange(8) / 8, np.nan).astype(np.float32)
    columns = {"rollout_logprobs": logprobs, "policy_versions": policy_versions}
    return Episode(np.arange(8, dtype=np.int32) + start, mask, group, member, "stop", columns)


def test_tokens_that_the_policy_did_not_sample_are_read_but_not_trained():
    """A tool's output between two turns is in the row, outside the mask.

    It is not counted as completion length.
    """
    plan = make_row_shapes(
        row_lengths=(10,),
        micro_batch_tokens=64,
        mini_batches=1,
        completions=2,
        segments_per_row=1,
        row_shards=1,
    )
    episodes = [
        _tool_episode(0, 0, 0),
        _tool_episode(0, 1, 0).with_columns(rollout_logprobs=np.full(8, -1.0)),
    ]
    batch, _ = pack(episodes, np.array([1, 0], np.float32), plan, mask_truncated=False)
    (rows,) = batch.rows
    mask = [0, 0, 1, 1, 0, 0, 1, 0]
    np.testing.assert_array_equal(rows.input_ids[0, 0, 0, :8], np.arange(8))
    np.testing.assert_array_equal(rows.position_ids[0, 0, 0, :8], np.arange(8))
    np.testing.assert_array_equal(rows.completion_mask[0, 0, :, :8], [mask, mask])
    assert rows.completion_mask.sum() == 6  # nothing beyond the episodes
    np.testing.assert_array_equal(rows.completion_index[0, 0, :, :8], [np.zeros(8), mask])
    # The tool's tokens have no log-prob, not even NaN: 2/8, 3/8 and 6/8 below 0.
    assert rows.rollout_logprobs[0, 0, 0][rows.completion_mask[0, 0, 0]].tolist() == [
        -0.25,
        -0.375,
        -0.75,
    ]
    assert (
        np.count_nonzero(rows.rollout_logprobs[0, 0, 0]) == 3
        and np.isfinite(rows.rollout_logprobs).all()
    )
    # Not 6, the tokens after the prompt.
    np.testing.assert_array_equal(batch.completion_lengths, [[3, 3]])
    # A trainer at step 6: 2, 2 and 0 steps, twice.
    assert staleness_metrics(batch, 6) == {
        "rollout/staleness_mean": pytest.approx(4 / 3),
        "rollout/staleness_max": 2.0,
    }


def test_order_of_finishing_does_not_change_a_batch():
    rollout = counted_rollout([(2, 3), (2, 3), (3, 1), (3, 2), (1, 4), (1, 1)], group_size=2)
    plan = make_row_shapes(
        row_lengths=(8,),
        micro_batch_tokens=16,
        mini_batches=3,
        completions=2,
        segments_per_row=2,
        row_shards=1,
    )
    groups = [rollout.episodes[i : i + 2] for i in (0, 2, 4)]
    finished = OpenGroups(2)
    out_of_order = [
        groups[2][1],
        groups[0][0],
        groups[2][0],
        groups[1][0],
        groups[0][1],
        groups[1][1],
    ]
    yielded = [finished.add([episode]) for episode in out_of_order]
    # A group is complete with its second episode, whichever that is; members in order.
    found = [[(e.group, e.member) for e in complete] for complete in yielded]
    assert found == [[], [], [(2, 0), (2, 1)], [], [(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    expected, _ = pack(rollout.episodes, np.ones(6, np.float32), plan, mask_truncated=False)
    batch, _ = pack(collect(yielded), np.ones(6, np.float32), plan, mask_truncated=False)
    jax.tree.map(np.testing.assert_array_equal, batch, expected)


@pytest.mark.parametrize(
    ("mask", "said"), [([1, 1, 1], "its first token is"), ([0, 0, 0], "no token is")]
)
def test_an_episode_that_can_not_be_trained_on_is_named(mask, said):
    plan = make_row_shapes(
        row_lengths=(8,),
        micro_batch_tokens=16,
        mini_batches=1,
        completions=2,
        segments_per_row=1,
        row_shards=1,
    )
    good = counted_rollout([(2, 1), (2, 1)], 2).episodes
    wrong = dataclasses.replace(good[1], sampled_mask=np.array(mask, bool))
    with pytest.raises(ValueError, match=f"rollout: completion 1: {said} marked as sampled"):
        pack([good[0], wrong], np.ones(2, np.float32), plan, mask_truncated=False)


def test_one_completion_a_row_is_padded_as_packed_rows_are():
    """Padding has position 0 and segment 0.

    The experts' grouped product reads it, so its rounding depends on it.
    """
    ids = ([5, 6], [7]), ([8], [9, 10, 11])
    rows = one_a_row(*([np.array(each, np.int32) for each in part] for part in ids), 5, 3)
    assert rows.input_ids.tolist() == [[5, 6, 8, 0, 0], [7, 9, 10, 11, 0], [0] * 5]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 0], [0] * 5]
    assert rows.segment_ids.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0] * 5]
    assert rows.completion_mask.tolist() == [
        [False, False, True, False, False],
        [False, True, True, True, False],
        [False] * 5,
    ]
    assert rows.completion_index[:, 0].tolist() == [0, 1, 2]
