"""The ceilings of size and style, which a file beside the checkout states and another measures.

No commit of this project can raise them. Tokens are the currency, not lines.
"""

import json
import runpy
from pathlib import Path

import pytest

from docs.rooms import code_tokens

_ROOT = Path(__file__).resolve().parents[1]
_SHARED = _ROOT.parent / "shared"
_CEILINGS = _SHARED / "ceilings.json"
_MEASURE = _SHARED / "code_size.py"
_STAGE = "readable"
_HELD = (
    "tokens",
    "wide",
    "vague",
    "packed",
    "pairs",
    "triples",
    "walrus",
    "conditional",
    "comprehension",
    "tuples",
    "skips",
    "unbroken",
)


@pytest.fixture(scope="module")
def ceilings():
    if not _CEILINGS.exists():
        pytest.skip("the file of ceilings is not beside this checkout")
    return json.loads(_CEILINGS.read_text(encoding="utf-8"))[_STAGE]


@pytest.fixture(scope="module")
def code_size():
    """The measure, as a dict of its names."""
    if not _MEASURE.exists():
        pytest.skip("the measure of code is not beside this checkout")
    return runpy.run_path(str(_MEASURE))


@pytest.fixture(scope="module")
def counts(code_size):
    """Kind -> its number in the package and its commands."""
    return code_size["by_room"]([str(_ROOT / "dcmdp_jax"), str(_ROOT / "bin")])["all"]


def test_code_tokens_by_hand():
    # x = f ( 1 ) and def g ( ) : return x: six and seven. Docstrings and comments are none.
    text = (
        '"""Docstring."""\n\n# comment\nx = f(\n    1)\ndef g():\n    """Of two\n    '
        'lines."""\n    return x\n'
    )
    assert code_tokens(text) == 13


def test_the_page_of_rooms_counts_tokens_as_the_measure_does(code_size):
    for name in ("training/step.py", "algorithm/losses.py", "observe/report.py"):
        text = (_ROOT / "dcmdp_jax" / name).read_text(encoding="utf-8")
        assert code_tokens(text) == code_size["measure"](text)["tokens"], name


@pytest.mark.parametrize("kind", _HELD)
def test_package_and_commands_stay_below_the_ceiling(kind, ceilings, counts):
    assert counts[kind] <= ceilings[kind]


def test_a_code_line_holds_few_tokens(ceilings, counts):
    assert counts["tokens"] / counts["lines"] <= ceilings["per_line"]


def test_markdown_stays_below_the_ceiling(ceilings):
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in _markdown())
    assert words <= ceilings["markdown_words"], (
        f"{words} words of Markdown: cut as many as are added"
    )


def _markdown():
    """Pages of the project, not of what was installed, built or run in the checkout."""
    for path in _ROOT.rglob("*.md"):
        parts = path.relative_to(_ROOT).parts
        if not parts[0].startswith(".") and parts[0] not in ("build", "runs", "models"):
            yield path
