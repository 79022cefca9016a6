"""Rows of conversations: nulls of tables, calls as text, weights of messages and rows."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.rows import problem_from_row


def _call(arguments, name="add"):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _chat(*answers):
    messages = []
    for answer in answers:
        messages += [{"role": "user", "content": "2+3?"}, {"role": "assistant", **answer}]
    return {"messages": messages}


def _problem(row):
    return problem_from_row(json.dumps(row), source="rows", index=0, answers="learned")


def _learned(row):
    """Whether each turn of the assistant is learned."""
    turns = [message for message in _problem(row).completion if message["role"] == "assistant"]
    return [turn.get("learned", True) for turn in turns]


def _from_parquet(path, rows, **options):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return load_problems(str(path), **options)


def test_nulls_of_a_table_are_no_arguments_at_any_depth(tmp_path):
    # pyarrow gives each struct the fields of all rows: {"town": "Lima", "a": None, "at": None}.
    rows = [
        _chat({"content": "", "tool_calls": [_call({"town": "Lima"}, "get_rain")]}),
        _chat({"content": "", "tool_calls": [_call({"a": 2, "at": {"x": 1}})]}),
        _chat({"content": "", "tool_calls": [_call({"a": 3, "at": {"y": [{"z": 1}, {"w": 2}]}})]}),
    ]
    problems = _from_parquet(tmp_path / "rows.parquet", rows, answers="learned")
    called = [
        problem.completion[1]["tool_calls"][0]["function"]["arguments"] for problem in problems
    ]
    assert called == [
        {"town": "Lima"},
        {"a": 2, "at": {"x": 1}},
        {"a": 3, "at": {"y": [{"z": 1}, {"w": 2}]}},
    ]
    assert "learned" not in problems[0].completion[1]


@pytest.mark.parametrize("answers", ["learned", "unused"])
def test_nulls_of_a_table_are_no_entries_of_a_tools_schema(tmp_path, answers):
    def tool(name, properties):
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    rain = {"town": {"type": "string"}}
    add = {"a": {"type": "integer", "enum": [1, 2]}}
    rows = [
        {
            "prompt": [{"role": "user", "content": "?"}],
            "completion": "1",
            "tools": [tool("get_rain", rain)],
        },
        {
            "prompt": [{"role": "user", "content": "!"}],
            "completion": "2",
            "tools": [tool("add", add)],
        },
    ]
    problems = _from_parquet(tmp_path / "rows.parquet", rows, answers=answers)
    assert [problem.tools for problem in problems] == [
        (tool("get_rain", rain),),
        (tool("add", add),),
    ]


def test_a_null_in_json_is_an_argument_and_columns_of_a_table_stay_as_they_are(tmp_path):
    row = _chat({"content": "", "tool_calls": [_call({"town": None})]})
    assert _problem(row).completion[1]["tool_calls"][0]["function"]["arguments"] == {"town": None}
    text = _chat({"content": "", "tool_calls": [_call('{"town": null}')]})
    problems = _from_parquet(tmp_path / "rows.parquet", [text], answers="learned")
    assert problems[0].completion[1]["tool_calls"][0]["function"]["arguments"] == {"town": None}
    rows = [{"prompt": "1?", "extra": {"a": 1}}, {"prompt": "2?", "extra": {"b": 2}}]
    problems = _from_parquet(tmp_path / "more.parquet", rows, answers="unused", keep_columns=True)
    assert problems[0].columns["extra"] == {"a": 1, "b": None}


@pytest.mark.parametrize(
    ("field", "no", "yes"),
    [
        ("weight", 0, 1),  # OpenAI, Mistral, Together
        ("weight", 0.0, 1.0),
        ("loss_weight", 0, 1),
        ("loss", False, True),  # ms-swift
        ("train", False, True),  # axolotl
        ("training", False, True),
        ("trainable", False, True),
        ("masked", True, False),  # torchtune
    ],
)
def test_a_messages_weight_says_whether_its_turn_is_learned(field, no, yes):
    row = _chat(
        {"content": "5", field: no},
        {"content": "6", field: yes},
        {"content": "7", field: None},
        {"content": "8"},
    )
    assert _learned(row) == [False, True, True, True]
    assert all(field not in message for message in _problem(row).completion)


def test_weights_of_numpy_and_of_a_table_are_read(tmp_path):
    row = _chat(
        {"content": "5", "train": np.bool_(False)}, {"content": "6", "train": np.bool_(True)}
    )
    problem = problem_from_row(row, source="rows", index=0, answers="learned")
    assert problem.completion[1]["learned"] is False and "learned" not in problem.completion[3]
    [problem] = _from_parquet(
        tmp_path / "rows.parquet",
        [_chat({"content": "5", "weight": 0}, {"content": "6"})],
        answers="learned",
    )
    assert [message.get("learned") for message in problem.completion] == [None, False, None, None]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            _chat({"content": "5", "weight": 0.5}),
            r"messages\[1\].weight is 0.5, must be 0 or 1, or false or true",
        ),
        (_chat({"content": "5", "weight": -1}), r"messages\[1\].weight is -1, must be"),
        (_chat({"content": "5", "loss": "true"}), r"messages\[1\].loss is 'true', must be"),
        (_chat({"content": "5", "weight": float("nan")}), r"messages\[1\].weight is nan, must be"),
        (
            _chat({"content": "5", "train_detail": [{"begin_offset": 0}]}),
            r"messages\[1\].train_detail is .*not read",
        ),
        (
            _chat({"content": "5", "loss_scale": 2}),
            r"messages\[1\].loss_scale is 2, which is not read",
        ),
        (_chat({"content": "5", "mask": True}), r"messages\[1\].mask is True, which is not read"),
        (
            _chat({"content": "5", "weight": 0, "train": True}),
            "weight and train contradict each other",
        ),
        (
            _chat({"content": "5", "weight": 0}),
            "'messages': its weights leave no turn of the assistant to learn",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "?", "weight": 1},
                    {"role": "assistant", "content": "5"},
                ]
            },
            r"messages\[0\] is a turn of the user that is to be learned; only the assistant's are",
        ),
        (
            {
                "prompt": [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": "4", "weight": 1},
                    {"role": "user", "content": "?"},
                ],
                "completion": [{"role": "assistant", "content": "5"}],
            },
            r"prompt\[1\] is to be learned, and a prompt is not",
        ),
        (
            _chat({"content": "5"}) | {"weight": 0.3},
            "field 'weight' is 0.3, and rows have no weights",
        ),
        (
            {"prompt": "?", "completion": "5", "loss_weight": 0},
            "field 'loss_weight' is 0, and rows have no weights",
        ),
        (
            _chat({"content": "5"}) | {"weights": [0, 1]},
            r"field 'weights' is \[0, 1\], which is not read",
        ),
        (
            _chat({"content": "", "tool_calls": [_call("{broken")]}),
            r"tool_calls\[0\].arguments is .*not valid JSON",
        ),
        (
            _chat({"content": "", "tool_calls": [_call("[1]")]}),
            r"arguments is \[1\], must be a JSON object",
        ),
        (
            _chat({"content": "", "tool_calls": [{"function": {}}]}),
            r"tool_calls\[0\] is .* needs a name",
        ),
        (
            _chat({"content": "", "tool_calls": "call"}),
            r"messages\[1\].tool_calls is .*not valid JSON",
        ),
        (
            _chat({"content": "", "tool_calls": [_call('{"a": 1, "a": 2}')]}),
            r"tool_calls\[0\].arguments: field 'a' is there 2 times",
        ),
        (_chat({"content": "5"}) | {"tools": "[{"}, r"tools is '\[{', which is not valid JSON"),
        (
            _chat({"content": "5"}) | {"prompt": "?", "completion": "6"},
            "fields 'messages' and 'completion' may both be learned; take one out",
        ),
        (_chat({"content": None}), r"messages\[1\] is {.*}, needs a role and a content"),
    ],
)
def test_what_can_not_be_obeyed_is_refused_by_name(row, said):
    with pytest.raises(ValueError, match=said):
        _problem(row)


def test_a_weight_of_one_on_a_row_and_of_zero_on_a_user_changes_nothing():
    row = {
        "messages": [
            {"role": "user", "content": "?", "train": False},
            {"role": "assistant", "content": "5"},
        ]
    }
    assert _learned(row | {"weight": 1}) == [True]
    assert "train" not in _problem(row).completion[0]


def test_a_prompt_beside_messages_and_empty_tools_change_nothing():
    row = _chat({"content": "5"})
    others = {"prompt": "another", "completion": "", "tools": " "}
    assert _problem(row | others) == _problem(row)
