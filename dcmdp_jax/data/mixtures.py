"""Mixtures of tasks: locations with weights, and the order in which their problems are asked.

    a.jsonl@2,b.parquet@1,arithmetic:difficulty=2,count=2048@1

gives half of the prompts from a.jsonl, a quarter from each of the others, whatever their sizes.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dcmdp_jax.errors import UserError, shorten

ARITHMETIC = "arithmetic"
"""The built-in task, which a location names before a colon."""

# "@" and a number at the end. A Hub configuration that is a number needs a weight behind it.
_WEIGHT = re.compile(r"(.*)@([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*", re.DOTALL)
_FUNCTION = re.compile(r"[^,:]+\.py:[^\W\d]\w*")
_LARGEST_WEIGHT = 10**6
_LONGEST_CYCLE = 10**5


class Part(NamedTuple):
    """A task of a mixture.

    Attributes:
        name: source of its problems where rows have no `data_source`.
        location: where its problems are.
        weight: its share of the prompts, over the sum of all weights.
    """

    name: str
    location: str
    weight: Fraction = Fraction(1)


def parse_mixture(text: str) -> tuple[Part, ...]:
    """The tasks of a setting, at least one. A task without a weight has weight 1.

    Raises:
        UserError: in one line, for an empty location, a weight out of range, or a task that is
            there twice.
    """
    locations = []
    weights = []
    for item in split_locations(text):
        found = _WEIGHT.fullmatch(item)
        location, weight = (
            (found[1].strip(), Fraction(found[2])) if found else (item.strip(), Fraction(1))
        )
        if not location:
            raise UserError(f"got {shorten(text)}, an empty name is no task")
        if not 0 < weight <= _LARGEST_WEIGHT:
            raise UserError(
                f"got {shorten(item)}, a weight must be above 0 and at most {_LARGEST_WEIGHT}"
            )
        if location in locations:
            raise UserError(
                f"got {shorten(location)} twice, name it once and raise its weight (@2)"
            )
        locations.append(location)
        weights.append(weight)
    parts = tuple(
        Part(*each) for each in zip(location_names(locations), locations, weights, strict=True)
    )
    if sum(cycle(weights)) > _LONGEST_CYCLE:
        raise UserError(f"got weights {', '.join(map(str, weights))}, give them fewer digits")
    return parts


def split_locations(text: str) -> list[str]:
    """Locations joined by commas.

    A comma before `key=value` belongs to the built-in task or the function that it continues.
    """
    locations: list[str] = []
    for part in text.split(","):
        last = locations[-1] if locations else ""
        continues = "=" in part and not _has_settings(part.strip())
        if continues and _has_settings(last) and not _WEIGHT.fullmatch(last):
            locations[-1] += f",{part}"
        else:
            locations.append(part.strip())
    return locations


def task_arguments(location: str, settings: str, keys: Sequence[str] = ()) -> dict[str, str]:
    """The settings of a task, `key=value,...`, as text.

    Args:
        location: the whole location, for errors.
        settings: the part of it that holds the settings.
        keys: the allowed keys; empty: any.

    Raises:
        UserError: in one line, for a part not of the form `key=value`, an unknown key, or a
            repeated one.
    """
    values: dict[str, str] = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not (key in keys if keys else key.isidentifier()) or not equals:
            known = f" with a key of {', '.join(keys)}" if keys else ""
            raise UserError(f"task {location}: {setting.strip()!r} is not key=value{known}")
        if key in values:
            raise UserError(f"task {location}: {key} is given twice")
        values[key] = value
    return values


def is_weighted(location: str) -> bool:
    """Whether a location has a weight for certain: behind a file, a function or the built-in task,
    not a Hub name.
    """
    found = _WEIGHT.fullmatch(location)
    return found is not None and (
        _has_settings(found[1]) or found[1].endswith((".jsonl", ".parquet"))
    )


def source_name(location: str) -> str:
    """Default `source` of a location's problems: the file's name without suffix, the function's, or
    `arithmetic`.
    """
    kind, _, rest = location.partition(":")
    return rest.partition(",")[0] if is_function(location) else Path(kind).stem


def location_names(locations: Sequence[str]) -> list[str]:
    """Names of sources; tasks that would share one are distinguished by their settings."""
    names = [source_name(location) for location in locations]
    shared = {name for name, count in Counter(names).items() if count > 1}
    return [
        re.sub(r"[^\w.=-]", "_", location) if name in shared and _has_settings(location) else name
        for name, location in zip(names, locations, strict=True)
    ]


def is_function(location: str) -> bool:
    """Whether a location is a function of a user's file, `path.py:function,key=value,...`."""
    return _FUNCTION.fullmatch(location.partition(",")[0]) is not None


def _has_settings(location: str) -> bool:
    return location.partition(":")[0] == ARITHMETIC or is_function(location)


def cycle(weights: Sequence[Fraction]) -> list[int]:
    """The smallest whole numbers in the proportion of the weights: prompts of each task in one
    cycle.
    """
    unit = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * unit) for weight in weights]
    return [number // math.gcd(*whole) for number in whole]


class PromptStream(NamedTuple):
    """The endless order in which problems are asked: a function of seed and position, so that a
    resumed run goes on in it exactly.

    Each task is gone through in epochs, each a permutation drawn from (seed, epoch), and from the
    task's place where there are several. Of several tasks each has its exact share of every cycle,
    evenly spread over it with an offset drawn from (seed, cycle).

    Attributes:
        sizes: problems of each task, which stand one task after the other.
        weights: weight of each.
    """

    sizes: tuple[int, ...]
    weights: tuple[Fraction, ...] = (Fraction(1),)

    def at(self, *, seed: int, first: int, count: int) -> np.ndarray:
        """[count] int, the places of the problems at positions first .. first + count - 1."""
        if len(self.sizes) == 1:
            return prompt_order(self.sizes[0], seed=seed, first=first, count=count)
        shares = cycle(self.weights)
        starts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        number, place = divmod(first, sum(shares))
        cycles = range(number, (first + count) // sum(shares) + 1)
        chosen = np.concatenate([_tasks(shares, seed, each) for each in cycles])[: place + count]
        found = np.zeros(count, np.int64)
        for task, size in enumerate(self.sizes):
            mine = np.flatnonzero(chosen == task)
            before = int((mine < place).sum())
            own = prompt_order(
                size,
                seed=seed,
                first=number * shares[task] + before,
                count=len(mine) - before,
                task=task,
            )
            found[mine[before:] - place] = starts[task] + own
        return found


def _tasks(shares: Sequence[int], seed: int, number: int) -> np.ndarray:
    """The tasks of one cycle, in order."""
    offsets = np.random.default_rng([seed, number, len(shares)]).random(len(shares))
    times = np.concatenate(
        [(np.arange(n) + offset) / n for n, offset in zip(shares, offsets, strict=True)]
    )
    return np.repeat(np.arange(len(shares)), shares)[np.argsort(times, kind="stable")]


def prompt_order(
    problems: int, *, seed: int, first: int, count: int, task: int | None = None
) -> np.ndarray:
    """Problems at positions first .. first + count - 1 of the endless shuffled stream of one task.

    Each epoch is a permutation drawn from (seed, epoch), and from the task's place in a mixture, so
    a position's problem depends on nothing else.
    """
    epochs = range(first // problems, (first + count) // problems + 1)
    drawn = [[seed, epoch] if task is None else [seed, epoch, task] for epoch in epochs]
    orders = [np.random.default_rng(each).permutation(problems) for each in drawn]
    return np.concatenate(orders)[first % problems :][:count]
