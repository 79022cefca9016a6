"""Ablation of eta, the dual learning rate: table 4, Qwen3-8B.

    python -m research.studies --study=configs/studies/ablation_dual_learning_rate.py
    python -m research.studies --study=configs/studies/ablation_dual_learning_rate.py:paper  # 8 GPUs
    with vLLM

The default is 1.0. At demo size an arm has fifty times what its label says.
"""

from configs.studies.base import DEMO, QWEN3_8B, arms, make_study
from research.studies.study import Study

_SETTING = "algorithm.dual_learning_rate"
# Label, which is the paper's value: demo's value, the paper's.
_VALUES = {"0.5": (25.0, 0.5), "1.0": (50.0, 1.0), "1.5": (75.0, 1.5)}


def get_study(arg: str = "") -> Study:
    demo, paper = (
        {label: {_SETTING: values[size]} for label, values in _VALUES.items()} for size in (0, 1)
    )
    return make_study(
        arg,
        "Dual learning rate eta",
        demo=arms(DEMO, demo),
        paper=arms(QWEN3_8B, paper),
        baseline="1.0",
    )
