"""The studies whose metrics are kept, and what each arm was: `python -m research.kept_studies`
writes arms.txt.

An arm is what its settings resolve to today. That the kept runs had these,
research/tests/kept_studies_test.py replays from each run's own discrepancy and multiplier.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from configs.studies.dose_response import FIXED, SETTING
from configs.studies.mismatch_map import CHANGES
from research.studies.results import read_kept_metrics
from research.studies.study import Arm
from research.studies.sweep import load_study, table_of

_ROOT = Path(__file__).resolve().parents[1]
KEPT = _ROOT / "research" / "kept"
ARMS = Path(__file__).parent / "tables" / "arms.txt"
_STUDIES = "configs/studies"
STUDIES: dict[str, str] = {
    "countdown": "examples/countdown/countdown.py:small",
    "planted": "examples/planted/planted.py",
    "long_completions": f"{_STUDIES}/long_completions.py",
    "regimes": f"{_STUDIES}/long_completions.py:regimes",
    "smollm2": f"{_STUDIES}/smollm2.py",
    "dose_response": f"{_STUDIES}/dose_response.py",
    "dose_response_wide": f"{_STUDIES}/dose_response.py",
    "dose_response_one": f"{_STUDIES}/dose_response.py:one",
    "dose_response_one_state": f"{_STUDIES}/dose_response.py:one",
    "dose_response_vllm": f"{_STUDIES}/dose_response.py:vllm",
    "dose_response_vllm_xeon": f"{_STUDIES}/dose_response.py:vllm",
    **{f"map_{name}": f"{_STUDIES}/mismatch_map.py:{name}" for name in CHANGES},
    "lag": f"{_STUDIES}/lag.py",
    "lag_corrections": f"{_STUDIES}/lag.py:corrections",
    "embedded": f"{_STUDIES}/evidence.py",
    "int4": f"{_STUDIES}/evidence.py:int4",
    "vllm": f"{_STUDIES}/evidence.py:vllm",
    "methods": f"{_STUDIES}/methods.py",
    "dual_learning_rate": f"{_STUDIES}/ablation_dual_learning_rate.py",
    "multiplier": f"{_STUDIES}/ablation_multiplier.py",
    "tolerance": f"{_STUDIES}/ablation_tolerance.py",
}
"""Name of the kept metrics -> the study."""
_RULES_FIRST = {
    "paper_regime": f"{_STUDIES}/paper_regime.py",
    "paper_regime_readings": f"{_STUDIES}/paper_regime.py:readings",
    "paper_regime_calm": f"{_STUDIES}/paper_regime.py:calm",
    "doses_pilots": f"{_STUDIES}/doses.py:pilots",
    "doses": f"{_STUDIES}/doses.py",
    "doses_late_pilots": f"{_STUDIES}/doses.py:late_pilots",
    "doses_late": f"{_STUDIES}/doses.py:late",
}
"""Studies whose rules are written before their runs."""
for _name, _study in _RULES_FIRST.items():
    if (KEPT / f"{_name}.jsonl.gz").exists():
        STUDIES[_name] = _study
STEPS: Mapping[str, int] = {"dose_response_wide": 40, "embedded": 80, "int4": 80, "vllm": 32}
"""Steps of studies that ran with --config.training.steps."""
_INT4 = {"rollout.precision": "int4"}
_GRPO = {"algorithm.method": "grpo", "training.prompts_per_mini_batch": 12}
_LONGER = ("grpo_3e-4", "exact_3e-4", "exact_1e-3")
_RATES = ("1e-4", "2e-4", "3e-4", "3.5e-4", "1e-3")
WITHOUT_A_STUDY: Mapping[str, Mapping[str, Arm]] = {
    "dose_response_wide": {
        "token_0.1": Arm("demo", SETTING | FIXED | {"algorithm.multiplier": 0.1} | _INT4, past=True)
    },
    "learning_rate": {
        (name := f"{engine}_{rate}"): Arm(
            "demo",
            _GRPO
            | {
                "optimizer.learning_rate": float(rate),
                "training.steps": 120 if name in _LONGER else 80,
            }
            | {"rollout.precision": precision},
        )
        for engine, precision in (("grpo", "fp8"), ("int4", "int4"), ("exact", "exact"))
        for rate in _RATES
    },
}
"""Kept runs that no study file has."""


def arms_of(name: str) -> dict[str, Arm]:
    """The arms that the metrics `name` has runs of."""
    study = load_study(str(_ROOT / STUDIES[name])).arms if name in STUDIES else {}
    arms = {**study, **WITHOUT_A_STUDY.get(name, {})}
    return {arm: arms[arm] for arm in read_kept_metrics(KEPT / f"{name}.jsonl.gz", None)}


def given(name: str) -> list[str]:
    """What the study's command gave every run."""
    return [f"--config.training.steps={STEPS[name]}"] if name in STEPS else []


def arms_text() -> str:
    """The table of arms of every kept study."""
    names = dict.fromkeys((*STUDIES, *WITHOUT_A_STUDY))
    heads = {name: f"{name}: {STUDIES.get(name, 'no study file')}" for name in names}
    return "\n".join(f"{heads[name]}\n\n{table_of(arms_of(name), given(name))}" for name in names)


if __name__ == "__main__":
    ARMS.write_text(arms_text(), encoding="utf-8")
