"""A study's results: a number per run, mean and interval per arm, paired differences to a baseline.

In tables, in figures of each arm's mean curve with the baseline's, and in one small file of kept
metrics, from which tables and figures are drawn again without the runs. That file is gzipped JSON
lines, one of each run and step: {"arm": "grpo", "seed": 0, "step": 3, "reward/mean": 0.41, ...},
with the metrics that a study compares and nine significant digits, which hold a float32 exactly.
"""

import dataclasses
import functools
import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.estimators import t_half_width
from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe import jsonl
from dcmdp_jax.observe.metric_names import current_name
from dcmdp_jax.observe.metrics_io import Series
from dcmdp_jax.observe.page_kit import COLORS, INK, MUTED, make_figure, style_axes

_LAST_SHARE = 10
"""Of a run's steps the last in so many: a tenth."""
Points = tuple[np.ndarray, np.ndarray]
"""Steps and values of a metric."""
Table = Mapping[str, Mapping[int, Series]]
"""Arm -> seed -> the run's metrics."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """One number of a finished run.

    Attributes:
        title: heading of its column, with the unit.
        value: number in the run's metrics; NaN where they have none.
    """

    title: str
    value: Callable[[Series], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: NaN without a value.
        half_width: half of the 95% t interval; NaN with one value.
        values: seed -> value.
    """

    mean: float
    half_width: float
    values: Mapping[int, float]


Estimates = Mapping[str, Estimate]
"""Arm -> its estimate."""


def held_out(series: Series) -> Points:
    """Steps and held-out avg@K, the mean over tasks at the steps that have all."""
    scores = [
        points for name, points in series.items() if name.startswith("eval/") and "/avg@" in name
    ]
    values_by_step = _at_common_steps(scores)
    means = [np.mean(values) for values in values_by_step.values()]
    return np.array(list(values_by_step), np.int64), np.array(means)


def _at_common_steps(curves: Sequence[Points]) -> dict[int, list[float]]:
    """Step -> the value of each curve there, for the steps that all have."""
    if not curves:
        return {}
    points = [dict(zip(steps.tolist(), values.tolist(), strict=True)) for steps, values in curves]
    common_steps = sorted(set.intersection(*map(set, points)))
    return {step: [values[step] for values in points] for step in common_steps}


def recorded(series: Series, name: str) -> Points:
    """Steps and values of a metric, empty where a run has none."""
    return series.get(name, (np.zeros(0, np.int64), np.zeros(0)))


def _last_held_out(series: Series) -> float:
    values = held_out(series)[1]
    return 100 * values[-1] if len(values) else math.nan


def _last_tenth(name: str) -> Callable[[Series], float]:
    return lambda series: _tenths(series, name)[1]


def _tenths(series: Series, name: str) -> tuple[float, float]:
    """Means over the first and the last tenth of the steps, at least one; NaN without a value."""
    values = recorded(series, name)[1]
    if not len(values):
        return math.nan, math.nan
    count = max(1, len(values) // _LAST_SHARE)
    return values[:count].mean(), values[-count:].mean()


def _growth(series: Series) -> float:
    first, last = _tenths(series, "discrepancy/mean")
    return last / first if first > 0 else math.nan


def _share_over_tolerance(series: Series) -> float:
    if "discrepancy/mean" not in series or "dual/tolerance" not in series:
        return math.nan
    return 100 * np.mean(series["discrepancy/mean"][1] > series["dual/tolerance"][1])


MEASURES = {
    "held_out": Measure("held-out avg@K, %", _last_held_out),
    "reward": Measure("reward, last tenth", _last_tenth("reward/mean")),
    "discrepancy": Measure("discrepancy, last tenth", _last_tenth("discrepancy/mean")),
    "growth": Measure("discrepancy, last tenth over first", _growth),
    "over_tolerance": Measure("steps over c, %", _share_over_tolerance),
    "multiplier": Measure("lambda, last tenth", _last_tenth("dual/multiplier")),
    "entropy": Measure("entropy, last tenth, nats", _last_tenth("policy/entropy")),
    "mismatch": Measure("mismatch, last tenth, nats", _last_tenth("mismatch/log_ratio_abs_mean")),
    "staleness": Measure(
        "staleness, last tenth, nats", _last_tenth("staleness/log_ratio_abs_mean")
    ),
}
"""Columns of a study's table; one whose metric no run has is left out.

The held-out score is of the inference engine's policy after the last step.
"""


def estimate(values: Mapping[int, float]) -> Estimate:
    """Mean over seeds with its 95% t interval; values that are not finite are left out."""
    finite = {seed: value for seed, value in values.items() if math.isfinite(value)}
    if not finite:
        return Estimate(mean=math.nan, half_width=math.nan, values={})
    return Estimate(
        mean=math.fsum(finite.values()) / len(finite),
        half_width=t_half_width(list(finite.values())),
        values=finite,
    )


def measure_arms(runs: Table, measure: Measure) -> Estimates:
    """A measure of each arm."""
    return {
        arm: estimate({seed: measure.value(series) for seed, series in seeds.items()})
        for arm, seeds in runs.items()
    }


def paired_differences(arms: Estimates, baseline: str) -> Estimates:
    """Each other arm minus the baseline, seed by seed, over the seeds that both have.

    A seed fixes the initial weights and the order of problems, so the spread between seeds cancels
    in part.
    """
    base = arms[baseline].values
    differences = {}
    for arm, arm_estimate in arms.items():
        if arm != baseline:
            values = arm_estimate.values
            differences[arm] = estimate(
                {seed: value - base[seed] for seed, value in values.items() if seed in base}
            )
    return differences


def curves(runs: Table, read: Callable[[Series], Points]) -> dict[str, np.ndarray]:
    """Mean curve of each arm with its pointwise 95% t interval, at the steps of all its seeds.

    Returns:
        Arm -> [n, 3] float64: step, mean, half width (NaN with one seed). An arm without values is
        left out.
    """
    curve_by_arm = {}
    for arm, seeds in runs.items():
        values_by_step = _at_common_steps([read(series) for series in seeds.values()])
        if values_by_step:
            curve_by_arm[arm] = np.array(
                [
                    [step, np.mean(values), t_half_width(values)]
                    for step, values in values_by_step.items()
                ]
            )
    return curve_by_arm


def tables(title: str, runs: Table, baseline: str, notes: Sequence[str]) -> str:
    """The study's tables in Markdown: each measure of each arm, and differences to the baseline."""
    columns = {}
    for name, measure in MEASURES.items():
        arms = measure_arms(runs, measure)
        if any(arm_estimate.values for arm_estimate in arms.values()):
            columns[name] = arms
    headings = [MEASURES[name].title for name in columns]
    lines = [f"# {title}", "", "Mean over seeds ± half of the 95% t interval.", ""]
    rows = []
    for arm, seeds in runs.items():
        cells = [_cell(arms[arm]) for arms in columns.values()]
        rows.append([arm, str(len(seeds)), *cells])
    lines += markdown_table(["arm", "seeds", *headings], rows)

    if len(runs) > 1 and runs.get(baseline):
        lines += ["", f"Paired difference to {baseline}, seed by seed.", ""]
        differences = [paired_differences(arms, baseline) for arms in columns.values()]
        rows = []
        for arm in runs:
            if arm != baseline:
                rows.append([arm, *(_cell(arms[arm], "+") for arms in differences)])
        lines += markdown_table(["arm", *headings], rows)
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def _cell(number: Estimate, sign: str = "") -> str:
    if not number.values:
        return "-"
    text = f"{number.mean:{sign}.3g}"
    return f"{text} ± {number.half_width:.2g}" if math.isfinite(number.half_width) else text


BASELINE_COLOR = "#8a8a8a"
DPI = 130
_MOST_COLUMNS = 4
_FAMILY = re.compile(r"^ascent_|(_one)?(_(eta)?[0-9.]+)?$")
_COLORS = {
    "grpo": BASELINE_COLOR,
    "grpo_perturbed": "#000000",
    "dc_grpo": "#0072B2",
    "dual_grpo": "#56B4E9",
    "threshold_grpo": "#009E73",
    "tis": "#D55E00",
    "icepop": "#E69F00",
    "dppo": "#CC79A7",
    "exact": "#000000",
    "matched": "#7a5195",
    "token": "#0072B2",
    "sequence": "#D55E00",
    "reward": "#009E73",
    "state": "#CC79A7",
}
"""Arms that several studies have."""
_CURVES = {
    "held_out": ("held-out score", "avg@K", ""),
    "reward": ("Reward", "mean reward", "reward/mean"),
    "discrepancy": (
        "Discrepancy between the engines (dashed: the budget c)",
        "discrepancy",
        "discrepancy/mean",
    ),
    "multiplier": ("Lagrange multiplier", "lambda", "dual/multiplier"),
    "entropy": ("Policy entropy", "nats", "policy/entropy"),
}
"""File stem -> heading, unit, and the metric; "" for the held-out score."""


def color_of(name: str) -> str:
    """The color of an arm, by its name alone: the same in every panel, figure and study.

    An arm that is named after a penalty and its strength has the penalty's, `token_10` that of
    `token`.
    """
    family = _FAMILY.sub("", name)
    return _COLORS.get(family) or COLORS[zlib.crc32(family.encode()) % len(COLORS)]


def draw_curves(
    title: str,
    unit: str,
    arms: Mapping[str, np.ndarray],
    level: Mapping[str, float] | None = None,
    *,
    baseline: str,
) -> Figure:
    """Plot mean and 95% interval over seeds by step: a panel for each arm, with the baseline.

    Args:
        title: heading.
        unit: unit of the values.
        arms: label -> [n, 3]: step, mean, half width of the interval; no band where that is NaN.
        level: label -> value of a horizontal dashed line in the arm's color, such as its budget.
        baseline: label of the arm that the others are compared with.
    """
    labels = [label for label in arms if label != baseline] or list(arms)
    columns = min(_MOST_COLUMNS, len(labels))
    rows = math.ceil(len(labels) / columns)
    figure, panels = make_figure(
        width=2.9 * columns + 0.4,
        height=2.1 * rows + 0.7,
        title=f"{title} (gray: {baseline})",
        rows=rows,
        columns=columns,
        sharex=True,
        sharey=True,
    )
    for unused_axes in panels[len(labels) :]:
        unused_axes.set_visible(False)
    for axes, label in zip(panels, labels, strict=False):
        if baseline in arms and label != baseline:
            plot_curve(axes, arms[baseline], BASELINE_COLOR)
        plot_curve(axes, arms[label], color_of(label))
        if level and label in level:
            axes.axhline(level[label], color=color_of(label), linestyle=(0, (5, 2)), linewidth=1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
        style_axes(axes, label)
    figure.supxlabel("training step", color=MUTED, fontsize=9)
    figure.supylabel(unit, color=MUTED, fontsize=9)
    return figure


def plot_curve(axes: Axes, curve: np.ndarray, color: str) -> None:
    steps, mean, half = curve.T
    marker = "o" if len(steps) <= 12 else None
    axes.plot(steps, mean, color=color, linewidth=1.5, marker=marker, markersize=3)
    if np.isfinite(half).any():
        axes.fill_between(steps, mean - half, mean + half, color=color, alpha=0.15, linewidth=0)


def draw_differences(title: str, unit: str, arms: Estimates) -> Figure:
    """Plot each arm's paired difference: a point for each seed, the mean with its 95% interval.

    Args:
        title: heading.
        unit: unit of the difference.
        arms: label -> the difference.
    """
    figure, (axes,) = make_figure(8.6, 0.6 * len(arms) + 1.5)
    axes.axvline(0, color=INK, linewidth=1)
    for row, (label, difference) in enumerate(arms.items()):
        color = color_of(label)
        values = list(difference.values.values())
        axes.plot(values, [row + 0.18] * len(values), "o", color=color, alpha=0.45, markersize=5)
        axes.errorbar(
            difference.mean,
            row - 0.12,
            xerr=difference.half_width if np.isfinite(difference.half_width) else None,
            fmt="D",
            color=color,
            capsize=4,
        )
    axes.set_yticks(range(len(arms)), list(arms))
    axes.set_ylim(len(arms) - 0.4, -0.6)
    style_axes(axes, title, x=unit)
    return figure


def save_figures(title: str, baseline: str, series: Table, directory: Path) -> None:
    """Draw the curves of `_CURVES`, and differences by seed, as far as runs have them."""
    directory.mkdir(exist_ok=True)
    budgets = {}
    for arm, seeds in series.items():
        for run in list(seeds.values())[:1]:
            if "dual/tolerance" in run:
                budgets[arm] = run["dual/tolerance"][1][-1]
    for stem, (heading, unit, name) in _CURVES.items():
        read = functools.partial(recorded, name=name) if name else held_out
        curve_by_arm = curves(series, read)
        if curve_by_arm:
            level = budgets if stem == "discrepancy" else None
            figure = draw_curves(
                f"{title}: {heading}", unit, curve_by_arm, level, baseline=baseline
            )
            figure.savefig(directory / f"{stem}.png", dpi=DPI)

    for name in ("held_out", "discrepancy"):
        differences = {}
        arms = measure_arms(series, MEASURES[name])
        for arm, difference in paired_differences(arms, baseline).items():
            if difference.values:
                differences[arm] = difference
        if differences:
            heading = f"{title}: difference to {baseline} by seed"
            figure = draw_differences(heading, MEASURES[name].title, differences)
            figure.savefig(directory / f"difference_{name}.png", dpi=DPI)


_COMPARED = set(
    """
    reward/mean discrepancy/mean discrepancy/max discrepancy/p50 discrepancy/p99 discrepancy/spent
    discrepancy/engine_share displacement/abs_mean displacement/abs_p50 displacement/abs_p95
    displacement/abs_p99 distribution/total_variation completion/length_mean
    completion/truncated_fraction optimizer/grad_norm dual/penalty_share dual/multiplier
    dual/tolerance policy/entropy policy/clip_low_fraction policy/clip_high_fraction
    mismatch/noise_floor mismatch/log_ratio_abs_mean staleness/log_ratio_abs_mean
    """.split()
)
"""Metrics of a study's file, besides the scores."""
_DIGITS = 9
"""Significant digits, which give a float32 back."""


def write_kept_metrics(path: Path, runs: Table) -> None:
    """Write the metrics of all runs, atomically. Equal metrics give equal bytes."""
    lines: list[str] = []
    for arm, seeds in runs.items():
        for seed, series in seeds.items():
            lines += _lines(arm, seed, series)
    atomic_write(path, gzip.compress("".join(lines).encode(), mtime=0))


def _lines(arm: str, seed: int, series: Series) -> list[str]:
    by_step: dict[int, dict[str, float]] = defaultdict(dict)
    for name, (steps, values) in series.items():
        is_score = name.startswith(("eval/", "evaluation/")) and "/avg@" in name
        if is_score or name in _COMPARED:
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                by_step[step][name] = float(f"{value:.{_DIGITS}g}")
    return [
        jsonl.encode({"arm": arm, "seed": seed, "step": step, **values})
        for step, values in sorted(by_step.items())
    ]


def read_kept_metrics(path: Path, arms: Sequence[str] | None) -> Table:
    """Read what `write_kept_metrics` wrote.

    Args:
        path: the file.
        arms: labels of the study, in its order; None for the file's own.

    Returns:
        Arm -> seed -> series; an arm that the file lacks has no seeds.

    Raises:
        UserError: in one line, if the file can't be read, or holds an arm that the study has not.
    """
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read as gzipped JSON lines ({error})") from error
    # Arm -> seed -> metric -> step -> value.
    points: dict[str, dict[int, dict[str, dict[int, float]]]] = {arm: {} for arm in arms or ()}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            arm = row.pop("arm")
            seed = row.pop("seed")
            step = row.pop("step")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}, line {number}: must be an object with arm, seed, step and metrics"
            ) from error
        if arms is None:
            points.setdefault(arm, {})
        if arm not in points:
            raise UserError(
                f"{path}, line {number}: arm {arm!r} is none of the study's: {', '.join(arms)}"
            )
        run_points = points[arm].setdefault(seed, {})
        for name, value in row.items():
            run_points.setdefault(current_name(name), {})[step] = float(value)

    runs: dict[str, dict[int, Series]] = {}
    for arm, seeds in points.items():
        runs[arm] = {}
        for seed, run_points in seeds.items():
            runs[arm][seed] = {
                name: (np.array(list(values), np.int64), np.array(list(values.values())))
                for name, values in run_points.items()
            }
    return runs
