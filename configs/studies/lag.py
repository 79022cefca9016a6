"""Sampling 0, 1, 2 and 4 steps ahead: reward, mismatch, staleness, and each remedy under lag.

    python -m research.studies --study=configs/studies/lag.py            # vLLM: BF16, FP8 cache
    python -m research.studies --study=configs/studies/lag.py:corrections  # vLLM, corrections only,
    and a GRPO python -m research.studies --study=configs/studies/lag.py:local        embedded
    engine: FP8 weights, no overlap

The setting of configs/studies/dose_response.py, in which GRPO learns in every run, from the same
first policy:

    python -m research.sweep --study=configs/studies/lag.py --kept=research/kept/lag.jsonl.gz \
        --config.model.path=runs/evidence/policy

`lag0_grpo_perturbed` is GRPO with std_epsilon = 2e-6 instead of 1e-6: what differs between the two
is chance, and no smaller effect is claimed. `proximal` is GRPO with the decoupled objective.
docs/overlap.md says what the lag is and has the results.
"""

from configs.studies.base import DEMO, DIFFERS, VLLM
from configs.studies.dose_response import SETTING
from configs.studies.remedies import remedy_arms
from research.studies.study import Arm, Study

LAGS = (0, 1, 2, 4)
SEEDS = tuple(range(5))
_PERTURBED = {"algorithm.std_epsilon": 2e-6}
_CORRECTIONS = ("grpo", "grpo_perturbed", "tis", "icepop")


def get_study(arg: str = "") -> Study:
    if arg not in ("", "corrections", "local"):
        raise ValueError(f"study argument {arg!r}: allowed are corrections and local")
    config = DEMO if arg == "local" else VLLM
    given = remedy_arms(config, {}, DEMO)
    remedies = {name: dict(given[name].settings) for name in ("grpo", "dc_grpo", "tis", "icepop")}
    remedies["proximal"] = remedies["grpo"] | {"algorithm.ratio_denominator": "proximal"}
    arms = {
        f"lag{lag}_{name}": Arm(
            config,
            settings | SETTING | {"rollout.lag": lag},
            differs=DIFFERS if name == "dc_grpo" else (),
        )
        for lag in LAGS
        for name, settings in remedies.items()
        if lag or name != "proximal"  # without a lag it is GRPO
    }
    arms["lag0_grpo_perturbed"] = Arm(
        config, remedies["grpo"] | SETTING | {"rollout.lag": 0} | _PERTURBED
    )
    if arg == "corrections":
        arms = {
            name: arm
            for name, arm in arms.items()
            if name.split("_", 1)[1] in _CORRECTIONS and "lag2" not in name
        }
    engine = "embedded FP8 engine" if arg == "local" else "vLLM, FP8 key-value cache"
    return Study(f"Lag of sampling ({engine})", arms, "lag0_grpo", SEEDS)
