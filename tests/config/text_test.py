"""Settings as text."""

import re
from pathlib import Path

import pytest

from configs.base import get_config
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.config.settings import Config, setting_names
from dcmdp_jax.config.text import print_config, settings_page, settings_text
from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import declared

_ROOT = Path(__file__).resolve().parents[2]


def test_the_page_in_docs_is_that_of_the_declarations():
    page = (_ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_page(), "dcmdp settings > docs/settings.md"


def test_the_page_has_a_row_for_each_setting():
    section = ""
    found = []
    for line in settings_page().splitlines():
        if line.startswith("## "):
            section = "" if line == "## The run" else f"{line.removeprefix('## ')}."
        elif row := re.match(r"\| `(\w+)`( \*)? \| `", line):
            found.append(section + row[1])
            assert bool(row[2]) == declared(Config)[found[-1]].about.free
            assert len(re.findall(r"(?<!\\)\|", line)) == 6  # five cells
    assert sorted(found) == sorted(setting_names())


def test_a_row_says_default_range_unit_and_source():
    assert (
        "| `group_size` | `8` | at least 2 completions | G, completions of each prompt. | paper "
        "[6.1]: 8 |\n" in settings_page()
    )


def test_a_printed_config_marks_what_differs_from_the_defaults():
    config = get_config()
    config.task.train = "rows.jsonl"
    config.algorithm.tolerance = 0.001
    lines = print_config(from_config_dict(config)).splitlines()
    assert [line for line in lines if line.startswith("*")] == [
        "* task.train = 'rows.jsonl'    # default: ''",
        "* algorithm.tolerance = 0.001    # default: 0.0037",
    ]
    assert len(lines) == len(setting_names()) and "  algorithm.multiplier = 0.1" in lines


def test_a_word_is_looked_up_in_the_names_then_in_the_descriptions():
    def names(word):
        return re.findall(r"--config\.([\w.]+)=", settings_text(word))

    assert names("lr") == ["optimizer.learning_rate"]
    assert names("algorithm.tolerance") == [
        "algorithm.tolerance",
        "algorithm.tolerance_steps",
        "algorithm.tolerance_factor",
    ]
    assert names("vespo") == ["algorithm.trust_region"]  # no name has it
    with pytest.raises(UserError, match="config.temprature: .* did you mean 'rollout.temperature'"):
        settings_text("temprature")
