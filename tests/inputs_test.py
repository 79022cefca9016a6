"""Quotes that stay short, JSON files that are none, addresses."""

import os

import pytest

from dcmdp_jax.errors import shorten, shorten_name
from dcmdp_jax.inputs import is_address, is_url, read_json_object


def test_a_quote_is_cut_and_says_how_long_it_was():
    assert shorten("short") == "'short'"
    assert shorten("x" * 80) == repr("x" * 80)
    assert shorten("x" * 81) == f"'{'x' * 80}'... (81 characters)"
    assert shorten(b"\x00" * 10**6).endswith("... (1,000,000 bytes)")
    assert shorten_name("x" * 10**6) == f"{'x' * 160}... (1,000,000 characters)"
    assert shorten_name("lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize(
    "value", [list(range(10**6)), {str(i): i for i in range(10**5)}, [["x" * 10**6]], 10**4000]
)
def test_a_quote_of_anything_is_short(value):
    assert len(shorten(value)) < 120


def test_a_quote_of_nested_lists_stops():
    nested = []
    for _ in range(10**5):
        nested = [nested]
    assert len(shorten(nested)) < 120


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON"),
        ("\ufeff{}", "begins with a byte order mark; save it as UTF-8 without BOM"),
        ("{'a': 1}", "not valid JSON"),
        ("[" * 10**5, "not valid JSON (maximum recursion depth exceeded"),
        ("[]", "holds a list, must hold a JSON object"),
        ("true", "holds true or false, must hold"),
        ("null", "holds null, must hold"),
        ('"a"', "holds a string, must hold"),
        ("1.5", "holds a number, must hold"),
    ],
)
def test_a_file_without_an_object_is_named(tmp_path, text, reason):
    path = tmp_path / "file.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        read_json_object(path)
    assert str(caught.value).startswith(f"{path}: {reason}") and "\n" not in str(caught.value)


def test_an_object_is_read(tmp_path):
    (tmp_path / "file.json").write_text('{"a": [1, 2]}')
    assert read_json_object(tmp_path / "file.json") == {"a": [1, 2]}
    with pytest.raises(FileNotFoundError):
        read_json_object(tmp_path / "none.json")


def test_a_fifo_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config.json: is a FIFO, must be a file"):
        read_json_object(tmp_path / "config.json")


def test_an_address_has_a_port_that_exists():
    good = ["host:1", "10.0.0.1:65535", "[::1]:8000", "[fe80::1%eth0]:80", "a-b.example:00080"]
    bad = [
        "host",
        "host:",
        ":80",
        "host:0",
        "host:65536",
        "host:-1",
        "host:80a",
        "::1:8000",
        "[::1]",
        "ho st:80",
        "host:80 ",
    ]
    assert [one for one in good + bad if is_address(one)] == good
    assert not is_address("host:\N{ARABIC-INDIC DIGIT SEVEN}") and not is_address(
        "host:" + "1" * 5000
    )


def test_a_url_may_leave_its_port_out():
    good = [
        "http://host",
        "https://host/v1",
        "http://host:8000/v1",
        "http://[::1]:8000",
        "http://host?a=b:c",
    ]
    bad = [
        "http://",
        "http://:80",
        "http://host:70000",
        "http://host:0/v1",
        "http:host",
        "ftp://host",
        "http://::1:80",
    ]
    assert [one for one in good + bad if is_url(one)] == good
