"""Tasks and rewards of the library verifiers (0.4, its API v1): single-turn tasksets.

    pip install 'verifiers>=0.4,<0.5'
    TASKS=examples/plugins/verifiers_tasks.py
    dcmdp train --config=configs/demo.py \
        --config.task.train=$TASKS:tasks,taskset=MY_TASKSET,size=1000 \
        --config.rewards.functions=$TASKS:task_score

`taskset` names one as the library does: an installed package or module. The reward scores
completions with the tasks' own rewards, on a trace of one prompt and one completion. No model
server is started: tasks that need one, a container or tools can't be asked so. Problems of other
tasks have no value of the reward.
"""

import asyncio
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcmdp_jax.errors import UserError
from dcmdp_jax.rewards.protocol import completion_text

_LARGEST = 10**6


def tasks(*, taskset: str = "", size: int | None = None) -> list[dict[str, Any]]:
    """Rows of a taskset; the column `verifiers` says where a task is, for `task_score`."""
    if not taskset:
        raise UserError("name a taskset of verifiers, taskset=ID")
    if size is not None and (type(size) is not int or not 1 <= size <= _LARGEST):
        raise UserError(f"size = {size!r} must be a whole number from 1 to {_LARGEST}")
    try:
        import verifiers.v1  # noqa: F401
    except ImportError:
        raise UserError(
            "the library verifiers is missing: pip install 'verifiers>=0.4,<0.5'"
        ) from None
    loaded = load_taskset(taskset)
    if size is None and not loaded.bounded:
        raise UserError("it has no end; give size=N")
    source = taskset.rpartition("/")[2]
    return [
        _row(task) | {"data_source": source, "verifiers": {"taskset": taskset, "index": index}}
        for index, task in enumerate(itertools.islice(loaded, size))
    ]


def _row(task: Any) -> dict[str, Any]:
    """The prompt of a task as messages."""
    needs = (
        "a container"
        if task.NEEDS_CONTAINER
        else "tools"
        if type(task).toolsets(task.config)
        else ""
    )
    if needs or task.data.prompt is None:
        raise UserError(
            f"its task {task.data.idx} needs {needs or 'a user that speaks first'}, which is not "
            "supported"
        )
    prompt = task.data.prompt
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = [message.model_dump(mode="json", exclude_none=True) for message in prompt]
    system = task.data.system_prompt
    return {"prompt": [{"role": "system", "content": system}, *messages] if system else messages}


def task_score(
    completions: Sequence[Any],
    verifiers: Sequence[Mapping[str, Any] | None],
    log_extra: Callable[[str, list[Any]], None],
    **columns: Any,
) -> list[float | None]:
    """The weighted sum of a task's rewards; None for a problem of another task.

    Rewards that need a runtime are left out by the library; where none is left, the completion has
    no value. The rewards and metrics that the task recorded are logged by `log_extra` as
    `verifiers`.

    Args:
        completions: texts, or lists of messages.
        verifiers: the taskset of each problem and the place in it.
        log_extra: takes what tasks record.
        columns: not used.
    """
    chosen = [None if one is None else task_of(one["taskset"], one["index"]) for one in verifiers]
    traces = [
        None if task is None else _trace(task, completion_text(completion))
        for task, completion in zip(chosen, completions, strict=True)
    ]

    async def score() -> None:
        await asyncio.gather(
            *(task.score(one) for task, one in zip(chosen, traces, strict=True) if task is not None)
        )

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
    prompt = (
        [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    )
    system = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    messages = [*system, *prompt, AssistantMessage(content=text)]
    nodes = [
        MessageNode(
            parent=place - 1 if place else None, message=message, sampled=place == len(messages) - 1
        )
        for place, message in enumerate(messages)
    ]
    given = TraceTask(type=type(task).__name__, data=data)
    return vf.Trace(
        task=given,
        agent=AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        is_completed=True,
        ok=True,
    )


def _recorded(trace: Any) -> dict[str, Any]:
    rewards = {
        name: None if reward is None else reward.score for name, reward in trace.rewards.items()
    }
    return rewards | dict(trace.metrics)
