"""The reward `reasoning_gym`: a dataset of the library judges answers to its own problems."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dcmdp_jax.rewards.math.answers import last_boxed
from dcmdp_jax.rewards.verl_signature import completion_text

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(
    completions: Sequence[Any], reasoning_gym: Sequence[Mapping[str, Any] | None], **columns: Any
) -> list[float | None]:
    r"""The dataset's `score_answer`, mostly from 0 to 1; None for a problem that is none of the library's.

    The answer of a completion is its last `<answer>...</answer>`, else its last `\boxed{}`; without either the score is
    that of no answer.

    Args:
        completions: texts, or lists of messages.
        reasoning_gym: of each problem the dataset's name and configuration, and the entry's index and answer.
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
