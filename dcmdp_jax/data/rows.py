"""Rows of a dataset as problems. The schema is recognized row by row from the fields."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dcmdp_jax.data.learned_rows import (
    chats_without_nulls,
    check_row_weight,
    messages_to_learn,
    messages_to_read,
    parse_field,
)
from dcmdp_jax.data.tool_calls import Schema
from dcmdp_jax.errors import UserError, shorten, shorten_name
from dcmdp_jax.inputs import unique_fields
from dcmdp_jax.rewards.math import notation, numbers
from dcmdp_jax.rewards.math.answers import answer_defect
from dcmdp_jax.rewards.math.references import NoAnswer, answer_text, literal, reason_for_no_answer
from dcmdp_jax.rewards.protocol import ARGUMENTS, Message, Problem

_Row = Mapping[str, Any]

_PROMPT_FIELDS = ("prompt", "problem", "question")
# Arguments of reward functions, and as in TRL the fields that these come from.
_NO_COLUMNS = ("prompt", "completion", *ARGUMENTS)
# A label may be the number of a class, so it comes last; a solution counts if it has a box.
_ANSWER_FIELDS = (
    "reward_model",
    "final_answer",
    "expected_answer",
    "ground_truth",
    "answer",
    "solution",
    "label",
)
# What is learned: a whole chat, or behind a prompt also a worked solution, or an answer as GSM8K
# writes it.
_COMPLETION_FIELDS = ("messages", "completion", "solution", "answer")
_LAST_ROLES = ("user", "tool", "assistant")
_CHAT_AS_TEXT = re.compile(r"""\s*+\[?\s*+\{\s*+["'](?:role|content)["']""")
# Python's numbers take the digits of every script; models, other verifiers and most readers do not.
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")
PANDAS_INDEX = "__index_level_0__"
"""The column in which pandas numbers rows."""

Answers = Literal["required", "optional", "unused", "learned"]
"""What becomes of a row whose answer the verifier can't use: "required", it is refused; "optional",
it is a problem without answer if the row has none that is text or a number, and refused if it has;
"unused", it is one in any case. "learned": no answer is read, and the row must have a completion to
learn from.
"""


def problem_from_row(
    row: _Row | str | bytes,
    *,
    source: str,
    index: int,
    keep_columns: bool = False,
    answers: Answers = "required",
) -> Problem:
    """Make a problem from one row.

    Args:
        row: the row's fields, or its JSON text. A table's chats and tools have the fields of all
            rows, so their nulls stand for nothing, at any depth; a null in JSON text is what the
            row says.
        source: name to use where the row has no `data_source`.
        index: 0-based row number.
        keep_columns: whether the problem has `columns`.
        answers: handling of a row without a usable answer.

    Raises:
        UserError: if the row is not a JSON object, its schema is unknown, its prompt is empty, or
            it has no answer and needs one, or one that nothing could match; or no completion, or an
            empty one, where it is learned.
    """
    if isinstance(row, Mapping):
        fields = chats_without_nulls(row)
    else:
        row = _parse_json(row)
        fields = row
    learned = answers == "learned"
    prompt = ""
    messages = ()
    if not learned or fields.get("messages") is None:
        prompt, messages = _prompt(fields)
    answer = None
    completion = ()
    if learned:
        check_row_weight(fields)
        messages = messages_to_read(messages)
        solution, completion = _completion(fields)
    else:
        try:
            answer, solution = _checked_answer(fields, prompt)
        except UserError as error:
            is_absent = isinstance(error, NoAnswer)
            may_lack = answers == "unused" or (answers == "optional" and is_absent)
            if not may_lack:
                raise
            solution = _solution(fields).strip()

    texts = [message["content"] for message in (*messages, *completion)]
    texts += [prompt, answer or ""]
    if learned:
        texts.append(solution)
    if any("\ud800" <= character <= "\udfff" for character in "".join(texts)):
        raise UserError("holds half of a surrogate pair, which is not a character")
    if fields.get("context") and not messages:
        prompt = f"{fields['context']}\n\n{prompt}"
    data_source = fields.get("data_source")
    if isinstance(data_source, str) and data_source:
        source = data_source
    columns = {}
    if keep_columns:
        columns = {name: row[name] for name in row if name not in _NO_COLUMNS}
    tools = ()
    if messages or completion:
        tools = _tools(fields, is_checked=learned)
    return Problem(
        prompt=prompt,
        answer=answer,
        source=source,
        index=index,
        messages=messages,
        tools=tools,
        solution=solution,
        completion=completion,
        columns=columns,
    )


def _parse_json(text: str | bytes) -> _Row:
    if not text.strip():
        raise UserError("the row is empty")
    try:
        row = json.loads(text, object_pairs_hook=unique_fields)
    except json.JSONDecodeError as error:
        raise UserError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except UnicodeDecodeError:
        raise UserError("not valid UTF-8") from None
    except RecursionError:
        raise UserError("nested too deeply") from None
    if not isinstance(row, dict):
        raise UserError(f"the row is a JSON {type(row).__name__}, not an object")
    return row


def _prompt(row: _Row) -> tuple[str, tuple[Message, ...]]:
    """The text that is asked, and the chat that it is part of where the prompt is messages."""
    field, *_ = _present(row, _PROMPT_FIELDS, "prompt")
    value = _chat_or_text(row[field], field)
    messages = ()
    if isinstance(value, tuple):
        messages = value
        if not messages or messages[-1]["role"] not in _LAST_ROLES:
            raise UserError(
                f"field {field!r}: the last message must be the user's or a tool's, or the "
                "assistant's to continue"
            )
        value = messages[-1]["content"]
        for message in messages:
            if message["role"] == "user":
                value = message["content"]
    if not isinstance(value, str):
        raise UserError(
            f"field {field!r} is {type(value).__name__}, not text or a list of messages"
        )
    if not value.strip():
        raise UserError("the prompt is empty")
    return value, messages


def _completion(row: _Row) -> tuple[str, tuple[Message, ...]]:
    """What is learned of a row: the text after its prompt, or the assistant's of messages."""
    field, *_ = _present(row, _COMPLETION_FIELDS, "completion")
    if field == "messages" and row.get("completion"):
        raise UserError("fields 'messages' and 'completion' may both be learned; take one out")
    value = _chat_or_text(row[field], field)
    if isinstance(value, str) and field != "messages":
        if not value.strip():
            raise UserError(f"field {field!r}: the completion is empty")
        if field != "completion":
            value = value.strip()
        return value, ()
    if not isinstance(value, tuple):
        raise UserError(
            f"field {field!r} is {type(value).__name__}, not a list of messages or, after a "
            "prompt, text"
        )
    turns = [message for message in value if message["role"] == "assistant"]
    if not turns:
        raise UserError(f"field {field!r} has no turn of the assistant")
    for turn in turns:
        if not turn["content"].strip() and not turn.get("tool_calls"):
            raise UserError(f"field {field!r} has an empty turn of the assistant")
    return "", messages_to_learn(value, field)


def _chat_or_text(value: Any, field: str) -> Any:
    """A field's messages, also where they are written as text; any other value as it is."""
    if isinstance(value, str) and _CHAT_AS_TEXT.match(value):
        value = literal(value)
        if value is None:
            raise UserError(
                f"field {field!r} starts as a chat written as text, but is not valid JSON"
            )
        if isinstance(value, dict):
            value = [value]
    if isinstance(value, list):
        return tuple(
            _message(message, f"{field}[{number}]") for number, message in enumerate(value)
        )
    return value


def _message(message: Any, path: str) -> Message:
    """A message with text as content, without the null fields that a table gives it."""
    if not isinstance(message, Mapping):
        raise UserError(f"{path} is {shorten(message)}, must be an object with role and content")
    entries = {str(name): value for name, value in message.items() if value is not None}
    content = entries.get("content")
    if content is None and entries.get("tool_calls"):
        content = ""
    if isinstance(content, list) and all(map(_is_text_block, content)):
        content = "".join(block["text"] for block in content)
    if not isinstance(entries.get("role"), str) or not isinstance(content, str):
        raise UserError(f"{path} is {shorten(message)}, needs a role and a content that are text")
    return entries | {"content": content}


def _is_text_block(block: Any) -> bool:
    if not isinstance(block, Mapping) or block.get("type") != "text":
        return False
    return isinstance(block.get("text"), str)


def _tools(row: _Row, *, is_checked: bool) -> tuple[Schema, ...]:
    """The column `tools` if it is a list of JSON schemas or the text of one, else nothing.

    Any other is for the reward alone. With `is_checked`, text must be valid JSON.
    """
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_field(tools, "tools")
        except UserError:
            if is_checked:
                raise
            return ()
    schemas = isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
    return tuple(tools) if schemas else ()


def _checked_answer(row: _Row, prompt: str) -> tuple[str, str]:
    """The result of `_answer`, if the verifier can use the answer."""
    answer, solution = _answer(row)
    if not answer:
        raise NoAnswer(f"the answer {answer_defect(answer)}")
    reason = reason_for_no_answer(answer, prompt)
    if reason is not None:
        raise NoAnswer(
            f"the answer is {shorten(answer)}, {reason}; write its value or leave the row out"
        )
    defect = answer_defect(answer)
    if defect:
        raise UserError(f"the answer {defect}: {shorten(answer)}")
    digit = _FOREIGN_DIGIT.search(answer)
    if digit:
        raise UserError(
            f"the answer {shorten(answer)} has the digit {digit[0]!r}, write {int(digit[0])}"
        )
    return answer, solution


def _answer(row: _Row) -> tuple[str, str]:
    """The reference answer and, where the row has one, a worked solution."""
    fields = _present(row, _ANSWER_FIELDS, "answer", NoAnswer)
    solution = _solution(row)
    field = fields[0]
    if fields == ["solution", "label"] and notation.last_boxed(solution) is None:
        field = "label"
    value = row[field]

    if field == "reward_model":
        if not isinstance(value, Mapping) or value.get("ground_truth") is None:
            raise NoAnswer("field 'reward_model' has no ground_truth")
        value = value["ground_truth"]
    elif field == "final_answer" and isinstance(value, list):
        value = _olympiad_answer(row)
    elif field == "solution":
        value = notation.last_boxed(solution)
        if value is None:
            raise NoAnswer(r"no answer field, and no \boxed{} in the solution")
    elif field == "answer" and isinstance(value, str) and "####" in value:
        solution, _, value = value.rpartition("####")

    answer = answer_text(value, field)
    choices = row.get("choices") or row.get("options")
    if isinstance(choices, Mapping):
        choices = choices.get("text")
    may_be_index = answer.isdecimal() and isinstance(choices, list) and choices
    if may_be_index and (isinstance(value, int) or answer not in map(str, choices)):
        raise UserError(
            f"field {field!r} is {answer} beside {len(choices)} choices, an index from 0 or 1; "
            "write the letter of the right choice, or its text"
        )
    return answer, solution.strip()


def _present(
    row: _Row,
    names: Sequence[str],
    noun: str,
    error: type[UserError] = UserError,
) -> list[str]:
    """The fields of these names that a row has, null ones aside.

    Raises:
        error: if there are none, with the fields that the row has.
    """
    present = [name for name in row if row[name] is not None]
    fields = [name for name in names if name in present]
    if not fields:
        has = shorten_name(", ".join(map(str, present))) if present else "none"
        raise error(f"no {noun} in any of the fields {', '.join(names)}; the row has {has}")
    return fields


def _solution(row: _Row) -> str:
    value = row.get("solution") or row.get("reference_solution") or ""
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else ""


def _olympiad_answer(row: _Row) -> Any:
    answers = row["final_answer"]
    if len(answers) != 1 or not isinstance(answers[0], str):
        raise UserError(f"field 'final_answer' must be a list of one text, not {shorten(answers)}")
    answer = answers[0].strip()
    if row.get("is_multiple_answer"):
        # ", " keeps 2500,750 from reading as a number of digit groups
        elements = notation.split_elements(answer.replace("$", ""), ",", digit_groups=False)
        answer = ", ".join(elements)
    error = row.get("error")
    if error:
        if _FOREIGN_DIGIT.search(str(error)) or numbers.parse_number(str(error)) is None:
            raise UserError(f"field 'error' is {shorten(error)}, not a number")
        answer += rf"\tolerance{{{error}}}"
    return answer
