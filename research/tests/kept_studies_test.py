"""Every arm of every kept study is what its table says, by its own metrics."""

import numpy as np
import pytest

from dcmdp_jax.errors import UserError
from research.kept_studies import ARMS, KEPT, STUDIES, WITHOUT_A_STUDY, arms_of, arms_text, given
from research.replay import check_replay
from research.studies.results import read_kept_metrics
from research.studies.sweep import arm_values, load_study

_NAMES = sorted(path.name.partition(".")[0] for path in KEPT.glob("*.jsonl.gz"))


def test_every_kept_study_is_listed():
    assert sorted({*STUDIES, *WITHOUT_A_STUDY}) == _NAMES


@pytest.mark.parametrize("name", _NAMES)
def test_the_multiplier_of_every_kept_run_is_that_of_its_arms_table(name):
    runs = read_kept_metrics(KEPT / f"{name}.jsonl.gz", None)
    values = {label: arm_values(arm, given(name)) for label, arm in arms_of(name).items()}
    check_replay(runs, values)
    for label, seeds in runs.items():
        for series in seeds.values():
            assert int(series["reward/mean"][0][-1]) == values[label]["training.steps"], label


@pytest.mark.parametrize(("name", "prefix"), [("long_completions", ""), ("regimes", "int3_")])
def test_fifteen_runs_under_the_papers_name_would_be_refused(name, prefix):
    """As the metrics were kept until 2026-11-27: runs of eta 50 as the arm `dc_grpo`, whose eta is
    1.
    """
    runs = read_kept_metrics(KEPT / f"{name}.jsonl.gz", None)[f"{prefix}dc_grpo_eta50"]
    papers = arm_values(load_study(STUDIES[name]).arms[f"{prefix}dc_grpo"])
    for seed, series in runs.items():
        with pytest.raises(
            UserError,
            match=f"arm 'dc_grpo', seed {seed}: lambda is .* at step 2, the settings give",
        ):
            check_replay({"dc_grpo": {seed: series}}, {"dc_grpo": papers})


def test_a_wrong_eta_or_c_is_found_in_every_kept_run_that_ascends():
    """eta a hundredth larger, c a hundredth smaller."""
    seen = 0
    for name in _NAMES:
        arms = arms_of(name)
        for label, seeds in read_kept_metrics(KEPT / f"{name}.jsonl.gz", None).items():
            values = arm_values(arms[label], given(name))
            for seed, series in seeds.items():
                lambdas = series["dual/multiplier"][1]
                inside = (lambdas[1:] > 0) & (lambdas[1:] < values["algorithm.multiplier_max"])
                if (np.diff(lambdas) != 0)[inside].any():
                    for setting, factor in (("dual_learning_rate", 1.01), ("tolerance", 0.99)):
                        other = values | {
                            f"algorithm.{setting}": factor * values[f"algorithm.{setting}"]
                        }
                        if setting == "tolerance" and values["algorithm.tolerance_steps"]:
                            continue
                        with pytest.raises(UserError, match=f"arm '{label}', seed {seed}"):
                            check_replay({label: {seed: series}}, {label: other})
                        seen += 1
    assert seen > 150


def test_the_table_of_arms_is_that_of_the_resolved_settings():
    assert ARMS.read_text(encoding="utf-8") == arms_text(), "python -m research.kept_studies"


def test_the_tables_say_which_eta_the_old_studies_had():
    rows = [
        line.split(" | ")
        for line in ARMS.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    eta = {row[0].strip("| `"): row[4] for row in rows}
    assert {
        name: eta[name]
        for name in ("0.5", "1.0", "1.5", "lag0_dc_grpo", "ascent_0.9", "dc_grpo_eta50")
    } == {
        "0.5": "25",
        "1.0": "50",
        "1.5": "75",
        "lag0_dc_grpo": "30",
        "ascent_0.9": "107.759",
        "dc_grpo_eta50": "50",
    }
    assert eta["ascent_token"] == "2000" and eta["int4_dc_grpo"] == "1"
    # Every arm with the paper's name that is not the paper's says in what.
    for row in rows:
        if "dc_grpo" in row[0] and row[4] != "1":
            assert "dual_learning_rate" in row[-1], row
