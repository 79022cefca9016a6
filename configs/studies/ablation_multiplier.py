"""Ablation of lambda_0, the first multiplier: table 3, Qwen3-8B.

    python -m research.studies --study=configs/studies/ablation_multiplier.py
    python -m research.studies --study=configs/studies/ablation_multiplier.py:paper  # 8 GPUs
    with vLLM

The default is 0.1.
"""

from configs.studies.base import DEMO, QWEN3_8B, arms, make_study
from research.studies.study import Study

_SETTING = "algorithm.multiplier"
# Label, which is the paper's value: demo's value, the paper's.
_VALUES = {"0.05": (0.05, 0.05), "0.1": (0.1, 0.1), "0.2": (0.2, 0.2)}


def get_study(arg: str = "") -> Study:
    demo, paper = (
        {label: {_SETTING: values[size]} for label, values in _VALUES.items()} for size in (0, 1)
    )
    return make_study(
        arg,
        "Initial multiplier lambda_0",
        demo=arms(DEMO, demo),
        paper=arms(QWEN3_8B, paper),
        baseline="0.1",
    )
