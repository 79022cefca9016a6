"""A study's results: one number per run, mean and interval per arm, paired differences to the baseline."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dcmdp_jax.evaluation.estimators import t_half_width
from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe.metrics_io import Series

_LAST_SHARE = 10
Table = Mapping[str, Mapping[int, Series]]
"""Arm -> seed -> the run's metrics."""


class Measure(NamedTuple):
    """One number of a finished run.

    Attributes:
        title: heading of its column, with the unit.
        value: number in the run's metrics; NaN where they have none.
    """

    title: str
    value: Callable[[Series], float]


class Estimate(NamedTuple):
    """A mean over seeds.

    Attributes:
        mean: NaN without a value.
        half_width: half of the 95% t interval; NaN with one value.
        values: seed -> value.
    """

    mean: float
    half_width: float
    values: Mapping[int, float]


def held_out(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Steps and held-out avg@K, the mean over tasks at the steps that have all."""
    scores = [points for name, points in series.items() if name.startswith("eval/") and "/avg@" in name]
    found = _at_common_steps(scores)
    return np.array(list(found), np.int64), np.array([np.mean(values) for values in found.values()])


def _at_common_steps(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[int, list[float]]:
    """Step -> the value of each curve there, for the steps that all have."""
    found = [dict(zip(*(axis.tolist() for axis in curve), strict=True)) for curve in curves]
    steps = sorted(set.intersection(*map(set, found))) if found else []
    return {step: [values[step] for values in found] for step in steps}


def recorded(series: Series, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric, empty where a run has none."""
    return series.get(name, (np.zeros(0, np.int64), np.zeros(0)))


def _last_held_out(series: Series) -> float:
    values = held_out(series)[1]
    return 100 * float(values[-1]) if len(values) else math.nan


def _last_tenth(name: str) -> Callable[[Series], float]:
    def value(series: Series) -> float:
        values = recorded(series, name)[1]
        return float(values[-max(1, len(values) // _LAST_SHARE) :].mean()) if len(values) else math.nan

    return value


def _growth(series: Series) -> float:
    values = recorded(series, "discrepancy/mean")[1]
    count = max(1, len(values) // _LAST_SHARE)
    first = float(values[:count].mean()) if len(values) else 0.0
    return float(values[-count:].mean()) / first if first > 0 else math.nan


def _share_over_tolerance(series: Series) -> float:
    if not {"discrepancy/mean", "dual/tolerance"} <= series.keys():
        return math.nan
    return 100 * float(np.mean(series["discrepancy/mean"][1] > series["dual/tolerance"][1]))


MEASURES = {
    "held_out": Measure("held-out avg@K, %", _last_held_out),
    "reward": Measure("reward, last tenth", _last_tenth("reward/mean")),
    "discrepancy": Measure("discrepancy, last tenth", _last_tenth("discrepancy/mean")),
    "growth": Measure("discrepancy, last tenth over first", _growth),
    "over_tolerance": Measure("steps over c, %", _share_over_tolerance),
    "multiplier": Measure("lambda, last tenth", _last_tenth("dual/multiplier")),
    "entropy": Measure("entropy, last tenth, nats", _last_tenth("policy/entropy")),
    "mismatch": Measure("mismatch, last tenth, nats", _last_tenth("mismatch/log_ratio_abs_mean")),
    "staleness": Measure("staleness, last tenth, nats", _last_tenth("staleness/log_ratio_abs_mean")),
}
"""Columns of a study's table; one whose metric no run has is left out. The held-out score is the inference engine's
policy after the last step."""


def estimate(values: Mapping[int, float]) -> Estimate:
    """Mean over seeds with its 95% t interval; values that are not finite are left out."""
    finite = {seed: value for seed, value in values.items() if math.isfinite(value)}
    if not finite:
        return Estimate(math.nan, math.nan, {})
    return Estimate(math.fsum(finite.values()) / len(finite), t_half_width(list(finite.values())), finite)


def measure_arms(runs: Table, measure: Measure) -> dict[str, Estimate]:
    """A measure of each arm."""
    return {
        arm: estimate({seed: measure.value(series) for seed, series in seeds.items()}) for arm, seeds in runs.items()
    }


def paired_differences(arms: Mapping[str, Estimate], baseline: str) -> dict[str, Estimate]:
    """Each other arm minus the baseline, seed by seed, over the seeds that both have.

    A seed fixes the initial weights and the order of problems, so the spread between seeds cancels in part.
    """
    base = arms[baseline].values
    return {
        arm: estimate({seed: value - base[seed] for seed, value in found.values.items() if seed in base})
        for arm, found in arms.items()
        if arm != baseline
    }


def curves(runs: Table, read: Callable[[Series], tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    """Mean curve of each arm with its pointwise 95% t interval, at the steps that all its seeds have.

    Returns:
        Arm -> [n, 3] float64: step, mean, half width (NaN with one seed). An arm without values is left out.
    """
    found = {}
    for arm, seeds in runs.items():
        if columns := _at_common_steps([read(run) for run in seeds.values()]):
            found[arm] = np.array([[step, np.mean(values), t_half_width(values)] for step, values in columns.items()])
    return found


def tables(title: str, runs: Table, baseline: str, notes: Sequence[str]) -> str:
    """The study's tables in Markdown: every measure of every arm, and the paired differences to the baseline."""
    columns = {name: measure_arms(runs, measure) for name, measure in MEASURES.items()}
    columns = {name: arms for name, arms in columns.items() if any(found.values for found in arms.values())}
    headings = [MEASURES[name].title for name in columns]
    lines = [f"# {title}", "", "Mean over seeds ± half of the 95% t interval.", ""]
    lines += markdown_table(
        ["arm", "seeds", *headings],
        [[arm, str(len(runs[arm])), *(_cell(arms[arm]) for arms in columns.values())] for arm in runs],
    )
    differences = {name: paired_differences(arms, baseline) for name, arms in columns.items()}
    if len(runs) > 1 and runs.get(baseline):
        lines += ["", f"Paired difference to {baseline}, seed by seed.", ""]
        lines += markdown_table(
            ["arm", *headings],
            [[arm, *(_cell(found[arm], "+") for found in differences.values())] for arm in runs if arm != baseline],
        )
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def _cell(found: Estimate, sign: str = "") -> str:
    if not found.values:
        return "-"
    text = f"{found.mean:{sign}.3g}"
    return f"{text} ± {found.half_width:.2g}" if math.isfinite(found.half_width) else text
