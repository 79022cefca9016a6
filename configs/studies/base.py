"""The two sizes that every study has.

A study says every setting of the algorithm and the optimizer that is not that of configs/base.py:
no arm inherits what a demo is tuned to.
"""

from collections.abc import Mapping
from typing import Any

from research.studies.study import Arm, Study

DEMO = "demo"
VLLM = "demo_vllm:fp8_kv"
QWEN3_8B = "qwen3_8b"
QWEN3_30B_A3B = "qwen3_30b_a3b"
R1_DISTILL = "r1_distill_qwen_1p5b"
SIZE = {
    "algorithm.tolerance_steps": 0,
    "optimizer.learning_rate": 1e-4,
    "training.prompts_per_step": 48,
    "training.prompts_per_mini_batch": 24,
}
"""What arms of demo size take of the demo's training: two updates per weight sync. c is not
measured: it is the same in all.
"""
ASCENT = {DEMO: (0.0012, 50.0), VLLM: (0.002, 30.0)}
"""c and eta at demo size: fifty and thirty times the paper's eta, so that lambda moves within 40
steps.
"""
DIFFERS = ("tolerance", "dual_learning_rate")
"""So `dc_grpo` of demo size is not the paper's."""
SEEDS = (0, 1, 2, 3, 4)
PAPER_SEEDS = (0,)
"""The paper reports one run of each."""
SIX_BENCHMARKS = ",".join(
    f"data/{name}.jsonl"
    for name in ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench")
)


def make_study(
    arg: str, title: str, *, demo: Mapping[str, Arm], paper: Mapping[str, Arm], baseline: str
) -> Study:
    """A study at demo size, or with the argument `paper` at the paper's, on the six benchmarks.

    Args:
        arg: "" or "paper".
        title: heading.
        demo, paper: arms of the two.
        baseline: an arm of both.

    Raises:
        ValueError: for another argument.
    """
    if arg not in ("", "paper"):
        raise ValueError(f"study argument {arg!r}: allowed is paper")
    if arg == "paper":
        evaluation = (
            f"--config.evaluation.task={SIX_BENCHMARKS}",
            "--config.rollout.max_completion_tokens=32768",
            "--config.evaluation.temperature=0.7",
        )
        return Study(f"{title} (the paper's constants)", paper, baseline, PAPER_SEEDS, evaluation)
    return Study(f"{title} (demo size)", demo, baseline, SEEDS)


EVALUATED = {"evaluation.task": SIX_BENCHMARKS, "evaluation.every_steps": 20}
"""Figures 2 and 3 are curves: held-out scores on the six benchmarks while training, each with the
paper's K.
"""


def evaluated_arms(config: str, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Arm]:
    """`arms` that are evaluated while they train."""
    return arms(config, {label: {**EVALUATED, **changes} for label, changes in settings.items()})


def arms(config: str, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Arm]:
    """One config, and label -> its changes; `SIZE` at demo size, `ASCENT` for its methods."""
    found = {}
    for label, changes in settings.items():
        taken: dict[str, Any] = {}
        if config in ASCENT:
            (c, eta), method = ASCENT[config], changes.get("algorithm.method", "dc_grpo")
            taken = SIZE | (
                {"algorithm.tolerance": c} if method in ("dc_grpo", "threshold_grpo") else {}
            )
            taken |= {"algorithm.dual_learning_rate": eta} if method == "dc_grpo" else {}
        found[label] = Arm(
            config, taken | changes, differs=DIFFERS if taken and "dc_grpo" in label else ()
        )
    return found
