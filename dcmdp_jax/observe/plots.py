"""Figures of one or several runs: pure functions from recorded metrics to matplotlib figures.

Every `draw_*` takes {label: metrics of the run, as returned by `read_metrics`} and returns a `Figure`, or None if no
run recorded its metrics. Nothing uses pyplot or its global state; save a figure with `figure.savefig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from dcmdp_jax.observe.metric_names import STEP_PHASES
from dcmdp_jax.observe.metrics_io import Series

Runs = Mapping[str, Series]

# Okabe and Ito's, distinguishable with common color blindness; without yellow, which is faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, MUTED, GRID = "#222222", "#666666", "#e3e3e3"


def style_axes(axes: Axes) -> None:
    """Draw a faint grid behind the data, and of the frame the bottom alone."""
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#bbbbbb")


_LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_SMOOTH_ABOVE = 40
_BARS_UP_TO = 200
_RAISED, _LOWERED = "#D55E00", "#0072B2"


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Compute a centered moving average that is shorter at the ends and skips NaN.

        s_i = mean of the finite v_j with |j - i| <= window // 2

    Args:
        values: [n] float.
        window: odd number of values; 1 returns the values unchanged.

    Returns:
        [n] float64; NaN only where a window holds no finite value.
    """
    finite = np.isfinite(values)
    totals = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    place = np.arange(len(values))
    low, high = np.maximum(place - window // 2, 0), np.minimum(place + window // 2 + 1, len(values))
    count = counts[high] - counts[low]
    return np.where(count > 0, (totals[high] - totals[low]) / np.maximum(count, 1), np.nan)


def draw_reward(runs: Runs) -> Figure | None:
    """Plot training reward by step, with the held-out avg@K as points on the same scale.

    With more than two tasks, the points are their mean at the steps where all were evaluated.
    """
    if not _recorded(runs, "reward/mean"):
        return None
    figure, (axes,) = _panels("Reward", 1)
    for index, (label, series) in enumerate(runs.items()):
        color = _line(axes, series, "reward/mean", label if len(runs) > 1 else "training reward", index)
        for place, (name, steps, values) in enumerate(_held_out(series)):
            axes.plot(
                steps,
                values,
                linestyle=(0, (1, 2)),
                linewidth=1,
                marker=_MARKERS[place],
                markersize=7,
                markeredgecolor="white",
                color=color if len(runs) > 1 or place else COLORS[1],
                label=f"{label}: {name}" if len(runs) > 1 else name,
                zorder=4,
            )
    _finish(axes, "mean reward", from_zero=True)
    return figure


def draw_sources(runs: Runs) -> Figure | None:
    """Plot mean reward, discrepancy and length of each data source's completions, where a run has several."""
    kinds = {
        kind: row for kind, row in _OF_SOURCES.items() if any(_sources(series, *row[:2]) for series in runs.values())
    }
    if not kinds:
        return None
    figure, panels = _panels("By data source", len(kinds))
    for axes, (kind, (prefix, suffix, unit)) in zip(panels, kinds.items(), strict=True):
        for index, (label, series) in enumerate(runs.items()):
            for place, source in enumerate(_sources(series, prefix, suffix)):
                # A run's color where there are several, a source's where there is one.
                color, variant, shown = (index, place, f"{label}: {source}") if len(runs) > 1 else (place, 0, source)
                _line(axes, series, f"{prefix}{source}{suffix}", shown, color, variant)
        axes.set_title(kind, **_PANEL_TITLE)
        _finish(axes, unit, from_zero=True)
    return figure


def _sources(series: Series, prefix: str, suffix: str) -> list[str]:
    """Data sources that a metric of theirs was recorded of."""
    names = sorted(name for name in series if name.startswith(prefix) and name.endswith(suffix))
    return [name.removeprefix(prefix).removesuffix(suffix) for name in names]


def draw_evaluation(runs: Runs) -> Figure | None:
    """Plot every held-out score by step, one panel per score; scores from 0 to 1 in percent."""
    names = sorted({name for series in runs.values() for name in series if name.startswith("eval/")})
    if not names:
        return None
    figure, panels = _panels("Held-out evaluation", len(names), columns=min(2 if len(names) <= 4 else 4, len(names)))
    for axes, name in zip(panels, names, strict=True):
        for index, (label, series) in enumerate(runs.items()):
            if name in series:
                steps, values = series[name]
                axes.plot(steps, values, marker="o", markersize=5, color=_color(index), label=label)
        axes.set_title(name.removeprefix("eval/").replace("/", " "), **_PANEL_TITLE)
        scores = np.concatenate([series[name][1] for series in runs.values() if name in series])
        shares = np.all((scores >= 0) & (scores <= 1) | ~np.isfinite(scores))
        _finish(axes, "" if shares else "mean reward", legend=len(runs) > 1, percent=bool(shares))
    return figure


def draw_discrepancy(runs: Runs) -> Figure | None:
    """Plot mean discrepancy, tolerance c (dashed) and noise floor (dotted) by step, and the completions over c."""
    if not _recorded(runs, "discrepancy/mean"):
        return None
    share = "discrepancy/completions_over_tolerance"
    figure, panels = _panels("Discrepancy between training and inference engine", 1 + _recorded(runs, share))
    for index, (label, series) in enumerate(runs.items()):
        _line(panels[0], series, "discrepancy/mean", label if len(runs) > 1 else "mean discrepancy", index)
    _draw_tolerances(panels[0], runs)
    _draw_noise_floors(panels[0], runs)
    panels[0].set_title("mean over sampled tokens", **_PANEL_TITLE)
    _finish(panels[0], "discrepancy", from_zero=True)
    if len(panels) > 1:
        for index, (label, series) in enumerate(runs.items()):
            _line(panels[1], series, share, label, index)
        panels[1].set_title("completions whose own mean is over c", **_PANEL_TITLE)
        _finish(panels[1], "share of completions", from_zero=True, legend=False, percent=True)
    return figure


def draw_multiplier(runs: Runs) -> Figure | None:
    """Plot the multiplier lambda by step, and the constraint violation that moves it."""
    if not _recorded(runs, "dual/multiplier"):
        return None
    figure, panels = _panels("Lagrange multiplier", 1 + _recorded(runs, "dual/violation"))
    for index, (label, series) in enumerate(runs.items()):
        _line(panels[0], series, "dual/multiplier", label, index, smoothed=False)
    panels[0].set_title("lambda", **_PANEL_TITLE)
    _finish(panels[0], "lambda", legend=len(runs) > 1)
    if len(panels) == 1:
        return figure
    axes = panels[1]
    if len(runs) == 1:
        (series,) = runs.values()
        steps, values = series["dual/violation"]
        finite = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        for part, color, label in (
            (np.maximum(finite, 0), _RAISED, "over budget: lambda rises"),
            (np.minimum(finite, 0), _LOWERED, "under budget: lambda falls"),
        ):
            if len(steps) <= _BARS_UP_TO:
                axes.bar(steps, part, width=0.85, color=color, label=label)
            else:
                axes.fill_between(steps, part, step="mid", color=color, linewidth=0, label=label)
    else:
        for index, (label, series) in enumerate(runs.items()):
            _line(axes, series, "dual/violation", label, index)
    axes.axhline(0.0, color=INK, linewidth=0.8)
    axes.set_title("violation: mean discrepancy - c", **_PANEL_TITLE)
    _finish(axes, "violation", legend=len(runs) == 1)
    return figure


def draw_lengths(runs: Runs) -> Figure | None:
    """Plot completion lengths (mean; for a single run also the range) and the truncated share."""
    if not _recorded(runs, "completion/length_mean"):
        return None
    truncated = "completion/truncated_fraction"
    figure, panels = _panels("Completion lengths", 1 + _recorded(runs, truncated))
    for index, (label, series) in enumerate(runs.items()):
        _line(panels[0], series, "completion/length_mean", label if len(runs) > 1 else "mean", index)
        if len(runs) == 1 and {"completion/length_min", "completion/length_max"} <= series.keys():
            steps, low = series["completion/length_min"]
            high = _at(series["completion/length_max"], steps)
            panels[0].fill_between(
                steps, low, high, color=_color(0), alpha=0.12, linewidth=0, label="shortest to longest"
            )
    panels[0].set_title("sampled tokens of a completion", **_PANEL_TITLE)
    _finish(panels[0], "tokens", from_zero=True)
    if len(panels) > 1:
        for index, (label, series) in enumerate(runs.items()):
            _line(panels[1], series, truncated, label, index)
        panels[1].set_title("cut by the length limit", **_PANEL_TITLE)
        _finish(panels[1], "share of completions", from_zero=True, legend=False, percent=True)
    return figure


def draw_mismatch(runs: Runs) -> Figure | None:
    """Plot the mismatch of the engines' probabilities: tail, displacement, KL, correlation, effective sample size."""
    return _grid(
        runs,
        "Engine mismatch",
        (
            ("99th percentile of the discrepancy", "discrepancy", ("discrepancy/p99",)),
            (
                "|logit p - logit q|, mean and 95th percentile",
                "nats",
                ("displacement/abs_mean", "displacement/abs_p95"),
            ),
            ("KL(rollout || train), k3", "nats", ("mismatch/k3",)),
            ("Pearson correlation of probabilities", "correlation", ("mismatch/pearson",)),
            ("effective sample size", "share of tokens", ("mismatch/effective_sample_size",)),
        ),
    )


def draw_optimization(runs: Runs) -> Figure | None:
    """Plot entropy, gradient norm, clip fractions, importance ratio, charge and all-equal groups."""
    return _grid(
        runs,
        "Optimization",
        (
            ("policy entropy", "nats", ("policy/entropy",)),
            ("gradient norm before clipping", "norm", ("optimizer/grad_norm",)),
            ("clipped tokens", "share of tokens", ("policy/clip_low_fraction", "policy/clip_high_fraction")),
            ("importance ratio", "ratio", ("policy/ratio_min", "policy/ratio_mean", "policy/ratio_max")),
            ("charge in the update", "share of the update", ("dual/charge_share",)),
            ("prompts with all-equal rewards", "share of prompts", ("reward/all_equal_groups",)),
        ),
    )


def draw_time(runs: Runs) -> Figure | None:
    """Plot seconds per phase (median over steps, which excludes compilation) and the throughput by step."""
    phases = [phase for phase in STEP_PHASES if _recorded(runs, f"time/{phase}")]
    if not phases:
        return None
    throughput = "throughput/tokens_per_second"
    figure, panels = _panels("Time", 1 + _recorded(runs, throughput))
    for row, series in enumerate(runs.values()):
        left = 0.0
        for phase in phases:
            values = series[f"time/{phase}"][1] if f"time/{phase}" in series else np.zeros(0)
            values = values[np.isfinite(values)]
            seconds = float(np.median(values)) if len(values) else 0.0
            color, name = _PHASE_COLORS[phase], phase if row == 0 else None
            panels[0].barh(row, seconds, left=left, height=0.6, color=color, label=name)
            left += seconds
        panels[0].text(left, row, f"  {left:.3g} s", va="center", fontsize=9, color=INK)
    panels[0].set_yticks(range(len(runs)), list(runs))
    spare = max(0.0, (2 - len(runs)) / 2)
    panels[0].set_ylim(len(runs) - 0.4 + spare, -0.6 - spare)
    panels[0].margins(x=0.12)
    panels[0].set_title("seconds of a median step", **_PANEL_TITLE)
    style_axes(panels[0])
    panels[0].legend(**_LEGEND, ncols=len(phases), loc="lower center", bbox_to_anchor=(0.5, -0.22))
    if len(panels) > 1:
        for index, (label, series) in enumerate(runs.items()):
            _line(panels[1], series, throughput, label, index)
        panels[1].set_title("throughput", **_PANEL_TITLE)
        _finish(panels[1], "tokens / s", from_zero=True, legend=len(runs) > 1)
    return figure


def draw_gap(runs: Runs) -> Figure | None:
    """Plot the two parts of the gap between trainer and engine where sampling runs ahead of training."""
    return _grid(
        runs,
        "Staleness and mismatch",
        (
            ("mean absolute log-ratio of a token", "nats", tuple(f"{part}/log_ratio_abs_mean" for part in _PARTS)),
            ("largest absolute log-ratio", "nats", tuple(f"{part}/log_ratio_max" for part in _PARTS)),
        ),
        by_group=True,
    )


def draw_timeline(runs: Runs) -> Figure | None:
    """Plot three steps of each run that samples ahead as bars in time: which phase when, in which process."""
    shown = {label: chosen for label, series in runs.items() if (chosen := _three_steps(series)) is not None}
    if not shown:
        return None
    figure, panels = _panels("Three steps", len(shown), columns=1)
    for axes, (label, steps) in zip(panels, shown.items(), strict=True):
        series, drawn = runs[label], set()
        at = {name: _at(series[f"time/{name}"], steps) for name in _OF_TIMELINE}
        # At most a step before the trainer: what samples them may have begun before a program was compiled.
        begun = {process: np.concatenate([at[f"start_{phase}"] for phase in _TIMELINE if _TIMELINE[phase] == process])
                 for process in (0, 1)}  # fmt: skip
        trainer, sampler = (np.min(each[np.isfinite(each)], initial=np.inf) for each in begun.values())
        begin = max(min(trainer, sampler), trainer - np.nanmin(at["total"], initial=np.inf))
        for phase, process in _TIMELINE.items():
            starts = at[f"start_{phase}"] - begin
            for step, start, end in zip(steps.tolist(), starts, starts + at[phase], strict=True):
                name, start = None if phase in drawn else phase, max(start, 0.0)
                if not start < end < np.inf:  # a phase that was not recorded has NaN
                    continue
                drawn.add(phase)
                color = _PHASE_COLORS[phase]
                axes.barh(process, end - start, left=start, height=0.6, color=color, edgecolor="white", label=name)
                if phase in ("step", "generate"):
                    axes.text((start + end) / 2, process, f"{step}", ha="center", va="center", fontsize=9, color=INK)
        axes.set_xlim(left=0)
        axes.set_yticks((0, 1), ("trainer", "sampler"))
        axes.set_title(f"{label}: numbers are steps", **_PANEL_TITLE)
        style_axes(axes)
        axes.set_xlabel("seconds", color=MUTED, fontsize=9)
        if drawn:
            axes.legend(**_LEGEND, ncols=len(_TIMELINE), loc="upper left")
        axes.set_ylim(-0.6, 2.2)
    return figure


def _three_steps(series: Series) -> np.ndarray | None:
    """Three steps in a row of a run that samples ahead, of median duration: the first steps compile."""
    if not all(f"time/{name}" in series for name in _OF_TIMELINE):
        return None
    steps, totals = series["time/start_step"][0], series["time/total"]
    seconds = np.nan_to_num(_at(totals, steps), nan=np.inf)
    sums = [seconds[place : place + 3].sum() for place in range(max(1, len(steps) - 2))]
    place = int(np.argsort(sums, kind="stable")[(len(sums) - 1) // 2])
    return steps[place : place + 3]


FIGURES: dict[str, tuple[str, Callable[[Runs], Figure | None]]] = {
    "reward": ("Mean reward of the training completions; points are held-out evaluations.", draw_reward),
    "sources": ("Training completions by data source.", draw_sources),
    "discrepancy": ("Mean discrepancy between the engines against the budget c.", draw_discrepancy),
    "multiplier": ("The price of discrepancy: it rises while the budget is exceeded and falls after.", draw_multiplier),
    "lengths": ("Completion lengths and the share cut by the limit.", draw_lengths),
    "evaluation": ("Scores on held-out problems.", draw_evaluation),
    "mismatch": ("Mismatch of the engines' probabilities on the same tokens.", draw_mismatch),
    "gap": ("What the policy moved since its tokens were sampled, and what the engine computes otherwise.", draw_gap),
    "optimization": ("The policy update.", draw_optimization),
    "time": ("Time per phase and throughput.", draw_time),
    "timeline": ("Which phase ran when: the trainer and the sampler of later steps.", draw_timeline),
}
"""File stem to (caption, function), in display order."""

_PARTS = ("staleness", "mismatch", "gap")
# Phase -> line of its process: 0 is the trainer, 1 what samples.
_TIMELINE = {"wait": 0, "push": 0, "step": 0, "generate": 1, "verify": 1, "pack": 1}
_PHASE_COLORS = dict(zip((*STEP_PHASES, "wait"), COLORS, strict=False))
_OF_TIMELINE = ("total", *_TIMELINE, *(f"start_{phase}" for phase in _TIMELINE))
# Panel -> begin and end of its metrics' names, unit.
_OF_SOURCES = {
    "reward": ("reward/source/", "/mean", "mean reward"),
    "discrepancy": ("discrepancy/source/", "/mean", "mean discrepancy"),
    "length": ("completion/source/", "/length_mean", "tokens"),
}

_PANEL_TITLE = {"fontsize": 10, "color": INK, "loc": "left", "pad": 6}
_LEGEND = {"frameon": False, "fontsize": 9, "labelcolor": INK}


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _recorded(runs: Runs, name: str) -> bool:
    return any(name in series for series in runs.values())


def _at(series: tuple[np.ndarray, np.ndarray], steps: np.ndarray) -> np.ndarray:
    """Return the values at `steps`, NaN where the series has none."""
    known = dict(zip(series[0].tolist(), series[1].tolist(), strict=True))
    return np.array([known.get(step, np.nan) for step in steps.tolist()])


def _held_out(series: Series) -> list[tuple[str, np.ndarray, np.ndarray]]:
    names = sorted(name for name in series if name.startswith("eval/") and "/avg@" in name)
    if len(names) <= 2:
        return [(f"held-out {name.removeprefix('eval/').replace('/', ' ')}", *series[name]) for name in names]
    steps = np.array(sorted(set.intersection(*(set(series[name][0].tolist()) for name in names))), np.int64)
    mean = np.mean([_at(series[name], steps) for name in names], axis=0)
    return [(f"held-out avg, mean of {len(names)} tasks", steps, mean)]


def _panels(title: str, count: int, columns: int | None = None) -> tuple[Figure, list[Axes]]:
    columns = count if columns is None else columns
    rows = -(-count // columns)
    width = {1: 10.8, 2: 10.8, 3: 13.0, 4: 14.4}[columns]
    figure = Figure(figsize=(width, 0.5 + (3.7 if rows == 1 else 2.9 * rows)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def _line(
    axes: Axes, series: Series, name: str, label: str, index: int, variant: int = 0, *, smoothed: bool = True
) -> str:
    """Plot one run's curve and return its color; above 40 steps, draw the values faint under their moving average.

    The run's `index` selects the color. `variant` selects the line style if one run has several curves.
    """
    color = _color(index)
    if name not in series:
        return color
    steps, values = series[name]
    values = np.where(np.isfinite(values), values, np.nan)
    style = {"color": color, "linestyle": _LINE_STYLES[(index // len(COLORS) + variant) % len(_LINE_STYLES)]}
    if smoothed and len(steps) > _SMOOTH_ABOVE:
        axes.plot(steps, values, linewidth=0.8, alpha=0.3, **style)
        values = smooth(values, len(steps) // 20 | 1)
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, values, linewidth=1.8, label=label, marker=marker, zorder=3, **style)
    return color


def _draw_tolerances(axes: Axes, runs: Runs) -> None:
    """Draw tolerances dashed: one horizontal line per constant value, a curve for one that changes."""
    constant: dict[float, list[int]] = {}
    for index, series in enumerate(runs.values()):
        steps, values = series.get("dual/tolerance", (np.zeros(0), np.zeros(0)))
        levels = set(values[np.isfinite(values)].tolist())
        if len(levels) == 1:
            constant.setdefault(levels.pop(), []).append(index)
        elif levels:  # measured on the first steps, which have a setting in its place
            steps, values = steps[values == values[-1]], values[values == values[-1]]
            axes.plot(steps, values, color=_color(index), linestyle="--", linewidth=1.3, label="tolerance c", zorder=2)
    for level, indices in constant.items():
        color = INK if len(constant) == 1 else _color(indices[0])
        _horizontal(axes, level, color=color, linestyle="--", label=f"tolerance c = {level:g}")


def _draw_noise_floors(axes: Axes, runs: Runs) -> None:
    """Draw each run's last measured noise floor as a dotted line: no budget below it can be met."""
    for index, (label, series) in enumerate(runs.items()):
        values = series.get("mismatch/noise_floor", (None, np.zeros(0)))[1]
        if (values := values[np.isfinite(values)]).size:
            text = f"noise floor = {values[-1]:.2g}" + (f", {label}" if len(runs) > 1 else "")
            _horizontal(axes, float(values[-1]), color=_color(index), linestyle=":", label=text)


def _horizontal(axes: Axes, level: float, **style: Any) -> None:
    axes.axhline(level, linewidth=1.3, zorder=2, **style)
    # axhline does not extend the axes' limits by itself.
    axes.update_datalim([(1.0, level)], updatex=False)
    axes.autoscale_view(scalex=False)


def _grid(
    runs: Runs, title: str, cells: tuple[tuple[str, str, tuple[str, ...]], ...], *, by_group: bool = False
) -> Figure | None:
    cells = tuple(cell for cell in cells if any(_recorded(runs, name) for name in cell[2]))
    if not cells:
        return None
    figure, panels = _panels(title, len(cells), columns=min(2, len(cells)))
    for axes, (heading, unit, names) in zip(panels, cells, strict=True):
        for place, name in enumerate(names):
            short = name.partition("/")[0] if by_group else name.rpartition("/")[2].replace("_", " ")
            for index, (label, series) in enumerate(runs.items()):
                text = label if len(names) == 1 else short if len(runs) == 1 else f"{label}: {short}"
                _line(axes, series, name, text, *((place, 0) if len(runs) == 1 else (index, place)))
        axes.set_title(heading, **_PANEL_TITLE)
        _finish(axes, unit, legend=len(runs) > 1 or len(names) > 1)
    return figure


def _finish(axes: Axes, unit: str, *, from_zero: bool = False, legend: bool = True, percent: bool = False) -> None:
    style_axes(axes)
    axes.set_xlabel("training step", color=MUTED, fontsize=9)
    axes.set_ylabel(unit, color=MUTED, fontsize=9)
    low, high = axes.get_xlim()
    if high - low < 2:  # a whole step each side, where ticks in between would be rounded to the same number
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    # A constant curve gets a fixed scale, so that rounding is not magnified.
    low, high = axes.get_ylim()
    if from_zero:
        low, high = min(0.0, low if axes.dataLim.ymin < 0 else 0.0), max(high, 0.0)
    if not axes.dataLim.height > 1e-12 * max(abs(low), abs(high)):
        level = axes.dataLim.ymax if np.isfinite(axes.dataLim.ymax) else 0.0
        room = max(0.5 * abs(level), 1e-3)
        low, high = 0.0 if from_zero and level >= 0 else level - room, level + room
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(PercentFormatter(1) if percent else StrMethodFormatter("{x:.6g}"))
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(**_LEGEND, loc="best")
