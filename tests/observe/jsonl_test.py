"""Strict lines, torn tails, atomic truncation."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcmdp_jax.observe import jsonl


def _refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_non_finite_values_are_written_as_strict_json():
    line = jsonl.encode(
        {"a": math.nan, "b": math.inf, "c": -math.inf, "d": [np.float32(0.5), None, True]}
    )
    assert line == '{"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": [0.5, null, true]}\n'
    json.loads(line, parse_constant=_refuse)


@given(st.floats())
def test_every_float_reads_back(value):
    back = float(json.loads(jsonl.encode({"x": value}), parse_constant=_refuse)["x"])
    assert back == value or (math.isnan(back) and math.isnan(value))


@given(st.text())
def test_text_stays_on_one_line(text):
    line = jsonl.encode({"x": text})
    assert line.count("\n") == 1 and json.loads(line) == {"x": text}


def test_encode_names_a_value_json_cannot_represent():
    with pytest.raises(ValueError, match=r"of type object; allowed"):
        jsonl.encode({"x": object()})


def test_read_skips_a_torn_last_line_and_a_missing_file_is_empty(tmp_path):
    path = tmp_path / "m.jsonl"
    assert jsonl.read(path) == []
    path.write_bytes(b'{"step": 1}\n{"step": 2, "reward/mean": 0.')
    assert jsonl.read(path) == [{"step": 1}]


@pytest.mark.parametrize("middle", [b"\x00\x00\x00", b'{"step": 2', b"[1, 2]", b"\xff\xfe"])
def test_read_names_a_damaged_line_before_the_last(tmp_path, middle):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + middle + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl line 2 is not a JSON object"):
        jsonl.read(path)


def test_truncate_after_a_kill_at_any_byte(tmp_path):
    lines = [b'{"step": 1, "x": 1.5}\n', b'{"step": 2, "x": 2.5}\n', b'{"step": 3, "x": 3.5}\n']
    whole = b"".join(lines)
    path = tmp_path / "m.jsonl"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        jsonl.truncate(path, last_step=2)
        # A record is there once its closing brace is, one byte before the newline.
        expected = [line for end, line in zip((21, 43), lines, strict=False) if cut >= end]
        assert path.read_bytes() == b"".join(expected), cut
    assert list(tmp_path.iterdir()) == [path]


def test_truncate_does_not_touch_a_good_file(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    before = path.stat()
    jsonl.truncate(path, last_step=2)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_truncate_drops_a_damaged_line_with_a_warning(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\n{"step": 2}\n')
    jsonl.truncate(path, last_step=9)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert "m.jsonl line 2 is unreadable" in caplog.text
