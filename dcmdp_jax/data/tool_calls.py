"""Calls of tools in a turn of the policy: where they stand, and their arguments by the tools' JSON schemas."""

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcmdp_jax.errors import one_line, shorten

Schema = Mapping[str, Any]

CALL_FORMATS = {
    "Qwen's and Hermes'": {"syntax": "json", "open": "<tool_call>", "close": "</tool_call>"},
    "Llama 3's": {"syntax": "json", "open": "", "close": ""},
    "Qwen3.5's": {"syntax": "xml", "open": "<tool_call>", "close": "</tool_call>"},
}
"""Formats that chat templates write calls in, by name: the syntax of a call, and the marks around it."""

# Looping text is read from each of its braces to its end.
_MOST_UNCLOSED_OBJECTS = 1000
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_START = {"json": r'\{(?=\s*+")', "xml": r"<function=(?P<name>[^<>\n]+)>"}
_PARAMETER = re.compile(
    r"\s*+<parameter=([^<>\n]+)>\n?(.*?)(?:</parameter>|(?=<parameter=|</function>|</tool_call>)|\Z)",
    re.DOTALL,
)
_FUNCTION_END = re.compile(r"\s*+</function>")
# As templates write Python's values in XML.
_PYTHON_LITERALS = {"True": True, "False": False, "None": None}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "string": ("a string", lambda value: isinstance(value, str)),
    "integer": ("an integer", lambda value: _is_number(value) and value == int(value)),
    "number": ("a number", _is_number),
    "boolean": ("a boolean", lambda value: isinstance(value, bool)),
    "array": ("an array", lambda value: isinstance(value, list)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "null": ("null", lambda value: value is None),
}
"""JSON type -> the words for it, and whether a value has it. 3.0 is an integer, as JSON Schema has it."""


def find_calls(
    text: str, tools: Sequence[Schema], call_format: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Find the calls in a turn.

    A call has a known tool's name and its arguments, wherever it stands. Between the format's marks, which say that a
    call is meant, it may have another name or no arguments, and anything else there is a problem. The rest of the turn
    is the answer. Nothing in a thought is a call.

    Args:
        text: the turn, with what its prompt begins it with.
        tools: the tools' JSON schemas, which give arguments their types where these can be read so.
        call_format: one of `CALL_FORMATS`.

    Returns:
        The calls in order, each with `name` and `arguments`; the problem of each mark without a call.
    """
    text, functions = _THOUGHT.sub("", text), tool_functions(tools)
    is_xml, marks = call_format["syntax"] == "xml", (call_format["open"], call_format["close"])
    patterns = [*(re.escape(mark) for mark in marks if mark), _START[call_format["syntax"]]]
    calls, problems = [], []
    call_end, unclosed_objects, is_marked, unread = 0, 0, False, None

    for event in re.finditer("|".join(patterns), text):
        if event.start() < call_end:
            continue
        if event[0] in marks:
            problems += _unread_problem(text, unread, event.start(), is_xml)
            is_marked = event[0] == call_format["open"]
            unread = event.end() if is_marked else None
            continue

        call, end = _read_function(text, event) if is_xml else _read_object(text, event.start())
        unclosed_objects += not end
        if unclosed_objects > _MOST_UNCLOSED_OBJECTS:
            break
        if call is None or not (is_marked or (call["name"] in functions and call["arguments"] is not None)):
            continue
        schema = functions.get(call["name"], {}).get("parameters")
        arguments = typed_arguments(call["arguments"] or {}, schema or {}, is_text=is_xml)
        calls.append({"name": call["name"], "arguments": arguments})
        call_end, unread = end, None

    problems += _unread_problem(text, unread, len(text), is_xml)
    return calls, problems


def tool_functions(tools: Sequence[Schema]) -> dict[str, Schema]:
    """The tools' descriptions by their names, of schemas with `function` around them or without."""
    functions = [tool.get("function", tool) for tool in tools]
    return {function.get("name"): function for function in functions if isinstance(function, Mapping)}


def _unread_problem(text: str, start: int | None, end: int, is_xml: bool) -> list[str]:
    """What is wrong between an opening mark and the next mark, if no call was read there.

    A mark that nothing closes and no call begins behind is a mention in the answer.
    """
    if start is None or (end == len(text) and not re.search(r"\{|<function", text[start:])):
        return []
    needed = "a call needs the tool's name, which is text, and its arguments, which are an object"
    if is_xml:
        return [f"{needed}: <function=name><parameter=argument>value</parameter></function>"]
    try:
        json.loads(text[start:end])
    except (ValueError, RecursionError) as error:
        return [one_line(error)]
    return [needed]


def _read_object(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    """The call that a JSON object is, None if it is none; and the object's end, 0 if it has none."""
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
    arguments, end = {}, start.end()
    while parameter := _PARAMETER.match(text, end):
        arguments[parameter[1].strip()] = parameter[2].removesuffix("\n")
        end = parameter.end()
    closing = _FUNCTION_END.match(text, end)
    end = closing.end() if closing else end
    return {"name": start["name"].strip(), "arguments": arguments if arguments or closing else None}, end


def typed_arguments(arguments: Mapping[str, Any], schema: Schema, *, is_text: bool) -> dict[str, Any]:
    """Arguments with the types of their schema where they can be read so, as they are elsewhere.

    Args:
        arguments: by name.
        schema: of all arguments.
        is_text: whether all values are text, because their syntax has no types. Text that may be read as another type
            of its schema is; otherwise it stays text where the schema allows that.
    """
    properties = schema.get("properties") or {}
    return {name: _typed(value, properties.get(name), is_text) for name, value in arguments.items()}


def _typed(value: Any, schema: Schema | None, is_text: bool) -> Any:
    readings = [value]
    if isinstance(value, str) and schema and _described(schema):
        with contextlib.suppress(ValueError, RecursionError):
            literal = value.strip()
            is_python = literal in _PYTHON_LITERALS
            readings.append(_PYTHON_LITERALS[literal] if is_python else json.loads(literal))
    if is_text and not isinstance(readings[-1], str):
        readings.reverse()
    for reading in readings:
        with contextlib.suppress(ValueError):
            return checked_value(reading, schema or {}, "")
    return value


def checked_arguments(arguments: Mapping[str, Any], function: Schema) -> dict[str, Any]:
    """The arguments of a call, which fit the tool's schema. Null for one that may be left out leaves it out.

    Args:
        arguments: by name.
        function: the tool's name and the schema of its `parameters`.

    Raises:
        ValueError: in one line that names the argument, what it must be, and its value.
    """
    schema = function.get("parameters") or {}
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    for name in arguments:
        if name not in properties:
            known = ", ".join(properties) or "none"
            raise ValueError(f"{function['name']} has no argument {shorten(name)}, only {known}")
    for name in required:
        if name not in arguments:
            raise _missing(name, properties.get(name) or {})
    return {
        name: checked_value(value, properties[name], name)
        for name, value in arguments.items()
        if value is not None or name in required or _allows_null(properties[name])
    }


def checked_value(value: Any, schema: Schema, name: str) -> Any:
    """A value that fits its JSON schema, a whole number as an int where that is its type.

    Read are `type`, `enum`, `const`, `anyOf`, `oneOf`, `nullable`, `items`, `prefixItems`, `properties`, `required` and
    `additionalProperties`.

    Raises:
        ValueError: in one line with the name of the value or its entry, what it must be, and what it is.
    """
    if value is None and _allows_null(schema):
        return None
    problem = f"{name} must be {_described(schema)}, got {shorten(value)}"
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        for choice in choices:
            with contextlib.suppress(ValueError):
                return checked_value(value, choice, name)
        raise ValueError(problem)

    types = _type_names(schema)
    if types and not any(_TYPES[type_name][1](value) for type_name in types):
        raise ValueError(problem)
    if "integer" in types and isinstance(value, float) and value == int(value):
        value = int(value)
    if not _is_listed(value, schema):
        raise ValueError(problem)
    if isinstance(value, list):
        return _checked_items(value, schema, name)
    return _checked_entries(value, schema, name) if isinstance(value, dict) else value


def _checked_items(values: list[Any], schema: Schema, name: str) -> list[Any]:
    first = schema.get("prefixItems") or []
    if first and len(values) != len(first):
        raise ValueError(f"{name} must have {len(first)} entries, got {shorten(values)}")
    others = [schema.get("items") or {}] * (len(values) - len(first))
    schemas = [*first, *others]
    return [checked_value(value, schemas[place], f"{name}[{place}]") for place, value in enumerate(values)]


def _checked_entries(entries: dict[str, Any], schema: Schema, name: str) -> dict[str, Any]:
    properties, others = schema.get("properties") or {}, schema.get("additionalProperties", {})
    for key in schema.get("required") or ():
        if key not in entries:
            raise _missing(f"{name}.{key}", properties.get(key) or {})
    for key in entries:
        if key not in properties and others is False:
            raise ValueError(f"{name} has no entry {shorten(key)}, only {', '.join(properties)}")
    others = others if isinstance(others, Mapping) else {}
    return {key: checked_value(value, properties.get(key, others), f"{name}.{key}") for key, value in entries.items()}


def _missing(name: str, schema: Schema) -> ValueError:
    described = _described(schema)
    return ValueError(f"{name} is missing" + (f", it must be {described}" if described else ""))


def _type_names(schema: Schema) -> list[str]:
    """The types that a schema allows, those that are none left out."""
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared or []
    return [name for name in names if name in _TYPES]


def _allows_null(schema: Schema) -> bool:
    choices = schema.get("anyOf") or schema.get("oneOf") or ()
    if schema.get("nullable") or "null" in _type_names(schema) or not _described(schema):
        return True
    return any(_allows_null(choice) for choice in choices)


def _is_listed(value: Any, schema: Schema) -> bool:
    """Whether a value is one of those that its schema lists, if it lists any; true is not 1."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if listed is None:
        return True
    return any(value == entry and isinstance(value, bool) == isinstance(entry, bool) for entry in listed)


def _described(schema: Schema) -> str:
    """What a schema allows, in words; empty if that is anything."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if listed is not None:
        words = [repr(value) for value in listed]
    elif choices := schema.get("anyOf") or schema.get("oneOf"):
        words = [_described(choice) for choice in choices]
    else:
        words = [_TYPES[name][0] for name in _type_names(schema)]
    words += ["null"] if words and schema.get("nullable") and "null" not in words else []
    return " or ".join(words)
