"""Remedies for engine mismatch beside the paper's methods: TIS, IcePop, DPPO, matched precision; and no mismatch.

    python -m bin.sweep --study=configs/studies/remedies.py              embedded engine, FP8 weights
    python -m bin.sweep --study=configs/studies/remedies.py:vllm         vLLM, FP8 key-value cache
    python -m bin.sweep --study=configs/studies/remedies.py:paper        Qwen3-8B, 8 GPUs, vLLM with FP8 in blocks

TIS, IcePop and DPPO are GRPO with the thresholds of configs/remedies.py. `matched` is GRPO whose trainer computes its
forward pass with the engine's quantized weights, `exact` GRPO against an engine in the trainer's own precision, the
control. Both have the embedded engine in every study: vLLM's quantized forward pass is not emulated, and its float32 is
close to the trainer's, not equal.
"""

from collections.abc import Mapping
from typing import Any

from configs.remedies import REMEDIES
from configs.studies.base import DEMO, QWEN3_8B, SEEDS, arms, make_study
from configs.studies.methods import METHODS
from dcmdp_jax.lab.studies.study import Arm, Study

VLLM = "configs/demo_vllm.py:fp8_kv"
_GRPO = {"algorithm.method": "grpo"}


def remedy_arms(config: str, engine: Mapping[str, Any], embedded: str, *, matched: str = "fp8") -> dict[str, Arm]:
    """Arms of `config` against the engine of these settings; `embedded` is the config of `matched` and `exact`.

    `matched` has the embedded engine in the precision of that name.
    """
    remedies = {
        name: {f"algorithm.{key}": value for key, value in REMEDIES[name].items()} for name in ("tis", "icepop", "dppo")
    }
    controls = {
        "matched": {"rollout.precision": matched, "model.forward_precision": matched},
        "exact": {"rollout.precision": "exact"},
    }
    return {
        **arms(config, {method: {"algorithm.method": method, **engine} for method in METHODS}),
        **arms(config, {name: {**_GRPO, **changes, **engine} for name, changes in remedies.items()}),
        **arms(embedded, {name: {**_GRPO, "rollout.engine": "local", **changes} for name, changes in controls.items()}),
    }


def get_study(arg: str = "") -> Study:
    if arg == "vllm":
        return Study("Remedies (vLLM, FP8 key-value cache, demo size)", remedy_arms(VLLM, {}, DEMO), "grpo", SEEDS)
    fp8 = {"rollout.precision": "fp8_per_block"}
    return make_study(
        arg,
        "Remedies",
        demo=remedy_arms(DEMO, {}, DEMO),
        paper=remedy_arms(QWEN3_8B, fp8, f"{QWEN3_8B}:local"),
        baseline="grpo",
    )
