"""Row shapes of a run and places in them: little padding and equal work.

They are a function of the plan and of the lengths alone.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcmdp_jax.data.row_layout import (
    ANY_NUMBER,
    LengthChoice,
    RowShapes,
    computed_tokens,
    lay_out,
    make_row_shapes,
)
from dcmdp_jax.models.attention import SKIP_SEGMENTS

EIGHTS = LengthChoice(multiple=8)


def _plan(lengths, rows, most, completions, segments=1, shards=1):
    return RowShapes(
        row_lengths=lengths,
        rows_per_micro_batch=rows,
        micro_batches=most,
        mini_batches=1,
        completions=completions,
        segments_per_row=segments,
        row_shards=shards,
        longest=lengths[-1],
    )


def test_places_of_longer_rows_take_shorter_sequences_by_hand():
    # Rows of 4, two at a time, and of 8, three at a time. One sequence is longer than 4: its
    # micro-batch has two places left, which take the next two. The last goes to a short one: 24 + 8
    # = 32 positions. Each in the shortest row that holds it would be 24 + 2 x 8 = 40.
    plan = _plan((4, 8), (2, 3), (3, 2), completions=4)
    layout = lay_out(np.array([2, 7, 3, 4]), plan)
    assert (
        layout.micro_batches.tolist() == [1, 1]
        and computed_tokens(plan, layout.micro_batches) == 32
    )
    assert layout.shape.tolist() == [0, 1, 1, 1] and layout.row.tolist() == [0, 0, 2, 1]


def _brute_force(lengths, plan):
    """The least cost over all numbers of micro-batches that hold the sequences, longest first."""
    falling = sorted(lengths, reverse=True)
    best = np.inf
    for counts in itertools.product(*(range(most + 1) for most in plan.micro_batches)):
        places = [
            length
            for length, rows, count in zip(
                plan.row_lengths[::-1], plan.rows_per_micro_batch[::-1], counts[::-1], strict=True
            )
            for _ in range(rows * count)
        ]
        if len(places) >= len(falling) and all(
            n <= place for n, place in zip(falling, places, strict=False)
        ):
            cost = computed_tokens(plan, np.array(counts)) + 32 * plan.row_shards * sum(counts)
            best = min(best, cost)
    return best


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=9),
    rows=st.tuples(*(st.integers(1, 3) for _ in range(3))),
    shards=st.sampled_from([1, 2]),
)
def test_the_numbers_of_micro_batches_are_the_best_there_are(lengths, rows, shards):
    rows = tuple(shards * each for each in rows)
    plan = _plan(
        (100, 300, 900), rows, tuple(-(-9 // each) for each in rows), completions=9, shards=shards
    )
    counts = lay_out(np.array(lengths), plan).micro_batches
    assert (counts <= plan.micro_batches).all()
    cost = computed_tokens(plan, counts) + 32 * shards * int(counts.sum())
    assert cost == _brute_force(lengths, plan)


def test_equal_completions_leave_no_padding_and_share_micro_batches():
    # 32 rows of 80 on two devices. Halves of the limit leave 16 micro-batches of two rows, or
    # padding; a factor of sqrt 2 between them also gives 8 of four rows: 8 x 4 x 80 = 2,560
    # positions, all of them real.
    plan = make_row_shapes(
        longest=80,
        micro_batch_tokens=16384,
        mini_batches=4,
        completions=32,
        segments_per_row=1,
        row_shards=2,
    )
    counts = lay_out(np.full(32, 80), plan).micro_batches
    assert (
        counts[-1] == 8
        and plan.rows_per_micro_batch[-1] == 4
        and computed_tokens(plan, counts) == 2560
    )


def test_packed_rows_by_hand():
    # Rows of 8, and half as long: 7 | 5 + 3 | 4, the last in a short row: 8 + 8 + 4 positions.
    plan = _plan((4, 8), (1, 1), (1, 4), completions=4, segments=2)
    layout = lay_out(np.array([7, 5, 4, 3]), plan)
    assert layout.micro_batches.tolist() == [1, 2]
    assert layout.shape.tolist() == [1, 1, 0, 1] and layout.start.tolist() == [0, 0, 0, 5]
    assert layout.segment.tolist() == [1, 1, 1, 2]


def test_rows_that_take_alike_lie_on_different_devices():
    # Four rows over two devices, rows 0 and 1 on the first: 9 and 7 there would be twice the
    # attention of 5 and 3.
    plan = _plan((10,), (4,), (1,), completions=4, shards=2)
    assert lay_out(np.array([9, 7, 5, 3]), plan).row.tolist() == [0, 2, 1, 3]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 304), max_size=24),
    segments=st.sampled_from([1, 2, ANY_NUMBER]),
    tokens=st.sampled_from([1, 640, 16384]),
    shards=st.sampled_from([1, 2, 8, 64]),
)
def test_every_sequence_has_a_place_of_its_own(lengths, segments, tokens, shards):
    rows = dict(segments_per_row=segments, row_shards=shards, micro_batch_tokens=tokens)
    plan = make_row_shapes(
        longest=304, length_choice=EIGHTS, mini_batches=1, completions=24, **rows
    )
    layout = lay_out(np.array(lengths, np.int64), plan)
    assert (layout.micro_batches <= plan.micro_batches).all() and len(plan.row_lengths) <= 8
    shapes = zip(plan.micro_batches, plan.rows_per_micro_batch, plan.row_lengths, strict=True)
    taken = [np.zeros((most * rows, length), int) for most, rows, length in shapes]
    placements = zip(lengths, layout.shape, layout.row, layout.start, layout.segment, strict=True)
    for length, shape, row, start, segment in placements:
        assert start + length <= plan.row_lengths[shape] and 1 <= segment <= segments
        assert row < layout.micro_batches[shape] * plan.rows_per_micro_batch[shape]
        taken[shape][row, start : start + length] += 1
    assert sum(each.sum() for each in taken) == sum(lengths) and all(
        each.max(initial=0) <= 1 for each in taken
    )
    for rows, length in zip(plan.rows_per_micro_batch, plan.row_lengths, strict=True):
        assert rows % shards == 0 and rows // shards * length <= max(length, tokens)
        assert rows <= max(shards, 24 + shards - 1)
    again = lay_out(np.array(lengths, np.int64), plan)
    for name, values in vars(layout).items():
        assert np.array_equal(values, getattr(again, name)), name


def _draws(seed, limit, prompts, group, shortest, longest):
    """Prompts of `shortest` to `longest` tokens, and lognormal completions.

    Their median is a quarter of the limit.
    """
    rng = np.random.default_rng(seed)
    asked = rng.integers(shortest, longest + 1, prompts)
    completions = (
        np.exp(rng.normal(np.log(limit / 4), 0.79, prompts * group)).astype(int).clip(1, limit)
    )
    return completions + asked.repeat(group)


# Computed over real tokens, median of 20 batches. Buckets of three lengths with micro-batches of
# 16,384 tokens were 4.2 and 4.6 in the first two, 1.8 and 3.7 in the last two.
@pytest.mark.parametrize(
    ("limit", "prompts", "mini_batches", "shards", "segments", "most"),
    [
        (256, 16, 1, 2, 1, 1.28),
        (256, 16, 4, 2, 1, 1.36),
        (256, 16, 1, 2, ANY_NUMBER, 1.1),
        (256, 16, 4, 2, ANY_NUMBER, 1.13),
        (8192, 64, 4, 8, 1, 1.25),
        (8192, 64, 4, 8, ANY_NUMBER, 1.05),
        # The default on GPUs.
        (8192, 64, 4, 1, SKIP_SEGMENTS["cudnn"], 1.03),
        (8192, 64, 4, 8, SKIP_SEGMENTS["cudnn"], 1.06),
        # 128 completions on 64 devices: the longest alone takes a device 1.44 times its equal
        # share.
        (8192, 64, 4, 64, ANY_NUMBER, 1.48),
    ],
)
def test_ragged_lengths_leave_little_padding(limit, prompts, mini_batches, shards, segments, most):
    asked = (16, 48) if limit == 256 else (64, 512)
    completions = prompts * 8 // mini_batches
    rows = dict(
        segments_per_row=segments, row_shards=shards, micro_batch_tokens=16384, length_choice=EIGHTS
    )
    batch = dict(mini_batches=mini_batches, completions=completions)
    plan = make_row_shapes(longest=limit + asked[1], **rows, **batch)
    ratios = []
    for seed in range(20):
        lengths = _draws(seed, limit, prompts, 8, *asked).reshape(mini_batches, completions)
        computed = sum(computed_tokens(plan, lay_out(row, plan).micro_batches) for row in lengths)
        ratios.append(computed / lengths.sum())
    assert np.median(ratios) <= most


def test_one_length_is_computed_without_padding():
    # Rows of 80, one completion each, 640 tokens on each of two devices: 8 rows there, all 128 in 8
    # micro-batches.
    plan = make_row_shapes(
        row_lengths=(80,),
        micro_batch_tokens=640,
        mini_batches=1,
        completions=128,
        segments_per_row=1,
        row_shards=2,
    )
    assert (plan.rows_per_micro_batch, plan.micro_batches) == ((16,), (8,))
    assert lay_out(np.full(128, 80), plan).micro_batches.tolist() == [8]


def test_more_devices_than_completions():
    plan = make_row_shapes(
        longest=64,
        micro_batch_tokens=16384,
        mini_batches=1,
        completions=3,
        segments_per_row=1,
        row_shards=8,
    )
    assert set(plan.rows_per_micro_batch) == {8}
    layout = lay_out(np.array([64, 64, 1]), plan)
    assert layout.micro_batches.sum() == 1 and sorted(layout.row.tolist()) == [0, 1, 2]


def test_nothing_to_compute():
    plan = make_row_shapes(
        longest=64,
        micro_batch_tokens=64,
        mini_batches=1,
        completions=4,
        segments_per_row=1,
        row_shards=1,
    )
    assert lay_out(np.zeros(0, np.int64), plan).micro_batches.sum() == 0


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 56), min_size=48, max_size=48),
    segments=st.sampled_from([2, 5, ANY_NUMBER]),
)
def test_rows_of_several_of_the_longest_need_room_for_few(lengths, segments):
    # Rows of 512 hold nine of 56 tokens: with any number of segments 48 x 56 // 457 + 1 = 6 rows
    # suffice, not 48.
    rows = dict(row_lengths=(256, 512), longest=56, micro_batch_tokens=512, row_shards=1)
    plan = make_row_shapes(mini_batches=1, completions=48, segments_per_row=segments, **rows)
    layout = lay_out(np.array(lengths), plan)
    assert (layout.micro_batches <= plan.micro_batches).all()
    if segments == ANY_NUMBER:
        assert plan.micro_batches[-1] * plan.rows_per_micro_batch[-1] == 6


def test_no_row_is_chosen_that_no_sequence_fits_into():
    """No row is shorter than the shortest sequence.

    Prompts of 28 tokens and up to 5 sampled: rows of 8, 16 and 24 tokens would stay empty for ever.
    """
    sizes = {
        "micro_batch_tokens": 640,
        "mini_batches": 1,
        "completions": 64,
        "segments_per_row": 1,
        "row_shards": 1,
    }
    without = make_row_shapes(longest=39, length_choice=EIGHTS, **sizes)
    assert min(without.row_lengths) < 29
    choice = LengthChoice(shortest=29, multiple=8)
    shapes = make_row_shapes(longest=39, length_choice=choice, **sizes)
    assert set(shapes.row_lengths) <= {32, 40} and shapes.row_lengths[-1] == 40
    # Where rows hold several, what is left of the shortest is no place for one either.
    packed = make_row_shapes(longest=39, length_choice=choice, **sizes | {"segments_per_row": 8})
    assert min(packed.row_lengths) >= 29
    for made in (shapes, packed):
        layout = lay_out(np.full(64, 29), made)
        assert layout.micro_batches.sum() > 0
