"""Calls of tools in a turn of the policy, and their arguments by the tools' JSON schemas."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dcmdp_jax.errors import shorten

Schema = Mapping[str, Any]

CALL_FORMATS = {
    "Qwen's and Hermes'": {
        "syntax": "json",
        "open": "<tool_call>",
        "close": "</tool_call>",
        "example": '{"name": "...", "arguments": {...}}',
    },
    "Llama 3's": {"syntax": "json", "open": "", "close": ""},
    "Qwen3.5's": {
        "syntax": "xml",
        "open": "<tool_call>",
        "close": "</tool_call>",
        "example": "<function=...><parameter=...>...</parameter></function>",
    },
}
"""Formats that chat templates write calls in: the syntax of a call, and the marks around it."""

# Looping text is read from each of its braces to its end.
_MOST_UNCLOSED_OBJECTS = 1000
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_START = {"json": r'\{(?=\s*+")', "xml": r"<function=(?P<name>[^<>\n]+)>"}
_PARAMETER = re.compile(
    r"\s*+<parameter=([^<>\n]+)>\n?(.*?)"
    r"(?:</parameter>|(?=<parameter=|</function>|</tool_call>)|\Z)",
    re.DOTALL,
)
_FUNCTION_END = re.compile(r"\s*+</function>")
# As templates write Python's values in XML.
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
_TYPES: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "string": ("a string", str),
    "integer": ("an integer", int),
    "number": ("a number", (int, float)),
    "boolean": ("a boolean", bool),
    "array": ("an array", list),
    "object": ("an object", dict),
    "null": ("null", type(None)),
}


def find_calls(
    text: str, tools: Sequence[Schema], call_format: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Find the calls in a turn.

    A call has a known tool's name and its arguments, wherever it stands. Between the format's
    marks, which say that a call is meant, it may have another name or no arguments, and anything
    else there is a problem. The rest of the turn is the answer. Nothing in a thought is a call.

    Args:
        text: the turn, with the mark of a thought that its prompt begins.
        tools: the tools' JSON schemas, which give arguments their types where these can be read so.
        call_format: one of `CALL_FORMATS`.

    Returns:
        The calls in order, each with `name` and `arguments`; for each mark without a call how one
        is written.
    """
    text = _THOUGHT.sub("", text)
    functions = tool_functions(tools)
    is_xml = call_format["syntax"] == "xml"
    marks = (call_format["open"], call_format["close"])
    patterns = [*(re.escape(mark) for mark in marks if mark), _START[call_format["syntax"]]]
    written = f"it is written {call_format.get('example')}"

    calls = []
    problems = []
    call_end = 0
    unclosed_objects = 0
    is_marked = False
    unread = None  # where the text of an opening mark begins, until a call is read there

    for event in re.finditer("|".join(patterns), text):
        if event.start() < call_end:
            continue
        if event[0] in marks:
            if unread is not None:
                problems.append(written)
            is_marked = event[0] == call_format["open"]
            unread = None
            if is_marked:
                unread = event.end()
            continue

        if is_xml:
            call, end = _read_function(text, event)
        else:
            call, end = _read_object(text, event.start())
        if not end:  # the object never closes
            unclosed_objects += 1
        if unclosed_objects > _MOST_UNCLOSED_OBJECTS:
            break
        if call is None:
            continue
        is_known = call["name"] in functions and call["arguments"] is not None
        if not is_marked and not is_known:
            continue
        schemas = argument_schemas(functions.get(call["name"], {}))
        arguments = {}
        for name, value in (call["arguments"] or {}).items():
            arguments[name] = _typed(value, schemas.get(name, {}), is_text=is_xml)
        calls.append({"name": call["name"], "arguments": arguments})
        call_end = end
        unread = None

    # A mark that nothing closes and no call begins behind is a mention in the answer.
    if unread is not None and re.search(r"\{|<function", text[unread:]):
        problems.append(written)
    return calls, problems


def tool_functions(tools: Sequence[Schema]) -> dict[str, Schema]:
    """The tools' descriptions by their names, of schemas with `function` around them or without."""
    functions = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            functions[function.get("name")] = function
    return functions


def argument_schemas(function: Schema) -> Schema:
    """The schemas of a tool's arguments by their names."""
    return (function.get("parameters") or {}).get("properties") or {}


def _read_object(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    """The call that a JSON object is, or None, and the object's end, 0 if it has none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, 0
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(value.get("name"), str) or not isinstance(arguments, dict | None):
        return None, end
    return {"name": value["name"], "arguments": arguments}, end


def _read_function(text: str, start: re.Match[str]) -> tuple[dict[str, Any], int]:
    """The call that begins with `<function=name>`, and its end. Models forget closing tags."""
    arguments = {}
    end = start.end()
    parameter = _PARAMETER.match(text, end)
    while parameter:
        arguments[parameter[1].strip()] = parameter[2].removesuffix("\n")
        end = parameter.end()
        parameter = _PARAMETER.match(text, end)
    closing = _FUNCTION_END.match(text, end)
    if closing:
        end = closing.end()
    if not arguments and not closing:
        arguments = None
    return {"name": start["name"].strip(), "arguments": arguments}, end


def _typed(value: Any, schema: Schema, *, is_text: bool) -> Any:
    """An argument with the type of its schema, if it can be read so.

    Args:
        value: the argument.
        schema: its schema.
        is_text: whether its syntax has text alone, which then is text only where it can be nothing
            else.
    """
    readings = [value]
    if isinstance(value, str) and _described(schema):
        with contextlib.suppress(ValueError, RecursionError):
            literal = value.strip()
            readings.append(json.loads(_PYTHON_LITERALS.get(literal, literal)))
    if is_text and not isinstance(readings[-1], str):
        readings.reverse()
    for reading in readings:
        with contextlib.suppress(ValueError):
            return checked_value(reading, schema, "")
    if None in readings:
        return None
    return value


def checked_arguments(arguments: Mapping[str, Any], function: Schema) -> dict[str, Any]:
    """The arguments of a call, which fit the tool's schema, without nulls of optional ones.

    Args:
        arguments: by name.
        function: the tool's name and the schema of its `parameters`.

    Raises:
        ValueError: in one line that names the argument, what it must be, and its value.
    """
    schemas = argument_schemas(function)
    required = (function.get("parameters") or {}).get("required") or ()
    for name in arguments:
        if name not in schemas:
            problem = f"{function['name']} has no argument {shorten(name)}"
            if schemas:
                problem += f", only {', '.join(schemas)}"
            raise ValueError(problem)
    for name in required:
        if name not in arguments:
            described = _described(schemas.get(name, {}))
            raise ValueError(f"{name} is missing, it must be {described or 'there'}")
    checked = {}
    for name, value in arguments.items():
        if value is not None or name in required or _allows_null(schemas[name]):
            checked[name] = checked_value(value, schemas[name], name)
    return checked


def checked_value(value: Any, schema: Schema, name: str) -> Any:
    """A value that fits its JSON schema; 3.0 is an integer, as an int, and true is none.

    Read are `type`, `nullable`, `enum`, `anyOf`, `items`, `prefixItems` and `additionalProperties`,
    which schemas of Python functions have.

    Raises:
        ValueError: in one line with the name of the value or its entry, what it must be, and what
            it is.
    """
    if not schema or (value is None and _allows_null(schema)):
        return value
    for choice in schema.get("anyOf", ()):
        with contextlib.suppress(ValueError):
            return checked_value(value, choice, name)

    types = _type_names(schema)
    listed = schema.get("enum")
    first = schema.get("prefixItems", ())
    if "integer" in types and isinstance(value, float) and value.is_integer():
        value = int(value)
    is_bool = isinstance(value, bool)
    # Python takes true for 1.
    fits = not types and "anyOf" not in schema
    for type_name in types:
        if is_bool == (type_name == "boolean"):
            fits |= isinstance(value, _TYPES[type_name][1])
    is_listed = listed is None
    for entry in listed or ():
        is_listed |= value == entry and is_bool == isinstance(entry, bool)
    if not fits or not is_listed:
        raise ValueError(f"{name} must be {_described(schema)}, got {shorten(value)}")

    if isinstance(value, list):
        if first and len(value) != len(first):
            raise ValueError(f"{name} must have {len(first)} entries, got {shorten(value)}")
        schemas = first or [schema.get("items")] * len(value)
        entries = enumerate(zip(value, schemas, strict=True))
        return [checked_value(entry, schema, f"{name}[{i}]") for i, (entry, schema) in entries]
    if isinstance(value, dict):
        schema = schema.get("additionalProperties")
        return {key: checked_value(entry, schema, f"{name}.{key}") for key, entry in value.items()}
    return value


def _type_names(schema: Schema) -> list[str]:
    """The types that a schema allows, as far as they are known."""
    names = schema.get("type") or []
    if isinstance(names, str):
        names = [names]
    return [name for name in names if name in _TYPES]


def _allows_null(schema: Schema) -> bool:
    return bool(schema.get("nullable")) or "null" in _type_names(schema)


def _described(schema: Schema) -> str:
    """What a schema allows, in words; empty if that is anything."""
    choices = [_described(choice) for choice in schema.get("anyOf", ())]
    types = [_TYPES[name][0] for name in _type_names(schema)]
    words = [repr(value) for value in schema.get("enum", ())] or choices or types
    if words and schema.get("nullable"):
        words = [*words, "null"]
    return " or ".join(words)
