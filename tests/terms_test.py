"""Pages, help and messages use the field's terms: docs/glossary.md lists the older words."""

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_OLDER = {
    "penalty": r"charges?|charged|token pays|tokens? still pay",
    "weight sync": r"push(?:es|ed)? (?:of|weights)|(?:each|a|weight|last) push",
    "collapsed": r"learning ended|end(?:s|ed)? learning",
    "zero-mismatch engine": r"exact engines?",
    "logit difference": r"displacements?",
    "tolerance c": r"(?:a|the|its|no|every|this|each|other) budgets?|budgets? (?:c|of|on)",
    "decode, prefill": r"legs?",
    "top-k tokens": r"likeliest tokens",
    "mitigation": r"remed(?:y|ies)(?!\.(?:md|py))",
    "policy-loss variant": r"trust regions?",
    "variant": r"arms?(?!\.txt)",
    "experiment": r"(?<!case )(?<!to )stud(?:y|ies)(?!/)",
    "off-policy steps": r"(?:a|the|any|no|with) lag|lag of \d",
    "vLLM process": r"sidecars?",
    "checksum verification": r"fingerprints?|proven push|the proof is",
    "alert": r"alarms?",
    "SFT warm start": r"warm-up",
    "validation": r"held[ -]out",
    "graded": r"judge[sd]? (?:the|what|right|its)",
    "fake quantization": r"matched (?:precision|rounding)",
    "fixed checkpoint": r"frozen SmolLM2",
    "injected": r"planted(?!/|\.py|_test)",
    "zero-variance groups": r"all-equal groups?|groups of all-equal",
    "dual ascent": r"paper's ascent",
    "variable-length": r"ragged",
    "fixed-length": r"uniform (?:lengths?|rows?|mini)",
    "interpretation": r"our readings?",
}
"""Term -> the words that it replaced, as a pattern."""

# Written by programs from texts of the code, docstrings shown as they are, recipes of the code, and
# rules that were written before a study's runs.
_OTHERS = set(
    """settings.md metrics.md translations.md certificates.md test_long.md api.md
    api_reference.md architecture.md extending.md doses.md paper_regime.md""".split()
)
# Setting names are words of messages too.
_IN_CODE = ("alert", "mitigation", "SFT warm start", "validation", "variant", "experiment")


def _pages():
    folders = ("docs", "research", "examples", "benchmarks")
    paths = [
        *_ROOT.glob("*.md"),
        *(page for name in folders for page in (_ROOT / name).glob("*.md")),
    ]
    return [path for path in paths if path.name not in (*_OTHERS, "CHANGELOG.md")]


def _prose(text):
    """A page without code, without the targets of its links, and without the list of older words."""
    text = text.partition("\n## Older words\n")[0]
    text = re.sub(r"```.*?```|^ {4}.*?$|`[^`]*`", " ", text, flags=re.DOTALL | re.MULTILINE)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


def _found(text, terms):
    """The older words of a text, each with the term in its place."""
    return [
        (match[0], term)
        for term in terms
        for match in re.finditer(rf"(?<![\w/])(?:{_OLDER[term]})\b", text, re.IGNORECASE)
    ]


def test_an_older_word_is_found_in_prose_and_not_in_code():
    text = "An alarm, see `alarm/mismatch`.\n\n    dcmdp train   # an alarm\n\n[x](y#alarms)"
    assert _found(_prose(text), _OLDER) == [("alarm", "alert")]
    assert _found(_prose("a\n## Older words\n\n| alarm |"), _OLDER) == []


@pytest.mark.parametrize("page", _pages(), ids=lambda path: str(path.relative_to(_ROOT)))
def test_a_page_uses_the_terms_of_the_glossary(page):
    assert _found(_prose(page.read_text(encoding="utf-8")), _OLDER) == []


def test_the_glossary_has_every_term():
    glossary = (_ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert [term for term in _OLDER if term not in glossary] == []


def test_messages_use_the_terms():
    terms = [term for term in _OLDER if term not in _IN_CODE]
    text = (_ROOT / "tests" / "recorded" / "messages.txt").read_text(encoding="utf-8")
    assert _found(re.sub(r"`[^`]*`", " ", text), terms) == []


def test_help_uses_the_terms():
    """Texts of the commands: every string with a space that is no docstring."""
    terms = [term for term in _OLDER if term not in _IN_CODE]
    found = {}
    for path in sorted((_ROOT / "dcmdp_jax" / "commands").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        texts = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if " " in node.value and id(node) not in docstrings
        ]
        found[path.name] = _found(" ".join(texts), terms)
    assert {name: words for name, words in found.items() if words} == {}
