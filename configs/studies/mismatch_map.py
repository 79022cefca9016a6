"""Where does mismatch matter? GRPO and the exact control, one setting of dose_response changed.

    python -m research.sweep --study=configs/studies/mismatch_map.py:2bits \
        --kept=research/kept/map_2bits.jsonl.gz --config.model.path=runs/evidence/policy

Three arms of every setting: GRPO against the mismatched engine, the same with std_epsilon = 2e-6
(chance alone), and GRPO whose log-probs are the trainer's own. Completions of 200 tokens, where
these differ most, have penalties too. The argument names the setting, 3bits without one;
research/appendix.md has the tables of those that were run.
"""

from typing import Any

from configs.studies.base import DEMO
from configs.studies.dose_response import FIXED, SETTING
from research.studies.study import Arm, Study

LONG: dict[str, Any] = {
    "task.train": "arithmetic:difficulty=6,count=2048,seed=0",
    "task.max_prompt_tokens": 60,
    "evaluation.task": "arithmetic:difficulty=6,count=64,split=heldout",
    "warmup.task": "arithmetic:difficulty=6,count=16384,seed=1,error_rate=0.5",
    "rollout.max_completion_tokens": 208,
}
"""Chains of 24 steps, worked solutions of 167 to 201 tokens; the policy has a warm-up of 2,000
steps on them.
"""
CHANGES: dict[str, dict[str, Any]] = {
    "2bits": {"rollout.precision": "int2"},
    "3bits": {"rollout.precision": "int3"},
    "rate4e-4": {"optimizer.learning_rate": 4e-4},
    "rate1e-3": {"optimizer.learning_rate": 1e-3},
    "four_updates": {"training.prompts_per_mini_batch": 2},
    "128steps": {"training.steps": 128, "evaluation.every_steps": 128},
    "400steps": {"training.steps": 400, "evaluation.every_steps": 400},
    "200tokens": LONG,
}
"""Argument -> what differs from the setting of the dose-and-response study, whose weights have 4
bits.
"""


def get_study(arg: str = "") -> Study:
    arg = arg or "3bits"
    if arg not in CHANGES:
        raise ValueError(f"study argument {arg!r}: allowed are {', '.join(CHANGES)}")
    engine = {"algorithm.method": "grpo", **SETTING, "rollout.precision": "int4", **CHANGES[arg]}
    arms = {
        "grpo": engine,
        "grpo_perturbed": {**engine, "algorithm.std_epsilon": 2e-6},
        "exact": {**engine, "rollout.precision": "exact"},
    }
    if arg == "200tokens":
        arms["matched"] = {**engine, "model.forward_precision": "int4"}
        for level, strength in (
            ("token", 1),
            ("token", 10),
            ("reward", 1),
            ("reward", 10),
            ("reward", 100),
        ):
            penalty = {"algorithm.level": level, "algorithm.multiplier": float(strength)}
            arms[f"{level}_{strength}"] = {**engine, **FIXED, **penalty}
    found = {name: Arm(DEMO, settings) for name, settings in arms.items()}
    return Study(f"Map of regimes, {arg}", found, "grpo", tuple(range(5)))
