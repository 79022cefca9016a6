"""Lengths to count a step at, and such a step beside the worst case, by hand."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.compiled_parts.flops import step_flops
from benchmarks.compiled_parts.lengths import at_lengths, describe_lengths, parse_lengths
from dcmdp_jax.data.lengths import QUANTILES, Lengths
from dcmdp_jax.data.row_layout import RowShapes
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig

MODEL = ModelConfig("qwen3", 32, 16, 32, 2, 2, 1, 8)


def _run(tmp_path, *records):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records) + '{"step": 9'
    )
    return str(tmp_path)


def _record(*tokens):
    names = ["length_min", *(f"length_p{p}" for p in QUANTILES), "length_max"]
    return {f"completion/{name}": value for name, value in zip(names, tokens, strict=True)}


def test_a_recorded_run_is_averaged_over_its_steps(tmp_path):
    run = _run(
        tmp_path,
        _record(1, 10, 20, 40, 60, 80, 100),
        _record(3, 30, 40, 60, 80, 100, 140),
        {"eval/x": 1},
    )
    found = parse_lengths(run, limit=150)
    assert found.tokens == (2, 20, 30, 50, 70, 90, 120) and found.shares == (
        0,
        0.1,
        0.25,
        0.5,
        0.75,
        0.9,
        1,
    )
    assert found.name == f"{run}, 2 steps"
    assert np.median(found.draw(10_001, seed=0)) == pytest.approx(50, abs=1.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "lognormal(2048)",
            r"--lengths: got 'lognormal\(2048\)', must be lognormal\(MEDIAN,CAP\) in tokens, such as",
        ),
        ("lognormal(-5,10)", "--lengths: got 'lognormal"),
        (
            "lognormal(0,10)",
            r"--lengths: got lognormal\(0,10\), must have 1 <= MEDIAN <= CAP <= `limit`",
        ),
        ("lognormal(20,10)", "must have 1 <= MEDIAN"),
        ("lognormal(20,151)", "CAP <= `limit` = 150"),
        ("runs/none", "--lengths: got 'runs/none', must be lognormal"),
        ("{}", "has no metrics.jsonl"),
        ("{}/old", "holds no percentiles of lengths .*use lognormal"),
        ("{}/long", "has completions of 200 tokens, `limit` is 150"),
    ],
)
def test_what_can_not_be_planned_for_is_told_in_a_line(tmp_path, text, said):
    (tmp_path / "old").mkdir()
    (tmp_path / "long").mkdir()
    _run(tmp_path / "old", {"step": 1, "completion/length_mean": 3})
    _run(tmp_path / "long", _record(1, 2, 3, 4, 5, 6, 200))
    with pytest.raises(UserError, match=said) as raised:
        parse_lengths(text.format(tmp_path), limit=150)
    assert "\n" not in str(raised.value)


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
