"""Rows of every schema are read to the right prompt and answer.

Or refused by line number.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.rows import problem_from_row
from dcmdp_jax.errors import UserError

_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
_needs_data = pytest.mark.skipif(
    not _DATA.is_dir(), reason=f"the published datasets are not at {_DATA}"
)


def _write(path, *rows):
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows),
        encoding="utf-8",
    )
    return str(path)


def _dapo(prompt="1+1?", answer="2"):
    return {
        "data_source": "math_dapo",
        "prompt": prompt,
        "reward_model": {"ground_truth": answer, "style": "rule"},
    }


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "solution"),
    [
        (_dapo([{"role": "user", "content": "1+1?"}], "2"), "1+1?", "2", ""),
        (_dapo("1+1?", "2"), "1+1?", "2", ""),
        ({"prompt": "1+1?", "label": "2"}, "1+1?", "2", ""),
        ({"problem": "p", "solution": "", "answer": "025", "url": ""}, "p", "025", ""),
        ({"id": 3, "problem": "p", "answer": 27.0, "question": "p"}, "p", "27", ""),
        ({"problem": "p", "answer": -1.0}, "p", "-1", ""),
        ({"problem": "p", "answer": 9007199254740993}, "p", "9007199254740993", ""),
        (
            {
                "problem": r"earlier: \boxed{7}. Now?",
                "solution": r"as \boxed{1.6} \mathrm{cm}",
                "idx": 0,
            },
            r"earlier: \boxed{7}. Now?",
            "1.6",
            r"as \boxed{1.6} \mathrm{cm}",
        ),
        (
            {"question": "q", "answer": "It is 48/2 = <<48/2=24>>24\n#### 1,024"},
            "q",
            "1,024",
            "It is 48/2 = <<48/2=24>>24",
        ),
        (
            {"problem": "p", "expected_answer": "70", "reference_solution": "so 70"},
            "p",
            "70",
            "so 70",
        ),
        (
            {
                "question": "q",
                "context": None,
                "solution": ["s"],
                "final_answer": ["$221,$8$"],
                "is_multiple_answer": True,
            },
            "q",
            "221, 8",
            "s",
        ),
        (
            {
                "question": "q",
                "final_answer": ["5,113,(1,2)"],
                "is_multiple_answer": True,
                "unit": None,
                "error": None,
            },
            "q",
            "5, 113, (1,2)",
            "",
        ),
        (
            {
                "question": "q",
                "final_answer": ["4.2"],
                "is_multiple_answer": False,
                "unit": "%",
                "error": "1e-1",
            },
            "q",
            r"4.2\tolerance{1e-1}",
            "",
        ),
    ],
)
def test_schemas(row, prompt, answer, solution):
    problem = problem_from_row(row, source="file", index=5)
    assert (problem.prompt, problem.answer, problem.solution, problem.index) == (
        prompt,
        answer,
        solution,
        5,
    )
    assert problem.source == row.get("data_source", "file")


def test_messages_before_the_prompt_are_kept():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    problem = problem_from_row(_dapo(messages), source="file", index=0)
    assert problem.messages == tuple(messages)
    assert problem.prompt == "1+1?"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json}\n", "not valid JSON"),
        ("[1, 2]\n", "a JSON list, not an object"),
        (
            '{"prompt": "p", "answer": "1", "answer": "2"}\n',
            "field 'answer' is there 2 times; keep one",
        ),
        (
            '{"prompt": [{"role": "user", "content": "p", "content": "q"}], "answer": "1"}\n',
            "field 'content' is there 2 times",
        ),
        (json.dumps({"answer": "2"}) + "\n", "no prompt in any of the fields"),
        (json.dumps({"prompt": "1+1?"}) + "\n", "no answer in any of the fields"),
        (json.dumps(_dapo("  ")) + "\n", "the prompt is empty"),
        (json.dumps(_dapo([])) + "\n", "the last message must be the user's"),
        (json.dumps(_dapo([{"role": "user"}])) + "\n", "a role and a content"),
        (json.dumps(_dapo(3)) + "\n", "field 'prompt' is int"),
        (json.dumps(_dapo("p", "")) + "\n", "the answer is empty"),
        (json.dumps(_dapo("p", r"\frac{1}{2")) + "\n", "braces that do not balance"),
        (json.dumps(_dapo("p", True)) + "\n", "must be text or a finite number, not True"),
        (json.dumps({"prompt": "p", "answer": float("nan")}) + "\n", "finite number, not nan"),
        (json.dumps({"prompt": "p", "reward_model": {}}) + "\n", "no ground_truth"),
        (json.dumps({"problem": "p", "solution": "no box"}) + "\n", r"no \\boxed"),
        (
            json.dumps({"question": "p", "final_answer": ["4"], "error": "wide"}) + "\n",
            "'wide', not a number",
        ),
    ],
)
def test_a_bad_row_is_named_by_its_line_or_skipped_and_counted(tmp_path, caplog, line, reason):
    location = _write(tmp_path / "rows.jsonl", _dapo("a"), _dapo("b"), line, _dapo("c"))
    with pytest.raises(ValueError, match=rf"rows\.jsonl:3: .*{reason}") as raised:
        load_problems(location)
    assert "\n" not in str(raised.value)
    problems = load_problems(location, on_bad_row="skip")
    assert [(problem.prompt, problem.index) for problem in problems] == [
        ("a", 0),
        ("b", 1),
        ("c", 3),
    ]
    assert "1 of 4 rows are unusable" in caplog.text


def test_invalid_utf8_is_a_bad_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: not valid UTF-8"):
        load_problems(str(path))


def test_parquet_text_that_is_not_utf8_is_refused_in_one_line(tmp_path):
    offsets = pa.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0]))
    text = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff?")])
    pq.write_table(pa.table({"prompt": text, "answer": ["1"]}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"rows\.parquet: holds text that is not UTF-8") as raised:
        load_problems(str(tmp_path / "rows.parquet"))
    assert "\n" not in str(raised.value)


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    columns = [pa.array(["p"]), pa.array(["1"]), pa.array(["2"])]
    table = pa.Table.from_arrays(columns, names=["prompt", "answer", "answer"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"rows\.parquet: 2 columns are named 'answer'"):
        load_problems(str(tmp_path / "rows.parquet"))


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("nowhere.jsonl", "no such file"),
        ("nowhere.parquet", "no such file"),
        ("/nowhere/at/all", "not a .jsonl or .parquet file here"),
        ("arithmetic:dificulty=2", "'dificulty=2' is not key=value"),
    ],
)
def test_unreadable_locations(location, reason):
    with pytest.raises(ValueError, match=reason):
        load_problems(location)


def test_empty_damaged_and_foreign_files(tmp_path):
    with pytest.raises(ValueError, match="empty.jsonl: the file is empty"):
        load_problems(_write(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match=r"damaged\.parquet: not a readable parquet file"):
        load_problems(_write(tmp_path / "damaged.parquet", "not parquet"))
    with pytest.raises(ValueError, match="emty.jsonl: no such file; did you mean 'empty.jsonl'"):
        load_problems(str(tmp_path / "emty.jsonl"))
    with pytest.raises(ValueError, match="not a .jsonl or .parquet file"):
        load_problems(_write(tmp_path / "rows.csv", "a,b\n"))
    with pytest.raises(ValueError, match="no usable row"):
        load_problems(_write(tmp_path / "bad.jsonl", "{}\n"), on_bad_row="skip")


def test_a_hub_name_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'PATH_OF_A_CHECKOUT\[hub\]'"):
        load_problems("BytedTsinghua-SIA/DAPO-Math-17k")


def test_limit_and_settings_are_checked(tmp_path):
    location = _write(tmp_path / "rows.jsonl", _dapo("a"), _dapo("b"), "{broken\n")
    assert [problem.prompt for problem in load_problems(location, limit=2)] == ["a", "b"]
    with pytest.raises(ValueError, match="limit = 0"):
        load_problems(location, limit=0)
    with pytest.raises(ValueError, match="on_bad_row = 'ignore'"):
        load_problems(location, on_bad_row="ignore")  # type: ignore[arg-type]


def test_parquet_gives_what_jsonl_gives(tmp_path):
    rows = [_dapo([{"role": "user", "content": f"{k}+1?"}], str(k + 1)) for k in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert load_problems(str(tmp_path / "rows.parquet")) == load_problems(
        _write(tmp_path / "rows.jsonl", *rows)
    )


def test_the_builtin_task_is_a_location():
    problems = load_problems("arithmetic:difficulty=1,count=20,split=heldout", limit=3)
    assert [problem.source for problem in problems] == ["arithmetic"] * 3


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"problem": "p \\ud800", "answer": "1"}\n', "holds half of a surrogate pair"),
        ('{"problem": ' + "[" * 100_000 + "\n", "nested too deeply"),
    ],
)
def test_text_that_no_tokenizer_takes_is_named_or_skipped(tmp_path, row, reason):
    location = _write(tmp_path / "rows.jsonl", _dapo("a"), row)
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{reason}"):
        load_problems(location)
    assert len(load_problems(location, on_bad_row="skip")) == 1


@_needs_data
@pytest.mark.parametrize(
    ("name", "rows", "spot"),
    [
        ("benchmarks/aime24.jsonl", 30, {0: "204", 7: "025"}),
        ("benchmarks/aime25.jsonl", 30, {0: "70", 29: "240"}),
        ("benchmarks/amc23.jsonl", 40, {0: "27", 15: "-1"}),
        ("benchmarks/math500.jsonl", 500, {4: r"\text{Evelyn}", 242: r"\$32,\!348"}),
        ("benchmarks/minerva.jsonl", 272, {0: "1.6", 1: "4.5e33", 49: "-3./2"}),
        (
            "benchmarks/olympiadbench.jsonl",
            675,
            {87: "2500, 7500", 194: "221, 8", 316: r"4.2\tolerance{1e-1}"},
        ),
        ("benchmarks/alt/aime24_dapo_official_format.jsonl", 30, {0: "540"}),
        ("benchmarks/alt/aime25_nemo_skills.jsonl", 30, {0: "70"}),
        ("benchmarks/alt/minerva_limo.jsonl", 272, {0: "1.6"}),
        ("train/gsm8k_train.jsonl", 7473, {0: "72"}),
    ],
)
def test_published_files(name, rows, spot):
    problems = load_problems(str(_DATA / name))
    assert len(problems) == rows
    assert {index: problems[index].answer for index in spot} == spot


@_needs_data
def test_minerva_answers_are_those_of_the_copy_that_states_them():
    boxed = load_problems(str(_DATA / "benchmarks/minerva.jsonl"))
    stated = load_problems(str(_DATA / "benchmarks/alt/minerva_limo.jsonl"))
    assert [problem.answer for problem in boxed] == [problem.answer for problem in stated]


@_needs_data
def test_dapo_is_read_whole():
    path = _DATA / "train/dapo_math_17k.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    distinct = {
        (row["prompt"][0]["content"], row["reward_model"]["ground_truth"]): None for row in rows
    }
    problems = load_problems(str(path))
    assert [(problem.prompt, problem.answer) for problem in problems] == list(distinct)
    assert (len(rows), len(distinct)) == (17_917, 17_301)
    assert problems == load_problems(str(path.with_suffix(".parquet")))


@_needs_data
def test_defective_rows_of_a_published_file_are_named_or_skipped():
    location = str(_DATA / "train/math_train_rllm.jsonl")
    with pytest.raises(
        ValueError, match=r"math_train_rllm\.jsonl:887: no answer"
    ):  # null; rows 5328, 5330 are ""
        load_problems(location)
    kept = {problem.index for problem in load_problems(location, on_bad_row="skip")}
    assert set(range(7474)) - kept == {886, 1009, 5328, 5330}
