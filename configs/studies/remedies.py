"""The paper's methods, TIS, IcePop, DPPO, matched precision, and no mismatch, side by side.

    python -m research.studies --study=configs/studies/remedies.py  # embedded engine, FP8
    weights python -m research.studies --study=configs/studies/remedies.py:vllm   vLLM, FP8
    key-value cache python -m research.studies --study=configs/studies/remedies.py:paper  Qwen3-8B,
    8 GPUs, vLLM with FP8 in blocks

TIS, IcePop and DPPO are GRPO with the thresholds of configs/remedies.py. `matched` is GRPO whose
trainer rounds in its forward pass as the engine does, `exact` GRPO against an engine in the
trainer's own precision, the control. That is the embedded engine in every study: vLLM's float32 is
close to the trainer's, not equal.
"""

from collections.abc import Mapping
from typing import Any

from configs.remedies import REMEDIES
from configs.studies.base import DEMO, QWEN3_8B, SEEDS, VLLM, arms, make_study
from configs.studies.methods import METHODS
from research.studies.study import Arm, Study

_GRPO = {"algorithm.method": "grpo"}


def remedy_arms(
    config: str,
    engine: Mapping[str, Any],
    embedded: str,
    *,
    matched: str = "fp8",
    forward: Mapping[str, Any] = {},
) -> dict[str, Arm]:
    """Arms of `config` against the engine of these settings; `embedded` is the config of `exact`.

    `matched` has the same engine and the settings `forward` of the trainer; without them the
    embedded engine in the precision `matched`.
    """
    remedies = {
        name: {f"algorithm.{key}": value for key, value in REMEDIES[name].items()}
        for name in ("tis", "icepop", "dppo")
    }
    rounded = {"rollout.precision": matched, "model.forward_precision": matched}
    same = {"matched": {**engine, **forward}} if forward else {}
    controls = ({} if forward else {"matched": rounded}) | {"exact": {"rollout.precision": "exact"}}
    return {
        **arms(config, {method: {"algorithm.method": method, **engine} for method in METHODS}),
        **arms(
            config,
            {name: {**_GRPO, **changes, **engine} for name, changes in (remedies | same).items()},
        ),
        **arms(
            embedded,
            {
                name: {**_GRPO, "rollout.engine": "local", **changes}
                for name, changes in controls.items()
            },
        ),
    }


def get_study(arg: str = "") -> Study:
    if arg == "vllm":
        found = remedy_arms(VLLM, {}, DEMO, forward={"model.forward_cache": "fp8"})
        return Study("Remedies (vLLM, FP8 key-value cache, demo size)", found, "grpo", SEEDS)
    fp8 = {"rollout.precision": "fp8_per_block"}
    blocks = {"model.forward_precision": "fp8_per_block"}
    paper = remedy_arms(QWEN3_8B, fp8, f"{QWEN3_8B}:local", forward=blocks)
    return make_study(
        arg, "Remedies", demo=remedy_arms(DEMO, {}, DEMO), paper=paper, baseline="grpo"
    )
