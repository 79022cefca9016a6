"""The paper's range of lambda and the penalty's parts, at 200 tokens (research/long.md).

    python -m research.sweep --study=configs/studies/long_completions.py \
        --kept=research/kept/long_completions.jsonl.gz --config.model.path=runs/evidence/policy_long

Engine with int4 weights, one update a step, 32 steps. Every run's last policy is scored by its own
engine and by one that computes as the trainer does. Penalties are compared at the mean penalty of
the paper's measure: what they multiply lambda by, and the budgets, come from a run of GRPO that is
not in the study (`SIZES`).

`long_completions.py:regimes` asks where learning suffers and what repairs it (research/regimes.md):
GRPO and an exact engine with 3-bit weights, an FP8 cache, four updates a step and 128 steps,
remedies where it does.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from configs.studies.base import DEMO
from configs.studies.dose_response import FIXED, SETTING
from configs.studies.mismatch_map import LONG
from configs.studies.paper_regime import PROBLEMS, SCORED_EXACTLY
from dcmdp_jax.algorithm.remedies import Tokens
from research.studies.study import Arm, Study

STEPS = 32
SIZES = {"diff": 8.7e-4, "log": 2.43e-3, "ratio": 1.57e-3, "logit": 0.319}
"""Mean discrepancy of GRPO over its last 16 steps by measure, of a run with seed 100."""
DISPLACEMENT_P95 = 0.80
"""95th percentile of |logit p - logit q| of the same run."""
TOP = 16
"""Top-k tokens of the engine, for state penalties and score centering; the vocabulary has 104."""
RARE = 0.1
"""p of a token that the trainer finds unlikely."""
_MOVE = 0.3
"""What the ascent moves lambda by in `STEPS` steps where the discrepancy is a tenth above c."""


def _gap(tokens: Tokens) -> jax.Array:
    """p - q of each sampled token, [R, L]."""
    return jnp.where(
        tokens.completion_mask, jnp.exp(tokens.old_logprobs) - jnp.exp(tokens.rollout_logprobs), 0.0
    )


def engine_above(tokens: Tokens) -> jax.Array:
    """A_i - lambda max(q - p, 0): the other half of the one-sided penalty."""
    return tokens.advantages - tokens.multiplier * jnp.maximum(-_gap(tokens), 0.0)


def _unlikely(tokens: Tokens) -> jax.Array:
    """Tokens of which the trainer has a probability of at most `RARE`, [R, L]."""
    return jnp.exp(tokens.old_logprobs) <= RARE


def rare(tokens: Tokens) -> jax.Array:
    """A_i - lambda max(q - p, 0) where p is at most `RARE`, A_i elsewhere."""
    penalty = jnp.where(_unlikely(tokens), jnp.maximum(-_gap(tokens), 0.0), 0.0)
    return tokens.advantages - tokens.multiplier * penalty


def not_rare(tokens: Tokens) -> jax.Array:
    """A_i - lambda max(q - p, 0) where p is above `RARE`, A_i elsewhere."""
    penalty = jnp.where(_unlikely(tokens), 0.0, jnp.maximum(-_gap(tokens), 0.0))
    return tokens.advantages - tokens.multiplier * penalty


def signed(tokens: Tokens) -> jax.Array:
    """A_i - lambda (p - q): a token that the engine finds likelier is paid."""
    return tokens.advantages - tokens.multiplier * _gap(tokens)


def _ascent(measure: str, budget: float, statistic: str = "mean") -> dict[str, object]:
    """Dual ascent from 0 by `_MOVE` in `STEPS` steps at a tenth above c, at the paper's measure."""
    scale = SIZES["diff"] / SIZES[measure]
    level = SIZES[measure] if statistic == "mean" else DISPLACEMENT_P95
    return {
        "algorithm.method": "dc_grpo",
        "algorithm.measure": measure,
        "algorithm.budget": statistic,
        "algorithm.tolerance": budget * level,
        "algorithm.multiplier": 0.0,
        "algorithm.multiplier_max": scale,
        "algorithm.dual_learning_rate": scale * _MOVE / (STEPS * 0.1 * level),
    }


COLUMNS = {"rollout.top_logprobs": TOP}
PAPER = {
    "algorithm.method": "dc_grpo",
    "algorithm.multiplier": 0.1,
    "algorithm.tolerance": 0.0037,
    "algorithm.dual_learning_rate": 1.0,
    "algorithm.multiplier_max": 1.0,
}
"""The paper's constants; it states no upper end of lambda."""
ETA_50 = "dc_grpo_eta50"
"""Arm of runs that were kept as the paper's until 2026-11-27: they had fifty times its eta, the
demo's.
"""
REMEDIES: dict[str, dict[str, object]] = {
    "tis": {"algorithm.corrections": "tis(high=2)"},
    "icepop": {"algorithm.corrections": "icepop(low=0.5,high=5)"},
    "centered": {"algorithm.corrections": "score_centering"} | COLUMNS,
    "tis_centered": {"algorithm.corrections": "tis(high=2),score_centering"} | COLUMNS,
    "dc_grpo": PAPER,
    "token_0.03": FIXED | {"algorithm.multiplier": 0.03},
    "shaken": {"algorithm.std_epsilon": 1e-3},
}
"""Arm against any engine -> what differs from GRPO; the last is a control."""


def _regimes(engine: dict[str, object]) -> dict[str, dict[str, object]]:
    """GRPO in other settings, and with an exact engine where no other arm has one.

    Where learning suffers, against int3 and with four updates a step, every kind of remedy too.
    """
    longer = {"training.steps": 4 * STEPS, "evaluation.every_steps": 4 * STEPS}
    several = {"training.prompts_per_mini_batch": 2}
    exact = engine | {"rollout.precision": "exact"}
    int3 = engine | {"rollout.precision": "int3"}
    return {
        "int3": int3,
        **{f"int3_{name}": int3 | changes for name, changes in REMEDIES.items()},
        f"int3_{ETA_50}": int3 | PAPER | {"algorithm.dual_learning_rate": 50.0},
        "int3_matched": int3 | {"model.forward_precision": "int3"},
        "fp8_cache": engine | {"rollout.precision": "float32", "rollout.kv_cache_dtype": "fp8"},
        "four_updates": engine | several,
        **{
            f"four_updates_{name}": engine | several | changes for name, changes in REMEDIES.items()
        },
        "four_updates_exact": exact | several,
        "128steps": engine | longer,
        "128steps_exact": exact | longer,
    }


def get_study(arg: str = "") -> Study:
    if arg not in ("", "regimes"):
        raise ValueError(f"study argument {arg!r}: allowed is regimes, or none")
    engine = {"algorithm.method": "grpo", **SETTING, **LONG, "rollout.precision": "int4"}
    engine |= {"evaluation.task": PROBLEMS, "evaluation.samples": (4,)}
    if arg:
        found = _arms(_regimes(engine))
        return Study(
            "Completions of 200 tokens, other regimes",
            found,
            "int3",
            tuple(range(20)),
            SCORED_EXACTLY,
        )

    def fixed(strength: float, **changes: object) -> dict[str, object]:
        return {**FIXED, "algorithm.multiplier": strength} | {
            f"algorithm.{key}": each for key, each in changes.items()
        }

    here = "configs/studies/long_completions.py"
    penalties = {
        **{f"token_{strength:g}": fixed(strength) for strength in (0.1, 0.3, 1.0)},
        "ascent_0.9": _ascent("diff", 0.9),
        "ascent_1.25": _ascent("diff", 1.25) | {"algorithm.multiplier": 0.1},
        "trainer_above_1": fixed(1.0, sided="one"),
        "engine_above_1": fixed(1.0, method=f"{here}:engine_above", tolerance=0.0012),
        "rare_1": fixed(1.0, method=f"{here}:rare", tolerance=0.0012),
        "not_rare_1": fixed(1.0, method=f"{here}:not_rare", tolerance=0.0012),
        "signed_1": fixed(1.0, method=f"{here}:signed", tolerance=0.0012),
        "token_1_tis": fixed(1.0, corrections="tis(high=2)"),
        "log": fixed(SIZES["diff"] / SIZES["log"], measure="log"),
        "ratio": fixed(SIZES["diff"] / SIZES["ratio"], measure="ratio"),
        "logit": fixed(SIZES["diff"] / SIZES["logit"], measure="logit"),
        "ascent_logit_p95": _ascent("logit", 0.9, "p95"),
        "state_tv_1": fixed(1.0, method="state_tv") | COLUMNS,
    }
    arms = {
        "grpo": engine,
        "grpo_perturbed": engine | {"algorithm.std_epsilon": 2e-6},
        "grpo_shaken": engine | REMEDIES["shaken"],
        "exact": engine | {"rollout.precision": "exact"},
        **{
            name: engine | REMEDIES[name]
            for name in ("tis", "centered", "tis_centered", "dc_grpo", "token_0.03")
        },
        ETA_50: engine | PAPER | {"algorithm.dual_learning_rate": 50.0},
        **{name: engine | changes for name, changes in penalties.items()},
    }
    title = "Completions of 200 tokens, the paper's range"
    return Study(title, _arms(arms), "grpo", tuple(range(10)), SCORED_EXACTLY)


def _arms(settings: Mapping[str, dict[str, object]]) -> dict[str, Arm]:
    """Arms of the demo's model; those with fifty times the paper's eta are no longer run."""
    return {
        name: Arm(DEMO, changes, past=True, differs=("dual_learning_rate",))
        if name.endswith(ETA_50)
        else Arm(DEMO, changes)
        for name, changes in settings.items()
    }
