"""The two sizes that every study has."""

from collections.abc import Mapping
from typing import Any

from dcmdp_jax.lab.studies.study import Arm, Study

DEMO = "demo"
QWEN3_8B = "qwen3_8b"
QWEN3_30B_A3B = "qwen3_30b_a3b"
R1_DISTILL = "r1_distill_qwen_1p5b"
SEEDS = (0, 1, 2, 3, 4)
PAPER_SEEDS = (0,)
"""The paper reports one run of each."""
SIX_BENCHMARKS = ",".join(
    f"data/{name}.jsonl" for name in ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench")
)


def make_study(arg: str, title: str, *, demo: Mapping[str, Arm], paper: Mapping[str, Arm], baseline: str) -> Study:
    """A study at demo size, or with `paper` as its argument at the paper's, evaluated on the six benchmarks.

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
        evaluation = (f"--config.evaluation.task={SIX_BENCHMARKS}",)
        return Study(f"{title} (the paper's constants)", paper, baseline, PAPER_SEEDS, evaluation)
    return Study(f"{title} (demo size)", demo, baseline, SEEDS)


EVALUATED = {"evaluation.task": SIX_BENCHMARKS, "evaluation.every_steps": 20}
"""Figures 2 and 3 are curves: held-out scores on the six benchmarks while training, each with the paper's K."""


def evaluated_arms(config: str, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Arm]:
    """`arms` that are evaluated while they train."""
    return arms(config, {label: {**EVALUATED, **changes} for label, changes in settings.items()})


def arms(config: str, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Arm]:
    """One config, and label -> what it changes. The demos measure c on each run; a study's arms all have the same."""
    fixed = {"algorithm.tolerance_steps": 0} if config.startswith("configs/demo") else {}
    return {label: Arm(config, {**fixed, **changes}) for label, changes in settings.items()}
