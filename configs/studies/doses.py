"""Does any dose of the penalty help where the mismatch costs learning, with c set from the engine?

    python -m research.doses  # runs what is not kept, all arms of a seed before the next seed
    python -m research.studies --study=configs/studies/doses.py --dry-run
        # every arm's resolved settings

3-bit weights, one update of each weight sync, completions of 200 tokens, 32 steps
(research/doses.md has the rules). `doses.py:pilots` is what was run first: GRPO's discrepancy, from
which c follows, and the penalty's gradient. `doses.py:late` is setting B: 4-bit weights, four
updates of each weight sync, 64 steps, at a learning rate where GRPO collapses late, which
`doses.py:late_pilots` looked for.

All runs start from the policy in research/kept/start_200_tokens, 0.3M parameters.
"""

from configs.studies.paper_regime import (
    BASE,
    CALM,
    CENTERED,
    DC_GRPO,
    GRPO,
    SCORED_EXACTLY,
    SETTING,
    fixed,
)
from research.studies.study import Arm, Study

START = "research/kept/start_200_tokens"
INT3 = {"model.path": START, "rollout.precision": "int3"}
SEEDS = tuple(range(20, 60))
"""None of them was used by an earlier study."""
PILOT_SEEDS = (100, 101, 102)
FACTOR = 1.25
"""c over the healthy discrepancy, the default of `algorithm.tolerance_factor`."""
HEALTHY = 0.00709
"""Median over the pilots of GRPO of the median discrepancy of their four steps."""
SMALL = {
    "algorithm.multiplier": 0.005,
    "algorithm.dual_learning_rate": 0.05,
    "algorithm.multiplier_max": 0.03,
}
"""The ascent at a twentieth of the paper's lambda_0 and eta."""

LATE_SETTING = {**SETTING, **GRPO, "model.path": START}
"""Setting B: 4-bit weights, four updates of each weight sync, 64 steps."""
LATE_RATES = (2e-4, 1e-4, 5e-5)
"""Learning rates that the pilots of late collapse try."""
LATE_RATE = 1e-4
"""The one that their rule chose."""
LATE_HEALTHY = 0.00126
"""As `HEALTHY`, of the pilots at that rate."""
LATE_SEEDS = tuple(range(20, 50))
"""No other run with four updates of this policy has them."""

BASELINES: dict[str, dict[str, object]] = {
    "grpo": {},
    "grpo_shaken": {"algorithm.std_epsilon": 1e-3},
}


def ascents(healthy: float) -> dict[str, dict[str, object]]:
    """The paper's ascent with c from the engine's healthy discrepancy; and from lambda 0."""
    own_c = DC_GRPO | {"algorithm.tolerance": FACTOR * healthy}
    return {"dc_own_c": own_c, "dc_from_0": own_c | {"algorithm.multiplier": 0.0}}


def get_study(arg: str = "") -> Study:
    if arg not in ("", "pilots", "late", "late_pilots"):
        raise ValueError(f"study argument {arg!r}: allowed are pilots, late, late_pilots, or none")
    if arg == "late_pilots":
        return _late_pilots()
    if arg == "late":
        return _late()
    common = {**SETTING, **CALM, **GRPO, **INT3}

    if arg == "pilots":
        pilots = {
            "grpo": common | {"training.steps": 4},
            "token_0.01": common | fixed(0.01) | {"training.steps": 16},
        }
        pilot_arms = {label: Arm(BASE, settings) for label, settings in pilots.items()}
        return Study("Doses, pilots", pilot_arms, "grpo", PILOT_SEEDS)

    coarse_ascents = ascents(HEALTHY)
    changes = {
        **BASELINES,
        "token_0.001": fixed(0.001),
        "token_0.003": fixed(0.003),
        "token_0.01": fixed(0.01),
        "token_0.03": fixed(0.03),
        **coarse_ascents,
        "dc_small": coarse_ascents["dc_own_c"] | SMALL,
        "centered": CENTERED,
    }
    arms = {label: Arm(BASE, common | settings) for label, settings in changes.items()}
    return Study("Doses where the mismatch costs learning", arms, "grpo", SEEDS, SCORED_EXACTLY)


def _late_pilots() -> Study:
    """GRPO and a zero-mismatch engine at each rate."""
    arms = {}
    for rate in LATE_RATES:
        settings = LATE_SETTING | {"optimizer.learning_rate": rate}
        arms[f"grpo_{rate:g}"] = Arm(BASE, settings)
        arms[f"exact_{rate:g}"] = Arm(BASE, settings | {"rollout.precision": "exact"})
    return Study("Late collapse, pilots", arms, f"grpo_{LATE_RATES[0]:g}", PILOT_SEEDS)


def _late() -> Study:
    """Doses where GRPO collapses late; importance sampling is the positive control."""
    changes = {
        **BASELINES,
        "token_0.003": fixed(0.003),
        "token_0.01": fixed(0.01),
        **ascents(LATE_HEALTHY),
        "tis": {"algorithm.corrections": "tis(high=2)"},
    }
    common = LATE_SETTING | {"optimizer.learning_rate": LATE_RATE}
    arms = {label: Arm(BASE, common | settings) for label, settings in changes.items()}
    return Study("Doses in late collapse", arms, "grpo", LATE_SEEDS, SCORED_EXACTLY)
