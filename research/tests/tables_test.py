"""Every table of research/ is that of the kept metrics."""

import re
from pathlib import Path

import pytest

from research.__main__ import FIGURES, IMAGES, TABLES, TEXTS
from research.kept_studies import arms_of
from research.studies.arms import algorithm_of
from research.studies.study import Arm
from research.studies.sweep import arm_values

_HERE = Path(__file__).resolve().parents[1]
_PAGES = {page.name: page.read_text(encoding="utf-8") for page in _HERE.glob("*.md")}


@pytest.mark.parametrize("name", TEXTS)
def test_a_table_is_that_of_the_kept_metrics(name):
    assert (TABLES / f"{name}.txt").read_text(encoding="utf-8") == TEXTS[name](), (
        f"python -m research {name}"
    )


def test_every_table_and_figure_is_made_by_the_command():
    assert {path.stem for path in TABLES.glob("*.txt")} == set(TEXTS) and set(FIGURES) <= set(TEXTS)
    made = {stem for make in FIGURES.values() for stem in make()}
    assert {path.stem for path in IMAGES.glob("*.png")} == made


def test_links_and_commands_of_the_pages_exist():
    for name, text in _PAGES.items():
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (_HERE / link).exists(), (name, link)
        for module in re.findall(r"python -m research\.(\w+)", text):
            assert (_HERE / f"{module}.py").exists() or (_HERE / module / "__main__.py").exists(), (
                name,
                module,
            )
        for kept in re.findall(r"`kept/(\w+\.[\w.]+)`", text):
            assert (_HERE / "kept" / kept).exists() or kept.startswith("NAME"), (name, kept)
        for of_one in re.findall(r"python -m research (\w+)", text):
            assert of_one in (*TEXTS, "NAME"), (name, of_one)


def test_the_readme_lists_every_page():
    assert set(re.findall(r"\]\((\w+\.md)\)", _PAGES["README.md"])) == set(_PAGES) - {"README.md"}


_ARMS_OF = {
    "research/long.md": "long_completions",
    "research/regimes.md": "regimes",
    "research/real.md": "smollm2",
}
_ARMS_OF["research/countdown.md"] = "countdown"
"""Pages with a table of arms, and the kept study that has them."""


def test_an_arm_that_a_page_calls_the_papers_is_the_papers():
    """Rows "| `arm` | ... the paper's ... |" against the arm's resolved settings, all of the
    algorithm's.
    """
    papers = algorithm_of(arm_values(Arm("configs/qwen3_8b.py")))
    seen = []
    for page, kept in _ARMS_OF.items():
        found = {
            label.partition("_")[2] if kept == "countdown" else label: arm
            for label, arm in arms_of(kept).items()
        }
        text = (_HERE.parent / page).read_text(encoding="utf-8")
        for label, said in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", text, re.MULTILINE):
            for eta in re.findall(r"\beta (?:= )?\**([\d.]+)", said)[:1]:
                algorithm = algorithm_of(arm_values(found[label]))
                assert float(eta.rstrip(".")) == algorithm["dual_learning_rate"], (page, label)
                differs = {name for name, value in papers.items() if algorithm[name] != value}
                assert (
                    "the paper's" not in said
                    or "said to be" in said
                    or differs == set(found[label].differs)
                ), page
                assert "dual_learning_rate" not in differs or "said to be" in said, (page, label)
                seen.append(label)
    assert seen == ["dc_grpo_eta50", "dc_grpo", "dc_grpo"]
