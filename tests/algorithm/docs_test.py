"""The snippet of docs/algorithm.md runs and gives the numbers written beside it."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithm.md"


def test_snippet_prints_what_the_page_says(capsys):
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    exec(compile(code, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    written = re.findall(r"^print\(.*\)\s+# (\[[^]]*\]|[\d.]+)", code, re.MULTILINE)
    numbers = [float(x) for line in written for x in re.findall(r"-?\d+\.\d+", line)]
    shown = [float(x) for x in re.findall(r"-?\d+\.\d+", printed)]
    assert len(numbers) == 8
    assert shown == pytest.approx(numbers, rel=1e-6)
