"""Environments: what a policy talks to in turns.

    class Game:
        observation_role = "user"                       # of the chat messages that observations become; may be left out

        def reset(self, prompt, **columns): ...         # -> None, or text that is added to the prompt
        def step(self, text): ...                       # -> observation, reward, done

One object plays one completion. `reset` gets the prompt as reward functions do, and the data's columns. `step` gets the
text that the policy wrote in its turn, and returns the text that it is answered, a number, and whether the completion
ends here. Both may be `async def`. The reward `environment` is the sum of a completion's rewards.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from dcmdp_jax.errors import UserError
from dcmdp_jax.rewards.protocol import RewardError, plain_value, shown
from dcmdp_jax.user_code import load_function

BUILT_IN_ENVIRONMENTS = {"calculator": "dcmdp_jax.environments.calculator:Calculator"}
"""Environments with short names."""

_LONGEST_OBSERVATION = 100_000
_LARGEST = 1e9


@dataclasses.dataclass(frozen=True)
class Step:
    """What an environment says to one turn.

    Attributes:
        observation: text that the policy reads next; empty where it ends.
        reward: of this turn.
        done: whether the completion ends.
    """

    observation: str
    reward: float
    done: bool


def load_environment(name: str, columns: Sequence[str]) -> Callable[[], Any]:
    """Import an environment's class, or a function that makes one, and check its methods.

    Args:
        name: a name in `BUILT_IN_ENVIRONMENTS`, `module:Class`, or `path.py:Class` relative to the working directory.
        columns: names of the columns that `reset` will get.

    Raises:
        RewardError: in one line, if it can't be imported, or has no `reset` or `step` that can be called so.
    """
    try:
        made = load_function(BUILT_IN_ENVIRONMENTS.get(name, name), "class")
    except UserError as error:
        raise RewardError(f"environment {error}") from error
    if inspect.isclass(made):
        for method, arguments in (("reset", ("prompt", *columns)), ("step", ("text",))):
            function = getattr(made, method, None)
            if not callable(function):
                raise RewardError(f"environment {name}: the class has no method {method}")
            try:
                inspect.signature(function).bind(None, **dict.fromkeys(arguments))
            except TypeError as error:
                raise RewardError(
                    f"environment {name}: {method} can't be called as {method}({', '.join(arguments)}): {error}"
                ) from None
    return made


def checked_observation(value: Any) -> str:
    """The first observation, empty for None.

    Raises:
        RewardError: if it is no text, or too long. It does not name the environment.
    """
    if value is not None and not isinstance(value, str):
        raise RewardError(f"reset returned {shown(value)}, needs text or None")
    return _bounded(value or "")


def checked_step(value: Any) -> Step:
    """A step from what `step` returned.

    Raises:
        RewardError: if it is no observation, reward and end. It does not name the environment.
    """
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise RewardError(f"step returned {shown(value)}, needs (observation, reward, done)")
    observation, reward, done = value[0], plain_value(value[1]), plain_value(value[2])
    if not isinstance(done, bool):
        raise RewardError(f"step returned {shown(done)} as its third value, which must be True or False")
    if not isinstance(observation, str) and not (observation is None and done):
        raise RewardError(f"step returned {shown(observation)} as observation, needs text")
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward) or abs(reward) > _LARGEST:
        raise RewardError(f"step returned {shown(reward)} as reward, needs a number of at most {_LARGEST:g}")
    return Step(_bounded(observation or ""), float(reward), done)


def _bounded(text: str) -> str:
    if len(text) > _LONGEST_OBSERVATION:
        raise RewardError(f"an observation has {len(text):,} characters, at most {_LONGEST_OBSERVATION:,} are read")
    return text
