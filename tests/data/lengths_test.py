"""Lengths to plan for, and what a step is expected to compute for them."""

import numpy as np
import pytest

from dcmdp_jax.data.lengths import (
    Lengths,
    expected_step,
    lognormal,
    padding_advice,
    typical_lengths,
)
from dcmdp_jax.data.row_layout import RowShapes


def test_lognormal_lengths_have_the_median_and_the_cap():
    drawn = lognormal(64, 256).draw(20_000, seed=0)
    assert np.median(drawn) == pytest.approx(64, rel=0.05)
    # The logarithm of 256 / 64 is 1.386, 1.755 standard deviations of 0.79: 4.0% lie above.
    assert (drawn == 256).mean() == pytest.approx(0.04, abs=0.01)
    assert drawn.min() >= 1 and typical_lengths(256).name == "lognormal(64,256)"
    assert typical_lengths(1).draw(3, seed=0).tolist() == [1, 1, 1]


def test_an_expected_step_by_hand():
    # Two mini-batches of 3 completions of 10 tokens after prompts of 2: rows of 16, two at a time
    # on one device, so two micro-batches each: 2 x 2 x 2 x 16 = 128 positions for 72 tokens.
    plan = RowShapes(
        row_lengths=(16,),
        rows_per_micro_batch=(2,),
        micro_batches=(2,),
        mini_batches=2,
        completions=3,
        segments_per_row=1,
        row_shards=1,
        longest=16,
    )
    found = expected_step(plan, np.array([2]), Lengths("ten", (0.0, 1.0), (10.0, 10.0)))
    assert (found.tokens, found.computed, found.squares) == (72, 128, 6 * 12**2)
    assert 1 - found.tokens / found.computed == pytest.approx(1 - 72 / 128)


def test_the_advice_names_a_setting_that_helps():
    def advice(completions=64, shards=2, segments=1, *, chosen=True, limited=False):
        plan = RowShapes(
            row_lengths=(8192,),
            rows_per_micro_batch=(2,),
            micro_batches=(64,),
            mini_batches=1,
            completions=completions,
            segments_per_row=segments,
            row_shards=shards,
            longest=8192,
        )
        return padding_advice(plan, automatic=chosen, limited=limited)

    assert advice(chosen=False) == "`row_lengths`=() chooses the lengths of rows"
    assert advice(limited=True).startswith("`segments_per_row`=0 puts")
    assert advice(15).startswith(
        "a mini-batch has 15 completions for 2 devices: raise `completions`"
    )
    assert advice(16).endswith("set `segments_per_row`")
    assert (
        advice(segments=9)
        == "completions are far shorter than 8192 tokens: lower `max_completion_tokens`"
    )
