"""Rows without a mathematical answer.

Prompts alone, chats with tools, a ground truth of any JSON.
"""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.prompts import encode_prompts
from dcmdp_jax.data.rows import problem_from_row
from tests.support.chat_rows import CODE, SEARCH

# verl's schema: a row of a code set and one of search-R1.
_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def _problem(row, **settings):
    return problem_from_row(row, source="file", index=3, keep_columns=True, **settings)


def _text(problem, template=None, suffix=""):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    encoded = encode_prompts([problem], tokenizer, prompt_suffix=suffix, max_prompt_tokens=999)
    return tokenizer.decode(encoded.token_ids[0])


@pytest.mark.parametrize(
    ("row", "answers", "answer"),
    [
        ({"prompt": "p"}, "optional", None),
        ({"prompt": "p"}, "unused", None),
        (CODE, "optional", None),
        (SEARCH, "unused", None),
        ({"prompt": "p", "reward_model": {"ground_truth": None}}, "optional", None),
        ({"prompt": "p", "solution": "def f(): ..."}, "optional", None),
        ({"prompt": "p", "answer": ""}, "optional", None),
        ({"prompt": "p", "answer": 7}, "optional", "7"),
        ({"prompt": "p", "answer": "{"}, "unused", None),
    ],
)
def test_a_row_needs_an_answer_only_where_one_is_used(row, answers, answer):
    assert _problem(row, answers=answers).answer == answer


@pytest.mark.parametrize(
    ("row", "answers", "message"),
    [
        ({"prompt": "p"}, "required", "no answer in any of the fields"),
        (CODE, "required", "field 'reward_model': an answer must be text or a finite number"),
        ({"prompt": "p", "answer": r"\frac{1}{2"}, "optional", "braces that do not balance"),
        ({"prompt": "p", "answer": ""}, "required", "the answer is empty"),
    ],
)
def test_a_wrong_answer_is_refused_where_it_may_be_used(row, answers, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        _problem(row, answers=answers)


def test_columns_are_the_given_ones(tmp_path):
    problem = _problem(CODE | {"answer": 5, "log_metric": 1}, answers="unused")
    assert problem.columns == {
        **{name: CODE[name] for name in CODE if name != "prompt"},
        "answer": 5,
    }
    pq.write_table(pa.Table.from_pylist([CODE]), tmp_path / "rows.parquet")
    [read] = load_problems(str(tmp_path / "rows.parquet"), answers="unused", keep_columns=True)
    assert read.columns == {name: CODE[name] for name in CODE if name != "prompt"}
    assert read.messages == tuple(CODE["prompt"]) and read.source == "codecontests"


def test_a_chat_keeps_its_system_and_tool_turns_and_gets_the_suffix_at_the_users_last():
    chat = [
        {"role": "system", "content": "Use tools.", "tool_calls": None},
        {
            "role": "user",
            "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2?"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    problem = _problem({"prompt": chat}, answers="unused")
    assert problem.prompt == "1+2?"
    assert problem.messages[2] == {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    assert problem.as_prompt == list(problem.messages)
    assert problem.as_completion("4") == [{"role": "assistant", "content": "4"}]
    template = (
        "{% for t in tools or [] %}<{{ t['function']['name'] }}>{% endfor %}{% for m in messages "
        "%}{{ m['role'] }}:{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{% "
        "endfor %}{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}go:{% endif %}"
    )
    assert _text(problem, template, "!") == "system:Use tools.;user:1+2?!;assistant:add;tool:3;go:"
    described = _problem({"prompt": chat, "tools": json.dumps([_TOOL])}, answers="unused")
    assert _text(described, template).startswith("<add>system:")
    with pytest.raises(
        ValueError, match="the chat template leaves out the tool 'add' in problem 3 of file"
    ):
        _text(described, "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}")
    assert _text(described).startswith(
        "<|im_start|>system\nadd<|im_end|>\n<|im_start|>system\nUse tools."
    )


def test_a_chat_that_ends_with_the_assistant_is_continued():
    chat = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "It is"}]
    text = _text(_problem({"prompt": chat}, answers="unused"))
    assert text == "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\nIt is"


def test_text_prompts_stay_text():
    problem = _problem({"prompt": "1+2?"}, answers="unused")
    assert (problem.as_prompt, problem.as_completion("3")) == ("1+2?", "3")


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (
            [{"role": "system", "content": "x"}],
            "the last message must be the user's or a tool's, or the assistant's",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": "x"}]}],
            "needs a role and a content that are text",
        ),
        ([{"role": "user"}], "needs a role and a content that are text"),
        (["x"], "prompt[0] is 'x', must be an object with role and content"),
    ],
)
def test_a_chat_that_can_not_be_asked_is_refused(chat, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        _problem({"prompt": chat}, answers="unused")


def test_rows_that_differ_in_their_chat_alone_are_two_problems(tmp_path):
    rows = [
        {"prompt": [{"role": "system", "content": s}, {"role": "user", "content": "a"}]}
        for s in "xyx"
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load_problems(str(path), answers="unused")
    assert [problem.messages[0]["content"] for problem in problems] == ["x", "y"]
    ids = encode_prompts(problems, build_tokenizer(), max_prompt_tokens=99).token_ids
    assert not np.array_equal(ids[0], ids[1])


_ASKED = {"problem": "How many eggs are left?"}


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"reward_model": {"ground_truth": '["17"]'}}, "17"),
        ({"ground_truth": "['3/4']"}, "3/4"),  # as Python prints a list
        ({"ground_truth": r'["\\frac{3}{4}"]'}, r"\frac{3}{4}"),
        ({"ground_truth": r'["\frac{3}{4}"]'}, r"\frac{3}{4}"),  # in JSON, \f is a form feed
        ({"answer": ["17"]}, "17"),
        ({"answer": 1e23}, "1" + 23 * "0"),  # not 99999999999999991611392
        ({"answer": -27.0}, "-27"),
        ({"answer": "[17]"}, "17"),
        ({"answer": '"17"'}, "17"),
        ({"answer": "[1, 7]"}, "[1, 7]"),  # an interval
        ({"answer": "<think>5+12</think> <answer> 17 </answer>"}, "17"),
        ({"answer": "17&nbsp;"}, "17"),
        ({"answer": "x &lt; 3&#8203;"}, "x < 3\u200b"),
        (
            {"answer": r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"},
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        ),
        ({"answer": "The final answer is 3.5."}, "3.5"),
        ({"answer": "So, the correct answer: (C)"}, "(C)"),
        ({"answer": "answerable"}, "answerable"),
        ({"final_answer": "17"}, "17"),
        ({"label": 1, "answer": "17"}, "17"),
        ({"label": 1, "solution": r"5+12 is \boxed{17}"}, "17"),
        ({"label": "17", "solution": "5+12"}, "17"),
    ],
)
def test_an_answer_is_what_the_row_means(row, answer):
    assert _problem(_ASKED | row).answer == answer


@pytest.mark.parametrize("answer", ['["17", "18"]', '{"value": 17}', ["17", "18"]])
def test_several_answers_and_objects_are_no_answer(answer):
    with pytest.raises(ValueError, match="an answer must be"):
        _problem(_ASKED | {"answer": answer})
    assert _problem(_ASKED | {"answer": answer}, answers="optional").answer is None


_NO_ANSWERS = (
    # what programs and people write where there is none
    "None",
    "null",
    "NaN",
    "N/A",
    "N.A.",
    "Unknown",
    "notfound",
    r"\text{Not found}",
    "not provided",
    "TBD",
    "none given",
    "No answer",
    "no solution provided",
    "Answers may vary",
    "various",
    ["None"],
    "[null]",
    # a reference to something else
    "see solution",
    "See the solution.",
    "see above",
    "refer to the solution",
    "as shown in the figure",
    "Figure 1",
    "See Figure 3",
    "solution omitted",
    "left to the reader",
    r"\boxed{\text{see solution}}",
    "The answer is: see above",
    # a report of a proof
    "proof",
    "$proof$",
    "proof.",
    "Proved",
    r"\text{Proved}",
    "hence proved",
    "Shown",
    "QED",
    "Q.E.D.",
    "Proof by induction",
    r"$\blacksquare$",
    r"\square",
    "\u220e",
    "\u2014",
    "-",
    "?",
    "",
    # pictures, links, code
    "![](img.png)",
    "[figure](fig.svg)",
    "https://example.com/a.png",
    "www.example.com/x",
    "<image>",
    "<img src='a.png'/>",
    "img_001.jpg",
    "data:image/png;base64,iVBOR",
    r"\includegraphics{a}",
    "[image]",
    "[asy]draw((0,0)--(1,1));[/asy]",
    r"\begin{tikzpicture}\draw (0,0);\end{tikzpicture}",
    "```python\nprint(5)\n```",
)
_ANSWERS = (
    "yes",
    "no",
    "true",
    "Tuesday",
    "red",
    "A",
    "Alice and Bob",
    "none",
    "(A) and (C)",
    "even",
    "closed",
    r"\text{None}",
    "None of the above",
    r"\emptyset",
    "the empty set",
    "no solution",
    "no real solutions",
    "infinitely many solutions",
    "undefined",
    "DNE",
    "impossible",
    "cannot be determined",
    r"\pi",
    r"\infty",
    r"\Omega",
    "[ABC]",
    "<1, 2, 3>",
    "[1,2]",
    "x<y",
    "5!",
    r"\mathbb{R}",
    "above the line",
    "seesaw",
    "two lines",
)


@pytest.mark.parametrize("answer", _NO_ANSWERS, ids=repr)
def test_a_reference_without_a_value_is_no_answer(answer):
    with pytest.raises(ValueError, match="^the answer is|an answer must be text"):
        _problem(_ASKED | {"answer": answer})
    assert _problem(_ASKED | {"answer": answer}, answers="optional").answer is None


@pytest.mark.parametrize("answer", _ANSWERS)
def test_words_and_signs_with_a_value_are_answers(answer):
    assert _problem(_ASKED | {"answer": answer}).answer == answer


def test_words_of_the_problem_itself_may_be_its_answer():
    assert (
        _problem({"problem": "Is this claim proved or open?", "answer": "proved"}).answer
        == "proved"
    )
    assert (
        _problem({"problem": "Which figure is a square?", "answer": "figure 1"}).answer
        == "figure 1"
    )


def test_words_are_no_answer_where_the_problem_asks_for_a_proof_alone():
    with pytest.raises(
        ValueError, match="the answer is 'done', and the problem asks for a proof; write its value"
    ):
        _problem({"problem": "Prove that 2 + 2 = 4.", "answer": "done"})
    assert (
        _problem(
            {"problem": "Find the colour and prove that it is unique.", "answer": "red"}
        ).answer
        == "red"
    )
    assert _problem({"problem": "Show that f(2) = 4.", "answer": "4"}).answer == "4"


def test_rows_without_a_value_are_named_and_left_out(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps(_ASKED | {"answer": a}) + "\n" for a in ("17", "see solution", "![](a.png)")
        )
    )
    with pytest.raises(
        ValueError,
        match="rows.jsonl:2: the answer is 'see solution', which is a remark without a value",
    ):
        load_problems(str(path))
    assert [problem.answer for problem in load_problems(str(path), on_bad_row="skip")] == ["17"]
    assert "2 of 3 rows are unusable and left out; the first is" in caplog.text


@pytest.mark.parametrize(
    "beside",
    [{"choices": ["17", "18"]}, {"options": ["17", "1"]}, {"choices": {"text": ["17", "18"]}}],
)
def test_an_index_beside_choices_is_refused(beside):
    with pytest.raises(ValueError, match="field 'answer' is 1 beside 2 choices, an index"):
        _problem(_ASKED | beside | {"answer": 1})
    assert _problem(_ASKED | beside | {"answer": "B"}).answer == "B"
    assert _problem(_ASKED | beside | {"answer": "17"}).answer == "17"  # a choice's text
    assert _problem(_ASKED | {"choices": [], "answer": 1}).answer == "1"


@pytest.mark.parametrize("write", [json.dumps, repr, lambda chat: json.dumps(chat[0])])
def test_a_chat_written_as_text_is_a_chat(write):
    chat = [{"role": "user", "content": "It's 5+12?"}]
    problem = _problem({"prompt": write(chat), "answer": "17"})
    assert (problem.prompt, problem.messages) == ("It's 5+12?", tuple(chat))
    with pytest.raises(ValueError, match="starts as a chat written as text, but is not valid JSON"):
        _problem({"prompt": write(chat)[:-3], "answer": "17"})


def test_answers_that_no_completion_matches_are_counted_in_one_line(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    answers = [
        "There are 17 eggs left in it.",
        r"\text{two lines}",
        "17",
        r"17\text{ eggs in a box}",
    ]
    path.write_text("".join(json.dumps({"problem": a, "answer": a}) + "\n" for a in answers))
    assert len(load_problems(str(path))) == 4
    assert "1 of 4 answers are sentences, which only the same words match" in caplog.text
    assert "row 0: 'There are 17 eggs" in caplog.text
    with pytest.raises(ValueError, match="is not matched by itself in a box"):
        _problem(_ASKED | {"answer": r"\}17\boxed{}"})
