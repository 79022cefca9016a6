"""The remedies that are compared: every one of ours, and the configured one, as settings of the algorithm."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from dcmdp_jax.algorithm.corrections import CORRECTIONS
from dcmdp_jax.algorithm.losses import LOSSES
from dcmdp_jax.algorithm.penalties import PENALTIES
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.algorithm.trust_regions import TRUST_REGIONS
from dcmdp_jax.config.algorithm import AlgorithmSettings, canonical
from dcmdp_jax.named_functions import Call, needed_parameters

NOTHING, CONFIGURED = "no remedy", "as configured"
SKYRL_BAND = Call("geometric_rejection", {"low": 0.99, "high": 1.01})
DROPPED_SHARE = 0.05
"""Share of the tokens that a filter without a default size is set to drop."""


def without_remedy(base: AlgorithmSettings) -> AlgorithmSettings:
    """GRPO with the normalizations of `base`."""
    return dataclasses.replace(
        base, method="grpo", corrections="", trust_region="clip", loss="surrogate", ratio_denominator="train",
        ratio_level="token", level="token",
    )  # fmt: skip


def entries(base: AlgorithmSettings, tokens: Tokens) -> dict[str, AlgorithmSettings]:
    """Settings of each remedy by name: none, penalties, corrections, trust regions, losses, `base` if it is another.

    Penalties charge at lambda and c of `base`. Trust regions have the engine's probability in the ratio's denominator:
    at the first update of a step they would all do the same with the trainer's. `acr` is a bound beside `tis`. A filter
    without a default size gets the one that drops 5% of the tokens; `geometric_rejection` has its own band and SkyRL's.

    Args:
        base: settings of the run.
        tokens: some of the engine's, which sizes are taken from.
    """
    plain = without_remedy(base)
    found = {NOTHING: plain}
    for name in PENALTIES:
        if name != "grpo":
            for level in ("token", "sequence"):
                label = name if level == "token" else f"{name}, whole completions"
                found[label] = dataclasses.replace(plain, method=name, level=level)
    calls = [
        Call(name, dict.fromkeys(needed_parameters(correction), _size(name, tokens)))
        for name, correction in CORRECTIONS.items()
    ]
    for call in map(str, (*calls, SKYRL_BAND)):
        found[call] = dataclasses.replace(plain, corrections=call)
    for call in map(_with_sizes, TRUST_REGIONS.items()):
        beside = {"corrections": "tis"} if call.startswith("acr") else {"ratio_denominator": "rollout"}
        found[call] = dataclasses.replace(plain, trust_region=call, **beside)
    for call in map(_with_sizes, LOSSES.items()):
        found[call] = dataclasses.replace(plain, loss=call)
    del found["surrogate"]  # the loss without remedy
    if base not in map(canonical, found.values()):
        found[CONFIGURED] = base
    return found


def _with_sizes(named: tuple[str, Callable[..., Any]]) -> str:
    name, function = named
    sizes = inspect.getfullargspec(function).kwonlydefaults or {}
    return str(Call(name, {size: value for size, value in sizes.items() if isinstance(value, float) and value}))


def _size(name: str, tokens: Tokens) -> float:
    """The largest estimate, to three digits, at which a filter drops 5% of the tokens; 1e-6 if it never does."""
    low, high = -6.0, 3.0
    mask = np.asarray(tokens.completion_mask)
    if not needed_parameters(CORRECTIONS[name]):
        return 0.0
    for _ in range(24):
        middle = (low + high) / 2
        dropped = ~np.asarray(CORRECTIONS[name](tokens, high=10.0**middle).keep)[mask]
        low, high = (middle, high) if dropped.mean() > DROPPED_SHARE else (low, middle)
    return float(f"{10.0**high:.3g}")
