"""Settings of the rewards, declared once each as in `config/settings.py`, of which they are a part."""

from __future__ import annotations

import dataclasses
import difflib
import math

from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import setting
from dcmdp_jax.inputs import shorten

# A test holds them and the names that `dcmdp_jax.rewards` knows together; importing that would import NumPy.
BUILT_IN_REWARDS = ("math", "environment", "last_number", "math_verify", "reasoning_gym", "verifiers")
_LARGEST_WEIGHT = 1e6
_LEAST_MEMORY_GIB = 0.125


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """Rewards in training and of held-out tasks."""

    functions: str = setting(
        "math",
        "Rewards, joined by commas: math (the answer, judged by task.verifier_*), math_verify (the plain library), "
        "reasoning_gym and verifiers (the scores of those libraries' tasks), environment (what task.environment "
        "gives), or functions of yours as module:function or path.py:function, with TRL's signature or verl's "
        "(docs/extending.md).",
        source="paper: a verifier of answers",
    )  # fmt: skip
    weights: tuple[float, ...] = setting(
        (), "Factor of each function in the sum, such as (1,0.1). Empty: 1 for each.", source="ours: as TRL"
    )
    timeout: float = setting(
        300.0, "Time that one call of a function may take, for all completions of one call of the engine; and one of "
        "an environment, for those of a turn.",
        unit="seconds", source="ours", minimum=0.01, free=True,
    )  # fmt: skip
    memory_limit: float = setting(
        0.0,
        "Memory (address space) of the process of a function or an environment, and of each process that it starts; "
        "above it the allocation fails. 0: no limit. What imports CUDA needs far more address space than memory.",
        unit="GiB", source="ours", minimum=0.0, free=True,
    )  # fmt: skip
    on_error: str = setting(
        "error",
        "A function or an environment that raises, is over the time limit or returns something else: error saves and "
        "stops, none counts its completions, which get no value from it.",
        choices=("error", "none"), free=True,
    )  # fmt: skip

    answer_extraction: str = setting(
        "strict",
        "What the reward math takes for a completion's answer: strict, the last \\boxed{} or, without one, what "
        "follows the last 'Answer:'; flexible, without either, the last '#### 72' or 'The answer is 72', which small "
        "models write.",
        source="paper: the final answer in a box; names as in lm-evaluation-harness and verl",
        choices=("strict", "flexible"),
    )  # fmt: skip

    @property
    def names(self) -> tuple[str, ...]:
        """The functions, one by one."""
        return tuple(name.strip() for name in self.functions.split(","))

    @property
    def weighted(self) -> tuple[tuple[str, float], ...]:
        """Each function with its weight."""
        return tuple(zip(self.names, self.weights or (1.0,) * len(self.names), strict=True))


def check_reward_settings(rewards: RewardSettings) -> None:
    """Check names and weights. Nothing is imported.

    Raises:
        UserError: in one line, naming setting, value and what is allowed.
    """
    names, weights = rewards.names, rewards.weights
    for name in names:
        place, _, function = name.rpartition(":")
        if name in BUILT_IN_REWARDS or (place and function.isidentifier()):
            continue
        near = difflib.get_close_matches(name, BUILT_IN_REWARDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"config.rewards.functions: got {shorten(name)}, allowed are "
            f"{', '.join(BUILT_IN_REWARDS)}, module:function and "
            f"path.py:function{hint}"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"config.rewards.functions: got {shorten(twice)} twice, name it once and raise its weight")
    if weights and len(weights) != len(names):
        raise UserError(
            f"config.rewards.weights: got {len(weights)} for the {len(names)} functions {rewards.functions}, must be "
            "one for each, or empty"
        )
    if 0 < rewards.memory_limit < _LEAST_MEMORY_GIB:
        raise UserError(
            f"config.rewards.memory_limit: got {rewards.memory_limit} GiB, must be 0 (no limit) or at least "
            f"{_LEAST_MEMORY_GIB} GiB, in which Python starts"
        )
    if weights and not any(weights):
        raise UserError("config.rewards.weights: got only 0, nothing would be learned; one must be another number")
    for weight in weights:
        if not math.isfinite(weight) or abs(weight) > _LARGEST_WEIGHT:
            raise UserError(
                f"config.rewards.weights: got {weight}, must be in [-{_LARGEST_WEIGHT:g}, {_LARGEST_WEIGHT:g}] "
                "(advantages are float32)"
            )
