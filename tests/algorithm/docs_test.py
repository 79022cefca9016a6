"""The executed pages print the numbers written beside them, and the code they name exists.

The pages are examples/one_step_by_hand.py, docs/losses.md and docs/algorithm.md.
"""

import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "algorithm.md"


def test_one_step_by_hand_prints_what_it_says(capsys):
    code = (ROOT / "examples" / "one_step_by_hand.py").read_text()
    exec(compile(code, "one_step_by_hand.py", "exec"), {})
    printed = capsys.readouterr().out
    written = re.findall(r"^print\(.*\)\s+# (\[[^]]*\]|[\d.]+)", code, re.MULTILINE)
    numbers = [float(x) for line in written for x in re.findall(r"-?\d+\.\d+", line)]
    shown = [float(x) for x in re.findall(r"-?\d+\.\d+", printed)]
    assert len(numbers) == 8
    assert shown == pytest.approx(numbers, rel=1e-6)


def test_the_first_example_prints_what_the_readme_says(capsys):
    page = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    exec(compile(code, "README.md", "exec"), {})
    shown = [float(word) for word in capsys.readouterr().out.split()]
    # By hand: d = |e^-0.7 - e^-0.9| = 0.0900156 and |e^-1.6 - e^-1.2| = 0.0992977, their mean over
    # four tokens 0.0473283. A = ±0.7071058; -mean over completions of the mean of A - 0.1 d
    # = (0.00900156 + 0.00992977) / 2 / 2 = 0.0047328. lambda = 0.1 + 0.0473283 - 0.0037 = 0.1436283.
    assert shown == pytest.approx([0.0047328, 0.0473283, 0.1436283], abs=1e-7)
    written = re.findall(r"# ([\d. ]+)$", code, re.MULTILINE)
    assert [float(word) for line in written for word in line.split()] == pytest.approx(
        shown, abs=2e-7
    )


def test_every_number_of_the_losses_page_is_computed(capsys):
    """Beside a print stands what it prints.

    A number of the text with six decimals or more is a value of the page.
    """
    page = (ROOT / "docs" / "losses.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    lines = 0
    for code in blocks:
        exec(compile(code, "docs/losses.md", "exec"), names)
        printed = capsys.readouterr().out.replace("\n", " ")
        written = " ".join(re.findall(r"^print\(.*?\)  # (.*)$", code, re.MULTILINE))
        assert len(re.findall(r"^print", code, re.MULTILINE)) == len(
            re.findall(r"^print.*  # ", code, re.MULTILINE)
        )
        assert re.findall("True|False", printed) == re.findall("True|False", written)
        numbers, shown = (
            [float(x) for x in re.findall(r"-?\d+\.\d*(?:e-?\d+)?", text)]
            for text in (written, printed)
        )
        assert shown == pytest.approx(numbers, rel=0, abs=2e-7), code
        lines += len(numbers)
    assert len(blocks) == 7 and lines > 30
    mask = names["mask"]
    objective = np.asarray(names["objective"]) * names["mask"]
    values = [names["advantages"], names["penalized"], objective, objective.sum(1) / mask.sum(1)]
    values += [names[name] for name in ("gradient", "mean_delta", "multiplier", "loss")]
    values += [np.sqrt(0.5), np.sqrt(2.0), 1e-6]
    values = np.concatenate([np.ravel(x) for x in values])
    prose = re.sub(r"```python\n.*?```", "", page, flags=re.DOTALL)
    found = [float(x) for x in re.findall(r"-?\d+\.\d{6,}", prose)]
    assert len(found) > 30
    assert [x for x in found if np.abs(np.abs(values) - abs(x)).min() > 2e-7] == []
    assert float(np.mean(objective.sum(1) / mask.sum(1))) == pytest.approx(
        -float(names["loss"]), abs=1e-7
    )


def test_interpretations_name_code_that_exists():
    readings = re.search(r"## Interpretations\n(.*?)\n## ", PAGE.read_text(), re.DOTALL).group(1)
    named = re.findall(r"`([\w/]+\.py): ([\w.]+)`", readings)
    assert len(named) >= readings.count("\nCode: ") > 10
    for path, name in named:
        assert re.search(rf"\bdef {name}\(", (ROOT / path).read_text()), f"{path}: {name}"
