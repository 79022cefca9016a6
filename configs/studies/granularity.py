"""Dual-GRPO with the discrepancy penalized by token and by sequence (section 4).

    python -m research.studies --study=configs/studies/granularity.py
    python -m research.studies --study=configs/studies/granularity.py:paper
    DeepSeek-R1-Distill-Qwen-1.5B

The paper argues for tokens and shows no figure.
"""

from configs.studies.base import DEMO, R1_DISTILL, arms, make_study
from research.studies.study import Study


def get_study(arg: str = "") -> Study:
    settings = {
        "grpo": {"algorithm.method": "grpo"},
        "token": {"algorithm.method": "dual_grpo", "algorithm.level": "token"},
        "sequence": {"algorithm.method": "dual_grpo", "algorithm.level": "sequence"},
    }
    demo, paper = (arms(config, settings) for config in (DEMO, R1_DISTILL))
    return make_study(arg, "Dual-GRPO by granularity", demo=demo, paper=paper, baseline="token")
