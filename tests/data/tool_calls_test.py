"""Calls in a turn, as vLLM's parsers of the formats read them, and arguments by their schemas."""

import json

import pytest
from transformers.utils import get_json_schema

from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.tool_calls import CALL_FORMATS, checked_arguments, find_calls
from tests.environments import planted_tools

_TOOLS = [get_json_schema(tool) for tool in (planted_tools.add, planted_tools.repeat)]
_QWEN, _LLAMA, _QWEN35 = CALL_FORMATS
_ADD = '{"name": "add", "arguments": {"a": 1}}'
_LLAMA_ADD = '{"name": "add", "parameters": {"a": 1}}'
_XML_ADD = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
_ADDED = ("add", {"a": 1})
_QUOTES = {"name": "repeat", "parameters": {"text": _LLAMA_ADD, "times": 1}}
_PARAMETERS = (
    "<parameter=text>\na\n  b <x> </s>\n</parameter>\n<parameter=times>\n2\n</parameter>\n"
)
_XML_TEXT = f"<function=repeat>\n{_PARAMETERS}</function>"


def _marked(call):
    return f"<tool_call>\n{call}\n</tool_call>"


# Format, turn, calls. vLLM 0.32 reads each so: hermes, llama3_json and qwen3_coder.
_AS_VLLM = [
    (_QWEN, _marked(_ADD), [_ADDED]),
    (_QWEN, f"I add. {_marked(_ADD)}{_marked(_ADD)} Done.", [_ADDED, _ADDED]),
    (_QWEN, f"<tool_call>\n{_ADD}", [_ADDED]),
    (_QWEN, _marked('{"arguments": {"b": 2, "a": 1}, "name": "add"}'), [("add", {"a": 1, "b": 2})]),
    (
        _QWEN,
        _marked(json.dumps({"name": "repeat", "arguments": {"text": '</s> "é" {', "times": 2}})),
        [("repeat", {"text": '</s> "é" {', "times": 2})],
    ),
    (_QWEN, "The sum is 4.", []),
    (_QWEN, '{"answer": 4}', []),
    (_QWEN, _marked('{"name": "add", "arguments": {"a": 1}'), []),
    (_QWEN, _marked("[1]"), []),
    (_LLAMA, _LLAMA_ADD, [_ADDED]),
    (_LLAMA, _ADD, [_ADDED]),
    (_LLAMA, f"Let me see. {_LLAMA_ADD}", [_ADDED]),
    (_LLAMA, f"{_LLAMA_ADD}; {_LLAMA_ADD}", [_ADDED, _ADDED]),
    (_LLAMA, '{"type": "function", "name": "add", "parameters": {"a": 1}}', [_ADDED]),
    (_LLAMA, f"<|python_tag|>{_LLAMA_ADD}", [_ADDED]),
    (_LLAMA, json.dumps(_QUOTES), [("repeat", _QUOTES["parameters"])]),
    (_LLAMA, '{"answer": 4}', []),
    (_LLAMA, 'The set is {"a"}, or {1, 2}.', []),
    (_LLAMA, '{"name": "add", "parameters": {"a": 1', []),
    (_QWEN35, f"</think>{_marked(_XML_ADD)}", [_ADDED]),
    (_QWEN35, f"</think>I add.\n{_marked(_XML_ADD)}\n{_marked(_XML_ADD)}", [_ADDED, _ADDED]),
    (_QWEN35, f"</think>{_XML_ADD}", [_ADDED]),
    (_QWEN35, f"</think><tool_call>\n{_XML_ADD.removesuffix('</function>')}", [_ADDED]),
    (
        _QWEN35,
        f"</think>{_marked(_XML_TEXT)}",
        [("repeat", {"text": "a\n  b <x> </s>", "times": 2})],
    ),
    (
        _QWEN35,
        f"</think>{_marked(_XML_TEXT.replace('2', 'two'))}",
        [("repeat", {"text": "a\n  b <x> </s>", "times": "two"})],
    ),
    (
        _QWEN35,
        f"</think>{_marked('<function=add><parameter=a>1<parameter=b>3</parameter></function>')}",
        [("add", {"a": 1, "b": 3})],
    ),
    (_QWEN35, "</think>The sum is 4.", []),
]
# What vLLM takes for text: forgotten marks, other tools' names, JSON before a call.
_BESIDE_VLLM = [
    (_QWEN, f"I add. {_ADD}", [_ADDED]),
    (_QWEN, f"{_ADD}\n</tool_call>", [_ADDED]),
    (_QWEN, _marked(f"[{_ADD}, {_ADD}]"), [_ADDED, _ADDED]),
    (_QWEN, _marked('{"name": "add", "arguments": "{\\"a\\": \\"1\\"}"}'), [_ADDED]),
    (_QWEN, f"The mark is <tool_call>. {_ADD}", [_ADDED]),
    (_QWEN, '{"name": "Paris", "arguments": {"a": 1}}', []),
    (_QWEN, '{"name": "add"}', []),
    (_QWEN, "The mark is <tool_call>.", []),
    (_QWEN, f"<think>{_marked(_ADD)}</think>4", []),
    (_LLAMA, f'{{"a": {{"b": 1}}}} {_LLAMA_ADD}', [_ADDED]),
    (_LLAMA, f'{{"type": "function", "function": {_LLAMA_ADD}}}', [_ADDED]),
    (_LLAMA, f'{{"thought": "open", {_LLAMA_ADD}', [_ADDED]),
    (_LLAMA, '{"name": "Paris", "parameters": {"a": 1}}', []),
    (_QWEN35, f"</think>{_XML_ADD.removesuffix('</function>')}{_XML_ADD}", [_ADDED, _ADDED]),
    (_QWEN35, "</think>Write <function=add> to add.", []),
    (_QWEN35, "</think><function=other>\n<parameter=a>\n1\n</parameter>\n</function>", []),
]


def _read(name, text):
    prefix = "<think>\n" if text.startswith("</think>") else ""
    calls, problems = find_calls(prefix + text, _TOOLS, CALL_FORMATS[name])
    return [(call["name"], call["arguments"]) for call in calls], problems


@pytest.mark.parametrize(("name", "text", "calls"), [*_AS_VLLM, *_BESIDE_VLLM])
def test_a_call_is_a_known_tools_name_with_its_arguments_wherever_it_stands(name, text, calls):
    assert _read(name, text)[0] == calls


def test_vllms_parsers_read_the_same_calls():
    hermes = pytest.importorskip("vllm.tool_parsers.hermes_tool_parser", exc_type=ImportError)
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser
    from vllm.tool_parsers.qwen3_engine_tool_parser import Qwen3EngineToolParser

    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<|python_tag|>", "<think>", "</think>", "<tool_call>", "</tool_call>"])
    parsers = {
        _QWEN: hermes.Hermes2ProToolParser,
        _LLAMA: Llama3JsonToolParser,
        _QWEN35: Qwen3EngineToolParser,
    }
    asked = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "?"}], tools=_TOOLS
    )
    for name, text, calls in _AS_VLLM:
        found = parsers[name](tokenizer, asked.tools).extract_tool_calls(text, asked).tool_calls
        assert [
            (call.function.name, json.loads(call.function.arguments)) for call in found
        ] == calls, text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (_QWEN, _marked('{"name": "add", "arguments": {"a": 1}')),
        (_QWEN, f"{_marked('add(1)')}{_marked(_ADD)}"),
        (_QWEN, "<tool_call>{'a': 1}"),
        (_QWEN, _marked('{"name": "add", "arguments": [1]}')),
        (_QWEN35, f"</think>{_marked('add(1)')}"),
    ],
)
def test_a_mark_without_a_call_is_told_how_one_is_written(name, text):
    assert _read(name, text)[1] == [f"it is written {CALL_FORMATS[name]['example']}"]


def test_a_marked_call_may_have_an_unknown_name_or_no_arguments():
    assert _read(_QWEN, _marked('{"name": "mul", "arguments": {"a": "1"}}')) == (
        [("mul", {"a": "1"})],
        [],
    )
    assert _read(_QWEN, _marked('{"name": "add"}')) == ([("add", {})], [])
    assert _read(_QWEN35, f"</think>{_marked('<function=add>')}") == ([("add", {})], [])


def test_looping_text_is_read_to_its_end():
    for name in CALL_FORMATS:
        for part in (
            '{"a": ',
            '{"name": "add", "arguments": ',
            "<tool_call>",
            "<function=add>",
            "<parameter=a>",
        ):
            assert _read(name, part * 20_000)[0] == []


def _tool(**properties):
    required = [name for name, schema in properties.items() if not schema.pop("optional", False)]
    return {"name": "tool", "parameters": {"properties": properties, "required": required}}


_INTEGER = {"type": "integer"}
_STRING = {"type": "string"}
_NUMBERS = {"type": "object", "additionalProperties": _INTEGER}


@pytest.mark.parametrize(
    ("schema", "value", "checked"),
    [
        (_INTEGER, 3.0, 3),
        ({"type": "number"}, 3, 3),
        ({"type": ["integer", "string"]}, "x", "x"),
        ({"type": "integer", "nullable": True}, None, None),
        ({"anyOf": [_INTEGER, {"type": "array", "items": _INTEGER}]}, [1, 2.0], [1, 2]),
        ({"enum": ["a", 1]}, 1, 1),
        ({"type": "array", "prefixItems": [_INTEGER, _STRING]}, [1, "a"], [1, "a"]),
        (_NUMBERS, {"k": 2.0}, {"k": 2}),
        ({"description": "anything"}, {"k": [None]}, {"k": [None]}),
        ({"type": "dict"}, {"k": 1}, {"k": 1}),
    ],
)
def test_arguments_that_fit_their_schema_are_taken(schema, value, checked):
    found = checked_arguments({"v": value}, _tool(v=dict(schema)))
    assert found == {"v": checked} and type(found["v"]) is type(checked)


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        (_INTEGER, "3.5", "v must be an integer, got '3.5'"),
        (_INTEGER, 3.5, "v must be an integer, got 3.5"),
        (_INTEGER, True, "v must be an integer, got True"),
        (_INTEGER, None, "v must be an integer, got None"),
        (_INTEGER, float("inf"), "v must be an integer, got inf"),
        ({"type": "number"}, "three", "v must be a number, got 'three'"),
        (_STRING, 5, "v must be a string, got 5"),
        ({"type": "boolean"}, 1, "v must be a boolean, got 1"),
        ({"type": "integer", "nullable": True}, "x", "v must be an integer or null, got 'x'"),
        (
            {"type": "string", "enum": ["low", "high"]},
            "mid",
            "v must be 'low' or 'high', got 'mid'",
        ),
        ({"enum": [1, 2]}, True, "v must be 1 or 2, got True"),
        (
            {"anyOf": [_INTEGER, {"type": "array", "items": _INTEGER}]},
            ["x"],
            "v must be an integer or an array, got ['x']",
        ),
        (
            {"type": "array", "items": _NUMBERS},
            [{"x": 1}, {"x": "a"}],
            "v[1].x must be an integer, got 'a'",
        ),
        (_NUMBERS, [], "v must be an object, got []"),
        (
            {"type": "array", "prefixItems": [_INTEGER, _STRING]},
            [1],
            "v must have 2 entries, got [1]",
        ),
        (_STRING, ["a" * 200], "v must be a string, got ["),
    ],
)
def test_an_argument_that_does_not_fit_is_named_with_its_type_and_value(schema, value, problem):
    with pytest.raises(ValueError) as raised:
        checked_arguments({"v": value}, _tool(v=dict(schema)))
    assert str(raised.value).startswith(problem) and "\n" not in str(raised.value)
    assert str(raised.value) == problem or len(str(raised.value)) < 150


def test_null_leaves_out_an_argument_that_may_be_left_out():
    tool = _tool(a=dict(_INTEGER), b=_INTEGER | {"optional": True})
    assert checked_arguments({"a": 1, "b": None}, tool) == {"a": 1}
    with pytest.raises(ValueError, match="^a is missing, it must be an integer$"):
        checked_arguments({"b": 1}, tool)
    with pytest.raises(ValueError, match="^tool has no argument 'c'$"):
        checked_arguments({"c": 1}, _tool())
    with pytest.raises(ValueError, match="^tool has no argument 'c', only a, b$"):
        checked_arguments({"a": 1, "c": None}, tool)


def test_text_gets_the_type_of_its_schema_where_it_can_be_read_so():
    optional = {"type": "string", "nullable": True}
    properties = {
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "free": {},
        "name": optional,
    }
    properties |= {"either": {"type": ["integer", "string"]}, "count": _INTEGER}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    values = {
        "flag": "True",
        "items": '["a", 1]',
        "free": "5",
        "name": "null",
        "either": "5",
        "count": "None",
    }
    parts = [f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items()]
    [call], _ = find_calls(
        f"<function=f>\n{''.join(parts)}</function>", tools, CALL_FORMATS[_QWEN35]
    )
    typed = {"flag": True, "items": ["a", 1], "free": "5", "name": None, "either": 5, "count": None}
    assert call["arguments"] == typed
    assert checked_arguments({"count": None}, tools[0]["function"]) == {}
    # JSON's own text stays text where that is allowed.
    text = json.dumps({"name": "f", "arguments": {"either": "5", "flag": "true", "name": "null"}})
    [call], _ = find_calls(text, tools, CALL_FORMATS[_LLAMA])
    assert call["arguments"] == {"either": "5", "flag": True, "name": "null"}
