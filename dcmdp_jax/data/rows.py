"""Rows of a dataset as problems. The schema is recognized row by row from the fields."""

from __future__ import annotations

import ast
import html
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from dcmdp_jax.errors import UserError
from dcmdp_jax.inputs import shorten, shorten_name
from dcmdp_jax.rewards.math.answers import answer_defect
from dcmdp_jax.rewards.math.notation import last_boxed, split_elements, unwrap_text
from dcmdp_jax.rewards.math.numbers import parse_number
from dcmdp_jax.rewards.protocol import ARGUMENTS, Message, Problem

_PROMPT_FIELDS = ("prompt", "problem", "question")
# Arguments of reward functions, and as in TRL the fields that these come from.
_NO_COLUMNS = ("prompt", "completion", *ARGUMENTS)
# A label may be the number of a class, so it comes last; a solution counts if it has a box.
_ANSWER_FIELDS = ("reward_model", "final_answer", "expected_answer", "ground_truth", "answer", "solution", "label")
# What datasets write where they have no answer (NuminaMath-1.5: a quarter of its rows); a policy could write it too.
_NO_ANSWERS = ("proof", "notfound", "not found", "n/a", "na", "nan", "null", "unknown", "not available", "no answer")
_LAST_ROLES = ("user", "tool", "assistant")
_CHAT_AS_TEXT = re.compile(r"""\s*+\[?\s*+\{\s*+["'](?:role|content)["']""")
# What stands around an answer, and is dropped: entities of HTML, tags, a sentence that only states it.
_ENTITY = re.compile(r"&(?:#[0-9]{1,6}|[a-zA-Z]{2,8});")
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*+)</answer>", re.DOTALL | re.IGNORECASE)
_STATED = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s++)?+(?:(?:the|my|our|final|correct|right)\s++)*+answer\s*+(?:is\b|[:=])[\s:]*+(.*)",
    re.DOTALL | re.IGNORECASE,
)
# Python's numbers take the digits of every script; models, other verifiers and most readers do not.
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")
PANDAS_INDEX = "__index_level_0__"
"""The column in which pandas numbers rows."""

Answers = Literal["required", "optional", "unused"]
"""What becomes of a row whose answer the verifier can't use: "required", it is refused; "optional", it is a problem
without answer if the row has none that is text or a number, and refused if it has; "unused", it is one in any case."""


class _NoAnswer(UserError):
    """The row has no answer that is text or a number."""


def problem_from_row(
    row: Mapping[str, Any] | str | bytes,
    *,
    source: str,
    index: int,
    keep_columns: bool = False,
    answers: Answers = "required",
) -> Problem:
    """Make a problem from one row.

    Args:
        row: the row's fields, or its JSON text.
        source: name to use where the row has no `data_source`.
        index: 0-based row number.
        keep_columns: whether the problem has `columns`.
        answers: handling of a row without a usable answer.

    Raises:
        UserError: if the row is not a JSON object, its schema is unknown, its prompt is empty, or it has no answer and
            needs one, or one that nothing could match.
    """
    if not isinstance(row, Mapping):
        row = _parse_json(row)
    prompt, messages = _prompt(row)
    try:
        answer, solution = _checked_answer(row)
    except UserError as error:
        if answers == "required" or (answers == "optional" and not isinstance(error, _NoAnswer)):
            raise
        answer, solution = None, _solution(row).strip()
    texts = [prompt, answer or "", *(message["content"] for message in messages)]
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise UserError("holds half of a surrogate pair, which is not a character")
    if row.get("context") and not messages:
        prompt = f"{row['context']}\n\n{prompt}"
    data_source = row.get("data_source")
    return Problem(
        prompt=prompt,
        answer=answer,
        source=data_source if isinstance(data_source, str) and data_source else source,
        index=index,
        messages=messages,
        tools=_tools(row) if messages else (),
        solution=solution,
        columns={name: row[name] for name in row if name not in _NO_COLUMNS} if keep_columns else {},
    )


def _parse_json(text: str | bytes) -> Mapping[str, Any]:
    if not text.strip():
        raise UserError("the row is empty")
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except UnicodeDecodeError:
        raise UserError("not valid UTF-8") from None
    except RecursionError:
        raise UserError("nested too deeply") from None
    if not isinstance(row, dict):
        raise UserError(f"the row is a JSON {type(row).__name__}, not an object")
    return row


def _prompt(row: Mapping[str, Any]) -> tuple[str, tuple[Message, ...]]:
    """The text that is asked, and the chat that it is part of where the prompt is messages."""
    field = next((name for name in _PROMPT_FIELDS if row.get(name) is not None), None)
    if field is None:
        raise UserError(f"no prompt in any of the fields {', '.join(_PROMPT_FIELDS)}; {_describe_fields(row)}")
    value = row[field]
    if isinstance(value, str) and _CHAT_AS_TEXT.match(value):
        value = _literal(value)
        if value is None:
            raise UserError(f"field {field!r} starts as a chat written as text, but is not valid JSON")
        value = [value] if isinstance(value, dict) else value
    messages: tuple[Message, ...] = ()
    if isinstance(value, list):
        messages = tuple(_message(message, field) for message in value)
        if not messages or messages[-1]["role"] not in _LAST_ROLES:
            raise UserError(
                f"field {field!r}: the last message must be the user's or a tool's, or the assistant's to continue"
            )
        asked = [message["content"] for message in messages if message["role"] == "user"]
        value = asked[-1] if asked else messages[-1]["content"]
    if not isinstance(value, str):
        raise UserError(f"field {field!r} is {type(value).__name__}, not text or a list of messages")
    if not value.strip():
        raise UserError("the prompt is empty")
    return value, messages


def _message(message: Any, field: str) -> Message:
    """A message with text as content, without the null fields that a table gives it."""
    if not isinstance(message, Mapping):
        raise UserError(f"field {field!r}: every message must be an object with a role and a content")
    kept = {str(name): value for name, value in message.items() if value is not None}
    content = kept.get("content")
    if content is None and kept.get("tool_calls"):
        content = ""
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(kept.get("role"), str) or not isinstance(content, str):
        raise UserError(f"field {field!r}: every message needs a role and a content that are text")
    return kept | {"content": content}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _tools(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The column `tools` where it is a list of JSON schemas or the text of one; else it is for the reward alone."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            return ()
    schemas = isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
    return tuple(tools) if schemas else ()


def _checked_answer(row: Mapping[str, Any]) -> tuple[str, str]:
    """The result of `_answer`, if the verifier can use the answer."""
    answer, solution = _answer(row)
    if not answer:
        raise _NoAnswer(f"the answer {answer_defect(answer)}")
    if unwrap_text(answer.strip("$. ")).strip().lower() in _NO_ANSWERS:
        raise _NoAnswer(f"the answer is {shorten(answer)}, which says that there is none")
    if defect := answer_defect(answer):
        raise UserError(f"the answer {defect}: {shorten(answer)}")
    if digit := _FOREIGN_DIGIT.search(answer):
        raise UserError(f"the answer {shorten(answer)} has the digit {digit[0]!r}, write {int(digit[0])}")
    return answer, solution


def _answer(row: Mapping[str, Any]) -> tuple[str, str]:
    """The reference answer and, where the row has one, a worked solution."""
    fields = [name for name in _ANSWER_FIELDS if row.get(name) is not None]
    if not fields:
        raise _NoAnswer(f"no answer in any of the fields {', '.join(_ANSWER_FIELDS)}; {_describe_fields(row)}")
    solution = _solution(row)
    field = fields[1] if fields == ["solution", "label"] and last_boxed(solution) is None else fields[0]
    value = row[field]
    if field == "reward_model":
        if not isinstance(value, Mapping) or value.get("ground_truth") is None:
            raise _NoAnswer("field 'reward_model' has no ground_truth")
        value = value["ground_truth"]
    elif field == "final_answer" and isinstance(value, list):
        value = _olympiad_answer(row)
    elif field == "solution":
        value = last_boxed(solution)
        if value is None:
            raise _NoAnswer(r"no answer field, and no \boxed{} in the solution")
    elif field == "answer" and isinstance(value, str) and "####" in value:
        solution, _, value = value.rpartition("####")
    answer, choices = _answer_text(value, field), row.get("choices") or row.get("options")
    choices = choices.get("text") if isinstance(choices, Mapping) else choices
    indexed = answer.isdecimal() and (isinstance(value, int) or answer not in map(str, choices or ()))
    if indexed and choices and isinstance(choices, list):
        raise UserError(
            f"field {field!r} is {answer} beside {len(choices)} choices, an index from 0 or 1; write the letter of "
            "the right choice, or its text"
        )
    return answer, solution.strip()


def _describe_fields(row: Mapping[str, Any]) -> str:
    """The fields that a row has, null ones aside, for an error about those it lacks."""
    found = [name for name in row if row[name] is not None]
    return f"the row has {shorten_name(', '.join(map(str, found)))}" if found else "the row has none"


def _solution(row: Mapping[str, Any]) -> str:
    value = row.get("solution") or row.get("reference_solution") or ""
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, str) else ""


def _answer_text(value: Any, field: str) -> str:
    """An answer without what stands around it: `["42"]`, `<answer>42</answer>`, `42&nbsp;`, `The answer is 42.`"""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), value)
        text = ([text] + _TAGGED.findall(text))[-1].strip()
        inner = _literal(text) if text[:1] in ("[", "{", '"', "'") else None
        texts = [isinstance(item, str) for item in inner] if isinstance(inner, list) else []
        if isinstance(inner, dict) or (len(texts) > 1 and any(texts)):
            raise _NoAnswer(f"field {field!r}: an answer must be one text or number, not {shorten(text)}")
        if isinstance(inner, str) or len(texts) == 1:
            return _answer_text(inner, field)
        stated = _STATED.fullmatch(text)
        return stated[1].removesuffix(".").strip() if stated else text
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _NoAnswer(f"field {field!r}: an answer must be text or a finite number, not {shorten(value)}")


def _literal(text: str) -> Any:
    """The value of a text in JSON, or as Python prints it; None for anything else."""
    if re.search(r"(?<!\\)\\[a-zA-Z]{2}", text):  # the backslashes of LaTeX, not escaped
        text = text.replace("\\", r"\\")
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return None


def _olympiad_answer(row: Mapping[str, Any]) -> Any:
    answers = row["final_answer"]
    if len(answers) != 1 or not isinstance(answers[0], str):
        raise UserError(f"field 'final_answer' must be a list of one text, not {shorten(answers)}")
    answer = answers[0].strip()
    if row.get("is_multiple_answer"):
        # ", " keeps 2500,750 from reading as a number of digit groups
        answer = ", ".join(split_elements(answer.replace("$", ""), ",", digit_groups=False))
    if row.get("error"):
        if _FOREIGN_DIGIT.search(str(row["error"])) or parse_number(str(row["error"])) is None:
            raise UserError(f"field 'error' is {shorten(row['error'])}, not a number")
        answer += rf"\tolerance{{{row['error']}}}"
    return answer
