"""A study's results: one number per run, mean and interval per arm, paired differences to the
baseline.

In tables, in figures of each arm's mean curve with the baseline's, and in one small file of kept
metrics, from which tables and figures are drawn again without the runs. That file is gzipped JSON
lines, one of each run and step: {"arm": "grpo", "seed": 0, "step": 3, "reward/mean": 0.41, ...},
with the metrics that a study compares and nine significant digits, which hold a float32 exactly.
"""

import functools
import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.estimators import t_half_width
from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe import jsonl
from dcmdp_jax.observe.metrics_io import Series
from dcmdp_jax.observe.page_kit import COLORS, INK, MUTED, make_figure, style_axes

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
    scores = [
        points for name, points in series.items() if name.startswith("eval/") and "/avg@" in name
    ]
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
        return (
            float(values[-max(1, len(values) // _LAST_SHARE) :].mean()) if len(values) else math.nan
        )

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
    "staleness": Measure(
        "staleness, last tenth, nats", _last_tenth("staleness/log_ratio_abs_mean")
    ),
}
"""Columns of a study's table; one whose metric no run has is left out. The held-out score is the
inference engine's policy after the last step.
"""


def estimate(values: Mapping[int, float]) -> Estimate:
    """Mean over seeds with its 95% t interval; values that are not finite are left out."""
    finite = {seed: value for seed, value in values.items() if math.isfinite(value)}
    if not finite:
        return Estimate(math.nan, math.nan, {})
    return Estimate(
        math.fsum(finite.values()) / len(finite), t_half_width(list(finite.values())), finite
    )


def measure_arms(runs: Table, measure: Measure) -> dict[str, Estimate]:
    """A measure of each arm."""
    return {
        arm: estimate({seed: measure.value(series) for seed, series in seeds.items()})
        for arm, seeds in runs.items()
    }


def paired_differences(arms: Mapping[str, Estimate], baseline: str) -> dict[str, Estimate]:
    """Each other arm minus the baseline, seed by seed, over the seeds that both have.

    A seed fixes the initial weights and the order of problems, so the spread between seeds cancels
    in part.
    """
    base = arms[baseline].values
    return {
        arm: estimate(
            {seed: value - base[seed] for seed, value in found.values.items() if seed in base}
        )
        for arm, found in arms.items()
        if arm != baseline
    }


def curves(
    runs: Table, read: Callable[[Series], tuple[np.ndarray, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Mean curve of each arm with its pointwise 95% t interval, at the steps that all its seeds
    have.

    Returns:
        Arm -> [n, 3] float64: step, mean, half width (NaN with one seed). An arm without values is
        left out.
    """
    found = {}
    for arm, seeds in runs.items():
        if columns := _at_common_steps([read(run) for run in seeds.values()]):
            found[arm] = np.array(
                [[step, np.mean(values), t_half_width(values)] for step, values in columns.items()]
            )
    return found


def tables(title: str, runs: Table, baseline: str, notes: Sequence[str]) -> str:
    """The study's tables in Markdown: every measure of every arm, and the paired differences to the
    baseline.
    """
    columns = {name: measure_arms(runs, measure) for name, measure in MEASURES.items()}
    columns = {
        name: arms for name, arms in columns.items() if any(found.values for found in arms.values())
    }
    headings = [MEASURES[name].title for name in columns]
    lines = [f"# {title}", "", "Mean over seeds ± half of the 95% t interval.", ""]
    lines += markdown_table(
        ["arm", "seeds", *headings],
        [
            [arm, str(len(runs[arm])), *(_cell(arms[arm]) for arms in columns.values())]
            for arm in runs
        ],
    )
    differences = {name: paired_differences(arms, baseline) for name, arms in columns.items()}
    if len(runs) > 1 and runs.get(baseline):
        lines += ["", f"Paired difference to {baseline}, seed by seed.", ""]
        lines += markdown_table(
            ["arm", *headings],
            [
                [arm, *(_cell(found[arm], "+") for found in differences.values())]
                for arm in runs
                if arm != baseline
            ],
        )
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def _cell(found: Estimate, sign: str = "") -> str:
    if not found.values:
        return "-"
    text = f"{found.mean:{sign}.3g}"
    return f"{text} ± {found.half_width:.2g}" if math.isfinite(found.half_width) else text


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

    An arm that is named after a charge and its strength has the charge's, `token_10` that of
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
    """Plot mean and 95% interval over seeds by training step: a panel for each arm, the baseline in
    gray in each.

    Args:
        title: heading.
        unit: unit of the values.
        arms: label -> [n, 3]: step, mean, half width of the interval; no band where that is NaN.
        level: label -> value of a horizontal dashed line in the arm's color, such as its budget.
        baseline: label of the arm that the others are compared with.
    """
    shown = [label for label in arms if label != baseline] or list(arms)
    columns = min(_MOST_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, panels = make_figure(
        2.9 * columns + 0.4,
        2.1 * rows + 0.7,
        f"{title} (gray: {baseline})",
        rows=rows,
        columns=columns,
        sharex=True,
        sharey=True,
    )
    for spare in panels[len(shown) :]:
        spare.set_visible(False)
    for axes, label in zip(panels, shown, strict=False):
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


def draw_differences(title: str, unit: str, arms: Mapping[str, Estimate]) -> Figure:
    """Plot each arm's paired difference: a point for each seed, the mean with its 95% interval.

    Args:
        title: heading.
        unit: unit of the difference.
        arms: label -> the difference.
    """
    figure, (axes,) = make_figure(8.6, 0.6 * len(arms) + 1.5)
    axes.axvline(0, color=INK, linewidth=1)
    for place, (label, (mean, half, values)) in enumerate(arms.items()):
        color = color_of(label)
        axes.plot(
            list(values.values()),
            [place + 0.18] * len(values),
            "o",
            color=color,
            alpha=0.45,
            markersize=5,
        )
        axes.errorbar(
            mean,
            place - 0.12,
            xerr=half if np.isfinite(half) else None,
            fmt="D",
            color=color,
            capsize=4,
        )
    axes.set_yticks(range(len(arms)), list(arms))
    axes.set_ylim(len(arms) - 0.4, -0.6)
    style_axes(axes, title, x=unit)
    return figure


def save_figures(title: str, baseline: str, series: Table, directory: Path) -> None:
    """Draw held-out score, reward, discrepancy, lambda, entropy, and differences by seed, as far as
    runs have them.
    """
    directory.mkdir(exist_ok=True)
    first = {arm: next(iter(seeds.values())) for arm, seeds in series.items() if seeds}
    budgets = {
        arm: float(run["dual/tolerance"][1][-1])
        for arm, run in first.items()
        if "dual/tolerance" in run
    }
    for stem, (heading, unit, name) in _CURVES.items():
        if found := curves(series, functools.partial(recorded, name=name) if name else held_out):
            level = budgets if stem == "discrepancy" else None
            figure = draw_curves(f"{title}: {heading}", unit, found, level, baseline=baseline)
            figure.savefig(directory / f"{stem}.png", dpi=DPI)
    for name in ("held_out", "discrepancy"):
        found = paired_differences(measure_arms(series, MEASURES[name]), baseline)
        if shown := {arm: one for arm, one in found.items() if one.values}:
            figure = draw_differences(
                f"{title}: difference to {baseline} by seed", MEASURES[name].title, shown
            )
            figure.savefig(directory / f"difference_{name}.png", dpi=DPI)


_KEPT = set(
    """
    reward/mean discrepancy/mean discrepancy/max discrepancy/p50 discrepancy/p99 discrepancy/spent
    discrepancy/engine_share displacement/abs_mean displacement/abs_p50 displacement/abs_p95
    displacement/abs_p99 distribution/total_variation completion/length_mean completion/truncated_fraction
    optimizer/grad_norm dual/charge_share dual/multiplier dual/tolerance policy/entropy
    policy/clip_low_fraction policy/clip_high_fraction mismatch/noise_floor mismatch/log_ratio_abs_mean
    staleness/log_ratio_abs_mean
    """.split()
)
_DIGITS = 9


def write_kept_metrics(path: Path, runs: Table) -> None:
    """Write the metrics of all runs, atomically. Equal metrics give equal bytes."""
    lines = [
        line
        for arm, seeds in runs.items()
        for seed, series in seeds.items()
        for line in _lines(arm, seed, series)
    ]
    atomic_write(path, gzip.compress("".join(lines).encode(), mtime=0))


def _lines(arm: str, seed: int, series: Series) -> list[str]:
    by_step: dict[int, dict[str, float]] = defaultdict(dict)
    for name, (steps, values) in series.items():
        if name in _KEPT or (name.startswith(("eval/", "evaluation/")) and "/avg@" in name):
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                by_step[step][name] = float(f"{value:.{_DIGITS}g}")
    return [
        jsonl.encode({"arm": arm, "seed": seed, "step": step, **by_step[step]})
        for step in sorted(by_step)
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
    points: dict[str, dict[int, dict[str, list[tuple[int, float]]]]] = {
        arm: {} for arm in arms or ()
    }
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
        of_run = points[arm].setdefault(seed, {})
        for name, value in row.items():
            of_run.setdefault(name, []).append((step, float(value)))
    return {
        arm: {
            seed: {name: _arrays(found) for name, found in series.items()}
            for seed, series in seeds.items()
        }
        for arm, seeds in points.items()
    }


def _arrays(points: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    steps, values = zip(*points, strict=True)
    return np.array(steps, np.int64), np.array(values, np.float64)
