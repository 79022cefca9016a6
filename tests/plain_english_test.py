"""Words of a private dialect, and old names, appear nowhere: the field's own words are used instead.

There are no exceptions. A word that is needed in its ordinary meaning, such as "alone", "begin" or "aside", is in the
table only within a phrase.
"""

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]

# Pattern -> what to write instead. Matched without regard to case; a space also matches a line break or an underscore.
_REPLACED = {
    r"under way": "in flight, running",
    r"st(?:and|ands|ood|anding) still": "deadlock, hang",
    r"anew": "again",
    r"rows? alone": "data-parallel",
    r"(?:whole|repeated) (?:on|in) (?:each|every|all)": "replicated",
    r"side by side": "fused",
    r"(?:puts?|putting) aside": "preempted",
    r"widen(?:s|ed|ing)?": "dequantize",
    r"(?:held|holds?|holding) (?:\w+ ){0,3}against": "compared with",
    r"(?:not|never|isn't|aren't) looked at": "ignored",
    r"lets? go of": "freed",
    r"means? nothing": "undefined",
    r"(?:not|never|can't) (?:to )?be had": "cannot be allocated, not available",
    r"to be had": "available",
    r"for ever": "forever, without a limit",
    r"(?:tells?|told|telling) of": "reports",
    r"so many": "N, the number of",
    r"whoever": "the caller",
    r"in vain": "without a result",
}
# Old names of modules, functions and constants.
_RENAMED = {
    "MOST_UNDER_WAY": "MAX_IN_FLIGHT_PROGRAMS",
    "leave_out_torch": "hide_torch",
    "prepare_memory": "keep_freed_memory",
    "give_back_freed": "release_freed_memory",
    "prepare_host": "set_cpu_devices, enable_compile_cache",
    "splits_rows_alone": "is_data_parallel",
    "on_own_rows": "shard_map_over_data",
    "_apart": "a name that states what is separated",
    "tell_of": "on_finished",
    "_Kept": "_QueuedCache",
    "parallel/host": "parallel/cpu",
    "parallel.host": "parallel.cpu",
    "dcmdp_jax/memory": "dcmdp_jax/process_memory",
    "dcmdp_jax.memory": "dcmdp_jax.process_memory",
    "tasks/answers": "rewards/math/answers",
    "tasks.answers": "rewards.math.answers",
}
# First words of a docstring that is no sentence: it answers a question that nobody asked.
_BAD_STARTS = {"Of", "What", "How", "Which", "From", "Who"}


def _texts():
    folders = ("dcmdp_jax", "bin", "configs", "examples", "benchmarks", "docs", "tests")
    paths = [path for folder in folders for path in (_ROOT / folder).rglob("*")]
    paths += [*_ROOT.glob("*.md"), _ROOT / "Makefile", _ROOT / ".ci" / "run", _ROOT / "pyproject.toml"]
    for path in paths:
        text = path.suffix in (".py", ".md", ".html", ".jinja", ".toml") or path.name in ("Makefile", "run")
        if path != Path(__file__).resolve() and text and path.is_file():
            yield path.relative_to(_ROOT).as_posix(), path.read_text(encoding="utf-8")


_TEXTS = dict(_texts())


def _findings(pattern):
    for name, text in _TEXTS.items():
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{name}:{line}: {text.splitlines()[line - 1].strip()[:160]}"


@pytest.mark.parametrize("words", _REPLACED)
def test_words_of_the_right_column_appear_nowhere(words):
    pattern = re.compile(r"(?<![a-z])" + words.replace(" ", r"(?:[_ ]|\s*\n[ #>]*)") + r"(?![a-z])", re.IGNORECASE)
    assert not list(_findings(pattern)), f"write: {_REPLACED[words]}"


@pytest.mark.parametrize("name", _RENAMED)
def test_old_names_appear_nowhere(name):
    pattern = re.compile(rf"(?<![\w/.]){re.escape(name)}(?!\w)|(?<=[\w]/){re.escape(name)}(?!\w)")
    assert not list(_findings(pattern)), f"it is called: {_RENAMED[name]}"


def test_a_docstring_starts_with_a_noun_phrase_or_a_verb():
    found = []
    for name, text in _TEXTS.items():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                docstring = ast.get_docstring(node) if isinstance(node, kinds) else None
                if docstring and docstring.split()[0] in _BAD_STARTS:
                    found.append(f"{name}:{getattr(node, 'lineno', 1)}: {docstring.splitlines()[0]}")
    assert not found


def test_no_two_classes_share_a_name():
    places = {}
    for name, text in _TEXTS.items():
        if name.startswith(("dcmdp_jax/", "bin/")) and name.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
