"""Python functions as tools, which the policy calls in its chat template's own format.

Runs in the isolated process. A turn's calls are answered by their results, each a message of the
role `tool`. A call that is malformed, has arguments that its tool's JSON schema does not allow, or
raises is answered by a text that begins with "error: ". A turn without a call ends the completion.
"""

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dcmdp_jax.data.chat import CallFormat
from dcmdp_jax.data.tool_calls import checked_arguments, tool_functions
from dcmdp_jax.errors import shorten
from dcmdp_jax.user_files import load_object

_UNKNOWN = "unknown"

Step = tuple[list[dict[str, str]], float, bool]
"""An environment's response to one turn: the messages without their role that the policy reads
next, this turn's reward, whether the completion ends.
"""


def failed_step(error: str) -> Step:
    """The step of a turn whose calls have no results. Hermes' templates must have a name."""
    return [{"name": _UNKNOWN, "content": f"error: {error}"}], 0.0, False


class Tools:
    """The functions that are tools, which answer the turns of any completion.

    Args:
        name: `tools:module:function,...`, or `tools:path.py:function,...` relative to the working
            directory.
        call_format: fields of the format of calls.
        longest: most characters of a result; a longer one is cut.

    Raises:
        UserError: in one line, if one can't be imported.
        Exception: transformers' exception for a function without type hints or docstring.
    """

    def __init__(self, name: str, call_format: Sequence[Any], longest: int) -> None:
        from transformers.utils import get_json_schema

        self._schemas = []
        self._functions = {}
        self._format = CallFormat(*call_format)
        self._longest = longest
        module, _, names = name.removeprefix("tools:").rpartition(":")
        functions = []
        for function_name in names.split(","):
            functions.append(load_object(f"{module}:{function_name}", "function"))
        for function in functions:
            schema = get_json_schema(function)
            self._schemas.append(schema)
            self._functions[schema["function"]["name"]] = function

    def call(self, method: str, *args: Any) -> list[Any]:
        """As `pool.load`'s function: "tools" are their JSON schemas, "reset" adds no text."""
        if method == "tools":
            return self._schemas
        if method == "reset":
            return [[""] * len(args[0]), "tool"]
        return [self._step(text) for text in args[1]]

    def _step(self, text: str) -> Step:
        calls, problems = self._format.find(text, self._schemas)
        answers = []
        for call in calls:
            name = call["name"]
            if name not in self._functions:
                name = _UNKNOWN
            answers.append({"name": name, "content": self._result(**call)})
        for problem in problems:
            error = f"error: this call can't be read: {problem[: self._longest]}"
            answers.append({"name": _UNKNOWN, "content": error})
        return answers, 0.0, not answers

    def _result(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name not in self._functions:
            return f"error: there is no tool {shorten(name)}, only {', '.join(self._functions)}"
        try:
            checked = checked_arguments(arguments, tool_functions(self._schemas)[name])
        except ValueError as error:
            return f"error: {error}"
        try:
            result = self._functions[name](**checked)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            text = result
            if not isinstance(result, str):
                text = json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:  # the user's function raises what it likes
            text = f"error: {type(error).__name__}: {error}"

        # Half a surrogate pair is no UTF-8: it becomes "?".
        text = text.encode(errors="replace").decode()
        if len(text) <= self._longest:
            return text
        return f"{text[: self._longest]} [cut, {len(text):,} characters]"
