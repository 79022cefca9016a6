"""GRPO at sampling temperatures 0.3, 0.7 and 1.0 (section 3; figure 2, left and middle).

    python -m research.studies --study=configs/studies/temperatures.py
    python -m research.studies --study=configs/studies/temperatures.py:paper
    DeepSeek-R1-Distill-Qwen-1.5B

Every arm is evaluated at one temperature: 1.0 at demo size, the paper's 0.7 on the six benchmarks.
"""

from configs.studies.base import DEMO, R1_DISTILL, arms, evaluated_arms, make_study
from research.studies.study import Study

TEMPERATURES = (0.3, 0.7, 1.0)


def get_study(arg: str = "") -> Study:
    grpo = {"algorithm.method": "grpo"}
    settings = {
        f"t={temperature}": grpo | {"rollout.temperature": temperature}
        for temperature in TEMPERATURES
    }
    demo = arms(DEMO, settings)
    paper = evaluated_arms(R1_DISTILL, settings)
    return make_study(arg, "GRPO by sampling temperature", demo=demo, paper=paper, baseline="t=1.0")
