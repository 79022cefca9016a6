"""The example of SFT and then RL with a tool: its rows teach what the tool's prompt asks for."""

import json
from pathlib import Path

from transformers.utils import get_json_schema

from dcmdp_jax.commands.flags import load_config
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.chat import find_call_format
from dcmdp_jax.user_files import load_object

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_FILE = str(_EXAMPLES / "sft_then_tool.py")


def _rows(name):
    return [json.loads(line) for line in (_EXAMPLES / name).read_text().splitlines()]


def test_conversations_are_right_and_no_problem_is_in_them():
    asked = []
    for row in _rows("tool_rows.jsonl"):
        _, user, call, result, answer = row["messages"]
        asked.append(user["content"])
        function = call["tool_calls"][0]["function"]
        a, b = function["arguments"].values()
        assert user["content"] == f"{a}+{b}=?"
        assert result["content"] == str(load_object(f"{_FILE}:add")(a, b))
        assert answer["content"] == rf"\boxed{{{a + b}}}"
    problems = [
        row["prompt"]
        for name in ("tool_problems.jsonl", "tool_problems_held_out.jsonl")
        for row in _rows(name)
    ]
    assert len(set(asked + problems)) == len(asked) + len(problems) == 600 + 512 + 64


def test_the_rows_read_as_what_the_environment_writes_and_reads():
    tokenizer = build_tokenizer()
    messages = _rows("tool_rows.jsonl")[0]["messages"]
    tool = get_json_schema(load_object(f"{_FILE}:add"))
    of_row = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    of_environment = tokenizer.apply_chat_template(
        messages[1:2], tools=[tool], tokenize=False, add_generation_prompt=True
    )
    assert of_row == of_environment
    whole = tokenizer.apply_chat_template(messages[:3], tokenize=False)
    turn = whole.removeprefix(of_row).removesuffix("<|im_end|>\n")
    calls = find_call_format(tokenizer, {}).read(turn, [tool])
    assert calls == [{"name": "add", "arguments": {"a": 48, "b": 4}}]


def test_both_configs_are_checked():
    learned = load_config(f"{_FILE}:sft")
    rewarded = load_config(_FILE)
    assert learned.task.train.endswith("tool_rows.jsonl") and learned.task.environment == ""
    assert rewarded.task.environment == "tools:examples/sft_then_tool.py:add"
    assert learned.model.architecture == rewarded.model.architecture
