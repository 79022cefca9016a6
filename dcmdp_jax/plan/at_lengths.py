"""A step at given lengths of completions, beside the worst case that its program is compiled for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dcmdp_jax.data.lengths import ExpectedStep, Lengths, expected_step, lognormal
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.plan.run_plan import CompiledRun


class AtLengths(NamedTuple):
    """A step at given lengths, all devices together.

    Attributes:
        lengths: lengths of the completions.
        expected: expected work of the step.
        worst: positions that the step computes when every completion has the longest length.
        flops: operations that the model needs for the real tokens.
    """

    lengths: Lengths
    expected: ExpectedStep
    worst: int
    flops: float

    def lines(self) -> list[str]:
        """For people."""
        expected = self.expected
        return [
            f"lengths      {self.lengths.name}: {expected.tokens:,.0f} tokens in a step with their prompts, whose "
            "median is a quarter of the limit",
            f"  computed   {expected.computed:,.0f} positions, {expected.computed / expected.tokens:.2f} times the "
            f"tokens ({expected.padding:.0%} padding); worst case {self.worst:,}",
            f"  operations {self.flops:.3e} needed by the model for these tokens",
        ]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "lengths": self.lengths.name, "tokens": self.expected.tokens, "computed": self.expected.computed,
            "computed_over_real": self.expected.computed / self.expected.tokens, "worst_computed": self.worst,
            "model_flops": self.flops,
        }  # fmt: skip


def forward_flops(model: ModelConfig, length: int) -> float:
    """Products of a forward pass, per token of a row of `length` tokens that is one sequence.

    Matrices: 2 per weight that multiplies (a token's own experts only). Causal attention: q k and p v over half of the
    row, 2 x 2 x heads x head_dim x length / 2 in each layer.
    """
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * queries + 2 * keys + 3 * model.active_mlp_width + model.num_experts)
    matrices = model.num_layers * layer + model.hidden_size * model.vocab_size
    return 2.0 * matrices + model.num_layers * 2.0 * queries * length


def at_lengths(plan: CompiledRun, lengths: Lengths) -> AtLengths:
    """The step of a plan at lengths. Prompts are lognormal with a median of a quarter of their limit."""
    packing, limit = plan.step.packing, plan.config.task.max_prompt_tokens
    prompts = lognormal(max(1, limit // 4), limit).draw(4096, seed=0)
    expected = expected_step(packing, np.minimum(prompts, limit), lengths)
    worst = (
        packing.mini_batches * packing.micro_batches[-1] * packing.rows_per_micro_batch[-1] * packing.row_lengths[-1]
    )
    # A token of a row of n tokens takes a + b n forward.
    matrices = forward_flops(plan.model, 0)
    attention = forward_flops(plan.model, 1) - matrices
    passes = 3 + (packing.mini_batches - 1) / packing.mini_batches
    return AtLengths(lengths, expected, worst, passes * (matrices * expected.tokens + attention * expected.squares))
