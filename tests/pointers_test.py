"""Names in back quotes, in docstrings, comments and pages, stand for something that exists."""

import ast
import functools
import re
import tokenize
from collections import defaultdict
from pathlib import Path

from dcmdp_jax.config.settings import Config
from dcmdp_jax.fields import declared

_ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("dcmdp_jax", "bin", "configs", "tests", "benchmarks", "research", "examples", "docs")
_QUOTED = re.compile(r"(?<!`)`([A-Za-z_][\w/-]*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`(?!`)")
_FILE = re.compile(r"\.(?:py|pyi|md|toml|sh)$")

# Roots of names that other packages define, and objects of other frameworks that pages name.
_LIBRARIES = set(
    """gguf jax jnp lax nnx numpy np optax os pyarrow ray sys time tokamax torch typing vllm transformers
    figure DataProto Figure GRPOTrainer LLM LlamaModel Logger RayPPOTrainer TokenExporter
    orchestrator generator reward_model lm_head MODULE""".split()
)
# Settings and modules of others whose first word is one of ours: verl's, and Qwen3.5's weights.
_NAMES_OF_OTHERS = {"algorithm.rollout_correction", "model.language_model"}
# Files of a reader, or of another framework, that pages and docstrings name.
_FILES_OF_OTHERS = set(
    "grpo.py my_engine.py my_remedies.py my_reward.py random.py resource.py x.toml".split()
)


@functools.cache
def _tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _sources():
    return [path for folder in _FOLDERS for path in sorted((_ROOT / folder).rglob("*.py"))]


@functools.cache
def _modules():
    """The dotted name of each module, from the top of the checkout -> its file."""
    names = {}
    for path in _sources():
        parts = path.relative_to(_ROOT).with_suffix("").parts
        names[".".join(part for part in parts if part != "__init__")] = path
    return names


@functools.cache
def _names(path):
    """What a file defines, takes as an argument, or imports."""
    names = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[-1])
    return names


@functools.cache
def _members():
    """Class -> names of its methods, fields and attributes, of all classes that have the name."""
    members = defaultdict(set)
    for path in _sources():
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    members[node.name].add(inner.name)
                elif isinstance(inner, ast.Name):
                    members[node.name].add(inner.id)
                elif isinstance(inner, ast.Attribute):
                    members[node.name].add(inner.attr)
    return members


@functools.cache
def _sections():
    """Names of settings and of their sections."""
    names = set()
    for name in declared(Config):
        parts = name.split(".")
        names |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return names


def _is_file(name):
    return any(path == name or path.endswith(f"/{name}") for path in _paths())


@functools.cache
def _paths():
    skipped = {".git", ".venv", "build", "runs", "__pycache__"}
    paths = (path.relative_to(_ROOT) for path in _ROOT.rglob("*"))
    return [path.as_posix() for path in paths if not skipped & set(path.parts)]


def _resolves(name, local_names):
    """Whether a dotted name is a file, a module, what a module or class has, a setting, or of a
    value in sight.
    """
    if _FILE.search(name):
        return _is_file(name) or name in _FILES_OF_OTHERS
    dotted = name.replace("/", ".")
    parts = dotted.split(".")
    if parts[0] in _LIBRARIES or dotted in _sections() or dotted in _NAMES_OF_OTHERS:
        return True
    if parts[0] == "dcmdp_jax" and parts[1] in _names(_ROOT / "dcmdp_jax" / "__init__.pyi"):
        return True
    if parts[0] in _members():
        return parts[1] in _members()[parts[0]]

    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        paths = [path for known, path in _modules().items() if f".{known}".endswith(f".{module}")]
        if paths and (end == len(parts) or any(parts[end] in _names(path) for path in paths)):
            return True
    folders = "/".join(parts)
    if any(path == folders or path.endswith(f"/{folders}") for path in _paths()):
        return True
    # A data file's name has a suffix that is no Python; an attribute belongs to a value of the same
    # file.
    return (
        "/" in name or parts[-1].islower() and (parts[0] in local_names or parts[-1] in _SUFFIXES)
    )


_SUFFIXES = set(
    "json jsonl html parquet safetensors csv txt log lock js gz yaml jinja previous".split()
)


def _dead(text, local_names):
    return [name for name in _QUOTED.findall(text) if not _resolves(name, local_names)]


def _prose(path):
    """Docstrings and comments of a file."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def test_a_pointer_to_a_module_that_is_gone_is_found():
    # There is no module `numerics`; `as_float` is defined in algorithm/stats.py, `stats.Mean` is a
    # class of it.
    assert _dead("see `numerics.as_float`, `stats.as_float`, `stats.Mean`", set()) == [
        "numerics.as_float"
    ]
    assert _dead("`gone_module.py`, `training/step.py`, `step.py`", set()) == ["gone_module.py"]
    # A setting, and an attribute of a value that the file has.
    assert _dead("`rollout.precision`, `rollout.nothing`, `batch.rows`", {"batch"}) == [
        "rollout.nothing"
    ]


def test_docstrings_and_comments_name_what_exists():
    dead = []
    for path in _sources():
        if path == Path(__file__):
            continue
        for text in _prose(path):
            dead += [f"{path.relative_to(_ROOT)}: {name}" for name in _dead(text, _names(path))]
    assert not dead, "\n".join(dead)


def test_pages_name_what_exists():
    dead = []
    for path in sorted(_ROOT.rglob("*.md")):
        if {".venv", "build", "runs"} & set(path.relative_to(_ROOT).parts):
            continue
        text = path.read_text(encoding="utf-8")
        in_code = set(re.findall(r"\w+", " ".join(re.findall(r"```.*?```", text, re.DOTALL))))
        dead += [f"{path.relative_to(_ROOT)}: {name}" for name in _dead(text, in_code)]
    assert not dead, "\n".join(dead)
