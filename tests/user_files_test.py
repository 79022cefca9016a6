"""A file of a user is imported by its path."""

import sys

from dcmdp_jax.user_files import is_missing, load_object


def test_a_file_is_run_once_and_again_when_it_changed(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("COUNT = []\ndef f(): return 1\n")
    first = load_object(f"{file}:f")
    assert load_object(f"{file}:f") is first and first() == 1
    file.write_text("def f(): return 22\n")
    assert load_object(f"{file}:f")() == 22


def test_a_file_without_the_word_has_nothing_of_that_name(tmp_path):
    file = tmp_path / "mine.py"
    assert is_missing(f"{file}:score")
    file.write_text("def scores(): pass\n")
    assert is_missing(f"{file}:score") and not is_missing(f"{file}:scores")
    assert is_missing(f"{file}:sc[ore")
    # It may be among them.
    file.write_text("from others import *\n")
    assert not is_missing(f"{file}:score") and not is_missing("module:score")


def test_a_file_named_as_a_module_does_not_replace_it(tmp_path):
    (tmp_path / "json.py").write_text("def dumps(): return 'mine'\n")
    import json

    assert load_object(f"{tmp_path / 'json.py'}:dumps")() == "mine"
    assert sys.modules["json"] is json and json.dumps(1) == "1"
