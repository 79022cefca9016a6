"""docs/evidence.md: its tables are those of the metrics that are kept beside it."""

import runpy
from pathlib import Path

import pytest

from dcmdp_jax.lab.studies.kept_metrics import read_kept_metrics
from dcmdp_jax.lab.studies.results import tables

_ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("name", "argument", "arms", "steps"), [("embedded", "", 9, 80), ("int4", "int4", 6, 80), ("vllm", "vllm", 7, 32)]
)
def test_the_tables_are_those_of_the_kept_metrics(name, argument, arms, steps):
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "evidence.py"))["get_study"](argument)
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / f"{name}.jsonl.gz", list(study.arms))
    assert len(runs) == arms and all(sorted(seeds) == [0, 1, 2, 3, 4] for seeds in runs.values())
    for seeds in runs.values():
        for series in seeds.values():
            assert series["reward/mean"][0].tolist() == list(range(1, steps + 1))
    page = (_ROOT / "docs" / "evidence.md").read_text()
    for block in tables(study.title, runs, study.baseline, []).split("\n\n"):
        if block.startswith("|"):
            assert block.strip() in page


@pytest.mark.parametrize(
    ("name", "study", "seeds"),
    [
        ("methods", "methods", 5),
        ("dual_learning_rate", "ablation_dual_learning_rate", 3),
        ("multiplier", "ablation_multiplier", 3),
        ("tolerance", "ablation_tolerance", 3),
    ],
)
def test_the_tables_without_strain_are_those_of_the_kept_metrics(name, study, seeds):
    made = runpy.run_path(str(_ROOT / "configs" / "studies" / f"{study}.py"))["get_study"]("")
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / f"{name}.jsonl.gz", list(made.arms))
    assert list(runs) == list(made.arms) and all(sorted(each) == list(range(seeds)) for each in runs.values())
    page = (_ROOT / "docs" / "evidence.md").read_text()
    for block in tables(made.title, runs, made.baseline, []).split("\n\n"):
        if block.startswith("|"):
            assert block.strip() in page
