"""Tasks and rewards of the libraries reasoning-gym and verifiers (0.4, its API v1).

    reasoning_gym:NAME,size=1000,seed=0,KEY=VALUE,...

Procedural problems, made offline from a seed. NAME is a dataset of the library, the keys are fields of its
configuration. The values are JSON, or text. The reward `reasoning_gym` scores with the dataset's own `score_answer`.

    verifiers:ID,size=1000

Single-turn tasks. ID names a taskset as the library does: an installed package or module. The reward `verifiers` scores
completions with the tasks' own rewards. No model server is started: tasks that need one, a container or tools can't be
asked so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcmdp_jax.data.mixtures import task_arguments
from dcmdp_jax.data.rows import problem_from_row
from dcmdp_jax.errors import UserError, one_line
from dcmdp_jax.inputs import shorten
from dcmdp_jax.rewards.math.notation import last_boxed
from dcmdp_jax.rewards.protocol import Problem, completion_text

_DEFAULT_SIZE, _DEFAULT_SEED = 1000, 0
_LARGEST_DATASET = 10**7
_LARGEST_TASKSET = 10**6
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_problems(location: str) -> list[Problem]:
    """The problems of a location.

    Each has the column `reasoning_gym`, from which the reward of that name makes the dataset's entry again. It has an
    answer, for `math`, only where the verifier can read it.

    Raises:
        UserError: in one line: the library is missing, it has no such dataset, the dataset refuses its configuration,
            or an entry can't be made.
    """
    name, config = _parse_dataset(location)
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


def _parse_dataset(location: str) -> tuple[str, dict[str, Any]]:
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
    for key, low, high in (("size", 1, _LARGEST_DATASET), ("seed", 0, 2**32 - 1)):
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


def verifiers_problems(location: str) -> list[Problem]:
    """The problems of a location, with the column `verifiers` from which the reward of that name finds the task.

    Raises:
        UserError: in one line: the library is missing, there is no such taskset, it has no end and no `size` is given,
            or a task needs more than one prompt and one completion.
    """
    name, size = _parse_taskset(location)
    try:
        import verifiers.v1  # noqa: F401
    except ImportError:
        raise UserError(
            f"task {location}: the library verifiers is missing: pip install 'verifiers>=0.4,<0.5'"
        ) from None
    try:
        taskset = load_taskset(name)
        if size is None and not taskset.bounded:
            raise UserError("it has no end; give size=N")
        tasks = list(itertools.islice(taskset, size))
        rows = [_row(task) for task in tasks]
    except Exception as error:  # a taskset is foreign code
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise UserError(f"task {location}: {one_line(reason)}") from error
    source = name.rpartition("/")[2]
    return [
        problem_from_row(
            row | {"verifiers": {"taskset": name, "index": index}},
            source=source,
            index=index,
            keep_columns=True,
            answers="unused",
        )
        for index, row in enumerate(rows)
    ]


def _parse_taskset(location: str) -> tuple[str, int | None]:
    name, _, settings = location.partition(":")[2].partition(",")
    if not name.strip():
        raise UserError(f"task {location}: name a taskset, verifiers:ID")
    text = task_arguments(location, settings, ["size"]).get("size")
    if text is None:
        return name.strip(), None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _LARGEST_TASKSET):
        raise UserError(f"task {location}: size = {text} must be a whole number from 1 to {_LARGEST_TASKSET}")
    return name.strip(), int(text)


def _row(task: Any) -> dict[str, Any]:
    """The prompt of a task as messages."""
    needs = "a container" if task.NEEDS_CONTAINER else "tools" if type(task).toolsets(task.config) else ""
    if needs or task.data.prompt is None:
        raise UserError(f"its task {task.data.idx} needs {needs or 'a user that speaks first'}, which is not supported")
    prompt = task.data.prompt
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = [message.model_dump(mode="json", exclude_none=True) for message in prompt]
    system = task.data.system_prompt
    return {"prompt": [{"role": "system", "content": system}, *messages] if system else messages}


def verifiers(
    completions: Sequence[Any],
    verifiers: Sequence[Mapping[str, Any] | None],
    log_extra: Callable[[str, list[Any]], None],
    **columns: Any,
) -> list[float | None]:
    """The weighted sum of a task's rewards; None for a problem of another task.

    Rewards that need a runtime are left out by the library; where none is left, the completion has no value. The
    rewards and metrics that the task recorded are logged by `log_extra` as `verifiers`.

    Args:
        completions: texts, or lists of messages.
        verifiers: the taskset of each problem and the place in it.
        log_extra: takes what tasks record.
        columns: not used.
    """
    del columns
    chosen = [None if one is None else task_of(one["taskset"], one["index"]) for one in verifiers]
    traces = [
        None if task is None else _trace(task, completion_text(completion))
        for task, completion in zip(chosen, completions, strict=True)
    ]

    async def score() -> None:
        await asyncio.gather(*(task.score(one) for task, one in zip(chosen, traces, strict=True) if task is not None))

    asyncio.run(score())
    log_extra("verifiers", [None if one is None else _recorded(one) for one in traces])
    return [None if one is None or not one.rewards else float(one.reward) for one in traces]


def load_taskset(name: str) -> Any:
    """A taskset by the library's own rule, with its default configuration."""
    from verifiers.v1 import TasksetConfig
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import taskset_class

    kind = taskset_class(name)
    return kind((concrete_type(kind, TasksetConfig) or TasksetConfig)(id=name))


@functools.lru_cache(maxsize=16)
def _tasks(name: str, count: int) -> list[Any]:
    return list(itertools.islice(load_taskset(name), count))


def task_of(name: str, index: int) -> Any:
    """The task at a place of a taskset."""
    count = 64
    while count <= index:  # few lengths, each loaded once
        count *= 4
    return _tasks(name, count)[index]


def _trace(task: Any, text: str) -> Any:
    """A completed trace of the library, with the task's prompt and one sampled message."""
    import verifiers.v1 as vf
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, TraceTask
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    data = task.data
    prompt = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    system = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    messages = [*system, *prompt, AssistantMessage(content=text)]
    nodes = [
        MessageNode(parent=place - 1 if place else None, message=message, sampled=place == len(messages) - 1)
        for place, message in enumerate(messages)
    ]
    given = TraceTask(type=type(task).__name__, data=data)
    return vf.Trace(task=given, agent=AgentInfo(config=vf.AgentConfig()), nodes=nodes, is_completed=True, ok=True)


def _recorded(trace: Any) -> dict[str, Any]:
    rewards = {name: None if reward is None else reward.score for name, reward in trace.rewards.items()}
    return rewards | dict(trace.metrics)
