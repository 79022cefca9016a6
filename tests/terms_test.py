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

# Docstrings as they are, and rules that were written before an experiment's runs.
_OTHERS = set("api_reference.md doses.md paper_regime.md".split())
# Names of settings, files and commands are words of messages too.
_NAMES = re.compile(
    r"[\w.]+[./_:][\w{][\w./:{}]*|{\w+}|--[\w.-]+|`[^`]*`|power charge voltage|charge: C coulomb"
)


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
    text = re.sub(r"```.*?```|^ {4}.*?$|`[^`]*`|{\w+}", " ", text, flags=re.DOTALL | re.MULTILINE)
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


def _without_names(text):
    return " ".join(_NAMES.sub(" ", text).split())


def test_messages_use_the_terms():
    text = (_ROOT / "tests" / "recorded" / "messages.txt").read_text(encoding="utf-8")
    assert _found(_without_names(text), _OLDER) == []


def _texts(path):
    """Strings of a module with a space, but for docstrings and remarks below a name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    remarks = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = isinstance(node, ast.Constant) and node.value
        if isinstance(text, str) and " " in text and id(node) not in remarks:
            yield text


def test_help_console_and_errors_use_the_terms():
    found = {}
    for path in sorted((_ROOT / "dcmdp_jax").rglob("*.py")):
        words = _found(_without_names(" ".join(_texts(path))), _OLDER)
        if words:
            found[path.name] = words
    assert found == {}


def test_templates_of_reports_use_the_terms():
    """Text outside of tags, expressions, scripts and styles."""
    code = r"<(script|style).*?</\1>|<!--.*?-->|<[^>]*>|{[{%#].*?[}%#]}"
    for path in sorted((_ROOT / "dcmdp_jax" / "observe" / "templates").glob("*.html")):
        text = re.sub(code, " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert _found(text, _OLDER) == [], path.name
