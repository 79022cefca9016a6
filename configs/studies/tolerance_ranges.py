"""Dual-GRPO with a dead zone: only discrepancies above c are penalized (section 5; figure 3).

    python -m research.studies --study=configs/studies/tolerance_ranges.py
    python -m research.studies --study=configs/studies/tolerance_ranges.py:paper
    DeepSeek-R1-Distill-Qwen-1.5B

The paper does not state its ranges: these go from no tolerance to one that few tokens exceed. At
demo size the mean discrepancy is about 0.001 and its 99th percentile about 0.02.
"""

from configs.studies.base import DEMO, R1_DISTILL, arms, evaluated_arms, make_study
from research.studies.study import Study

RANGES = (0.001, 0.005, 0.02, 0.1)


def get_study(arg: str = "") -> Study:
    settings = {"c=0": {"algorithm.method": "dual_grpo"}}
    for tolerance in RANGES:
        settings[f"c={tolerance}"] = {
            "algorithm.method": "threshold_grpo",
            "algorithm.tolerance": tolerance,
        }
    settings["grpo"] = {"algorithm.method": "grpo"}
    paper = evaluated_arms(R1_DISTILL, settings)
    return make_study(
        arg, "Tolerance ranges", demo=arms(DEMO, settings), paper=paper, baseline="c=0"
    )
