"""lambda computed again from a run's own metrics, by hand; wrong settings and gaps are found."""

import dataclasses

import numpy as np
import pytest

from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.errors import UserError
from research.replay import broken_rule, check_replay

_C = 0.25
_LAMBDAS = [0.5, 0.75, 0.625, 1.0]
_DELTA = [0.5, 0.125, 0.75, 0.25]
"""eta 1, c 0.25, cap 1: 0.5 + 0.25 = 0.75; 0.75 - 0.125 = 0.625; 0.625 + 0.5 is cut to 1."""


def _settings(**changes):
    usual = {"multiplier": 0.5, "tolerance": _C, "dual_learning_rate": 1.0, "multiplier_max": 1.0}
    algorithm = dataclasses.asdict(AlgorithmSettings(**(usual | changes)))
    return {f"algorithm.{name}": value for name, value in algorithm.items()}


def _series(lambdas=_LAMBDAS, delta=_DELTA, c=None):
    steps = np.arange(1, len(lambdas) + 1)
    columns = {
        "dual/multiplier": lambdas,
        "discrepancy/mean": delta,
        "dual/tolerance": c or [_C] * len(lambdas),
    }
    return {name: (steps, np.array(values, np.float64)) for name, values in columns.items()}


def test_the_settings_that_ran_give_the_recorded_multiplier():
    assert list(broken_rule(_series(), _settings())) == []
    with_exact_digits = _series([0.1, 0.1 + 50 * (0.0074 - 0.0037)], [0.0074, 0.0], [0.0037] * 2)
    float32 = {
        name: (steps, values.astype(np.float32))
        for name, (steps, values) in with_exact_digits.items()
    }
    assert (
        list(
            broken_rule(
                float32, _settings(multiplier=0.1, tolerance=0.0037, dual_learning_rate=50.0)
            )
        )
        == []
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dual_learning_rate": 50.0}, "lambda is 0.75 at step 2, the settings give 1.0"),
        ({"dual_learning_rate": 0.0}, "lambda is 0.75 at step 2, the settings give 0.5"),
        ({"tolerance": 0.125}, "c is 0.25 at step 1, the settings give 0.125"),
        ({"multiplier": 0.125}, "lambda begins at 0.5, the settings give 0.125"),
        ({"multiplier_max": 2.0}, "lambda is 1.0 at step 4, the settings give 1.125"),
        ({"method": "grpo"}, "lambda is 0.5 at step 1, the settings give 0.0"),
    ],
)
def test_other_settings_are_found(changes, said):
    assert next(broken_rule(_series(), _settings(**changes))) == said


def test_lambda_rests_while_c_is_measured_then_c_is_the_median_above_the_floor():
    """delta 0.5 and 0.125 with a floor of 0.25 in step 1: the median of 0.5 and 0.25, times 2, is
    0.75.
    """
    measured = {"tolerance_steps": 2, "tolerance_factor": 2.0}
    series = _series([0.5, 0.5, 0.5, 0.75], [0.5, 0.125, 1.0, 0.0], [_C, _C, 0.75, 0.75])
    series["mismatch/noise_floor"] = np.array([1]), np.array([0.25])
    assert list(broken_rule(series, _settings(**measured))) == []
    assert "c is 0.75 at step 3, the settings give 0.25" in list(broken_rule(series, _settings()))


def test_kept_runs_of_other_settings_and_gaps_are_refused_in_one_line():
    runs = {"dc_grpo": {3: _series()}}
    check_replay(runs, {"dc_grpo": _settings()})
    said = r"^arm 'dc_grpo', seed 3: lambda is 0.75 at step 2, the settings give 1.0; another run has this name,"
    with pytest.raises(UserError, match=said):
        check_replay(runs, {"dc_grpo": _settings(dual_learning_rate=50.0)})
    steps, values = runs["dc_grpo"][3]["discrepancy/mean"]
    runs["dc_grpo"][3]["discrepancy/mean"] = np.delete(steps, 1), np.delete(values, 1)
    said = (
        r"^arm 'dc_grpo', seed 3: discrepancy/mean has no step 2 of 4; a replay needs every step$"
    )
    with pytest.raises(UserError, match=said):
        check_replay(runs, {"dc_grpo": _settings()})
    del runs["dc_grpo"][3]["discrepancy/mean"]
    with pytest.raises(UserError, match="discrepancy/mean has no step 1 of 4"):
        check_replay(runs, {"dc_grpo": _settings()})
