"""A step at given lengths beside the worst case, by hand."""

from types import SimpleNamespace

import pytest

from benchmarks.compiled_parts.flops import step_flops
from dcmdp_jax.data.lengths import Lengths
from dcmdp_jax.data.row_layout import RowShapes
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.plan.plan_text import at_lengths, describe_lengths

MODEL = ModelConfig("qwen3", 32, 16, 32, 2, 2, 1, 8)


def test_a_step_at_lengths_by_hand():
    # Two mini-batches of 3 completions of 11 tokens after prompts of 1: rows of 16, two at a time.
    # Worst case: all rows of both micro-batches of each mini-batch, which is what is computed: 2 x
    # 2 x 2 x 16. Real are 6 x 12 = 72.
    packing = RowShapes(
        row_lengths=(16,),
        rows_per_micro_batch=(2,),
        micro_batches=(2,),
        mini_batches=2,
        completions=3,
        segments_per_row=1,
        row_shards=1,
        longest=16,
    )
    config = SimpleNamespace(task=SimpleNamespace(max_prompt_tokens=1))
    run = SimpleNamespace(placement=SimpleNamespace(packing=packing), config=config, model=MODEL)
    plan = SimpleNamespace(run=run, programs={})
    found = at_lengths(plan, Lengths("eleven", (0.0, 1.0), (11.0, 11.0)))
    assert (found["tokens"], found["computed"], found["worst_computed"]) == (72, 128, 128)
    # As for six rows of 12 tokens that are one sequence each, of which three need p^Train by a pass
    # of their own.
    assert found["model_flops"] == pytest.approx(
        step_flops(MODEL, length=12, tokens=72, recomputed_tokens=36)
    )
    line = describe_lengths(found).splitlines()[1]
    assert line == "  computed   128 positions, 1.78 times the tokens (44% padding); worst case 128"
    assert found["computed_over_real"] == pytest.approx(128 / 72)
