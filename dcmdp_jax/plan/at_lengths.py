"""A step at given lengths of completions, beside the worst case that its program is compiled for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dcmdp_jax.data.lengths import ExpectedStep, Lengths, expected_step, lognormal
from dcmdp_jax.plan.flops import forward_flops
from dcmdp_jax.plan.roofline import roofline
from dcmdp_jax.plan.run_plan import CompiledRun


class AtLengths(NamedTuple):
    """A step at given lengths, all devices together.

    Attributes:
        lengths: of the completions.
        expected: what it computes.
        worst: positions that it computes when every completion has the longest length.
        flops: operations that the model needs for the real tokens.
        seconds: lower bound of the time, that of the worst case by the share of its positions; None where the step was
            not compiled.
        worst_seconds: of the worst case.
    """

    lengths: Lengths
    expected: ExpectedStep
    worst: int
    flops: float
    seconds: float | None
    worst_seconds: float | None

    def lines(self) -> list[str]:
        """For people."""
        expected = self.expected
        lines = [
            f"lengths      {self.lengths.name}: {expected.tokens:,.0f} tokens in a step with their prompts, whose "
            "median is a quarter of the limit",
            f"  computed   {expected.computed:,.0f} positions, {expected.computed / expected.tokens:.2f} times the "
            f"tokens ({expected.padding:.0%} padding); worst case {self.worst:,}",
            f"  operations {self.flops:.3e} needed by the model for these tokens",
        ]
        if self.seconds is not None:
            lines.append(
                f"  time       {self.seconds:.3g} s at least, by positions; worst case {self.worst_seconds:.3g} s"
            )
        return lines

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "lengths": self.lengths.name, "tokens": self.expected.tokens, "computed": self.expected.computed,
            "computed_over_real": self.expected.computed / self.expected.tokens, "worst_computed": self.worst,
            "model_flops": self.flops, "seconds": self.seconds, "worst_seconds": self.worst_seconds,
        }  # fmt: skip


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
    compiled = plan.programs.get("step")
    seconds = None if compiled is None or compiled.refused else roofline(compiled, plan.topology.chip).overlapped
    return AtLengths(
        lengths, expected, worst, passes * (matrices * expected.tokens + attention * expected.squares),
        None if seconds is None else seconds * expected.computed / worst, seconds,
    )  # fmt: skip
