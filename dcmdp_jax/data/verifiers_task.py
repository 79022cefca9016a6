"""Single-turn tasks of the library verifiers (0.4, its API v1).

    verifiers:ID,size=1000

ID names a taskset as the library does: an installed package or module. The reward `verifiers` scores completions with
the tasks' own rewards. No model server is started: tasks that need one, a container or tools can't be asked so.
"""

from __future__ import annotations

import itertools
from typing import Any

from dcmdp_jax.data.rows import problem_from_row
from dcmdp_jax.errors import UserError, one_line
from dcmdp_jax.rewards.protocol import Problem

_LARGEST_SIZE = 10**6


def verifiers_problems(location: str) -> list[Problem]:
    """The problems of a location, with the column `verifiers` from which the reward of that name finds the task.

    Raises:
        UserError: in one line: the library is missing, there is no such taskset, it has no end and no `size` is given,
            or a task needs more than one prompt and one completion.
    """
    name, size = _parse(location)
    try:
        from dcmdp_jax.rewards.verifiers_score import load_taskset
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
            row | {"verifiers": {"taskset": name, "index": index}}, source=source, index=index, keep_columns=True,
            answers="unused",
        )
        for index, row in enumerate(rows)
    ]  # fmt: skip


def _parse(location: str) -> tuple[str, int | None]:
    name, *settings = (part.strip() for part in location.partition(":")[2].split(","))
    if not name:
        raise UserError(f"task {location}: name a taskset, verifiers:ID")
    size = None
    for setting in filter(None, settings):
        key, _, text = (part.strip() for part in setting.partition("="))
        if key != "size" or size is not None or not (text.isascii() and text.isdigit()):
            raise UserError(f"task {location}: {setting!r} is not size=N, once")
        size = int(text)
        if not 1 <= size <= _LARGEST_SIZE:
            raise UserError(f"task {location}: size = {size} must be from 1 to {_LARGEST_SIZE}")
    return name, size


def _row(task: Any) -> dict[str, Any]:
    """The prompt of a task as messages."""
    needs = "a container" if task.NEEDS_CONTAINER else "tools" if type(task).toolsets(task.config) else ""
    if needs or task.data.prompt is None:
        raise UserError(f"its task {task.data.idx} needs {needs or 'a user that speaks first'}, which is not supported")
    prompt = task.data.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [
        message.model_dump(mode="json", exclude_none=True) for message in prompt
    ]  # fmt: skip
    if task.data.system_prompt:
        messages.insert(0, {"role": "system", "content": task.data.system_prompt})
    return {"prompt": messages}
