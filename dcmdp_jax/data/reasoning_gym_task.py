"""Tasks and reward of the library reasoning-gym: procedural problems, made offline from a seed.

    reasoning_gym:NAME,size=1000,seed=0,KEY=VALUE,...

NAME is a dataset of the library, the keys are fields of its configuration. The values are JSON, or text. The reward
`reasoning_gym` scores with the dataset's own `score_answer`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dcmdp_jax.data.mixtures import task_arguments
from dcmdp_jax.data.rows import problem_from_row
from dcmdp_jax.errors import UserError, one_line
from dcmdp_jax.inputs import shorten
from dcmdp_jax.rewards.math.answers import last_boxed
from dcmdp_jax.rewards.protocol import Problem, completion_text

_DEFAULT_SIZE, _DEFAULT_SEED = 1000, 0
_LARGEST_SIZE = 10**7
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_problems(location: str) -> list[Problem]:
    """The problems of a location.

    Each has the column `reasoning_gym`, from which the reward of that name makes the dataset's entry again. It has an
    answer, for `math`, only where the verifier can read it.

    Raises:
        UserError: in one line: the library is missing, it has no such dataset, the dataset refuses its configuration,
            or an entry can't be made.
    """
    name, config = _parse(location)
    try:
        from reasoning_gym import factory
    except ImportError:
        raise UserError(
            f"task {location}: the library reasoning-gym is missing: pip install 'dcmdp-jax[tasks]'"
        ) from None
    if name not in factory.DATASETS:
        near = difflib.get_close_matches(name, factory.DATASETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"task {location}: reasoning-gym has no dataset {shorten(name)}{hint}")
    fields = [field.name for field in dataclasses.fields(factory.DATASETS[name][1])]
    if unknown := [key for key in config if key not in fields]:
        raise UserError(f"task {location}: {name} has no setting {shorten(unknown[0])}, it has {', '.join(fields)}")
    try:
        dataset = factory.create_dataset(name, **config)
        entries = [dataset[index] for index in range(config["size"])]
    except Exception as error:  # the library checks by assertions, and its generators raise what they like
        raise UserError(
            f"task {location}: {name} refuses it: {one_line(f'{type(error).__name__}: {error}')}"
        ) from error
    rows = [
        {"question": entry["question"], "answer": entry["answer"]}
        | {"reasoning_gym": {"dataset": name, "config": config, "index": index, "answer": entry["answer"]}}
        for index, entry in enumerate(entries)
    ]
    return [
        problem_from_row(row, source=name, index=index, keep_columns=True, answers="unused")
        for index, row in enumerate(rows)
    ]


def _parse(location: str) -> tuple[str, dict[str, Any]]:
    """The dataset and its configuration, with the size and the seed."""
    name, _, settings = location.partition(":")[2].partition(",")
    if not name.strip():
        raise UserError(f"task {location}: name a dataset of reasoning-gym, such as reasoning_gym:basic_arithmetic")
    config: dict[str, Any] = {"size": _DEFAULT_SIZE, "seed": _DEFAULT_SEED}
    for key, text in task_arguments(location, settings).items():
        try:
            config[key] = json.loads(text)
        except ValueError:
            config[key] = text
    for key, low, high in (("size", 1, _LARGEST_SIZE), ("seed", 0, 2**32 - 1)):
        if type(config[key]) is not int or not low <= config[key] <= high:
            raise UserError(f"task {location}: {key} = {config[key]!r} must be a whole number from {low} to {high}")
    return name.strip(), config


def reasoning_gym(
    completions: Sequence[Any], reasoning_gym: Sequence[Mapping[str, Any] | None], **columns: Any
) -> list[float | None]:
    r"""The dataset's `score_answer`, mostly from 0 to 1; None for a problem that is none of the library's.

    The answer of a completion is its last `<answer>...</answer>`, else its last `\boxed{}`; without either the score is
    that of no answer.

    Args:
        completions: texts, or lists of messages.
        reasoning_gym: the dataset's name and configuration, and the entry's index and answer, of each problem.
        columns: not used.
    """
    del columns
    return [
        None if made_by is None else _score(completion_text(completion), made_by)
        for completion, made_by in zip(completions, reasoning_gym, strict=True)
    ]


def answer_of(text: str) -> str | None:
    """The answer that a completion gives, None without one."""
    tagged = _ANSWER.findall(text)
    return tagged[-1].strip() if tagged else last_boxed(text)


def _score(text: str, made_by: Mapping[str, Any]) -> float:
    config = json.dumps(made_by["config"], sort_keys=True)
    entry = _entry(made_by["dataset"], config, made_by["index"])
    if entry["answer"] != made_by["answer"]:
        raise ValueError(
            f"{made_by['dataset']} makes another problem {made_by['index']} in this process than in the trainer's; its "
            "answers can't be scored"
        )
    return float(_dataset(made_by["dataset"], config).score_answer(answer_of(text), entry))


@functools.lru_cache(maxsize=64)
def _dataset(name: str, config: str) -> Any:
    from reasoning_gym import factory

    return factory.create_dataset(name, **json.loads(config))


@functools.lru_cache(maxsize=65536)
def _entry(name: str, config: str, index: int) -> Mapping[str, Any]:
    return _dataset(name, config)[index]
