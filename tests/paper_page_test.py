"""docs/paper.md names every equation, table and figure of the paper, and functions and commands
that exist.
"""

import importlib
import math
import re
import shlex
from pathlib import Path

import pytest

from configs import qwen3_8b, qwen3_30b_a3b
from dcmdp_jax.commands import evaluate
from dcmdp_jax.commands.flags import parse
from dcmdp_jax.config.load import from_config_dict, to_saved
from research.studies import sweep
from tests.support.each import check_each

_ROOT = Path(__file__).resolve().parents[1]
_PAGE = (_ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
_THEORY = (_ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
_TEX = _ROOT.parent / "shared" / "paper" / "dcmdp.tex"
_COMMANDS = re.findall(
    r"^    ((?:dcmdp|python -m research).*)$", f"{_PAGE}\n{_THEORY}", re.M
) + re.findall(r"`(dcmdp [a-z]+ --[^`]*|python -m research\.[^`]*)`", f"{_PAGE}\n{_THEORY}")


def _first_cells(page):
    return [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]


def _numbers(kind):
    """The numbers that the page's first columns have for `Eq.`, `Table` or `Figure`, in order."""
    tables = _PAGE[: _PAGE.index("## Numbers the paper reports")]
    return [int(n) for cell in _first_cells(tables) for n in re.findall(rf"^{kind} (\d+)", cell)]


def test_every_equation_table_and_figure_has_its_row():
    assert _numbers(r"Eq\.") == list(range(1, 21))
    assert sorted(set(_numbers("Table"))) == list(range(1, 7))
    assert sorted(set(_numbers("Figure"))) == list(range(1, 8))
    assert _PAGE.count("| Algorithm 1 |") == 1


@pytest.mark.skipif(not _TEX.is_file(), reason="the paper's source is not beside this checkout")
def test_the_counts_are_those_of_the_papers_source():
    tex = re.sub(r"(?<!\\)%.*", "", _TEX.read_text(encoding="utf-8"))
    bodies = re.findall(r"\\begin\{(equation|align)\}(.*?)\\end\{\1\}", tex, re.S)
    # An equation has one number; an align one for each line.
    numbers = [
        1 if kind == "equation" else len(re.findall(r"\\\\(?:\s|\[)", f"{body.strip()}\n")) + 1
        for kind, body in bodies
    ]
    assert sum(numbers) == max(_numbers(r"Eq\."))
    assert len(re.findall(r"\\begin\{table\*?\}", tex)) == max(_numbers("Table"))
    assert len(re.findall(r"\\begin\{(?:wrap)?figure\}", tex)) == max(_numbers("Figure"))


def test_named_functions_exist():
    for name in set(re.findall(r"`(dcmdp_jax\.[\w.]+\.\w+)`", f"{_PAGE}\n{_THEORY}")):
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function)), name


def test_the_constants_are_those_of_the_configs():
    table = _PAGE[_PAGE.index("## Constants") : _PAGE.index("## Numbers the paper reports")]
    cells = [
        [cell.strip() for cell in line.split("|")[2:5]]
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    dense, experts = (
        to_saved(from_config_dict(file.get_config().to_dict()))
        for file in (qwen3_8b, qwen3_30b_a3b)
    )
    checked = 0
    for names, *values in cells:
        names = re.findall(r"`([\w.]+)`", names)
        full = [
            name if not name.startswith(".") else names[0].partition(".")[0] + name
            for name in names
        ]
        for saved, value in zip(
            (dense, experts), (values[0], values[1].replace("the same", values[0])), strict=True
        ):
            words = value.replace("none: ", "").replace(",", "" if len(names) == 1 else " ").split()
            for name, word in zip(full, words, strict=False):
                section, _, setting = name.partition(".")
                known = (
                    saved[section][setting]
                    if section in ("algorithm", "training", "optimizer")
                    else None
                )
                known = saved["rollout"].get(setting) if section == "rollout" else known
                if name == "algorithm.trust_region":
                    known = float(re.search(r"high=([\d.]+)", known)[1])
                if known is not None:
                    assert word == known if isinstance(known, str) else float(word) == known, (
                        name,
                        word,
                        known,
                    )
                    checked += 1
    assert checked >= 2 * 17


def test_named_commands_are_understood(monkeypatch):
    monkeypatch.chdir(_ROOT)

    def check(command):
        # What follows two spaces describes the command.
        words = shlex.split(re.split(r"\s{2,}", command)[0].replace("python -m ", "dcmdp "))
        name = words[1]
        words = words[2:]
        if name == "research.studies":
            overrides = [word for word in words if word.startswith("--config.")]
            (study,) = [
                word.removeprefix("--study=") for word in words if word.startswith("--study=")
            ]
            assert sweep.resolve(sweep.load_study(study), Path("runs/none"), overrides)[0]
        elif name == "evaluate":
            evaluate.parse(words)
        elif name == "train":
            parse(["train", *words])
        else:
            assert (name, words) == ("research.theory", [])

    check_each(sorted(set(_COMMANDS)), check)


def test_the_reported_rows_average_to_the_papers_avg():
    rows = [
        [cell.strip() for cell in line.split("|")[3:10]]
        for line in (_ROOT / "research" / "paper_numbers.txt").read_text().splitlines()
        if re.match(r"\| Table \d.* \| \d", line)
    ]
    assert len(rows) == 15
    for row in rows:
        *scores, average = map(float, row)
        # Both are rounded to one decimal.
        assert math.isclose(sum(scores) / 6, average, abs_tol=0.06), row
