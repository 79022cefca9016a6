"""A budget that can't be met, or never binds, is refused before the first run, with what it was compared with."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from configs.base import get_config
from dcmdp_jax.config.settings import from_config_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.studies.budgets import check_budgets
from dcmdp_jax.lab.studies.study import StudyRun

_STEPS = np.arange(1, 4)


def _run(peak, floor):
    return {
        "discrepancy/mean": (_STEPS, np.array([peak, 3e-3, 2e-3])),
        "mismatch/noise_floor": (_STEPS[:1], np.array([floor])),
    }


_MEASURED = {"grpo": {0: _run(4e-3, 1e-3), 1: _run(5e-3, 5e-4)}}


def _check(**algorithm):
    raw = get_config().to_dict()
    raw["task"]["train"] = "x"
    config = from_config_dict(raw)
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, **algorithm))
    check_budgets([StudyRun("low", 0, Path("out"), ())], [config], _MEASURED, "grpo")


def test_a_budget_between_the_floor_and_the_peak_is_taken():
    _check(tolerance=0.001)
    _check(tolerance=0.005)


@pytest.mark.parametrize(
    ("tolerance", "said"),
    [
        (0.0009, "low: algorithm.tolerance=0.0009 is below the noise floor 0.001 .* choose 0.002 or more"),
        (0.0051, "low: algorithm.tolerance=0.0051 is above 0.005, the largest mean discrepancy of any step of grpo"),
    ],
)
def test_another_is_refused_and_the_line_says_which(tolerance, said):
    with pytest.raises(UserError, match=said):
        _check(tolerance=tolerance)
    _check(tolerance=tolerance, method="grpo")
    _check(tolerance=tolerance, dual_learning_rate=0.0)
    _check(tolerance=tolerance, tolerance_steps=4)


def test_a_file_without_the_baseline_is_refused():
    with pytest.raises(UserError, match="--measured: the file has no run of dc_grpo"):
        check_budgets([], [], _MEASURED, "dc_grpo")
