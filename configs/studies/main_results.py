"""GRPO and DC-GRPO with a BF16 and with an FP8 engine: tables 1 and 2.

    python -m research.studies --study=configs/studies/main_results.py
    python -m research.studies --study=configs/studies/main_results.py:paper  # Qwen3-8B, 8 GPUs
    with vLLM python -m research.studies --study=configs/studies/main_results.py:paper_30b
    Qwen3-30B-A3B, 32 GPUs with vLLM

With `:paper` and `:paper_30b` the FP8 engine is the paper's: vLLM with FP8 weights and activations.
At demo size it is the embedded engine's emulation. The two models need different machines, so each
has its part of the tables.
"""

import dataclasses
from collections.abc import Mapping

from configs.studies.base import DEMO, QWEN3_8B, QWEN3_30B_A3B, arms, make_study
from research.studies.study import Arm, Study


def _arms_30b(settings: Mapping[str, Mapping[str, str]]) -> dict[str, Arm]:
    """The paper's constants of this model: half of the 8B model's lambda_0, a third more c."""
    own = {"algorithm.multiplier": 0.05, "algorithm.tolerance": 0.0050}
    return {
        label: Arm(QWEN3_30B_A3B, changes | own, differs=("multiplier", "tolerance"))
        if "dc_grpo" in label
        else Arm(QWEN3_30B_A3B, changes)
        for label, changes in settings.items()
    }


def get_study(arg: str = "") -> Study:
    def settings(fp8: dict[str, str], bf16: dict[str, str]) -> dict[str, dict[str, str]]:
        return {
            f"{regime}_{method}": {"algorithm.method": method, **engine}
            for regime, engine in (("bf16", bf16), ("fp8", fp8))
            for method in ("grpo", "dc_grpo")
        }

    fp8 = {"rollout.precision": "fp8"}
    large = arg == "paper_30b"
    demo = arms(DEMO, settings(fp8, {"rollout.precision": "bfloat16"}))
    paper = _arms_30b(settings(fp8, {})) if large else arms(QWEN3_8B, settings(fp8, {}))
    study = make_study(
        "paper" if large else arg,
        "BF16 and FP8 engines",
        demo=demo,
        paper=paper,
        baseline="bf16_grpo",
    )
    return dataclasses.replace(study, title=f"{study.title}, Qwen3-30B-A3B") if large else study
