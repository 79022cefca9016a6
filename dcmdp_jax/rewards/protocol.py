"""Reward functions: how one is named, loaded, called and checked.

The signature is TRL's, so a function written for it works here unchanged:

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

`prompts` and `completions` are texts, `completion_ids` lists of token ids. Every other column of the data is a keyword
argument, and so are `answer`, the reference answer, and `source`, the data source. All have one element per completion.
The function may be `async def`.

None means that the completion has no value of this reward. As in TRL, it adds nothing to the weighted sum, and a
completion without any value gets 0.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from dcmdp_jax.errors import UserError

MATH = "math"
"""The reward of `rewards.math.verifier`, computed in the trainer's process and the verifier's workers."""

BUILT_IN = {"math_verify": "dcmdp_jax.rewards.plain_math_verify:math_verify"}
"""Reward functions with short names."""

ARGUMENTS = ("prompts", "completions", "completion_ids")
_LARGEST = 1e9

RewardFunction = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    r"""One task: what the model is asked and what a right answer equals.

    Attributes:
        prompt: text of the last user message, before any prompt suffix.
        answer: reference answer in the verifier's notation (see `math.answers`).
        source: where it comes from: the row's `data_source`, else the file's name without suffix.
        index: 0-based row number in its source.
        context: (role, content) of the messages before the prompt, a system message say.
        solution: a worked solution where the row has one, else empty; supervised warm-up learns from it.
        columns: the row's fields for reward functions, without the prompt; empty unless they were asked for.
    """

    prompt: str
    answer: str
    source: str
    index: int
    context: tuple[tuple[str, str], ...] = ()
    solution: str = ""
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)


class RewardError(UserError):
    """A reward function that is missing, raises, hangs, or returns something else than rewards. One line."""


class BadValue(ValueError):
    """A function returned something else than a list of rewards.

    Attributes:
        row: place of the completion whose value is wrong; None if the list is.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


@dataclasses.dataclass(frozen=True)
class Reward:
    """A reward and its weight in the total.

    Attributes:
        function: `math`, a name in `BUILT_IN`, `module:function` or `path.py:function`.
        weight: factor in the weighted sum of all rewards.
    """

    function: str
    weight: float = 1.0


def short_names(functions: Sequence[str]) -> list[str]:
    """The functions' own names; the whole name where two are equal."""
    short = [function.rpartition(":")[2] for function in functions]
    return [name if short.count(name) == 1 else function for name, function in zip(short, functions, strict=True)]


def load_reward(function: str, columns: Sequence[str]) -> RewardFunction:
    """Import a reward function and check that it accepts its arguments.

    Args:
        function: a name in `BUILT_IN`, `module:function`, or `path.py:function` relative to the working directory.
        columns: names of the columns that it will get.

    Raises:
        RewardError: if the file, the module or the function is missing, the import raises, or the function takes
            other arguments.
    """
    place, _, name = BUILT_IN.get(function, function).rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise RewardError(f"reward {function}: can't import {place}: {describe_error(error, place)}") from error
    loaded = getattr(module, name, None)
    if not callable(loaded):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise RewardError(f"reward {function}: {place} has no function {name!r}; it has {', '.join(there) or 'none'}")
    try:
        signature = inspect.signature(loaded)
    except ValueError:  # some functions written in C have no signature
        return loaded
    try:
        signature.bind(**dict.fromkeys((*ARGUMENTS, *columns)))
    except TypeError as error:
        raise RewardError(
            f"reward {function}: can't be called as {name}({', '.join((*ARGUMENTS, *columns))}): {error}; end its "
            "parameters with **columns, and name only columns of the data"
        ) from None
    return loaded


def call_reward(
    function: RewardFunction,
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> list[float | None]:
    """Call a reward function, async or not, and check what it returns.

    Raises:
        BadValue: if it does not return one finite number or None per completion.
        Exception: any exception of the function.
    """
    values = function(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
    if inspect.isawaitable(values):
        values = asyncio.run(_wait_for(values))
    # A dict gives its keys and a set has no order; text gives letters.
    if isinstance(values, Mapping | Set | str | bytes) or not isinstance(values, Iterable):
        raise BadValue(f"returned {_shown(values)}, needs a list with one reward per completion")
    if isinstance(values, Iterator):  # it may never end
        values = itertools.islice(values, len(completions) + 1)
    try:
        values = list(values)
    except TypeError:  # an array without dimensions
        raise BadValue(f"returned {_shown(values)}, needs a list with one reward per completion") from None
    if len(values) != len(completions):
        raise BadValue(f"returned {len(values)} rewards for {len(completions)} completions, needs one for each")
    return [_check_value(row, value) for row, value in enumerate(values)]


def _shown(value: Any) -> str:
    """The start of a value's text, after its type."""
    return repr(value) if value is None else f"the {type(value).__name__} {value!r:.80}"


def weighted_total(values: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float]:
    """Weighted sum of several rewards for each completion, 0 for one without any value.

    Args:
        values: for each reward, one value per completion; None adds nothing.
        weights: one per reward.
    """
    return [
        math.fsum(weight * value for weight, value in zip(weights, row, strict=True) if value is not None)
        for row in zip(*values, strict=True)
    ]


def describe_error(error: BaseException, place: str) -> str:
    """`KeyError: 'x' (length_reward.py, line 12)`, the last line of the user's file that ran.

    Args:
        error: what was raised.
        place: the file, or the module, of the function.
    """
    module = sys.modules.get(place)
    file = place if place.endswith(".py") else getattr(module, "__file__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file and _same_file(frame.filename, file)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _same_file(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _load_file(path: Path) -> Any:
    # A unique name: a file math.py must not replace the module `math`.
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path.resolve())
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    if (directory := str(path.resolve().parent)) not in sys.path:
        sys.path.append(directory)  # the modules beside the file, as when Python runs it
    spec.loader.exec_module(module)
    return module


async def _wait_for(values: Any) -> Any:
    return await values


def _check_value(row: int, value: Any) -> float | None:
    if value is None:
        return None
    # NumPy's and torch's scalars have item().
    plain = _plain(value)
    if not isinstance(plain, numbers.Real) or not math.isfinite(plain):
        raise BadValue(f"returned {value!r:.80}, needs a finite number or None", row)
    if abs(plain) > _LARGEST:
        raise BadValue(f"returned {plain}, needs a number of at most {_LARGEST:g}: advantages are float32", row)
    return float(plain)


def _plain(value: Any) -> Any:
    try:
        return value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # an array of several elements
        return value
