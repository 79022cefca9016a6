"""GRPO and DC-GRPO with a BF16 and with an FP8 engine: tables 1 and 2, Qwen3-8B.

    python -m bin.sweep --study=configs/studies/main_results.py
    python -m bin.sweep --study=configs/studies/main_results.py:paper          8 GPUs with vLLM

With `:paper` the FP8 engine is the paper's: vLLM with FP8 weights and activations. At demo size it is the embedded
engine's emulation. The paper has the same grid for Qwen3-30B-A3B, with lambda_0 = 0.05 and c = 0.0050: here it is
configs/qwen3_30b_a3b.py, in no study.
"""

from configs.studies.base import DEMO, QWEN3_8B, arms, make_study
from dcmdp_jax.studies.study import Study


def get_study(arg: str = "") -> Study:
    def settings(precisions: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        return {
            f"{regime}_{method}": {"algorithm.method": method, **engine}
            for regime, engine in precisions.items()
            for method in ("grpo", "dc_grpo")
        }

    vllm = {"rollout.engine": "vllm"}
    return make_study(
        arg,
        "BF16 and FP8 engines",
        demo=arms(DEMO, settings({"bf16": {"rollout.precision": "bfloat16"}, "fp8": {"rollout.precision": "fp8"}})),
        paper=arms(QWEN3_8B, settings({"bf16": vllm, "fp8": {**vllm, "rollout.precision": "fp8"}})),
        baseline="bf16_grpo",
    )
