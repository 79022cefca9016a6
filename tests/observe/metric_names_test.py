"""The metric table."""

import pytest

from dcmdp_jax.observe.metric_names import METRICS, PHASES, describe


def test_every_phase_has_its_time():
    assert {f"time/{phase}" for phase in PHASES} | {"time/total"} == {name for name in METRICS if "time/" in name[:5]}


def test_every_row_is_complete_and_under_its_own_name():
    for name, metric in METRICS.items():
        assert metric.name == name and metric.unit and metric.description and "\n" not in metric.description


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("eval/arithmetic/avg@8", "held-out arithmetic: mean reward over 8 samples a problem"),
        ("eval/math/hard/pass@32", "held-out math/hard: problems solved by at least one of 32 samples"),
        ("eval/avg@8", ""),
        ("other/thing", ""),
    ],
)
def test_names_outside_the_table(name, description):
    assert describe(name) == (name, "fraction" if description else "", description)
