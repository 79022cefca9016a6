"""The words and names that the style guide replaces appear nowhere: the field's own words are used instead.

A word may stand where it has its ordinary meaning; `_ALLOWED` names every such line by what it says.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_ITSELF = Path(__file__).relative_to(_ROOT).as_posix()

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
    "_apart": "a name that says what is separated",
    "tell_of": "on_finished",
    "_Kept": "a name that says what is kept",
    "parallel/host": "parallel/cpu",
    "parallel.host": "parallel.cpu",
    "dcmdp_jax/memory": "dcmdp_jax/process_memory",
    "dcmdp_jax.memory": "dcmdp_jax.process_memory",
    "vllm/server.py": "http_client",
    "vllm.server": "http_client",
    "vllm/client.py": "vllm/engine.py",
    "vllm.client": "vllm.engine",
    "tasks/answers": "rewards/math/answers",
    "tasks.answers": "rewards.math.answers",
    "vllm/answers": "replies",
    "vllm.answers": "replies",
}
# First words of a docstring that is no sentence: it answers a question that nobody asked.
_BAD_STARTS = {"Of", "What", "How", "Which", "From", "Who"}


def _tracked(*patterns):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=_ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    return [name for name in listed if name != _ITSELF and (_ROOT / name).is_file()]


_TEXTS = {name: (_ROOT / name).read_text() for name in _tracked("*.py", "*.md", "*.html", "Makefile", ".ci/run")}


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
