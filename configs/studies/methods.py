"""Four methods against one engine (figures 4 and 5): FP8, with `:paper` vLLM in BF16.

    python -m research.studies --study=configs/studies/methods.py
    python -m research.studies --study=configs/studies/methods.py:paper
    DeepSeek-R1-Distill-Qwen-1.5B

Dual-GRPO and threshold-GRPO have a multiplier fixed at 1.
"""

from configs.studies.base import DEMO, R1_DISTILL, arms, make_study
from research.studies.study import Study

METHODS = ("grpo", "dual_grpo", "threshold_grpo", "dc_grpo")


def get_study(arg: str = "") -> Study:
    settings = {method: {"algorithm.method": method} for method in METHODS}
    return make_study(
        arg, "Methods", demo=arms(DEMO, settings), paper=arms(R1_DISTILL, settings), baseline="grpo"
    )
