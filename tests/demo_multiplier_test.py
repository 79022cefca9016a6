"""The check of the demos' records sees each lie about lambda, and its sentence says what
happened.
"""

import numpy as np
import pytest

from dcmdp_jax.observe.metrics_io import without_placeholder
from dcmdp_jax.observe.report import describe_discrepancy, describe_multiplier
from research.replay import broken_rule

# c: 1.25 x the median of (0.25, 0.75 raised to its floor of 1) = 1.25 x 0.625 = 0.78125, from the
# third step on. lambda rests for two steps, then 0.125 + 2 (1 - 0.78125) = 0.5625, + 2 (0.25 -
# 0.78125) = -0.5, cut to 0.
_CONFIG = {
    "algorithm.method": "dc_grpo",
    "algorithm.budget": "mean",
    "algorithm.tolerance": 0.5,
    "algorithm.multiplier": 0.125,
    "algorithm.multiplier_max": 1.0,
    "algorithm.dual_learning_rate": 2.0,
    "algorithm.tolerance_steps": 2,
    "algorithm.tolerance_factor": 1.25,
}
_RECORD = {
    "dual/multiplier": [0.125, 0.125, 0.125, 0.5625, 0.0],
    "discrepancy/mean": [0.25, 0.75, 1.0, 0.25, 0.125],
    "dual/tolerance": [0.5, 0.5, 0.78125, 0.78125, 0.78125],
    "mismatch/noise_floor": [0.0, 1.0],
}


def _series(**changes):
    values = _RECORD | {name.replace("__", "/"): value for name, value in changes.items()}
    return {name: (np.arange(1, len(each) + 1), np.array(each)) for name, each in values.items()}


def test_a_record_that_follows_the_rule_passes():
    assert list(broken_rule(_series(), _CONFIG)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # Moved by eta (c - delta); not cut to 0; while c was measured; by one unit too much;
        # another first value.
        (
            {"dual__multiplier": [0.125, 0.125, 0.125, 0.0, 0.0]},
            "lambda is 0.0 at step 4, the settings give 0.5625",
        ),
        (
            {"dual__multiplier": [0.125, 0.125, 0.125, 0.5625, -0.5]},
            "lambda is -0.5 at step 5, the settings give 0.0",
        ),
        (
            {"dual__multiplier": [0.125, 0.0, 0.0, 0.4375, 0.0]},
            "lambda is 0.0 at step 2, the settings give 0.125",
        ),
        ({"dual__multiplier": [0.125, 0.125, 0.125, 0.562501, 0.0]}, "lambda is 0.5625010"),
        ({"dual__multiplier": [0.25, 0.25, 0.25, 0.6875, 0.0]}, "lambda begins at 0.25"),
        # The median without the floor.
        ({"dual__tolerance": [0.5, 0.5, 0.625, 0.625, 0.625]}, "c is 0.625"),
    ],
)
def test_a_record_that_breaks_the_rule_is_found(changes, said):
    assert any(line.startswith(said) for line in broken_rule(_series(**changes), _CONFIG))


def test_the_verdict_says_where_lambda_and_the_discrepancy_went():
    # Over c = 0.78125 at step 3 alone, of the three that have it; c was measured on the first two.
    series = without_placeholder(_series(), 2)
    assert describe_multiplier(series) == "from 0.125 to 0, peak 0.5625 at step 4"
    assert (
        describe_discrepancy(series)
        == "from 0.25 to 0.125 (first and last step); above the tolerance c in 1 of 3 steps"
    )
    constant = {"dual/multiplier": (np.arange(3), np.full(3, 0.5))}
    assert describe_multiplier(constant) == "stayed at 0.5"
    assert describe_multiplier({}) == describe_discrepancy({}) == ""
