"""DAPO-Math-17K as its publisher has it.

Copies of rows, an instruction of its own, the answer in its form.
"""

import json
import logging

import pytest

from dcmdp_jax.config.settings import TaskSettings
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.chat import with_suffix
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.prompts import encode_prompts
from dcmdp_jax.rewards.math.answers import extract_answer
from dcmdp_jax.rewards.protocol import Problem

_ASKED = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is {}+1?\n\nRemember to put your "
    'answer on its own line after "Answer:".'
)


def _row(number, copy, **changed):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": _ASKED.format(number), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(number + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"uuid-{number}"},
        "__index_level_0__": 1000 * copy + number,
        **changed,
    }


def _write(path, rows):
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("keep_columns", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_equal_rows_are_one_problem_and_counted(tmp_path, caplog, suffix, keep_columns):
    # 5 problems, 100 copies of each, as a table that pandas numbered: only __index_level_0__ tells
    # copies apart.
    location = _write(
        tmp_path / f"dapo{suffix}",
        [_row(number, copy) for copy in range(100) for number in range(5)],
    )
    with caplog.at_level(logging.WARNING):
        problems = load_problems(location, keep_columns=keep_columns)
    assert [problem.answer for problem in problems] == ["1", "2", "3", "4", "5"]
    assert [problem.index for problem in problems] == [0, 1, 2, 3, 4]
    assert "495 rows repeat an earlier row: 5 problems" in caplog.text
    assert len(load_problems(location, limit=3)) == 3


def test_rows_that_differ_are_kept(tmp_path, caplog):
    rows = [
        _row(1, 0),
        _row(1, 0, reward_model={"ground_truth": "3"}),
        _row(2, 0),
        {**_row(1, 0), "solution": "Count on from 1."},
    ]
    with caplog.at_level(logging.WARNING):
        assert len(load_problems(_write(tmp_path / "a.jsonl", rows))) == 4
    assert "repeat" not in caplog.text
    # A reward function sees the columns: rows that differ there are two tasks for it, and one
    # without it.
    tests = [{**_row(1, 0), "tests": ["a"]}, {**_row(1, 1), "tests": ["b"]}]
    location = _write(tmp_path / "b.jsonl", tests)
    assert len(load_problems(location, keep_columns=True)) == 2
    assert len(load_problems(location)) == 1


def _text(prompt, suffix):
    return with_suffix(Problem(prompt=prompt, answer="1", source="s", index=0), suffix)


_SUFFIX = TaskSettings().prompt_suffix


@pytest.mark.parametrize(
    "prompt",
    [
        _ASKED.format(1),
        "The last line of your response should be of the form Answer: \\boxed{$Answer}.\n\nWhat "
        "is 1+1?",
        "What is 1+1?\n请以“Answer: \\boxed{<final_answer>}”的格式输出最终答案。",
        "What is 1+1? Let's think step by step and output the final answer within \\boxed{}.",
        "What is 1+1? Put your final answer in \\boxed.",
        "What is 1+1? End with \\boxed{answer}.",
    ],
)
def test_a_prompt_with_its_own_instruction_gets_no_second_one(prompt):
    assert _text(prompt, _SUFFIX) == prompt
    # A suffix about something else stays.
    assert _text(prompt, " /no_think") == f"{prompt} /no_think"


@pytest.mark.parametrize(
    "prompt",
    [
        "What is 1+1?",
        # Boxes of DAPO's own problems, and Minerva's earlier parts, instruct nobody.
        "If $\\boxed{3}=2$, find \\[\\boxed{\\boxed{11}\\times\\boxed{20}}\\]",
        "Final answer: The final answer is 4. I hope it is correct.\n\nSubproblem 1: what is 2+2?",
        "Tom wrote Answer: 4. Is he right?",
    ],
)
def test_another_prompt_keeps_the_suffix(prompt):
    assert _text(prompt, _SUFFIX) == prompt + _SUFFIX


def test_an_instruction_in_a_system_message_counts():
    chat = (
        {"role": "system", "content": "Put the answer in \\boxed{}."},
        {"role": "user", "content": "1+1?"},
    )
    problem = Problem(prompt="1+1?", answer="2", source="s", index=0, messages=chat)
    assert with_suffix(problem, _SUFFIX) == "1+1?"


def test_how_many_go_without_is_said(caplog):
    problems = [
        Problem(prompt=p, answer="1", source="s", index=0) for p in (_ASKED.format(1), "1+1?")
    ]
    with caplog.at_level(logging.WARNING):
        encode_prompts(problems, build_tokenizer(), prompt_suffix=_SUFFIX, max_prompt_tokens=4096)
    assert "1 of 2 prompts say themselves how to write the answer" in caplog.text


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        # The form that DAPO asks for.
        ("First 5 cases, then 34.\n\nAnswer: 34", "34"),
        ("So 5.\n**Answer:** $34$<|im_end|>", "$34$"),
        ("So 5.\nAnswer:\n34\n", "34"),
        ("Answer: 5\nno, wrong.\nAnswer: -34\n", "-34"),
        ("Answer: \\frac{1}{2}", "\\frac{1}{2}"),
        # A box wins over a line, wherever it stands.
        ("Answer: 5\nFinally \\boxed{34}", "34"),
        ("Answer: $\\boxed{34}$", "34"),
        ("\\boxed{34}\nAnswer: 5", "34"),
        # None at all.
        ("The answer is 34", None),
        ("\\boxed{34", None),
    ],
)
def test_the_answer_is_read_in_its_form(completion, answer):
    assert extract_answer(completion) == answer
