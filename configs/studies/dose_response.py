"""What a fixed lambda does to discrepancy, reward, held-out score and entropy, by penalty.

    python -m research.sweep --study=configs/studies/dose_response.py \
        --kept=research/kept/dose_response.jsonl.gz --config.model.path=runs/evidence/policy
    python -m research.dose_tables research/kept/dose_response.jsonl.gz

Embedded engine with int4 weights, one update a step, learning rate 2e-4: GRPO learns in every run.
lambda is fixed (eta = 0) over four decades. `grpo_perturbed` is GRPO with std_epsilon = 2e-6
instead of 1e-6: what differs between the two is chance, and no smaller effect is claimed. All runs
start from one policy; research/appendix.md says how.

`dose_response.py:one` has the one-sided penalties with baselines that measure as they do, `:vllm`
the two-sided ones against vLLM, with an arm `matched` whose trainer rounds keys and values as
vLLM's FP8 cache does.
"""

from configs.studies.base import DEMO, VLLM
from research.studies.study import Arm, Study

PENALTIES = ("token", "reward", "sequence", "state")
"""Penalties, each an `algorithm.level`; `state` was one, and its runs are kept."""
LAMBDAS = (1, 10, 100, 1000)
"""Fixed multipliers, four decades. At 1 the penalty is 0.005 where advantages are 1; less was not
run.
"""
SEEDS = tuple(range(10))
SETTING = {
    "rollout.max_rows": 64,
    "rollout.min_rows": 64,
    "training.steps": 32,
    "training.prompts_per_step": 8,
    "training.prompts_per_mini_batch": 8,
    "optimizer.learning_rate": 2e-4,
    "evaluation.every_steps": 32,
    "evaluation.samples": (2,),
    "checkpoint.every_steps": 100_000,
    "observe.samples": 0,
    "mesh.cpu_devices": 1,
    "algorithm.tolerance_steps": 0,
    "warmup.steps": 0,
}
"""A run takes about 5 seconds of one core. 64 completions a step, in one update."""
ASCENT = {
    "algorithm.method": "dc_grpo",
    "algorithm.tolerance": 0.0044,
    "algorithm.dual_learning_rate": 2000.0,
    "algorithm.multiplier": 0.0,
    "algorithm.multiplier_max": 1000.0,
}
"""Dual ascent. c is 0.9 times GRPO's mean delta over the last half of its steps (0.00486), so that
it binds and is far above the noise floor. A step's delta differs from its mean by 0.001: at this
eta that moves lambda by 2, and what GRPO has above c moves it by 30 in 32 steps, to where the
token's penalty acts.
"""
_VLLM_TOLERANCE = 0.0049
"""c against vLLM: 0.9 times GRPO's mean delta over the last half of its steps, 0.00542 on an Intel
Xeon. On an AMD EPYC GRPO has 0.0050, and it hardly binds.
"""
_ENDING = {"two": "", "one": "_one"}
_INT4 = {"rollout.precision": "int4"}
FIXED = {
    "algorithm.method": "dc_grpo",
    "algorithm.dual_learning_rate": 0.0,
    "algorithm.multiplier_max": 1e6,
}
"""A fixed lambda."""


def doses(sided: str) -> dict[str, tuple[str, float]]:
    """Arm -> penalty and lambda: `token_10`, one-sided `token_one_10`."""
    penalties = [penalty + _ENDING[sided] for penalty in PENALTIES]
    return {
        f"{penalty}_{strength:g}": (penalty, float(strength))
        for penalty in penalties
        for strength in LAMBDAS
    }


def get_study(arg: str = "") -> Study:
    if arg not in ("", "one", "vllm"):
        raise ValueError(f"study argument {arg!r}: allowed are one and vllm")
    sided = arg if arg == "one" else "two"
    # One-sided discrepancy is about half of the two-sided one, so its baselines measure it so too.
    ending = {"algorithm.sided": sided}
    arms = {
        "grpo": {"algorithm.method": "grpo", **ending},
        "grpo_perturbed": {"algorithm.method": "grpo", "algorithm.std_epsilon": 2e-6, **ending},
        "exact": {"algorithm.method": "grpo", "rollout.precision": "exact", **ending},
    }
    chosen = doses(sided)
    for name, (penalty, strength) in chosen.items():
        level = penalty.removesuffix(_ENDING["one"])
        arms[name] = {**FIXED, **ending, "algorithm.level": level, "algorithm.multiplier": strength}
    for level in ("token", "reward"):
        arms[f"ascent_{level}"] = {**ASCENT, "algorithm.level": level}
    if arg == "one":
        arms = {
            name: settings
            for name, settings in arms.items()
            if name != "exact" and not name.startswith("ascent")
        }
    if arg == "vllm":
        arms["matched"] = {"algorithm.method": "grpo", "model.forward_cache": "fp8"}
        for level in ("token", "reward"):
            arms[f"ascent_{level}"] |= {"algorithm.tolerance": _VLLM_TOLERANCE}
        found = {
            name: Arm(
                DEMO if name == "exact" else VLLM,
                {**SETTING, **settings},
                past=name.startswith("state"),
            )
            for name, settings in arms.items()
        }
        return Study("Dose and response, vLLM, FP8 cache", found, "grpo", SEEDS[:5])
    found = {
        name: Arm(DEMO, {**SETTING, **_INT4, **settings}, past=name.startswith("state"))
        for name, settings in arms.items()
    }
    title = f"Dose and response, embedded int4 engine{', one-sided' if arg else ''}"
    return Study(title, found, "grpo", SEEDS)
