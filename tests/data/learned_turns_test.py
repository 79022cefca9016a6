"""What a supervised run learns of a turn is what its row says.

Read back, ended once, located in linear time.
"""

import json
import logging

import numpy as np
import pytest

from dcmdp_jax.data import chat, conversations
from dcmdp_jax.data import tokenizer as tokenizer_module
from dcmdp_jax.data.prompts import encode_prompts
from dcmdp_jax.data.rows import problem_from_row
from tests.support.byte_tokenizer import byte_tokenizer

_BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + _BEGIN
)
_TOOLS = "{% for t in tools or [] %}<|im_start|>system\n{{ t | tojson }}<|im_end|>\n{% endfor %}"
_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or "
    "[] %}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson "
    "}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
) + _BEGIN
# As Qwen3.5's and Qwen3-Coder's.
_XML_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or "
    "[] %}<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in "
    "c.function.arguments.items() %}<parameter={{ k }}>\n{{ v if v is string else v | tojson "
    "}}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
) + _BEGIN
# As DeepSeek's: it joins the arguments to its text.
_TEXT_CALLS = _CALLS.replace(
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}",
    "{{ c.function.name + ' ' + c.function.arguments }}",
)
_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation "
    "%}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif "
    "%}\n{% endfor %}"
) + _BEGIN
_GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_THINKING = _PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "get_rain",
        "description": "Rain of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}


def _call(arguments, name="get_rain"):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _answer(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def _row(*answers, tools=(), question="2+3?"):
    messages = []
    for answer in answers:
        messages += [{"role": "user", "content": question}, answer]
    return {"messages": messages} | ({"tools": list(tools)} if tools else {})


def _encode(template, row, *, stop_token_ids=(), chat_template_kwargs="", **tokens):
    tokenizer = byte_tokenizer(template, **tokens)
    problem = problem_from_row(json.dumps(row), source="rows", index=0, answers="learned")
    encoded = encode_prompts(
        [problem],
        tokenizer,
        max_prompt_tokens=10**6,
        chat_template_kwargs=chat_template_kwargs,
        learned=True,
        stop_token_ids=[tokenizer.convert_tokens_to_ids(token) for token in stop_token_ids],
    )
    return tokenizer, encoded.token_ids[0], encoded.targets[0]


def _learned(template, row, **options):
    """The text of each run of targets."""
    tokenizer, ids, targets = _encode(template, row, **options)
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(targets)) + 1)
    return [tokenizer.decode(ids[run]) for run in runs if targets[run[0]]]


@pytest.mark.parametrize(
    ("template", "answer", "field"),
    [
        (_PLAIN, _answer("", tool_calls=[_call({"town": "Lima"})]), "tool_calls"),
        (_PLAIN, _answer("5", reasoning_content="2 and 3."), "reasoning_content"),
        (_PLAIN, _answer("5", reasoning="2 and 3."), "reasoning"),
        (_PLAIN, _answer("5", thinking="2 and 3."), "thinking"),
        (_PLAIN, _answer("5", function_call={"name": "f", "arguments": "{}"}), "function_call"),
        # The first call alone; the second has another argument.
        (
            _CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
            _answer("", tool_calls=[_call({"town": "Lima"}), _call({"town": "Rom"})]),
            "tool_calls",
        ),
        # Python's repr in place of JSON, and names without arguments.
        (
            _CALLS.replace("| tojson", ""),
            _answer("", tool_calls=[_call({"town": "Lima", "wet": True})]),
            "tool_calls",
        ),
        (
            _CALLS.replace("c.function.arguments}", "{}}"),
            _answer("", tool_calls=[_call({"town": "Lima"})]),
            "tool_calls",
        ),
        (
            _PLAIN.replace(
                "{{ m.content }}",
                "{{ m.content | replace('3', 'three') if m.role == 'assistant' else m.content }}",
            ),
            _answer("3 mm"),
            "content",
        ),
        (
            _PLAIN.replace(
                "{{ m.content }}", "{{ m.content | upper if m.role == 'assistant' else m.content }}"
            ),
            _answer("it rains"),
            "content",
        ),
    ],
)
def test_what_the_template_leaves_out_of_a_turn_is_refused_by_row_and_field(
    template, answer, field
):
    said = rf"leaves out or changes {field} of messages\[1\] in problem 0 of rows, which then is not learned"
    with pytest.raises(ValueError, match=said):
        _learned(template, _row(answer))


def test_a_completion_of_messages_is_named_by_its_own_number():
    row = {
        "prompt": [{"role": "user", "content": "2+3?"}],
        "completion": [_answer("5", reasoning="2 and 3.")],
    }
    with pytest.raises(ValueError, match=r"reasoning of completion\[0\] in problem 0"):
        _learned(_PLAIN, row)


@pytest.mark.parametrize("template", [_CALLS, _XML_CALLS, _TEXT_CALLS])
@pytest.mark.parametrize(
    "arguments", [{"town": 'Zürich "x"\n'}, {"a": {"b": [1, 2.5, None, True]}, "s": "5"}, {}]
)
def test_the_form_of_arguments_does_not_change_what_is_learned(template, arguments):
    # OpenAI's files have the arguments as JSON text.
    as_object = _row(_answer("", tool_calls=[_call(arguments)]))
    as_text = _row(_answer("", tool_calls=[_call(json.dumps(arguments))]))
    _, ids, targets = _encode(template, as_object)
    _, ids_of_text, targets_of_text = _encode(template, as_text)
    assert ids.tolist() == ids_of_text.tolist() and targets.tolist() == targets_of_text.tolist()
    assert "\\\\" not in _learned(template, as_text)[0]


def test_a_turn_holds_thought_content_and_calls_in_the_rows_order():
    template = _CALLS.replace(
        "{{ m.content }}", "{% if m.reasoning %}<t>{{ m.reasoning }}</t>{% endif %}{{ m.content }}"
    )
    answer = _answer(
        "Let me look.",
        reasoning="Rain.",
        tool_calls=[_call({"town": "Lima"}), _call({"town": "Rom"})],
    )
    assert _learned(template, _row(answer)) == [
        "<t>Rain.</t>Let me look."
        '<tool_call>{"name": "get_rain", "arguments": {"town": "Lima"}}</tool_call>'
        '<tool_call>{"name": "get_rain", "arguments": {"town": "Rom"}}</tool_call><|im_end|>'
    ]
    backwards = template.replace("m.tool_calls or []", "(m.tool_calls or []) | reverse")
    with pytest.raises(ValueError, match=r"changes tool_calls of messages\[1\]"):
        _learned(backwards, _row(answer))


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ("", "the tool 'get_rain'"),
        (
            "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}",
            "the parameter 'town' of the tool 'get_rain'",
        ),
        (
            "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}{% "
            "endfor %}",
            "the parameter 'town' of the tool 'get_rain'",
        ),
    ],
)
def test_a_tool_is_described_where_its_schema_is_written_not_where_it_is_called(written, missing):
    row = _row(_answer("", tool_calls=[_call({"town": "Lima"})]), tools=[_SCHEMA])
    with pytest.raises(
        ValueError, match=f"the chat template leaves out {missing} in problem 0 of rows"
    ):
        _learned(written + _CALLS, row)
    assert len(_learned(_TOOLS + _CALLS, row)) == 1
    bare = {
        "type": "function",
        "function": {"name": "now", "description": "The time of day.", "parameters": {}},
    }
    with pytest.raises(ValueError, match="leaves out the description of the tool 'now'"):
        _learned(
            "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + _CALLS,
            _row(_answer("5"), tools=[bare]),
        )


def test_marks_without_the_end_token_get_one_warning_that_stopping_is_never_learned(caplog):
    template = _MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    row = _row(_answer("5"), _answer("6"))
    tokenizer = byte_tokenizer(template)
    problem = problem_from_row(row, source="rows", index=0, answers="learned")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            encode_prompts([problem, problem], tokenizer, max_prompt_tokens=1000, learned=True)
    [warning] = [record.getMessage() for record in caplog.records]
    assert (
        "stopping is never learned" in warning
        and "{% endgeneration %}" in warning
        and "<|im_end|>" in warning
    )
    caplog.clear()
    assert _learned(_MARKED, row) == ["5<|im_end|>", "6<|im_end|>"] and not caplog.records


def test_a_turn_ends_with_one_end_token_the_one_at_which_sampling_stops(caplog):
    # Gemma's <end_of_turn> is an added special token that all_special_ids lacks; its eos_token is
    # another.
    tokens = {"eos": "<eos>", "special": ("<eos>", "<start_of_turn>", "<end_of_turn>")}
    for answer in ("5", "5<end_of_turn>", "5<end_of_turn>\n"):
        row = _row(_answer(answer))
        assert _learned(_GEMMA, row, stop_token_ids=("<eos>", "<end_of_turn>"), **tokens) == [
            "5<end_of_turn>"
        ]
    assert "stopping" not in caplog.text
    # Where sampling does not stop at what the template writes, one line says so.
    assert _learned(_GEMMA, _row(_answer("5")), **tokens) == ["5<end_of_turn>"]
    assert (
        "stopping is never learned: no target is a token at which sampling stops ('<eos>')"
        in caplog.text
    )


def test_a_completion_with_its_own_end_token_gets_no_second():
    for completion in ("5", "5<|im_end|>", "5<|im_end|>\n"):
        assert _learned(_PLAIN, {"prompt": "2+3?", "completion": completion}) == ["5<|im_end|>"]


def test_a_row_without_the_thought_that_the_prompt_begins_is_told_of_enable_thinking():
    row = _row(_answer("5"))
    said = r"begins a thought, and messages\[1\] of problem 0 of rows has none; give it one as reasoning_content$"
    with pytest.raises(ValueError, match=said):
        _learned(_THINKING, row)
    switched = _PLAIN.replace(
        "assistant\n{% endif %}",
        "assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif "
        "%}{% endif %}",
    )
    with pytest.raises(
        ValueError, match='set {"enable_thinking": false} in chat_template_kwargs, or give it one'
    ):
        _learned(switched, row)
    off = json.dumps({"enable_thinking": False})
    assert _learned(switched, row, chat_template_kwargs=off) == ["5<|im_end|>"]


def test_an_empty_thought_that_the_template_writes_is_no_space_to_strip():
    # The prompt ends with a line break, the empty thought goes on with one; both are one token of
    # the whole.
    template = _THINKING.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
    )
    with pytest.raises(ValueError, match="begins a thought, and messages"):
        _learned(template, _row(_answer("5")), merges=[("Ċ", "Ċ")])


@pytest.mark.parametrize(
    "row",
    [
        _row(_answer("five")),
        {"prompt": [{"role": "user", "content": "2+3?"}], "completion": [_answer("five")]},
        {"prompt": "2+3?", "completion": [_answer("five")]},
    ],
)
def test_a_marked_answer_is_learned_whole_in_every_schema_where_the_prompt_begins_a_thought(row):
    template = _MARKED.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert _learned(template, row) == ["five<|im_end|>"]


def test_a_marked_chat_that_the_assistant_begins_may_hold_words_like_the_templates():
    row = _row(_answer("five"), question="What is <|im_start|>assistant\n?")
    row["messages"].insert(0, _answer("Hello."))
    assert _learned(_MARKED, row) == ["Hello.<|im_end|>", "five<|im_end|>"]


@pytest.mark.parametrize("template", [_PLAIN, _MARKED, _CALLS])
def test_encoding_a_conversation_takes_time_in_proportion_to_its_turns(monkeypatch, template):
    characters = []

    def counted(function):
        def count(*arguments, **options):
            result = function(*arguments, **options)
            characters.append(len(str(result)))
            return result

        return count

    monkeypatch.setattr(chat, "write_chat", counted(chat.write_chat))
    encode_texts = tokenizer_module.encode_texts
    monkeypatch.setattr(
        conversations,
        "encode_texts",
        lambda tokenizer, texts, what: (
            characters.extend(map(len, texts)) or encode_texts(tokenizer, texts, what)
        ),
    )

    def work(turns):
        characters.clear()
        learned = _learned(template, _row(*(_answer(f"it is {number}") for number in range(turns))))
        assert learned == [f"it is {number}<|im_end|>" for number in range(turns)]
        return sum(characters)

    # Twice the turns: twice the characters. Each turn's own prefix would make it four times.
    assert work(64) < 2.3 * work(32)


def test_a_long_chat_whose_words_look_like_the_templates_is_learned_as_a_short_one():
    answers = [_answer(f"say <|im_end|> {number}") for number in range(12)]
    learned = _learned(_PLAIN, _row(*answers))
    assert learned == [f"say <|im_end|> {number}<|im_end|>" for number in range(12)]
