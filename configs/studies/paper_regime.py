"""The paper's regime: delta about c, four updates per weight sync, late collapse, eta 1.

    python -m research.sweep --study=configs/studies/paper_regime.py --kept=FILE \
        --config.model.path=DIR --seeds=0

`paper_regime.py:readings` and `paper_regime.py:calm` are two more studies.

DIR is a policy of 0.3M parameters after 2,000 supervised steps on worked sums of 24 terms. Its
completions have about 190 tokens; the engine's weights are rounded to 4 bits with one scale for
each output channel. A step has 64 completions of 8 prompts. Without an argument: four updates per
weight sync, 64 steps. `readings`: other readings of the paper's penalty in the same setting. `calm`: the
same readings at lambda 1 with one update per weight sync and 32 steps, where the penalty on each
token ends four of five runs.

Every setting starts at `configs/base.py`, whose constants are the paper's (section 6.1); what a
study needs beside them is in this file, and the table of arms is printed from the resolved
settings. Measures and rules: research/paper_regime.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dcmdp_jax.algorithm.masked import masked_sum
from dcmdp_jax.algorithm.remedies import Tokens
from research.studies.study import Arm, Study

BASE = "configs/base.py"
PROBLEMS = "arithmetic:difficulty=6,count=128,split=heldout"
COMPLETION_TOKENS = 208
SETTING: dict[str, object] = {
    "task.train": "arithmetic:difficulty=6,count=2048,seed=0",
    "task.prompt_suffix": "",
    "task.max_prompt_tokens": 60,
    "rollout.precision": "int4",
    "rollout.compute_dtype": "float32",
    "rollout.max_completion_tokens": COMPLETION_TOKENS,
    "rollout.max_rows": 64,
    "rollout.min_rows": 64,
    "model.compute_dtype": "float32",
    "model.remat": "none",
    "model.logprob_chunk": 8192,
    "training.steps": 64,
    "training.prompts_per_step": 8,
    "training.prompts_per_mini_batch": 2,
    "training.micro_batch_tokens": 32768,
    "optimizer.learning_rate": 2e-4,
    "evaluation.task": PROBLEMS,
    "evaluation.samples": (4,),
    "evaluation.every_steps": 64,
    "evaluation.temperature": 1.0,
    "checkpoint.every_steps": 100_000,
    "observe.samples": 0,
    "mesh.cpu_devices": 1,
}
"""Four updates per weight sync. The learning rate is that of the kept studies of this policy
(configs/studies).
"""
CALM = {"training.prompts_per_mini_batch": 8, "training.steps": 32, "evaluation.every_steps": 32}
"""One update per weight sync."""
GRPO = {"algorithm.method": "grpo"}
DC_GRPO = {
    "algorithm.method": "dc_grpo",
    "algorithm.multiplier": 0.1,
    "algorithm.tolerance": 0.0037,
    "algorithm.dual_learning_rate": 1.0,
    "algorithm.multiplier_max": 1.0,
}
"""The paper's constants (section 6.1, 8B); it states no cap."""
HEALTHY = 0.00119
"""Median over 15 kept runs of GRPO (regimes.jsonl.gz: four_updates and its control) of the median
delta of the first four steps.
"""
CENTERED = {"algorithm.corrections": "score_centering", "rollout.top_logprobs": 16}
"""16 top-k tokens of the engine; the vocabulary has 104."""
VERL = {
    "algorithm.aggregation": "token_mean",
    "algorithm.trust_region": "clip(low=0.2,high=0.24,dual=3)",
}
"""verl's defaults where they differ from the paper's equations."""
_HERE = "configs/studies/paper_regime.py"
SCORED_EXACTLY = (
    "--config.rollout.precision=float32",
    f"--config.evaluation.task={PROBLEMS}",
    "--config.evaluation.samples=(4,)",
    "--config.evaluation.temperature=1.0",
    f"--config.rollout.max_completion_tokens={COMPLETION_TOKENS}",
)


def fixed(multiplier: float) -> dict[str, object]:
    """The paper's penalty with a lambda that does not move."""
    return DC_GRPO | {"algorithm.multiplier": multiplier, "algorithm.dual_learning_rate": 0.0}


def less_batch_mean(tokens: Tokens) -> jax.Array:
    """A_i - lambda (delta - mean delta of the tokens in the call), whose penalties add up to zero.

    With `SETTING` one call has all completions of an update.
    """
    mean = masked_sum(tokens.discrepancy, tokens.completion_mask).value()
    penalty = jnp.where(tokens.completion_mask, tokens.discrepancy - mean, 0.0)
    return tokens.advantages - tokens.multiplier * penalty


def _readings(penalty: dict[str, object]) -> dict[str, dict[str, object]]:
    """Readings of the paper's penalty under one rule for lambda."""
    return {
        "less_batch_mean": penalty | {"algorithm.method": f"{_HERE}:less_batch_mean"},
        "completion_mean": penalty | {"algorithm.level": "sequence"},
        "charge_verl": penalty | VERL,
    }


THRESHOLD = {"algorithm.method": "threshold_grpo", "algorithm.tolerance": 0.0037}
"""Penalty above c alone, lambda 1 (the paper's tolerance region)."""


def get_study(arg: str = "") -> Study:
    if arg not in ("", "readings", "calm"):
        raise ValueError(f"study argument {arg!r}: allowed are readings and calm, or none")
    common = {**SETTING, **GRPO}
    seeds = tuple(range(5))
    if arg == "calm":
        common |= CALM
        arms = {"grpo": {}, "threshold": THRESHOLD, "token_1": fixed(1.0), **_readings(fixed(1.0))}
        arms["charge_centered"] = fixed(1.0) | CENTERED
    elif arg == "readings":
        arms = {"grpo": {}, "threshold": THRESHOLD, **_readings(DC_GRPO)}
        arms["grpo_verl"] = VERL
    else:
        seeds = tuple(range(20))
        arms = {
            "grpo": {},
            "grpo_shaken": {"algorithm.std_epsilon": 1e-3},
            "exact": {"rollout.precision": "exact"},
            "dc_grpo": DC_GRPO,
            "dc_grpo_1.25": DC_GRPO | {"algorithm.tolerance": 1.25 * HEALTHY},
            "token_0.1": fixed(0.1),
            "centered": CENTERED,
            "tis": {"algorithm.corrections": "tis(high=2)"},
            "dc_grpo_centered": DC_GRPO | CENTERED,
        }
    differs = {"dc_grpo_1.25": ("tolerance",), "dc_grpo_centered": ("corrections",)}
    found = {
        name: Arm(BASE, common | changes, differs=differs.get(name, ()))
        for name, changes in arms.items()
    }
    title = {
        "": "The paper's own regime",
        "readings": "Readings of the penalty",
        "calm": "Readings, calm",
    }[arg]
    return Study(title, found, "grpo", seeds, SCORED_EXACTLY)
