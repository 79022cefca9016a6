"""Dual-GRPO with three penalties: difference, ratio, log-difference (section 4; figure 2, right).

    python -m research.studies --study=configs/studies/penalties.py
    python -m research.studies --study=configs/studies/penalties.py:paper
    DeepSeek-R1-Distill-Qwen-1.5B

GRPO is the baseline: the figure's gain is what a penalty adds. The figure has average@32 on all six
benchmarks, and so have the runs' own evaluations; section 6.1 and the final table have avg@4 on
three of them.
"""

from configs.studies.base import DEMO, R1_DISTILL, arms, evaluated_arms, make_study
from research.studies.study import Study


def get_study(arg: str = "") -> Study:
    dual = {"algorithm.method": "dual_grpo"}
    settings = {
        "grpo": {"algorithm.method": "grpo"},
        "diff": {**dual, "algorithm.measure": "diff"},
        "ratio": {**dual, "algorithm.measure": "ratio"},
        "log": {**dual, "algorithm.measure": "log"},
    }
    paper = evaluated_arms(
        R1_DISTILL, {label: {**arm, "evaluation.samples": (32,)} for label, arm in settings.items()}
    )
    return make_study(
        arg, "Dual-GRPO by penalty", demo=arms(DEMO, settings), paper=paper, baseline="grpo"
    )
