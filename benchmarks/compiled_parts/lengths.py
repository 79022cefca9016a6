"""A compiled step at given lengths of completions: a lognormal distribution, or a run's."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.config.checks import PACKING, as_settings
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.lengths import QUANTILES, Lengths, expected_step, lognormal
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.plan.run_plan import CompiledRun

_FORM = re.compile(r"lognormal\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_USAGE = "lognormal(MEDIAN,CAP) in tokens, such as lognormal(2048,8192), or the directory of a run"


def parse_lengths(text: str, *, limit: int) -> Lengths:
    """The lengths that a text names: `lognormal(MEDIAN,CAP)`, or the directory of a run.

    Args:
        text: the setting as written.
        limit: most tokens of a completion.

    Raises:
        UserError: one line with the text and what is allowed.
    """
    match = _FORM.fullmatch(text.strip())
    if match:
        median, cap = map(int, match.groups())
        if not 1 <= median <= cap <= limit:
            raise UserError(
                f"--lengths: got {text}, must have 1 <= MEDIAN <= CAP <= `limit` = {limit}"
            )
        return lognormal(median, cap)
    if not Path(text).is_dir():
        raise UserError(f"--lengths: got {text!r}, must be {_USAGE}")
    return _recorded(Path(text), limit)


def _recorded(run_dir: Path, limit: int) -> Lengths:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(
            f"--lengths: {run_dir} has no metrics.jsonl; name the directory of a run, or {_USAGE}"
        )
    names = [
        "completion/length_min",
        *(f"completion/length_p{p}" for p in QUANTILES),
        "completion/length_max",
    ]
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
            steps.append([float(record[name]) for name in names])
        except (ValueError, TypeError, KeyError):
            continue  # of an evaluation, or cut by a crash
    if not steps:
        raise UserError(
            f"--lengths: {path} holds no percentiles of lengths (completion/length_p50); runs of "
            "this version record them: use lognormal(MEDIAN,CAP) for an older one"
        )
    tokens = np.mean(steps, axis=0)
    if tokens[-1] > limit:
        raise UserError(
            f"--lengths: {run_dir} has completions of {tokens[-1]:.0f} tokens, `limit` is {limit}"
        )
    shares = (0.0, *(p / 100 for p in QUANTILES), 1.0)
    return Lengths(f"{run_dir}, {len(steps)} steps", shares, tuple(tokens.tolist()))


def forward_flops(model: ModelConfig, length: int) -> float:
    """Products of a forward pass, per token of a row of `length` tokens that is one sequence.

    Matrices: 2 per weight that multiplies (a token's own experts only). Causal attention: q k and p
    v over half of the row, 2 x 2 x heads x head_dim x length / 2 in each layer. A recurrent layer
    reads its state twice and adds to it once, 3 x 2 x heads x key x value.
    """
    recurrent_layers = len(model.recurrent_layers)
    full_layers = model.num_layers - recurrent_layers
    values = model.linear_num_value_heads * model.linear_value_head_dim
    queries = model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim

    # Columns of the matrices that a token's hidden state meets: of its own experts alone.
    active = dataclasses.replace(model, num_experts=model.num_experts_per_tok)
    mlp = 3 * active.stored_mlp_width + model.num_experts + model.family.shared_expert
    attention = (2 + model.family.output_gate) * queries + 2 * keys
    recurrence = model.mixed_width + 2 * values + 2 * model.linear_num_value_heads
    widths = model.num_layers * mlp + full_layers * attention + recurrent_layers * recurrence
    matrices = model.hidden_size * (widths + model.vocab_size)
    matrices += recurrent_layers * 3 * values * model.linear_key_head_dim
    return 2.0 * matrices + full_layers * 2.0 * queries * length


def lengths_asked(text: str, config: Config) -> Lengths | None:
    """The lengths that `--lengths` names, see `parse_lengths`; None without."""
    if not text:
        return None
    with as_settings(PACKING):
        return parse_lengths(text, limit=config.rollout.max_completion_tokens)


def at_lengths(plan: CompiledRun, lengths: Lengths) -> dict[str, Any]:
    """The step of a plan at lengths of completions, all devices together, as a tree for JSON.

    Prompts are lognormal with a median of a quarter of their limit. `worst_computed` are the
    positions of a step whose completions all have the longest length; `model_flops` the operations
    that the model needs for the real tokens.
    """
    packing = plan.run.placement.packing
    limit = plan.run.config.task.max_prompt_tokens
    prompts = lognormal(max(1, limit // 4), limit).draw(4096, seed=0)
    expected = expected_step(packing, np.minimum(prompts, limit), lengths)
    longest_rows = packing.micro_batches[-1] * packing.rows_per_micro_batch[-1]

    # A token of a row of n tokens takes a + b n forward.
    matrices = forward_flops(plan.run.model, 0)
    attention = forward_flops(plan.run.model, 1) - matrices
    passes = 3 + (packing.mini_batches - 1) / packing.mini_batches
    return {
        "lengths": lengths.name,
        "tokens": expected.tokens,
        "computed": expected.computed,
        "computed_over_real": expected.computed / expected.tokens,
        "worst_computed": packing.mini_batches * longest_rows * packing.row_lengths[-1],
        "model_flops": passes * (matrices * expected.tokens + attention * expected.squares),
    }


def describe_lengths(step: Mapping[str, Any]) -> str:
    """`at_lengths` for people."""
    return (
        f"lengths      {step['lengths']}: {step['tokens']:,.0f} tokens in a step with their "
        f"prompts, whose median is a quarter of the limit\n  computed   {step['computed']:,.0f} "
        f"positions, {step['computed_over_real']:.2f} times the tokens "
        f"({1 - 1 / step['computed_over_real']:.0%} padding); worst case "
        f"{step['worst_computed']:,}\n  operations {step['model_flops']:.3e} needed by the "
        "model for these tokens"
    )
