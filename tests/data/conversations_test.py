"""Conversations to learn from: which rows have them, and which of their tokens are targets."""

import json
import re

import numpy as np
import pytest

from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.prompts import encode_prompts, join_prompts

# As Qwen3's: an assistant's thought stays in the last turn alone.
_FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and "
    "loop.last %}<t>{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}{% if "
    "add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% "
    "generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] "
    "}}<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% "
    "endif %}"
)
_BARE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_TALK = [
    {"role": "system", "content": "add"},
    {"role": "user", "content": "1+1=?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2=?"},
    {"role": "assistant", "content": "it is 4"},
]


def _file(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _encoded(tmp_path, *rows, template=None, limit=200, **options):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    problems = load_problems(_file(tmp_path, *rows), answers="learned")
    return tokenizer, encode_prompts(
        problems, tokenizer, max_prompt_tokens=limit, learned=True, **options
    )


def _learned(tmp_path, row, **options):
    """The text of each run of targets."""
    tokenizer, found = _encoded(tmp_path, row, **options)
    [ids], [targets] = found.token_ids, found.targets
    assert ids.dtype == np.int32 and targets.dtype == bool and not targets[0]
    parts = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(targets)) + 1)
    return [tokenizer.decode(ids[part]) for part in parts if targets[part[0]]], tokenizer.decode(
        ids
    )


def test_of_messages_the_assistants_turns_are_learned_with_their_end_token(tmp_path):
    learned, whole = _learned(tmp_path, {"messages": _TALK})
    # The line break behind a turn is the template's, not what a policy samples.
    assert learned == ["2<|im_end|>", "it is 4<|im_end|>"]
    assert whole.startswith("<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\n1+1=?")


def test_a_templates_own_marks_give_the_same_targets(tmp_path):
    for row in ({"messages": _TALK}, {"prompt": _TALK[:4], "completion": _TALK[4:]}):
        assert _learned(tmp_path, row, template=_MARKED)[0] == _learned(tmp_path, row)[0]


def test_of_a_chat_that_the_assistant_begins_its_words_are_learned(tmp_path):
    chat = [_TALK[2], _TALK[3], _TALK[4]]
    for template in (None, _MARKED):
        learned, whole = _learned(tmp_path, {"messages": chat}, template=template)
        # Not the header before the first turn, "assistant" and a line break.
        assert learned == ["2<|im_end|>", "it is 4<|im_end|>"] and whole.startswith(
            "<|im_start|>assistant\n2"
        )


def test_marked_turns_are_learned_whole_where_the_prompt_begins_a_thought(tmp_path):
    template = _MARKED.removesuffix("{% endif %}") + "<t></t>{% endif %}"
    assert _learned(tmp_path, {"messages": _TALK}, template=template)[0] == [
        "2<|im_end|>",
        "it is 4<|im_end|>",
    ]


def test_the_assistants_turns_of_a_prompt_are_not_learned(tmp_path):
    assert _learned(tmp_path, {"prompt": _TALK[:4], "completion": _TALK[4:]})[0] == [
        "it is 4<|im_end|>"
    ]


def test_a_text_follows_the_prompt_that_a_policy_is_asked_with(tmp_path):
    learned, whole = _learned(tmp_path, {"prompt": "1+1=", "completion": " 2"}, prompt_suffix="?")
    assert learned == [" 2<|im_end|>"]
    assert whole == "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n 2<|im_end|>"


def test_a_worked_answer_is_learned_as_it_is(tmp_path):
    # The verifier's answer is 4; the policy learns to write the line that says so.
    row = {"question": "2+2?", "answer": "It is 4.\n#### 4"}
    assert _learned(tmp_path, row)[0] == ["It is 4.\n#### 4<|im_end|>"]
    assert _learned(tmp_path, row | {"solution": "2+2=4"})[0] == ["2+2=4<|im_end|>"]


def test_the_end_token_follows_a_template_that_writes_none(tmp_path):
    assert _learned(tmp_path, {"messages": _TALK}, template=_BARE)[0] == ["2", "it is 4<|im_end|>"]


def test_a_turn_that_is_written_otherwise_once_the_chat_goes_on_is_refused_by_name(tmp_path):
    with pytest.raises(
        ValueError, match="writes the start of problem 1 of rows otherwise once the chat goes on"
    ):
        _encoded(tmp_path, {"messages": _TALK[:3]}, {"messages": _TALK}, template=_FORGETFUL)
    assert _learned(tmp_path, {"messages": _TALK[:3]}, template=_FORGETFUL)[0] == ["<t>2<|im_end|>"]


def test_a_template_that_leaves_out_what_a_conversation_has_is_refused(tmp_path):
    silent = _MARKED.replace(
        "{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}"
    )
    with pytest.raises(
        ValueError, match="leaves out the text of the system in problem 0 of rows; it must write"
    ):
        _encoded(tmp_path, {"messages": _TALK}, template=silent)
    tools = [
        {"type": "function", "function": {"name": "add", "description": "?", "parameters": {}}}
    ]
    with pytest.raises(
        ValueError, match="leaves out the tool 'add' in problem 0 of rows; use a template that"
    ):
        _encoded(tmp_path, {"messages": _TALK[1:], "tools": tools}, template=_MARKED)
    # Llama's templates write the JSON of a tool's result.
    llama = _MARKED.replace("{% else %}{{ m['content'] }}", "{% else %}{{ m['content'] | tojson }}")
    result = [*_TALK[1:3], {"role": "tool", "content": '{"sum": 2}'}, _TALK[4]]
    assert _learned(tmp_path, {"messages": result}, template=llama)[0] == [
        "2<|im_end|>",
        "it is 4<|im_end|>",
    ]


def test_space_that_the_tokenizer_joins_to_the_header_is_named(monkeypatch, tmp_path):
    import dcmdp_jax.data.conversations as conversations

    def joined(tokenizer, texts, what):
        """As byte-level BPE: a line break and the space behind it are one token."""
        return [
            [1 if part == "\n  " else hash(part) for part in re.split(r"(\n +)", text)]
            for text in texts
        ]

    monkeypatch.setattr(conversations, "encode_texts", joined)
    chat = [*_TALK[:2], {"role": "assistant", "content": "  2"}]
    with pytest.raises(
        ValueError, match="joins space around a turn of problem 0 of rows to the template's; strip"
    ):
        _encoded(tmp_path, {"messages": chat})


def test_rows_without_something_to_learn_are_refused_by_file_and_line(tmp_path):
    good = {"prompt": "1+1=", "completion": "2"}
    for row, said in (
        ({"messages": _TALK[:2]}, "field 'messages' has no turn of the assistant"),
        (
            {"messages": [*_TALK[:2], {"role": "assistant", "content": " "}]},
            "has an empty turn of the assistant",
        ),
        (
            {"messages": "1+1"},
            "field 'messages' is str, not a list of messages or, after a prompt, text",
        ),
        ({"prompt": "1+1=", "completion": "\n"}, "field 'completion': the completion is empty"),
        (
            {"prompt": "1+1=", "completion": 2},
            "field 'completion' is int, not a list of messages or",
        ),
        (
            {"prompt": "1+1="},
            "no completion in any of the fields messages, completion, solution, answer; the row "
            "has",
        ),
        (
            {"completion": "2"},
            "no prompt in any of the fields prompt, problem, question; the row has completion",
        ),
        (
            {"messages": [{"role": "assistant", "content": "\ud800"}]},
            "holds half of a surrogate pair",
        ),
    ):
        with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{said}"):
            load_problems(_file(tmp_path, good, row), answers="learned")


def test_control_tokens_in_what_is_learned_are_named(tmp_path, caplog):
    _encoded(
        tmp_path,
        {"prompt": "1+1=", "completion": "2<|im_end|>"},
        {"prompt": "1+2=", "completion": "3"},
    )
    assert "1 of 2 problems hold control tokens in their text" in caplog.text


def test_conversations_over_the_limit_are_left_out_and_counted(tmp_path, caplog):
    # "<|im_start|>", user, a line break, "1+1=", "<|im_end|>" and a line break, then three for the
    # generation prompt are 12 tokens, "2" and the end token 2.
    short = {"prompt": "1+1=", "completion": "2"}
    long = {"prompt": "1+1=", "completion": "2" * 40}
    _, found = _encoded(tmp_path, short, long, limit=14)
    assert (len(found.problems), found.dropped, len(found.token_ids[0])) == (
        1,
        1,
        len(found.targets[0]),
    )
    assert (
        "1 of 2 conversations are over max_prompt_tokens + max_completion_tokens = 14"
        in caplog.text
    )
    with pytest.raises(
        ValueError, match=r"\+ max_completion_tokens = 5 leaves no conversation: the shortest"
    ):
        _encoded(tmp_path, short, long, limit=5)


def test_joined_conversations_keep_their_targets(tmp_path):
    _, found = _encoded(tmp_path, {"prompt": "1+1=", "completion": "2"}, {"messages": _TALK})
    both = join_prompts([found, found])
    assert len(both.targets) == 4
    for ids, targets in zip(both.token_ids, both.targets, strict=True):
        assert len(ids) == len(targets)
