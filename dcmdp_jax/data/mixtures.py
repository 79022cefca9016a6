"""Mixtures of tasks: locations with weights, and the order in which their problems are asked.

    a.jsonl@2,b.parquet@1,arithmetic:difficulty=2,count=2048@1

gives half of the prompts from a.jsonl, a quarter from each of the others, whatever their sizes.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from dcmdp_jax.errors import UserError, shorten

# "@" and a number at the end. A Hub configuration that is a number needs a weight behind it.
_WEIGHT = re.compile(r"(.*)@([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*", re.DOTALL)
_FUNCTION = re.compile(r"[^,:]+\.py:[^\W\d]\w*")
_LARGEST_WEIGHT = 10**6
# Prompts of a cycle, in which each task has its exact share.
_LONGEST_CYCLE = 10**5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
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
    weights = {}
    for item in split_locations(text):
        match = _WEIGHT.fullmatch(item)
        location = item.strip()
        weight = Fraction(1)
        if match is not None:
            location = match[1].strip()
            weight = Fraction(match[2])
        if not location:
            raise UserError(f"got {shorten(text)}, an empty name is no task")
        if not 0 < weight <= _LARGEST_WEIGHT:
            raise UserError(
                f"got {shorten(item)}, a weight must be above 0 and at most {_LARGEST_WEIGHT}"
            )
        if location in weights:
            raise UserError(
                f"got {shorten(location)} twice, name it once and raise its weight (@2)"
            )
        weights[location] = weight

    if sum(cycle(weights.values())) > _LONGEST_CYCLE:
        raise UserError(
            f"got weights {', '.join(map(str, weights.values()))}, give them fewer digits"
        )
    names = location_names(list(weights))
    return tuple(
        Part(name=name, location=location, weight=weights[location])
        for name, location in zip(names, weights, strict=True)
    )


def split_locations(text: str) -> list[str]:
    """Locations joined by commas.

    A comma before `key=value` belongs to the built-in task or the function that it continues.
    """
    locations = []
    for item in text.split(","):
        last = ""
        if locations:
            last = locations[-1]
        is_setting = "=" in item and not _has_settings(item.strip())
        if is_setting and _has_settings(last) and not _WEIGHT.fullmatch(last):
            locations[-1] += f",{item}"
        else:
            locations.append(item.strip())
    return locations


def task_arguments(location: str, settings: str, keys: Collection[str] = ()) -> dict[str, str]:
    """The settings of a task, `key=value,...`, as text.

    Args:
        location: the whole location, for errors.
        settings: the part of it that holds the settings.
        keys: the allowed keys; empty: any.

    Raises:
        UserError: in one line, for a part not of the form `key=value`, an unknown key, or a
            repeated one.
    """
    values = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        key = key.strip()
        is_allowed = key.isidentifier()
        allowed_keys = ""
        if keys:
            is_allowed = key in keys
            allowed_keys = f" with a key of {', '.join(keys)}"
        if not is_allowed or not equals:
            raise UserError(f"task {location}: {setting.strip()!r} is not key=value{allowed_keys}")
        if key in values:
            raise UserError(f"task {location}: {key} is given twice")
        values[key] = value.strip()
    return values


def is_weighted(location: str) -> bool:
    """Whether a location has a weight for certain: not behind a Hub name, which may end so."""
    match = _WEIGHT.fullmatch(location)
    if match is None:
        return False
    return _has_settings(match[1]) or match[1].endswith((".jsonl", ".parquet"))


def source_name(location: str) -> str:
    """Default `source` of problems: a file's name without suffix, a function's, or `arithmetic`."""
    path, _, settings = location.partition(":")
    if is_function(location):
        return settings.partition(",")[0]
    return Path(path).stem


def location_names(locations: Sequence[str]) -> list[str]:
    """Names of sources; tasks that would share one are distinguished by their settings."""
    names = [source_name(location) for location in locations]
    counts = Counter(names)
    for number, location in enumerate(locations):
        if counts[names[number]] > 1 and _has_settings(location):
            names[number] = re.sub(r"[^\w.=-]", "_", location)
    return names


def is_function(location: str) -> bool:
    """Whether a location is a function of a user's file, `path.py:function,key=value,...`."""
    return _FUNCTION.fullmatch(location.partition(",")[0]) is not None


def is_arithmetic(location: str) -> bool:
    """Whether a location is the built-in task, `arithmetic:key=value,...`."""
    return location.partition(":")[0] == "arithmetic"


def _has_settings(location: str) -> bool:
    return is_arithmetic(location) or is_function(location)


def cycle(weights: Collection[Fraction]) -> list[int]:
    """Prompts of each task in one cycle: the smallest integers in proportion to the weights."""
    unit = math.lcm(*(weight.denominator for weight in weights))
    counts = [int(weight * unit) for weight in weights]
    divisor = math.gcd(*counts)
    return [count // divisor for count in counts]


@dataclasses.dataclass(frozen=True)
class PromptStream:
    """The endless order in which problems are asked.

    A function of seed and position, so that a resumed run goes on in it exactly.

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
        starts = np.cumsum((0, *self.sizes[:-1]))
        first_cycle, offset = divmod(first, sum(shares))
        cycles = range(first_cycle, (first + count) // sum(shares) + 1)
        tasks = np.concatenate([_tasks(shares, seed, number) for number in cycles])
        tasks = tasks[: offset + count]
        problems = np.zeros(count, np.int64)
        for task, size in enumerate(self.sizes):
            positions = np.flatnonzero(tasks == task)
            before = int((positions < offset).sum())
            order = prompt_order(
                size,
                seed=seed,
                first=first_cycle * shares[task] + before,
                count=len(positions) - before,
                task=task,
            )
            problems[positions[before:] - offset] = starts[task] + order
        return problems


def _tasks(shares: Sequence[int], seed: int, number: int) -> np.ndarray:
    """The tasks of one cycle, in order."""
    offsets = np.random.default_rng([seed, number, len(shares)]).random(len(shares))
    pairs = zip(shares, offsets, strict=True)
    times = np.concatenate([(np.arange(share) + offset) / share for share, offset in pairs])
    return np.repeat(np.arange(len(shares)), shares)[np.argsort(times, kind="stable")]


def prompt_order(
    problems: int,
    *,
    seed: int,
    first: int,
    count: int,
    task: int | None = None,
) -> np.ndarray:
    """Problems at positions first .. first + count - 1 of the endless shuffled stream of one task.

    Each epoch is a permutation drawn from (seed, epoch), and from the task's place in a mixture, so
    a position's problem depends on nothing else.
    """
    orders = []
    for epoch in range(first // problems, (first + count) // problems + 1):
        entropy = [seed, epoch] if task is None else [seed, epoch, task]
        orders.append(np.random.default_rng(entropy).permutation(problems))
    return np.concatenate(orders)[first % problems :][:count]
