"""The ceilings of size and style, which a file beside the checkout states and another measures.

No commit of this project can raise them. Tokens are the currency, not lines.
"""

import ast
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
# Tokens of a code line, in a file's mean.
_MOST_IN_A_LINE = 10.5
_TABLES = {
    "dcmdp_jax/config/settings.py": "a setting with its default, unit and range is one line",
    "dcmdp_jax/engines/vllm/settings.py": "likewise",
}
_MOST_ARGUMENTS = 8
_LONG_SIGNATURES = {
    "dc_grpo_loss": "the whole method in one call, by keywords",
    "write": "a recorder's columns of one step, by keywords, in the code of other frameworks",
}


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


def _files():
    """(name, text) of each file of the package and its commands."""
    for folder in ("dcmdp_jax", "bin"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            yield path.relative_to(_ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_no_file_is_dense_but_tables(code_size):
    dense = []
    for name, text in _files():
        count = code_size["measure"](text)
        if count["tokens"] > _MOST_IN_A_LINE * count["lines"]:
            dense.append(name)
    assert dense == sorted(_TABLES)


def test_functions_take_few_arguments():
    long = []
    for _, text in _files():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
                if len(names) - (names[:1] in (["self"], ["cls"])) > _MOST_ARGUMENTS:
                    long.append(node.name)
    assert sorted(long) == sorted(_LONG_SIGNATURES)


def test_markdown_stays_below_the_ceiling(ceilings):
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in _markdown())
    assert words <= ceilings["markdown_words"], (
        f"{words} words of Markdown: cut as many as are added"
    )


def _markdown():
    """Pages that people write, not what a program writes from docstrings, or what was installed,
    built or run in the checkout.
    """
    for path in _ROOT.rglob("*.md"):
        parts = path.relative_to(_ROOT).parts
        if parts[0].startswith(".") or parts[0] in ("build", "runs", "models"):
            continue
        if parts != ("docs", "api_reference.md"):
            yield path
