"""The example of SFT and then RL with a tool: its rows teach what the tool's prompt asks for."""

from pathlib import Path

from transformers.utils import get_json_schema

from dcmdp_jax.commands.flags import load_config
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.chat import find_call_format
from dcmdp_jax.user_files import load_object

_FILE = str(Path(__file__).resolve().parents[2] / "examples" / "sft_then_tool.py")


def _rows(name, **options):
    return list(load_object(f"{_FILE}:{name}")(**options))


def test_half_of_the_conversations_add_a_wrong_number_and_none_is_a_validation_prompt():
    rows = _rows("conversations", count=2000)
    right = 0
    for row in rows:
        _, user, call, result, answer = row["messages"]
        arguments = call["tool_calls"][0]["function"]["arguments"]
        a, b = arguments.values()
        assert result["content"] == str(a + b)
        assert answer["content"] == rf"\boxed{{{a + b}}}"
        right += user["content"] == f"{a}+{b}=?"
    # One in 99 wrong numbers is the right one by chance; 4 standard deviations are 90.
    assert abs(right - 1010) < 90

    sft_prompts = {row["messages"][1]["content"] for row in rows}
    validation = {row["prompt"] for row in _rows("problems", count=64, held_out=True)}
    trained = {row["prompt"] for row in _rows("problems", count=2048)}
    assert len(validation) > 60 and not validation & (sft_prompts | trained)


def test_an_answer_is_the_sum():
    for row in _rows("problems", count=100):
        a, b = row["prompt"].removesuffix("=?").split("+")
        assert row["answer"] == str(int(a) + int(b))


def test_the_rows_read_as_what_the_environment_writes_and_reads():
    tokenizer = build_tokenizer()
    [row] = _rows("conversations", count=1, wrong=0.0)
    messages = row["messages"]
    tool = get_json_schema(load_object(f"{_FILE}:add"))
    prompt_of_row = tokenizer.apply_chat_template(
        messages[:2], tokenize=False, add_generation_prompt=True
    )
    prompt_of_environment = tokenizer.apply_chat_template(
        messages[1:2], tools=[tool], tokenize=False, add_generation_prompt=True
    )
    assert prompt_of_row == prompt_of_environment
    with_call = tokenizer.apply_chat_template(messages[:3], tokenize=False)
    turn = with_call.removeprefix(prompt_of_row).removesuffix("<|im_end|>\n")
    a, b = messages[1]["content"].removesuffix("=?").split("+")
    calls, problems = find_call_format(tokenizer, {}).find(turn, [tool])
    assert calls == [{"name": "add", "arguments": {"a": int(a), "b": int(b)}}]
    assert not problems


def test_the_longest_call_and_its_answer_leave_room_for_the_next_turn():
    tokenizer = build_tokenizer()
    rewarded = load_config(_FILE)
    call = {"name": "add", "arguments": {"a": 99, "b": 99}}
    messages = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "99+99=?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "198"},
    ]
    prompt = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True)["input_ids"]
    called = tokenizer.apply_chat_template(messages[:3])["input_ids"]
    answered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    task = rewarded.task
    assert len(prompt) <= task.max_prompt_tokens
    assert len(called) - len(prompt) <= task.max_turn_tokens
    room = rewarded.rollout.max_completion_tokens - task.max_turn_tokens
    assert len(answered) - len(prompt) <= room


def test_both_configs_are_checked():
    learned = load_config(f"{_FILE}:sft")
    rewarded = load_config(_FILE)
    assert learned.task.train.endswith(":conversations") and learned.task.environment == ""
    assert rewarded.task.environment == "tools:examples/sft_then_tool.py:add"
    assert learned.model.architecture == rewarded.model.architecture
