"""The ceilings of size, which a file beside the checkout states: no commit of this project can
raise them.
"""

import functools
import json
from pathlib import Path

import pytest

from docs.rooms import code_lines

_ROOT = Path(__file__).resolve().parents[1]
_CEILINGS = _ROOT.parent / "shared" / "ceilings.json"
_WHEN = "end"


@pytest.fixture
def ceilings():
    if not _CEILINGS.exists():
        pytest.skip("the file of ceilings is not beside this checkout")
    return json.loads(_CEILINGS.read_text(encoding="utf-8"))[_WHEN]


@functools.cache
def _sizes():
    files = [path for top in ("dcmdp_jax", "bin") for path in sorted((_ROOT / top).rglob("*.py"))]
    return {path.relative_to(_ROOT): code_lines(path.read_text(encoding="utf-8")) for path in files}


def test_code_lines_by_hand():
    # The docstring, the comment and the blank line are none; a call over two lines is two.
    text = (
        '"""Docstring."""\n\n# comment\nx = f(\n    1)\ndef g():\n    """Of two\n    '
        'lines."""\n    return x\n'
    )
    assert code_lines(text) == 4


def test_package_and_commands_stay_below_the_ceiling(ceilings):
    sizes = _sizes()
    total = sum(sizes.values())
    allowed = ceilings["total"]
    assert total <= allowed, (
        f"{total} lines of code, {allowed} allowed: delete as many as are added"
    )
    for room, most in ceilings.get("rooms", {}).items():
        # `commands` has the scripts of bin/ too, `beside` the modules that are in no room.
        own = [size for path, size in sizes.items() if _room(path) == room]
        assert sum(own) <= most, f"{room}: {sum(own)} lines of code, {most} allowed"


def _room(path):
    if path.parts[0] == "bin":
        return "commands"
    return path.parts[1] if len(path.parts) > 2 else "beside"


def test_no_file_is_longer_than_the_ceiling(ceilings):
    longest = {path: size for path, size in _sizes().items() if size > ceilings["file_lines"]}
    assert not longest, f"more than {ceilings['file_lines']} lines of code: {longest}"


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
