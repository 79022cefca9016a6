"""The metric table: complete rows, each found in the file of the function that it names, and the
page made from it.
"""

import ast
import re
from pathlib import Path

import pytest

from dcmdp_jax.observe.metric_names import METRICS, STEP_PHASES, metric_of
from docs import metrics

_PACKAGE = Path(__file__).resolve().parents[2] / "dcmdp_jax"


def test_every_phase_has_its_time():
    of_overlap = {"time/wait", "time/engine_idle", "time/overlap"}
    assert {f"time/{phase}" for phase in STEP_PHASES} | {
        "time/total",
        "time/clock",
    } | of_overlap == {name for name in METRICS if "time/" in name[:5]}


def test_every_row_is_complete_and_under_its_own_name():
    for name, metric in METRICS.items():
        assert (
            metric.name == name
            and metric.unit
            and metric.description
            and "\n" not in metric.description
        )


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_found_by_its_name_in_the_file_of_the_function_that_makes_it(name):
    file, _, function = METRICS[name].made_by.partition(":")
    text = (_PACKAGE / file).read_text(encoding="utf-8")
    nodes = ast.parse(text).body
    for word in function.split("."):
        [node] = [node for node in nodes if word in _names(node)]
        nodes = getattr(node, "body", [])
    # A name of the user's is filled in: `reward/{reward}/mean` is f"reward/{name}/mean".
    pattern = re.sub(r"\\{\w+\\}", r'[^"]+', re.escape(name))
    assert re.search(f'"{pattern}"', text), METRICS[name].made_by


def _names(node):
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [each for target in targets for each in getattr(target, "elts", [target])]
    return {getattr(node, "name", None), *(getattr(each, "id", None) for each in names)}


def test_the_page_is_written_from_the_table():
    assert metrics.PAGE.read_text(encoding="utf-8") == metrics.page(), "python -m docs.metrics"


@pytest.mark.parametrize(
    ("name", "unit", "description"),
    [
        (
            "eval/arithmetic/avg@8",
            "reward",
            "validation arithmetic: mean reward over 8 samples a problem",
        ),
        (
            "eval/math/hard/pass@32",
            "fraction",
            "validation math/hard: problems solved by at least one of 32 samples",
        ),
        (
            "eval_reward/a/own",
            "reward",
            "validation a/own: mean of this one of several rewards, before its weight",
        ),
        (
            "logged/len/mean",
            "as logged",
            "len/mean: what reward functions logged under this name (log_metric), mean of the step",
        ),
        ("reward/source/a/mean", "reward", "mean reward of data source a"),
        (
            "reward/own/failed",
            "completions",
            "completions that the reward own failed on (rewards.on_error)",
        ),
        (
            "discrepancy/source/a/b/mean",
            "discrepancy",
            "mean over the completions of data source a/b, each counted once",
        ),
        ("eval/avg@8", "", ""),
        ("other/thing", "", ""),
    ],
)
def test_names_outside_the_table(name, unit, description):
    found = metric_of(name)
    assert (found.name, found.unit, found.description) == (name, unit, description)
