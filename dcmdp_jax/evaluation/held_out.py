"""The held-out tasks of a run: their names, their problems, and K of each."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from dcmdp_jax.data.problems import source_name, split_locations
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.table import paper_samples
from dcmdp_jax.inputs import shorten


class HeldOutTask(NamedTuple):
    """One of the tasks of `evaluation.task`.

    Attributes:
        name: in the metrics, "aime24" for a file aime24.jsonl.
        location: of its problems.
        samples: K of avg@K.
    """

    name: str
    location: str
    samples: int


def held_out_tasks(task: str, samples: tuple[int, ...]) -> list[HeldOutTask]:
    """The tasks of the settings `evaluation.task` and `evaluation.samples`, in order.

    Args:
        task: locations, joined by commas.
        samples: K of each task, or one for all; empty for the paper's of its benchmarks and 8 of others.

    Raises:
        UserError: for an empty location, two tasks of one name, or numbers that don't fit the tasks.
    """
    locations = split_locations(task)
    if not all(locations):
        raise UserError(f"config.evaluation.task: got {shorten(task)}, an empty name is no task")
    if len(samples) not in (0, 1, len(locations)):
        raise UserError(
            f"config.evaluation.samples: got {len(samples)} numbers for {len(locations)} tasks; give one for all, one "
            "for each, or none"
        )
    names = _names(locations)
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"config.evaluation.task: two tasks are called {shorten(repeated[0])}; rename one")
    each = samples if len(samples) == len(locations) else samples * len(locations)
    each = each or tuple(paper_samples(name) for name in names)
    return [HeldOutTask(*one) for one in zip(names, locations, each, strict=True)]


def _names(locations: list[str]) -> list[str]:
    """Names of sources; built-in tasks beside each other are told apart by their arguments."""
    several = sum(location.startswith("arithmetic") for location in locations) > 1
    return [
        re.sub(r"[^\w.=-]", "_", location) if several and location.startswith("arithmetic") else source_name(location)
        for location in locations
    ]
