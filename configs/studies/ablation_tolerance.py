"""Ablation of c, the budget: table 5, Qwen3-8B.

    python -m research.studies --study=configs/studies/ablation_tolerance.py
    python -m research.studies --study=configs/studies/ablation_tolerance.py:paper  # 8 GPUs
    with vLLM

The default is 0.0037; the demo's is 0.0012, and its values have the paper's proportions.
"""

from configs.studies.base import DEMO, QWEN3_8B, arms, make_study
from research.studies.study import Study

_SETTING = "algorithm.tolerance"
# Label, which is the paper's value: demo's value, the paper's.
_VALUES = {
    "0.0030": (0.000973, 0.0030),
    "0.0035": (0.001135, 0.0035),
    "0.0037": (0.0012, 0.0037),
    "0.0040": (0.001297, 0.0040),
}


def get_study(arg: str = "") -> Study:
    demo, paper = (
        {label: {_SETTING: values[size]} for label, values in _VALUES.items()} for size in (0, 1)
    )
    return make_study(
        arg, "Budget c", demo=arms(DEMO, demo), paper=arms(QWEN3_8B, paper), baseline="0.0037"
    )
