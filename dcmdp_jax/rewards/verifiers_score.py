"""The reward `verifiers`: the tasks of a taskset of that library judge completions of their own prompts.

A completion becomes a trace of the library, with its prompt and one sampled message, and `Task.score` records the
rewards in it. Rewards that need a runtime are left out by the library; where none is left, the completion has no value.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import taskset_class

from dcmdp_jax.rewards.verl_signature import completion_text


def verifiers(
    completions: Sequence[Any],
    verifiers: Sequence[Mapping[str, Any] | None],
    log_extra: Callable[[str, list[Any]], None],
    **columns: Any,
) -> list[float | None]:
    """The weighted sum of a task's rewards; None for a problem of another task.

    The rewards and metrics that the task recorded are logged by `log_extra` as `verifiers`.

    Args:
        completions: texts, or lists of messages.
        verifiers: of each problem the taskset and the place in it.
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
    kind = taskset_class(name)
    return kind((concrete_type(kind, vf.TasksetConfig) or vf.TasksetConfig)(id=name))


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
    data = task.data
    prompt = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    system = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    messages = [*system, *prompt, AssistantMessage(content=text)]
    nodes = [
        MessageNode(parent=place - 1 if place else None, message=message, sampled=place == len(messages) - 1)
        for place, message in enumerate(messages)
    ]
    return vf.Trace(
        task=TraceTask(type=type(task).__name__, data=data), agent=AgentInfo(config=vf.AgentConfig()), nodes=nodes,
        is_completed=True, ok=True,
    )  # fmt: skip


def _recorded(trace: Any) -> dict[str, Any]:
    rewards = {name: None if reward is None else reward.score for name, reward in trace.rewards.items()}
    return rewards | dict(trace.metrics)
