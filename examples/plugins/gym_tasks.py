r"""Tasks and rewards of the library reasoning-gym: procedural problems, made offline from a seed.

    pip install 'reasoning-gym>=0.1.25,<0.2'
    GYM=examples/plugins/gym_tasks.py
    dcmdp train --config=configs/demo.py --config.task.train=$GYM:gym,dataset=chain_sum,size=2000 \
        --config.rewards.functions=$GYM:gym_score

`dataset` names a dataset of the library; `size` and `seed`, and all other settings, are fields of
its configuration. The reward is the dataset's own `score_answer`, mostly from 0 to 1. The answer of
a completion is its last `<answer>...</answer>`, else its last `\boxed{}`. Problems of other tasks
have no value of it, so it stands beside `math`.
"""

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dcmdp_jax.data.rows import problem_from_row
from dcmdp_jax.errors import UserError, one_line
from dcmdp_jax.rewards.math.notation import last_boxed
from dcmdp_jax.rewards.protocol import completion_text

_LARGEST = 10**7
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def gym(
    *, dataset: str = "", size: int = 1000, seed: int = 0, **settings: Any
) -> Iterator[dict[str, Any]]:
    """Rows of a dataset; `reasoning_gym` says how `gym_score` makes an entry again."""
    for key, value, low, high in (("size", size, 1, _LARGEST), ("seed", seed, 0, 2**32 - 1)):
        if type(value) is not int or not low <= value <= high:
            raise UserError(f"{key} = {value!r} must be a whole number from {low} to {high}")
    if not dataset:
        raise UserError("name a dataset of reasoning-gym, such as dataset=basic_arithmetic")
    try:
        from reasoning_gym import factory
    except ImportError:
        raise UserError(
            "the library reasoning-gym is missing: pip install 'reasoning-gym>=0.1.25,<0.2'"
        ) from None
    if dataset not in factory.DATASETS:
        near = difflib.get_close_matches(str(dataset), factory.DATASETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"reasoning-gym has no dataset {dataset!r:.80}{hint}")
    fields = [field.name for field in dataclasses.fields(factory.DATASETS[dataset][1])]
    config = {"size": size, "seed": seed, **settings}
    if unknown := [key for key in config if key not in fields]:
        raise UserError(f"{dataset} has no setting {unknown[0]!r}, it has {', '.join(fields)}")
    try:
        entries = _dataset(dataset, json.dumps(config, sort_keys=True))
        for index in range(size):
            entry = entries[index]
            made_by = {
                "dataset": dataset,
                "config": config,
                "index": index,
                "answer": entry["answer"],
            }
            row = {"question": entry["question"], "answer": entry["answer"]}
            # An answer that `math` can't read is none; `gym_score` has its own in `made_by`.
            answer = problem_from_row(row, source=dataset, index=index, answers="unused").answer
            yield row | {"answer": answer, "data_source": dataset, "reasoning_gym": made_by}
    except (
        Exception
    ) as error:  # the library checks by assertions, and its generators raise what they like
        raise UserError(
            f"{dataset} refuses it: {one_line(f'{type(error).__name__}: {error}')}"
        ) from error


def gym_score(
    completions: Sequence[Any], reasoning_gym: Sequence[Mapping[str, Any] | None], **columns: Any
) -> list[float | None]:
    """The dataset's score of each completion; None for a problem of another task.

    Args:
        completions: texts, or lists of messages.
        reasoning_gym: the dataset's name and configuration, and the entry's index and answer, of
            each problem.
        columns: not used.
    """
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
            f"{made_by['dataset']} makes another problem {made_by['index']} in this process than "
            "in the trainer's; its answers can't be scored"
        )
    return float(_dataset(made_by["dataset"], config).score_answer(answer_of(text), entry))


@functools.lru_cache(maxsize=64)
def _dataset(name: str, config: str) -> Any:
    from reasoning_gym import factory

    return factory.create_dataset(name, **json.loads(config))


@functools.lru_cache(maxsize=65536)
def _entry(name: str, config: str, index: int) -> Mapping[str, Any]:
    return _dataset(name, config)[index]
