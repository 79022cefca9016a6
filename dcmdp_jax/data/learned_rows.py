"""Rows of conversations: fields of tables, calls as objects, and which turns are learned."""

import json
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dcmdp_jax.errors import UserError, shorten, shorten_name
from dcmdp_jax.inputs import unique_fields
from dcmdp_jax.rewards.protocol import LEARNED, Message

# Fields of a message by which fine-tuning services and frameworks say whether its turn is learned
# (OpenAI and Mistral: weight; axolotl: train, training; ms-swift: loss; torchtune: masked).
_LEARNED_FIELDS = (
    LEARNED,
    *"learn weight loss_weight loss train training trainable loss_mask".split(),
)
_MASKED_FIELDS = ("masked", "mask_loss")
_FLAGS = (*_LEARNED_FIELDS, *_MASKED_FIELDS)
# What has no meaning here: parts of a turn, factors of tokens, and a mask whose direction differs
# between frameworks.
_REFUSED_FIELDS = "mask train_detail training_detail loss_scale token_weights weights".split()
_ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight")
_ROW_LISTS = ("weights", "loss_mask", "loss_masks", "loss_weights", "token_weights")


# Fields with objects of a chat template's.
_CHAT_FIELDS = ("messages", "prompt", "problem", "question", "completion", "tools")


def chats_without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table without the nulls within its chats and tools, at any depth."""
    chats = {name: _without_nulls(row[name]) for name in _CHAT_FIELDS if row.get(name) is not None}
    return {**row, **chats}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


def check_row_weight(row: Mapping[str, Any]) -> None:
    """Refuse weights of a row, or lists of them: each row is learned once, its tokens alike."""
    for name in _ROW_WEIGHTS:
        weight = row.get(name)
        if weight is not None and (not isinstance(weight, numbers.Number) or weight != 1):
            raise UserError(
                f"field {name!r} is {shorten(weight)}, and rows have no weights: leave the row or "
                "the field out"
            )
    for name in _ROW_LISTS:
        if isinstance(row.get(name), list | Mapping):
            raise UserError(
                f"field {name!r} is {shorten(row[name])}, which is not read: give a message a "
                "weight of 0 to leave its turn out, or take the field out"
            )


def messages_to_learn(messages: Sequence[Message], field: str) -> tuple[Message, ...]:
    """Mark the messages of a completion that are not to learn, and write calls as objects.

    The mark is `LEARNED: False`.

    Raises:
        UserError: in one line that names field, message and weight.
    """
    prepared = tuple(
        _prepared(message, f"{field}[{number}]") for number, message in enumerate(messages)
    )
    turns = [message for message in prepared if message["role"] == "assistant"]
    if not any(turn.get(LEARNED, True) for turn in turns):
        raise UserError(f"field {field!r}: its weights leave no turn of the assistant to learn")
    return prepared


def messages_to_read(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages of a prompt, none of which is learned: a weight of more than 0 is refused."""
    prepared = []
    for number, message in enumerate(messages):
        path = f"prompt[{number}]"
        if _flag(message, path):
            raise UserError(
                f"{path} is to be learned, and a prompt is not: move it to the completion"
            )
        prepared.append(_prepared(_without_flags(message), path))
    return tuple(prepared)


def _prepared(message: Message, path: str) -> Message:
    """A message without its flags, its calls as objects."""
    is_learned = _flag(message, path)
    prepared = _without_flags(message)
    if message["role"] != "assistant":
        if is_learned:
            raise UserError(
                f"{path} is a turn of the {shorten_name(message['role'])} that is to be learned; "
                "only the assistant's are: leave its weight out"
            )
        return prepared
    if is_learned is False:
        prepared[LEARNED] = False
    calls = _calls(message.get("tool_calls"), path)
    if calls:
        prepared["tool_calls"] = calls
    else:
        prepared.pop("tool_calls", None)
    return prepared


def _without_flags(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in _FLAGS}


def _flag(message: Message, path: str) -> bool | None:
    """Whether a message says that it is learned; None if it does not say."""
    for name in _REFUSED_FIELDS:
        if message.get(name) is not None:
            raise UserError(
                f"{path}.{name} is {shorten(message[name])}, which is not read: a weight of 0 or "
                "1 says whether a turn is learned"
            )
    flags = {}
    for name in _FLAGS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, numbers.Number | np.bool_) or value not in (0, 1):
            raise UserError(f"{path}.{name} is {shorten(value)}, must be 0 or 1, or false or true")
        flags[name] = bool(value) != (name in _MASKED_FIELDS)
    if len(set(flags.values())) > 1:
        raise UserError(f"{path}: {' and '.join(flags)} contradict each other")
    return next(iter(flags.values()), None)


def _calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """The calls of a message, their arguments as objects."""
    if isinstance(calls, str):
        calls = parse_field(calls, f"{path}.tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UserError(f"{path}.tool_calls is {shorten(calls)}, must be a list of objects")
    return [_call(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(calls)]


def _call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{path} is {shorten(call)}, it needs a name and arguments")
    arguments = function.get("arguments")
    # A call without arguments has an empty text in some files.
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    elif isinstance(arguments, str):  # as OpenAI's files have them
        arguments = parse_field(arguments, f"{path}.arguments")
    if not isinstance(arguments, Mapping):
        raise UserError(f"{path}.arguments is {shorten(arguments)}, must be a JSON object")
    function = {**function, "arguments": dict(arguments)}
    if "function" in call:
        return {**call, "function": function}
    return function


def parse_field(text: str, path: str) -> Any:
    """The value of a field that is JSON text.

    Raises:
        UserError: naming the field, if it is not valid JSON or has a field twice.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is {shorten(text)}, which is not valid JSON ({error})") from None
