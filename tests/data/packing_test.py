"""Rollout -> Batch: every token where it belongs, whatever the shapes."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcmdp_jax.data.episode import Episode, OpenGroups, collect
from dcmdp_jax.data.packing import default_row_lengths, make_plan, make_shared_plan, pack
from dcmdp_jax.training.host_metrics import staleness_metrics
from tests.engines.sampling import Rollout


def _rollout(lengths, group_size, finish=None):
    """Completion i has prompt 100 + group and tokens i * 1000 + t, log-prob -(t + 1) / 8."""
    prompts = [np.arange(p, dtype=np.int32) + 100 for p, _ in lengths]
    completions = [np.arange(c, dtype=np.int32) + 1000 * (i + 1) for i, (_, c) in enumerate(lengths)]
    logprobs = [-(np.arange(c, dtype=np.float32) + 1) / 8 for _, c in lengths]
    groups = np.arange(len(lengths), dtype=np.int32) // group_size
    return Rollout(prompts, completions, logprobs, finish or ["stop"] * len(lengths), groups, 7)


def _unpack(batch):
    """(mini-batch, completion) -> (prompt and completion ids, completion ids, log-probs), read back from the rows."""
    found = {}
    for rows in batch.rows:
        for m, a, r in np.ndindex(rows.input_ids.shape[:3]):
            segments = rows.segment_ids[m, a, r]
            for segment in np.unique(segments[segments > 0]):
                place = segments == segment
                mask = rows.completion_mask[m, a, r] & place
                (index,) = np.unique(rows.completion_index[m, a, r][mask])
                np.testing.assert_array_equal(rows.position_ids[m, a, r][place], np.arange(place.sum()))
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
    # Lengths with prompt: 3 + 2 = 5, 3 + 6 = 9 | 2 + 1 = 3, 2 + 8 = 10. Rows of 6 and 10: 0 and 2 are short.
    rollout = _rollout([(3, 2), (3, 6), (2, 1), (2, 8)], group_size=2)
    plan = make_plan(
        row_lengths=(6, 10), micro_batch_tokens=12, mini_batches=2, completions=2, segments_per_row=1, row_shards=1
    )
    # 12 tokens hold two rows of 6 and one of 10; in the worst case both completions need the bucket: 1 and 2 batches.
    assert (plan.rows_per_micro_batch, plan.micro_batches) == ((2, 1), (1, 2))
    batch, report = pack(rollout.episodes, np.array([1, 0, 0, 1], np.float32), plan, mask_truncated=False)
    np.testing.assert_array_equal(batch.micro_batches, [[1, 1], [1, 1]])
    short, long = batch.rows
    np.testing.assert_array_equal(short.input_ids[0, 0, 0], [100, 101, 102, 1000, 1001, 0])
    np.testing.assert_array_equal(short.completion_mask[0, 0, 0], [False, False, False, True, True, False])
    np.testing.assert_array_equal(short.segment_ids[0, 0, 0], [1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(short.segment_ids[0, 0, 1], 0)
    np.testing.assert_array_equal(long.completion_index[1, 0, 0], [0, 0] + [1] * 8)
    np.testing.assert_array_equal(long.rollout_logprobs[1, 0, 0][:4], [0, 0, -0.125, -0.25])
    # Tokens 5 + 9 + 3 + 10 = 27; computed: each mini-batch one short batch of 2 x 6 and one long of 1 x 10.
    assert (report.tokens, report.computed_tokens) == (27, 44)
    np.testing.assert_array_equal(batch.rewards, [[1, 0], [0, 1]])
    # Group ids restart in each mini-batch: 2 of the rollout is 0 of the second mini-batch.
    np.testing.assert_array_equal(batch.group_ids, [[0, 0], [0, 0]])


def test_shared_prompts_by_hand():
    # Groups of 2: prompts of 3 and 1 tokens (100, 101, 102 and 100), completions of 2, 4, 3 and 1 tokens.
    rollout = _rollout([(3, 2), (3, 4), (1, 3), (1, 1)], group_size=2)
    plan = make_shared_plan(
        max_prompt_tokens=4, max_completion_tokens=4, group_size=2, micro_batch_tokens=20, mini_batches=1,
        completions=4, row_shards=1,
    )  # fmt: skip
    # Rows of 4 + 1 tokens, of which 4 are computed; prompts of 4 - 1 tokens, padded to 12 so that a row sees 16.
    # 20 tokens hold one group: 2 x 4 + 12.
    assert (plan.row_lengths, plan.rows_per_micro_batch, plan.micro_batches) == ((5,), (2,), (2,))
    assert plan.prompt_length == 12
    batch, report = pack(rollout.episodes, np.zeros(4, np.float32), plan, mask_truncated=False)
    (rows,) = batch.rows
    assert batch.micro_batches.tolist() == [[2]]
    np.testing.assert_array_equal(rows.prompts.input_ids[0, :, 0, :3], [[100, 101, 0], [0, 0, 0]])
    np.testing.assert_array_equal(rows.prompts.lengths[0, :, 0], [2, 0])
    # A row begins with its prompt's last token, at its place in the prompt.
    np.testing.assert_array_equal(rows.input_ids[0, 0], [[102, 1000, 1001, 0, 0], [102, 2000, 2001, 2002, 2003]])
    np.testing.assert_array_equal(rows.position_ids[0, 0], [[2, 3, 4, 0, 0], [2, 3, 4, 5, 6]])
    np.testing.assert_array_equal(rows.input_ids[0, 1], [[100, 3000, 3001, 3002, 0], [100, 4000, 0, 0, 0]])
    np.testing.assert_array_equal(
        rows.completion_mask[0, 1], [[False, True, True, True, False], [False, True] + [False] * 3]
    )
    np.testing.assert_array_equal(rows.completion_index[0, 1, :, 1], [2, 3])
    np.testing.assert_array_equal(rows.rollout_logprobs[0, 1, 0], [0, -0.125, -0.25, -0.375, 0])
    # Tokens: 2 + 4 + 3 + 1 in the rows (the first reads a prompt's last token, the last is not read), 2 in prompts.
    assert (report.tokens, report.computed_tokens) == (12, 40)


def _routed(rollout, layers=2, k=2):
    """Experts of token t of completion i: 100 i + t, in all layers; of all tokens but the last."""
    sizes = [len(p) + len(c) - 1 for p, c in zip(rollout.prompt_ids, rollout.completion_ids, strict=True)]
    return [np.tile((100 * i + np.arange(n))[:, None, None], (1, layers, k)) for i, n in enumerate(sizes)]


def test_routed_experts_lie_with_the_tokens_that_were_read():
    # As the two tests above: rows of 6 and 10; -1 for what was not read, the last token of each and padding.
    rollout = _rollout([(3, 2), (3, 6), (2, 1), (2, 8)], group_size=2)
    rollout.routed_experts = _routed(rollout)
    plan = make_plan(
        row_lengths=(6, 10), micro_batch_tokens=12, mini_batches=2, completions=2, segments_per_row=1, row_shards=1
    )
    batch, _ = pack(rollout.episodes, np.zeros(4, np.float32), plan, mask_truncated=False)
    short, long = (rows.routed_experts for rows in batch.rows)
    assert short.shape == (2, 1, 2, 6, 2, 2) and short.dtype == np.int16
    np.testing.assert_array_equal(short[0, 0, 0, :, 1, 0], [0, 1, 2, 3, -1, -1])
    np.testing.assert_array_equal(short[0, 0, 1], -1)
    np.testing.assert_array_equal(long[1, 0, 0, :, 0, 1], [*range(300, 309), -1])

    rollout = _rollout([(3, 2), (3, 4), (1, 3), (1, 1)], group_size=2)
    rollout.routed_experts = _routed(rollout)
    plan = make_shared_plan(
        max_prompt_tokens=4, max_completion_tokens=4, group_size=2, micro_batch_tokens=20, mini_batches=1,
        completions=4, row_shards=1,
    )  # fmt: skip
    (rows,) = pack(rollout.episodes, np.zeros(4, np.float32), plan, mask_truncated=False)[0].rows
    # A row begins with its prompt's last token; the others are the group's, as its first member read them.
    np.testing.assert_array_equal(rows.routed_experts[0, 0, :, :, 0, 0], [[2, 3, -1, -1, -1], [102, 103, 104, 105, -1]])
    np.testing.assert_array_equal(
        rows.routed_experts[0, 1, :, :, 1, 1], [[200, 201, 202, -1, -1], [300, -1, -1, -1, -1]]
    )
    np.testing.assert_array_equal(rows.prompts.routed_experts[0, :, 0, :3, 0, 0], [[0, 1, -1], [-1, -1, -1]])


def test_refuses_experts_of_some_completions_alone():
    rollout = _rollout([(3, 2), (3, 3)], group_size=2)
    plan = make_plan(
        row_lengths=(6,), micro_batch_tokens=12, mini_batches=1, completions=2, segments_per_row=1, row_shards=1
    )
    routed = _routed(rollout)
    for wrong, message in (
        ([routed[0], None], r"completion 1: routed experts of shape None, expected \(6, 2, 2\)"),
        ([None, routed[1]], r"completion 1: routed experts of shape \(6, 2, 2\), expected None"),
        ([routed[0], routed[1][:, :1]], r"completion 1: routed experts of shape \(6, 1, 2\), expected \(6, 2, 2\)"),
    ):
        rollout.routed_experts = wrong
        with pytest.raises(ValueError, match=message):
            pack(rollout.episodes, np.zeros(2, np.float32), plan, mask_truncated=False)


def test_shared_prompts_keep_their_places_when_completions_are_dropped():
    rollout = _rollout([(2, 1)] * 6, group_size=2)
    plan = make_shared_plan(
        max_prompt_tokens=2, max_completion_tokens=2, group_size=2, micro_batch_tokens=1, mini_batches=1, completions=6,
        row_shards=1,
    )  # fmt: skip
    dropped = np.array([True, True, True, False, True, True])
    batch, _ = pack(rollout.episodes, np.ones(6, np.float32), plan, mask_truncated=False, dropped=dropped)
    (rows,) = batch.rows
    # Completion 3 is the second of the second group; the third group's micro-batch is not run.
    assert batch.micro_batches.tolist() == [[2]]
    np.testing.assert_array_equal(rows.prompts.lengths[0, :, 0], [0, 1, 0])
    np.testing.assert_array_equal(rows.segment_ids[0, :, :, 0], [[0, 0], [0, 1], [0, 0]])
    assert rows.completion_index[0, 1, 1, 1] == 3


def test_groups_are_split_over_devices_whole():
    # A group is 2 x 4 + 12 = 20 tokens. 35 hold one group: over two devices a micro-batch has two of the five, and the
    # third has one and an empty place. Over one device 70 hold three; over four there is one for each in any case.
    shapes = {"max_prompt_tokens": 4, "max_completion_tokens": 4, "group_size": 2, "mini_batches": 1, "completions": 10}
    sizes = ((70, 1), (35, 2), (17, 4))
    plans = [make_shared_plan(micro_batch_tokens=tokens, row_shards=shards, **shapes) for tokens, shards in sizes]
    assert [plan.rows_per_micro_batch for plan in plans] == [(6,), (4,), (8,)]
    assert [plan.micro_batches for plan in plans] == [(2,), (3,), (2,)]
    batch, _ = pack(_rollout([(3, 1)] * 10, 2).episodes, np.ones(10, np.float32), plans[1], mask_truncated=False)
    assert batch.micro_batches.tolist() == [[3]]
    np.testing.assert_array_equal(batch.rows[0].prompts.lengths[0], [[2, 2], [2, 2], [2, 0]])


def test_refuses_prompts_that_are_not_shared():
    plan = make_shared_plan(
        max_prompt_tokens=3, max_completion_tokens=4, group_size=2, micro_batch_tokens=64, mini_batches=1,
        completions=2, row_shards=1,
    )  # fmt: skip
    for lengths, message in (
        ([(2, 1), (3, 1)], "completions 0 and 1 are of one group and have different prompts"),
        # Up to 16 with the row's own 4 tokens, and the last of the prompt: 13 fit.
        ([(14, 1), (14, 1)], "the prompt of completion 0 has 14 tokens, the plan is for 13"),
        ([(2, 1), (2, 5)], "completion 1 has 6 tokens with the end of its prompt, rows 5"),
    ):
        with pytest.raises(ValueError, match=message):
            pack(_rollout(lengths, 2).episodes, np.ones(2, np.float32), plan, mask_truncated=False)


def test_segments_first_fit_longest_first():
    # Lengths 7, 5, 4, 3 in rows of 8 with at most 2 segments: 7 alone; 5 + 3; 4.
    rollout = _rollout([(1, 6), (1, 4), (1, 3), (1, 2)], group_size=4)
    plan = make_plan(
        row_lengths=(8,), micro_batch_tokens=8, mini_batches=1, completions=4, segments_per_row=2, row_shards=1
    )
    batch, report = pack(rollout.episodes, np.zeros(4, np.float32), plan, mask_truncated=False)
    assert batch.micro_batches.tolist() == [[3]]
    np.testing.assert_array_equal(batch.rows[0].segment_ids[0, 1, 0], [1, 1, 1, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(batch.rows[0].position_ids[0, 1, 0], [0, 1, 2, 3, 4, 0, 1, 2])
    np.testing.assert_array_equal(batch.rows[0].completion_index[0, 1, 0], [0, 1, 1, 1, 1, 0, 3, 3])
    assert report.computed_tokens == 24


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 23)), min_size=8, max_size=8),
    segments=st.sampled_from([1, 2, 100]),
    buckets=st.sampled_from([(32,), (8, 32), (8, 16, 24, 32)]),
    tokens=st.integers(1, 200),
    shards=st.sampled_from([1, 2, 4]),
)
def test_every_completion_comes_back_whole(lengths, segments, buckets, tokens, shards):
    rollout = _rollout(lengths, group_size=2)
    plan = make_plan(
        row_lengths=buckets, micro_batch_tokens=tokens, mini_batches=2, completions=4, segments_per_row=segments,
        row_shards=shards,
    )  # fmt: skip
    batch, report = pack(rollout.episodes, np.arange(8, dtype=np.float32), plan, mask_truncated=False)
    assert all(rows % shards == 0 for rows in plan.rows_per_micro_batch)
    found = _unpack(batch)
    assert sorted(found) == [(m, i) for m in range(2) for i in range(4)]
    for (m, i), (ids, completion, logprobs) in found.items():
        source = 4 * m + i
        np.testing.assert_array_equal(ids, np.concatenate([rollout.prompt_ids[source], completion]))
        np.testing.assert_array_equal(completion, rollout.completion_ids[source])
        np.testing.assert_array_equal(logprobs, rollout.rollout_logprobs[source])
    assert report.tokens == sum(p + c for p, c in lengths) <= report.computed_tokens


def test_dropped_and_truncated():
    rollout = _rollout([(1, 2), (1, 3), (1, 2), (1, 4)], 2, finish=["stop", "length", "stop", "stop"])
    plan = make_plan(
        row_lengths=(8,), micro_batch_tokens=64, mini_batches=1, completions=4, segments_per_row=1, row_shards=1
    )
    dropped = np.array([False, False, True, False])
    rollout.rollout_logprobs[2][:] = np.nan
    batch, report = pack(rollout.episodes, np.ones(4, np.float32), plan, mask_truncated=True, dropped=dropped)
    np.testing.assert_array_equal(batch.valid, [[True, True, False, True]])
    np.testing.assert_array_equal(batch.loss_mask, [[True, False, False, True]])
    # The dropped completion's tokens and numbers are nowhere; the truncated one still counts in the discrepancy.
    assert np.isfinite(batch.rows[0].rollout_logprobs).all()
    assert sorted(np.unique(batch.rows[0].completion_index[batch.rows[0].completion_mask])) == [0, 1, 3]
    assert report.tokens == 3 + 4 + 5


def test_too_long_is_named():
    plan = make_plan(
        row_lengths=(8,), micro_batch_tokens=64, mini_batches=1, completions=2, segments_per_row=1, row_shards=1
    )
    with pytest.raises(ValueError, match=r"completion 1 has 9 tokens with its prompt, rows 8"):
        pack(_rollout([(1, 2), (3, 6)], 2).episodes, np.ones(2, np.float32), plan, mask_truncated=False)
    with pytest.raises(ValueError, match="3 completions"):
        pack(_rollout([(1, 2)] * 3, 1).episodes, np.ones(3, np.float32), plan, mask_truncated=False)


@pytest.mark.parametrize(
    ("longest", "skips", "expected"),
    # 9216 / 4 = 2304 and 9216 / 2 = 4608, multiples of 128; 100 -> 25, 50, 100 rounded up to 8s; splash: next 512.
    [(9216, False, (2304, 4608, 9216)), (100, False, (32, 56, 104)), (9216, True, (9216,)), (700, True, (1024,))],
)
def test_default_row_lengths(longest, skips, expected):
    assert default_row_lengths(longest, skips_segments=skips) == expected


def _tool_episode(group, member, start, versions=(4, 6)):
    """Prompt of 2 tokens, two sampled, two of a tool's output, one sampled two versions later, its end."""
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 0], bool)
    policy_versions = np.array([-1, -1, versions[0], versions[0], -1, -1, versions[1], -1], np.int32)
    logprobs = np.where(mask, -np.arange(8) / 8, np.nan).astype(np.float32)
    return Episode(np.arange(8, dtype=np.int32) + start, mask, logprobs, policy_versions, group, member, "stop")


@pytest.mark.parametrize("shared", [False, True])
def test_tokens_that_the_policy_did_not_sample_are_read_but_not_trained(shared):
    """Output of a tool between two turns: in the row, outside the mask, and not counted as completion length."""
    shapes = {"micro_batch_tokens": 64, "mini_batches": 1, "completions": 2, "row_shards": 1}
    if shared:
        plan = make_shared_plan(max_prompt_tokens=2, max_completion_tokens=8, group_size=2, **shapes)
    else:
        plan = make_plan(row_lengths=(10,), segments_per_row=1, **shapes)
    episodes = [_tool_episode(0, 0, 0), dataclasses.replace(_tool_episode(0, 1, 0), rollout_logprobs=np.full(8, -1.0))]
    batch, _ = pack(episodes, np.array([1, 0], np.float32), plan, mask_truncated=False)
    (rows,) = batch.rows
    at = slice(0, 7) if shared else slice(0, 8)  # the first prompt token is shared
    mask = [0, 0, 1, 1, 0, 0, 1, 0][-7 if shared else 0 :]
    np.testing.assert_array_equal(rows.input_ids[0, 0, 0, at], np.arange(8)[-7 if shared else 0 :])
    np.testing.assert_array_equal(rows.position_ids[0, 0, 0, at], np.arange(8)[-7 if shared else 0 :])
    np.testing.assert_array_equal(rows.completion_mask[0, 0, :, at], [mask, mask])
    assert rows.completion_mask.sum() == 6  # nothing beyond the episodes
    np.testing.assert_array_equal(rows.completion_index[0, 0, :, at], [np.zeros(len(mask)), mask])
    # The tool's tokens have no log-prob, not even NaN: 2/8, 3/8 and 6/8 below 0.
    assert rows.rollout_logprobs[0, 0, 0][rows.completion_mask[0, 0, 0]].tolist() == [-0.25, -0.375, -0.75]
    assert np.count_nonzero(rows.rollout_logprobs[0, 0, 0]) == 3 and np.isfinite(rows.rollout_logprobs).all()
    # Not 6, the tokens after the prompt.
    np.testing.assert_array_equal(batch.completion_lengths, [[3, 3]])
    # A trainer at step 6: 2, 2 and 0 steps, twice.
    assert staleness_metrics(batch, 6) == {"rollout/staleness_mean": pytest.approx(4 / 3), "rollout/staleness_max": 2.0}


def test_order_of_finishing_does_not_change_a_batch():
    rollout = _rollout([(2, 3), (2, 3), (3, 1), (3, 2), (1, 4), (1, 1)], group_size=2)
    plan = make_plan(
        row_lengths=(8,), micro_batch_tokens=16, mini_batches=3, completions=2, segments_per_row=2, row_shards=1
    )
    groups = [rollout.episodes[i : i + 2] for i in (0, 2, 4)]
    finished = OpenGroups(2)
    out_of_order = [groups[2][1], groups[0][0], groups[2][0], groups[1][0], groups[0][1], groups[1][1]]
    yielded = [finished.add([episode]) for episode in out_of_order]
    # A group is complete with its second episode, whichever that is; members in order.
    assert [[(e.group, e.member) for e in complete] for complete in yielded] == [
        [], [], [(2, 0), (2, 1)], [], [(0, 0), (0, 1)], [(1, 0), (1, 1)],
    ]  # fmt: skip
    expected, _ = pack(rollout.episodes, np.ones(6, np.float32), plan, mask_truncated=False)
    batch, _ = pack(collect(yielded), np.ones(6, np.float32), plan, mask_truncated=False)
    jax.tree.map(np.testing.assert_array_equal, batch, expected)


@pytest.mark.parametrize(("mask", "said"), [([1, 1, 1], "its first token is"), ([0, 0, 0], "no token is")])
def test_an_episode_that_can_not_be_trained_on_is_named(mask, said):
    plan = make_plan(
        row_lengths=(8,), micro_batch_tokens=16, mini_batches=1, completions=2, segments_per_row=1, row_shards=1
    )
    good = _rollout([(2, 1), (2, 1)], 2).episodes
    wrong = dataclasses.replace(good[1], sampled_mask=np.array(mask, bool))
    with pytest.raises(ValueError, match=f"rollout: completion 1: {said} marked as sampled"):
        pack([good[0], wrong], np.ones(2, np.float32), plan, mask_truncated=False)


def _positions(lengths, plan, shards):
    """Positions a step computes: micro-batches of each bucket that hold a row, counted apart from `pack`."""
    computed = 0
    for first in range(0, len(lengths), plan.completions):
        left = sorted(lengths[first : first + plan.completions])
        for length, rows in zip(plan.row_lengths, plan.rows_per_micro_batch, strict=True):
            here = [n for n in left if n <= length]
            left = left[len(here) :]
            computed += -(-len(here) // rows) * rows * length
    return computed


# Computed over real tokens of 16 prompts x 8 completions, lognormal with a median of a quarter of the limit. With
# micro-batches of 16,384 tokens on each device whatever is there they are 4.2, 4.6 and 3.5 times the real tokens.
@pytest.mark.parametrize(
    ("limit", "mini_batches", "shards", "most"), [(256, 1, 2, 1.8), (256, 4, 2, 1.8), (8192, 1, 64, 2.7)]
)
def test_short_ragged_rows_fill_their_micro_batches(limit, mini_batches, shards, most):
    rng = np.random.default_rng(0)
    completions = np.exp(rng.normal(np.log(limit / 4), 0.79, 128)).astype(int).clip(1, limit)
    lengths = [(int(p), int(c)) for p, c in zip(rng.integers(16, 49, 16).repeat(8), completions, strict=True)]
    plan = make_plan(
        row_lengths=default_row_lengths(48 + limit, skips_segments=False), micro_batch_tokens=16384,
        mini_batches=mini_batches, completions=128 // mini_batches, segments_per_row=1, row_shards=shards,
    )  # fmt: skip
    _, report = pack(_rollout(lengths, 8).episodes, np.zeros(128, np.float32), plan, mask_truncated=False)
    totals = [p + c for p, c in lengths]
    assert report.computed_tokens == _positions(totals, plan, shards)
    assert report.computed_tokens <= most * sum(totals)


def test_rows_of_a_micro_batch_by_hand():
    shapes = {"micro_batch_tokens": 16384, "mini_batches": 1, "completions": 128, "segments_per_row": 1}
    # Three buckets on two devices: an eighth of 128 rows is 8 a device, below the 204, 107 and 53 that 16,384 tokens
    # hold.
    plan = make_plan(row_lengths=(80, 152, 304), row_shards=2, **shapes)
    assert (plan.rows_per_micro_batch, plan.micro_batches) == ((16, 16, 16), (8, 8, 8))
    # 32 rows: an eighth is 2 a device; 512 tokens hold 6, 3 and 1. 6 a device would be 12, 12 and 8 rows: 3 x 12 hold
    # as many micro-batches.
    plan = make_plan(row_lengths=(80, 152, 304), row_shards=2, **shapes | {"completions": 32})
    assert (plan.rows_per_micro_batch, plan.micro_batches) == ((12, 6, 4), (3, 6, 8))
    # One bucket gets all rows: 53 a device would be 106 and 22; two of 64 compute no empty row.
    plan = make_plan(row_lengths=(304,), row_shards=2, **shapes)
    assert (plan.rows_per_micro_batch, plan.micro_batches) == ((64,), (2,))
    # Packed, nobody knows how many rows 128 sequences take: an eighth.
    plan = make_plan(row_lengths=(304,), row_shards=2, **shapes | {"segments_per_row": 64})
    assert (plan.rows_per_micro_batch, plan.micro_batches) == ((16,), (8,))
    # Groups of 8 x 32 + 16 tokens: 16,384 hold 60 on a device, a mini-batch has 64: two of 32, not 60 and 4.
    plan = make_shared_plan(
        max_prompt_tokens=17, max_completion_tokens=32, group_size=8, micro_batch_tokens=16384, mini_batches=1,
        completions=512, row_shards=1,
    )  # fmt: skip
    assert (plan.prompt_length, plan.rows_per_micro_batch, plan.micro_batches) == (16, (256,), (2,))


@given(
    lengths=st.sampled_from([(80, 152, 304), (304,), (2304, 4608, 9216)]),
    tokens=st.integers(1, 40_000),
    completions=st.integers(1, 600),
    segments=st.sampled_from([1, 64]),
    shards=st.sampled_from([1, 2, 8, 64]),
)
def test_a_micro_batch_never_has_more_rows_than_the_mini_batch(lengths, tokens, completions, segments, shards):
    plan = make_plan(
        row_lengths=lengths, micro_batch_tokens=tokens, mini_batches=1, completions=completions,
        segments_per_row=segments, row_shards=shards,
    )  # fmt: skip
    for length, rows, micro in zip(plan.row_lengths, plan.rows_per_micro_batch, plan.micro_batches, strict=True):
        assert rows % shards == 0
        assert rows <= max(shards, completions) and rows // shards * length <= max(length, tokens)
        # All completions find room, and one micro-batch less would be too few.
        assert (micro - 1) * rows < completions <= micro * rows
