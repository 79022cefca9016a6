"""docs/algorithm.md: its snippet prints the numbers written beside it, and the code it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "algorithm.md"


def test_snippet_prints_what_the_page_says(capsys):
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    exec(compile(code, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    written = re.findall(r"^print\(.*\)\s+# (\[[^]]*\]|[\d.]+)", code, re.MULTILINE)
    numbers = [float(x) for line in written for x in re.findall(r"-?\d+\.\d+", line)]
    shown = [float(x) for x in re.findall(r"-?\d+\.\d+", printed)]
    assert len(numbers) == 8
    assert shown == pytest.approx(numbers, rel=1e-6)


def test_readings_name_code_that_exists():
    readings = re.search(r"## Readings\n(.*?)\n## ", PAGE.read_text(), re.DOTALL).group(1)
    named = re.findall(r"`([\w/]+\.py): ([\w.]+)`", readings)
    assert len(named) >= readings.count("\nCode: ") > 10
    for path, name in named:
        assert re.search(rf"\bdef {name}\(", (ROOT / path).read_text()), f"{path}: {name}"
