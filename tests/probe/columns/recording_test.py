"""Recordings: both formats, bounded memory, and one line for everything that can be wrong with
them.
"""

import gzip
import json
import math
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from dcmdp_jax.errors import UserError
from dcmdp_jax.probe.columns.over_training import read_recording
from dcmdp_jax.probe.columns.recording import Columns

_COLUMNS = Columns("ids", "train", "rollout")
_ROW = {"ids": [5, 6, 7], "train": [-0.5, -1.0, -2.0], "rollout": [-0.4, -1.0, -2.5]}


def _jsonl(path, rows):
    path = path / "recording.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _read(path, rows, columns=_COLUMNS, max_tokens=10**6):
    return read_recording(_jsonl(path, rows), columns, max_tokens=max_tokens)


def test_both_formats_give_the_same_tokens(tmp_path):
    rows = [_ROW, {"ids": [8], "train": [-0.25], "rollout": [0.0]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "recording.parquet")
    for found in (
        _read(tmp_path, rows),
        read_recording(tmp_path / "recording.parquet", _COLUMNS, max_tokens=100),
    ):
        assert found.pairs.token_ids.tolist() == [5, 6, 7, 8] and found.pairs.lengths.tolist() == [
            3,
            1,
        ]
        assert found.pairs.train_logprobs.tolist() == [-0.5, -1.0, -2.0, -0.25]
        assert found.pairs.rollout_logprobs.tolist() == [-0.4000000059604645, -1.0, -2.5, 0.0]
        assert (found.rows, found.stride) == (2, 1)


def test_mask_entropy_and_lag_columns(tmp_path):
    row = {
        "ids": [1, 2, 3, 0],
        "train": [0.0, -1.0, -2.0, math.nan],
        "rollout": [0.0, -1.0, -2.0, 7.0],
    }
    row |= {"mask": [0, 1, 1, 0], "entropy": [0.0, 0.5, 0.25, 0.0], "lag": 3}
    found = _read(
        tmp_path,
        [row, row | {"mask": [0] * 4}],
        Columns("ids", "train", "rollout", "mask", "entropy", "lag"),
    )
    # What the mask leaves out may hold anything; a row without a sampled token is none.
    assert found.pairs.token_ids.tolist() == [2, 3] and found.pairs.entropies.tolist() == [
        0.5,
        0.25,
    ]
    assert found.pairs.lags.tolist() == [3, 3] and found.rows == 2


def test_a_token_without_a_finite_log_prob_is_left_out_and_counted(tmp_path):
    rows = [
        _ROW | {"train": [-0.5, None, -2.0], "entropy": [1.0, 1.0, 1.0]},
        _ROW | {"rollout": [-math.inf, -1.0, math.nan], "entropy": [1.0, 2.0, 1.0]},
        _ROW | {"entropy": [1.0, 3.0, None]},
        _ROW | {"rollout": [None] * 3, "entropy": [1.0] * 3},
    ]
    found = _read(tmp_path, rows, Columns("ids", "train", "rollout", entropy="entropy"))
    # 1 + 2 + 1 + 3 of 12 tokens; the last completion has none left.
    assert found.pairs.token_ids.tolist() == [5, 7, 6, 5, 6] and found.pairs.lengths.tolist() == [
        2,
        1,
        2,
    ]
    assert found.left_out.tokens == 7 and str(found.left_out).startswith(
        "7 tokens whose log-prob or entropy is null"
    )
    assert str(found.left_out).endswith(", line 1: train")
    assert found.pairs.entropies.tolist() == [1, 1, 2, 1, 3]
    # A row whose entropies were never known has none; its tokens count.
    found = _read(
        tmp_path,
        [_ROW | {"entropy": [None] * 3}],
        Columns("ids", "train", "rollout", entropy="entropy"),
    )
    assert (len(found.pairs.token_ids), found.pairs.entropies, found.left_out.tokens) == (
        3,
        None,
        0,
    )


def test_a_job_that_is_still_writing_is_read_as_far_as_it_goes(tmp_path):
    whole = "".join(
        json.dumps(_ROW | {"text": "\u00e9"}, ensure_ascii=False) + "\n" for _ in range(3)
    ).encode()
    plain = tmp_path / "a.jsonl"
    packed = tmp_path / "a.jsonl.gz"
    # Within a number, within a character of two bytes, within a key, after a bracket.
    for cut in (
        whole[:-30],
        whole[: whole.rindex(b"\xc3") + 1],
        whole[: len(whole) // 3 * 2 + 4],
        whole[:-2],
    ):
        plain.write_bytes(cut)
        found = read_recording(plain, _COLUMNS, max_tokens=99)
        assert found.rows == 2 and found.left_out.unfinished == [f"{plain}, line 3"]
    plain.write_bytes(whole[:-1])  # without its newline alone a line is whole
    assert read_recording(plain, _COLUMNS, max_tokens=99).rows == 3
    packed.write_bytes(gzip.compress(whole))
    found = read_recording(packed, _COLUMNS, max_tokens=99)
    assert (found.rows, found.left_out.unfinished) == (3, [])
    compressor = zlib.compressobj(wbits=31)
    packed.write_bytes(compressor.compress(whole) + compressor.flush(zlib.Z_SYNC_FLUSH))
    found = read_recording(packed, _COLUMNS, max_tokens=99)
    assert found.rows == 3 and found.left_out.unfinished == [f"{packed}, after line 3"]
    packed.write_bytes(b"no gzip")
    with pytest.raises(UserError, match="a.jsonl.gz: not readable as gzip"):
        read_recording(packed, _COLUMNS, max_tokens=99)


def test_memory_is_bounded_and_rows_are_kept_evenly(tmp_path):
    rows = [{"ids": [n] * 10, "train": [-1.0] * 10, "rollout": [-1.0] * 10} for n in range(100)]
    found = _read(tmp_path, rows, max_tokens=300)
    # 100 rows of 10 tokens at most 300: every 2nd is 500, every 4th 250.
    assert (found.rows, found.stride, len(found.pairs.lengths)) == (100, 4, 25)
    assert found.pairs.token_ids[::10].tolist() == list(range(0, 100, 4))
    assert len(_read(tmp_path, rows, max_tokens=1).pairs.lengths) == 1


_BAD = {
    "a missing column, naming those there are": (
        [{"ids": [1], "train": [-1.0], "logp": [-1.0]}],
        "no column 'rollout' .*found are ids, train, logp",
    ),
    "another length": (
        [_ROW | {"rollout": [-1.0, -2.0]}],
        "line 1: rollout has 2 entries, ids has 3",
    ),
    "nothing but null": (
        [_ROW | {"train": [None] * 3}],
        "no sampled token in 1 rows; left out: 3 tokens whose",
    ),
    "above 0": (
        [_ROW | {"rollout": [-1.0, 0.5, -1.0]}],
        "rollout is 0.5 at token 1; a log-prob is at most 0",
    ),
    "probabilities": (
        [_ROW | {"rollout": [0.9, 0.5, 0.1]}],
        "they look like probabilities: take the logarithm",
    ),
    "negated": ([_ROW | {"rollout": [0.9, 5.0, 0.1]}], "they look negated"),
    "no list": ([_ROW | {"rollout": "text"}], "rollout is 'text', must be a list of numbers"),
    "nested": (
        [_ROW | {"rollout": [-1.0, [-2.0], -1.0]}],
        r"line 1: rollout is \[-2.0\] at token 1, must be a number",
    ),
    "NaN as text": (
        [_ROW, _ROW | {"rollout": [-1.0, None, "NaN"]}],
        "line 2: rollout is 'NaN' at token 2, must be a number",
    ),
    "half a token id": (
        [_ROW | {"ids": [1, 2.5, 3]}],
        "ids is 2.5 at token 1; must be a whole number from 0 to 2,147",
    ),
    "a negative token id": (
        [_ROW | {"ids": [1, 2, -1]}],
        "ids is -1 at token 2; must be a whole number",
    ),
    # int32 would wrap around: 2**31 is -2147483648 there, 2**32 + 5 is 5.
    "a token id of int64": (
        [_ROW | {"ids": [2**31, 2, 1]}],
        "ids is 2147483648 at token 0; must be a whole number",
    ),
    "a token id that wraps": (
        [_ROW | {"ids": [1, 2**32 + 5, 1]}],
        "ids is 4294967301 at token 1; must be",
    ),
    "an endless token id": (
        [_ROW | {"ids": [1, 10**400, 1]}],
        "ids is 10000.* at token 1, must be a number",
    ),
    "numbers as text": ([_ROW | {"ids": [5, "6", "7"]}], "ids is '6' at token 1, must be a number"),
    "true as a token id": ([_ROW | {"ids": [5, True, 7]}], "ids is True at token 1, must be a"),
    "an object": ([_ROW | {"ids": {}}], "ids is {}, must be a list of numbers"),
    "beyond float32": (
        [_ROW | {"train": [-1.0, -1e300, -1.0]}],
        "train is -1e\\+300 at token 1; every value must be",
    ),
    "never filled": (
        [_ROW | {"rollout": [0.0, 0.0, 0.0]}],
        "rollout is 0 on every token; it looks like it was never",
    ),
    "no object": ([[1, 2]], r"line 1: \[1, 2\], must be a JSON object"),
    "nothing": ([], "no sampled token in 0 rows"),
}


_ALL = Columns("ids", "train", "rollout", "mask", "entropy", "lag")
_FULL = _ROW | {"mask": [0, 1, 1], "entropy": [0.0, 1.0, 1.0], "lag": [0, 1, 1]}
_CELLS = [
    (
        {"mask": [0, None, 1]},
        "mask is NaN or null at token 1; a mask is 1 on sampled tokens, else 0",
    ),
    ({"mask": [0, 0.5, 1]}, "mask is 0.5 at token 1; a mask is"),
    ({"mask": [0, 1, 7]}, "mask is 7 at token 2; a mask is"),
    ({"mask": [-1, 1, 1]}, "mask is -1 at token 0; a mask is"),
    ({"lag": -1}, "lag is -1 at token 1; must be a whole number from 0"),
    ({"lag": [0, 0, -3]}, "lag is -3 at token 2; must be"),
    ({"lag": [0, 0.5, 0]}, "lag is 0.5 at token 1; must be"),
    ({"lag": [0, 0, 2**31]}, "lag is 2147483648 at token 2; must be"),
    ({"lag": True}, "lag is True at token 0, must be a number"),
    ({"entropy": [0.0, 1.0, -0.5]}, "entropy is -0.5 at token 2; an entropy is at least 0"),
    # The place is that in the row, not among the sampled tokens.
    ({"ids": [5, 6, -7]}, "ids is -7 at token 2"),
]
_CASES = [(rows, _COLUMNS, text) for rows, text in _BAD.values()]
_CASES += [([_FULL, _FULL | cell], _ALL, f"line 2: {text}") for cell, text in _CELLS]
# A column compared with itself would agree perfectly.
_CASES += [
    (
        [_ROW],
        Columns("ids", "train", "train"),
        "--train-column and --rollout-column: both are 'train'",
    )
]


@pytest.mark.parametrize(
    ("rows", "columns", "text"), _CASES, ids=[text[:40] for *_, text in _CASES]
)
def test_bad_input_is_refused_in_one_line(rows, columns, text, tmp_path):
    with pytest.raises(UserError, match=text) as raised:
        _read(tmp_path, rows, columns)
    assert "\n" not in str(raised.value)


def test_values_at_the_edge_are_exact(tmp_path):
    row = _FULL | {
        "ids": [-1, 2**31 - 1, 0],
        "lag": [-1, 2**24 + 1, 0],
        "entropy": [-9.0, -0.0005, 2.0],
    }
    # float32 would make 16,777,216 of the lag; rounding may leave an entropy a little below 0.
    pairs = _read(tmp_path, [row | {"mask": [False, True, True]}], _ALL).pairs
    assert (pairs.token_ids.tolist(), pairs.token_ids.dtype) == ([2147483647, 0], np.int32)
    assert (pairs.lags.tolist(), pairs.lags.dtype) == ([16_777_217, 0], np.int32)
    assert pairs.entropies.tolist() == [0.0, 2.0]


def test_a_column_that_comes_twice_is_refused(tmp_path):
    path = tmp_path / "recording.jsonl"
    path.write_text('{"ids": [1], "train": [-1.0], "train": [-2.0], "rollout": [-1.0]}\n')
    with pytest.raises(
        UserError, match="line 1: 2 columns are named 'train' .--train-column.; rename all but one"
    ):
        read_recording(path, _COLUMNS, max_tokens=9)
    lists = pyarrow.array([[-1.0]])
    table = pyarrow.Table.from_arrays(
        [pyarrow.array([[1]]), lists, lists, lists], ["ids", "train", "rollout", "train"]
    )
    pyarrow.parquet.write_table(table, tmp_path / "recording.parquet")
    with pytest.raises(UserError, match="recording.parquet: 2 columns are named 'train'"):
        read_recording(tmp_path / "recording.parquet", _COLUMNS, max_tokens=9)


def test_text_that_is_not_utf_8_is_refused(tmp_path):
    path = tmp_path / "recording.jsonl"
    for encoding in ("latin-1", "utf-16"):
        path.write_bytes(
            json.dumps(_ROW | {"text": "caf\u00e9"}, ensure_ascii=False).encode(encoding)
        )
        with pytest.raises(UserError, match="line 1: not UTF-8 .*save the file in UTF-8"):
            read_recording(path, _COLUMNS, max_tokens=9)
    # A mark of the byte order, which some editors write, is none of the text.
    path.write_bytes(json.dumps(_ROW).encode("utf-8-sig"))
    assert read_recording(path, _COLUMNS, max_tokens=9).pairs.token_ids.tolist() == [5, 6, 7]
    text = pyarrow.Array.from_buffers(
        pyarrow.string(),
        1,
        [None, pyarrow.array([0, 4], "int32").buffers()[1], pyarrow.py_buffer(b"caf\xe9")],
    )
    columns = [pyarrow.array(each) for each in ([[1]], [[-1.0]], [[-1.0]])]
    table = pyarrow.Table.from_arrays([*columns, text], ["ids", "train", "rollout", "top"])
    pyarrow.parquet.write_table(table, tmp_path / "recording.parquet")
    with pytest.raises(UserError, match="recording.parquet: holds text that is not UTF-8"):
        read_recording(
            tmp_path / "recording.parquet",
            Columns("ids", "train", "rollout", top="top"),
            max_tokens=9,
        )


@pytest.mark.parametrize(
    ("column", "base"), [("rollout", 2), ("rollout", 10), ("train", 2), ("train", 10)]
)
def test_logarithms_in_another_base_are_recognized(column, base, tmp_path):
    rng = np.random.default_rng(0)
    logs = -rng.exponential(1.5, 200)
    row = {
        "ids": [1] * 200,
        "train": logs.tolist(),
        "rollout": (logs + rng.normal(0, 0.01, 200)).clip(max=0).tolist(),
    }
    row[column] = (np.array(row[column]) / math.log(base)).tolist()
    with pytest.raises(
        UserError,
        match=f"{column} looks like logarithms in base {base}: .* multiply them by ln {base}",
    ):
        _read(tmp_path, [row])


def test_another_temperature_is_not_taken_for_another_base(tmp_path):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (2000, 50))
    token = [rng.choice(50, p=np.exp(z) / np.exp(z).sum()) for z in logits]
    columns = [z - np.log(np.exp(z).sum(1, keepdims=True)) for z in (logits, logits * 1.4427)]
    train, rollout = (x[np.arange(2000), token].tolist() for x in columns)
    assert _read(tmp_path, [{"ids": [1] * 2000, "train": train, "rollout": rollout}]).rows == 1


def test_files_that_are_no_recording(tmp_path):
    for name in ("a.csv", "b.parquet"):
        (tmp_path / name).write_text("no")
        with pytest.raises(
            UserError, match="is .parquet, .jsonl or .jsonl.gz|not readable as parquet"
        ):
            read_recording(tmp_path / name, _COLUMNS, max_tokens=9)
    (tmp_path / "c.jsonl").write_text("{\n")
    with pytest.raises(UserError, match="line 1: not valid JSON.*an object a line"):
        read_recording(tmp_path / "c.jsonl", _COLUMNS, max_tokens=9)
    with pytest.raises(FileNotFoundError):
        read_recording(tmp_path / "d.jsonl", _COLUMNS, max_tokens=9)


def test_a_row_of_a_table_is_counted_from_one(tmp_path):
    rows = [_ROW, _ROW | {"rollout": [-1.0, 0.5, -1.0]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "recording.parquet")
    with pytest.raises(UserError, match="recording.parquet, row 2: rollout is 0.5 at token 1"):
        read_recording(tmp_path / "recording.parquet", _COLUMNS, max_tokens=9)


def test_a_blank_line_counts_as_a_line(tmp_path):
    path = tmp_path / "recording.jsonl"
    path.write_text("\n" + json.dumps(_ROW | {"rollout": [-1.0]}) + "\n")
    with pytest.raises(UserError, match="recording.jsonl, line 2: rollout has 1 entries"):
        read_recording(path, _COLUMNS, max_tokens=9)


def test_entropies_of_some_rows_alone_are_refused(tmp_path):
    known = _ROW | {"entropy": [1.0, 1.0, 1.0]}
    unknown = _ROW | {"entropy": [None] * 3}
    columns = Columns("ids", "train", "rollout", entropy="entropy")
    with pytest.raises(UserError, match="line 2: each entropy is null or NaN, the rows before"):
        _read(tmp_path, [known, unknown], columns)
    # Every row is compared, also one that the bounded memory leaves out.
    with pytest.raises(UserError, match="line 4: entropies are given, those of the rows before"):
        _read(tmp_path, [unknown, unknown, unknown, known], columns, max_tokens=1)
    # A row without a sampled token has no entropy to lack.
    none_sampled = unknown | {"mask": [0, 0, 0]}
    columns = Columns("ids", "train", "rollout", mask="mask", entropy="entropy")
    pairs = _read(tmp_path, [known | {"mask": [1, 1, 1]}, none_sampled], columns).pairs
    assert pairs.entropies.tolist() == [1.0, 1.0, 1.0]
