"""A file is written whole or not at all."""

import os

import pytest

from dcmdp_jax.atomic_write import atomic_write


def test_text_and_bytes_replace_the_old_content(tmp_path):
    path = tmp_path / "file"
    atomic_write(path, "é\n")
    assert path.read_bytes() == b"\xc3\xa9\n"
    atomic_write(str(path), b"\xff")
    assert path.read_bytes() == b"\xff"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failure_leaves_the_old_content(tmp_path, monkeypatch, broken):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, "new")
    assert path.read_text() == "old"


def test_an_error_of_a_write_names_the_file(tmp_path, monkeypatch):
    """The system's own error of `write` and `fsync` does not."""

    def fail(*_):
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="File too large") as caught:
        atomic_write(tmp_path / "file", "new")
    assert caught.value.filename == str(tmp_path / "file")
