"""uv.lock is of the dependencies that pyproject.toml declares, and of public files alone."""

import re
import tomllib
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def _name(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-").replace(".", "-")


def test_the_lock_is_of_the_declared_dependencies():
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    lock = tomllib.loads((_ROOT / "uv.lock").read_text())
    [own] = [package for package in lock["package"] if package["name"] == project["name"]]
    declared = {
        (_name(text), re.sub(r"^[\w.-]+(\[[\w,-]+\])?", "", text))
        for text in project["dependencies"]
    }
    for texts in project["optional-dependencies"].values():
        declared |= {(_name(text), re.sub(r"^[\w.-]+(\[[\w,-]+\])?", "", text)) for text in texts}
    declared = {pair for pair in declared if pair[0] != project["name"]}
    locked = {
        (entry["name"], entry.get("specifier", "")) for entry in own["metadata"]["requires-dist"]
    }
    locked = {pair for pair in locked if pair[0] != project["name"]}

    def plain(pairs):
        return {(name, frozenset(specifier.split(","))) for name, specifier in pairs}

    assert plain(locked) == plain(declared), (
        "uv lock --no-config --default-index https://pypi.org/simple"
    )
    assert lock["requires-python"] == project["requires-python"]


def test_the_lock_names_public_files_alone():
    found = set(re.findall(r'"(\w+://[^/"]+)', (_ROOT / "uv.lock").read_text()))
    assert found == {"https://pypi.org", "https://files.pythonhosted.org"}
