"""The runs behind docs/evidence.md: the paper's methods, TIS, IcePop, DPPO, matched precision.

    python -m research.studies --study=configs/studies/evidence.py  # embedded engine: FP8
    weights and FP8 cache python -m research.studies --study=configs/studies/evidence.py:int4
    embedded engine: int4 weights, fewer arms python -m research.studies
    --study=configs/studies/evidence.py:vllm  vLLM: BF16, FP8 cache

The demo's learning rate times five and four mini-batches instead of two put GRPO under strain; c is
the paper's 0.0037, eta fifty times the paper's, thirty against vLLM: `dc_grpo` is not the paper's
method. research/appendix.md has the commands with the policy that all runs start from.
"""

from collections.abc import Mapping
from typing import Any

from configs.studies.base import DEMO, SEEDS, VLLM
from configs.studies.remedies import remedy_arms
from research.studies.study import Arm, Study

STRAIN = {
    "optimizer.learning_rate": 5e-4,
    "training.prompts_per_mini_batch": 12,
    "algorithm.tolerance": 0.0037,
    "evaluation.every_steps": 20,
}
_FP8_CACHE = {"rollout.kv_cache_dtype": "fp8"}
_INT4_ARMS = ("grpo", "dc_grpo", "tis", "icepop", "matched", "exact")


def get_study(arg: str = "") -> Study:
    if arg == "vllm":
        arms = {
            name: arm for name, arm in remedy_arms(VLLM, {}, DEMO).items() if arm.config == VLLM
        }
        return Study(
            "Remedies under strain, vLLM with an FP8 cache", _strained(arms), "grpo", SEEDS
        )
    if arg == "int4":
        arms = remedy_arms(DEMO, {"rollout.precision": "int4"}, DEMO, matched="int4")
        chosen = {name: arms[name] for name in _INT4_ARMS}
        return Study(
            "Remedies under strain, embedded int4 engine",
            _strained(chosen, cache={}),
            "grpo",
            SEEDS,
        )
    if arg:
        raise ValueError(f"study argument {arg!r}: allowed are int4, vllm")
    return Study(
        "Remedies under strain, embedded FP8 engine",
        _strained(remedy_arms(DEMO, {}, DEMO)),
        "grpo",
        SEEDS,
    )


def _strained(arms: Mapping[str, Arm], cache: Mapping[str, Any] = _FP8_CACHE) -> dict[str, Arm]:
    """The arms under strain. An embedded engine gets this cache; the exact control has none."""
    found = {}
    for name, arm in arms.items():
        settings = {
            **arm.settings,
            **STRAIN,
            **(cache if arm.config == DEMO and name != "exact" else {}),
        }
        found[name] = Arm(
            arm.config, settings, differs=("dual_learning_rate",) if name == "dc_grpo" else ()
        )
    return found
