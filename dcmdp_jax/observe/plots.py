"""Figures of one or several runs: pure functions from recorded metrics to matplotlib figures.

`FIGURES` has them all. Each takes {label: metrics of the run, as returned by `read_metrics`} and
returns a `Figure`, or None if no run recorded its metrics. Nothing uses pyplot or its global state;
save a figure with `figure.savefig`.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from dcmdp_jax.number_format import percent
from dcmdp_jax.observe.alarms import finite_values
from dcmdp_jax.observe.metric_names import STEP_PHASES, form_of_score
from dcmdp_jax.observe.metrics_io import Series
from dcmdp_jax.observe.page_kit import COLORS, INK, LEGEND, make_figure, style_axes

Runs = Mapping[str, Series]

_LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
_SMOOTH_ABOVE = 40


class Panel(NamedTuple):
    """Curves of some metrics by training step: one color a run, or one a curve for a single run.

    Attributes:
        heading: above the panel.
        unit: label of the vertical axis.
        names: metrics. One that no run recorded is left out, a panel without any is too.
        label: curve's name in the legend of a single run, where that has a legend; the run's if "".
        short: metric -> its part of a curve's name, where a panel has several.
        from_zero: the vertical axis has 0.
        percent: its values are shares.
        smoothed: curves above 40 steps are drawn under their moving average.
        marker: matplotlib's name of a point's marker.
        draw: draws (axes, runs) in place of the curves, without a step axis.
        overlay: draws (axes, runs) on top of the curves.
    """

    heading: str
    unit: str
    names: tuple[str, ...]
    label: str = ""
    short: Callable[[str], str] | None = None
    from_zero: bool = False
    percent: bool = False
    smoothed: bool = True
    marker: str | None = None
    draw: Callable[[Axes, Runs], None] | None = None
    overlay: Callable[[Axes, Runs], None] | None = None


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Compute a centered moving average that is shorter at the ends and skips NaN.

        s_i = mean of the finite v_j with |j - i| <= window // 2

    Args:
        values: [n] float.
        window: odd number of values, at most n; 1 returns the values unchanged.

    Returns:
        [n] float64; NaN only where a window holds no finite value.
    """
    finite = np.isfinite(values)
    total, count = (
        np.convolve(x, np.ones(window), "same") for x in (np.where(finite, values, 0.0), finite)
    )
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _draw(title: str, panels: Callable[[Runs], Iterable[Panel]], runs: Runs) -> Figure | None:
    """Draw the panels that a run recorded metrics for."""
    shown = [panel for panel in panels(runs) if _recorded(runs, panel.names)]
    if not shown:
        return None
    columns = min(len(shown), 2 if len(shown) <= 6 else 4)
    rows = -(-len(shown) // columns)
    height = 0.5 + (3.7 if rows == 1 else 2.9 * rows)
    figure, places = make_figure(
        14.4 if columns == 4 else 10.8, height, title, rows=rows, columns=columns
    )
    last = max(
        int(steps[-1]) for series in runs.values() for steps, _ in series.values() if len(steps)
    )
    for spare in places[len(shown) :]:
        spare.remove()
    for axes, panel in zip(places, shown, strict=False):
        if panel.draw is not None:
            panel.draw(axes, runs)
            continue
        _draw_curves(axes, panel, runs)
        if panel.overlay is not None:
            panel.overlay(axes, runs)
        _finish(axes, panel, last, legend=len(runs) > 1)
    return figure


def _draw_curves(axes: Axes, panel: Panel, runs: Runs) -> None:
    """Plot each run's curves; above 40 steps, draw the values faint under their moving average."""
    short = panel.short or (lambda name: name.rpartition("/")[2].replace("_", " "))
    names = [name for name in panel.names if _recorded(runs, (name,))]
    several = panel.short is not None or len(panel.names) > 1
    compared = len(runs) > 1
    for (place, name), (index, label) in itertools.product(enumerate(names), enumerate(runs)):
        if name not in runs[label]:
            continue
        text = short(name) if several else panel.label or label
        if compared:
            text = f"{label}: {short(name)}" if several else label
        color, variant = (index, place) if compared else (place, 0)
        line = _LINE_STYLES[(color // len(COLORS) + variant) % len(_LINE_STYLES)]
        style = {"color": _color(color), "linestyle": line}
        steps, values = runs[label][name]
        values = np.where(np.isfinite(values), values, np.nan)
        if panel.smoothed and len(steps) > _SMOOTH_ABOVE:
            axes.plot(steps, values, linewidth=0.8, alpha=0.3, **style)
            values = smooth(values, len(steps) // 20 | 1)
        marker = panel.marker or ("o" if len(steps) == 1 else None)
        axes.plot(
            steps, values, linewidth=1.8, label=text, marker=marker, markersize=5, zorder=3, **style
        )


def _finish(axes: Axes, panel: Panel, last: int, *, legend: bool) -> None:
    legend |= (
        len(axes.get_legend_handles_labels()[0]) > 1 or bool(panel.label) or panel.short is not None
    )
    style_axes(axes, panel.heading, x="training step", y=panel.unit, legend=legend)
    axes.set_xlim(-0.02 * max(last, 2), 1.02 * max(last, 2))  # all panels of a page alike
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    low, high = axes.dataLim.intervaly if np.isfinite(axes.dataLim.intervaly).all() else (0.0, 0.0)
    low, high = (min(low, 0.0), max(high, 0.0)) if panel.from_zero else (low, high)
    # A constant curve gets a fixed scale, so that rounding is not magnified.
    room = (
        0.05 * (high - low)
        if high - low > 1e-12 * max(abs(low), abs(high))
        else max(0.5 * abs(high), 1e-3)
    )
    axes.set_ylim(0.0 if panel.from_zero and not low else low - room, high + room)
    axes.yaxis.set_major_formatter(
        PercentFormatter(1) if panel.percent else StrMethodFormatter("{x:.6g}")
    )


def _draw_budget(axes: Axes, runs: Runs) -> None:
    """Draw each run's budget dashed, from the step on at which it was known, and its noise floor
    dotted.
    """
    for index, (label, series) in enumerate(runs.items()):
        color, whose = (_color(index), f", {label}") if len(runs) > 1 else (INK, "")
        style = {"color": color, "linewidth": 1.3, "zorder": 2}
        steps, budgets = series.get("dual/tolerance", (np.zeros(0), np.zeros(0)))
        if (known := np.isfinite(budgets)).any():
            text = f"budget c = {budgets[known][-1]:g}{whose}"
            axes.plot(steps[known], budgets[known], linestyle="--", label=text, **style)
        if (floors := finite_values(series, "mismatch/noise_floor")).size:
            axes.axhline(
                floors[-1], linestyle=":", label=f"noise floor = {floors[-1]:.2g}{whose}", **style
            )


def _draw_phases(axes: Axes, runs: Runs) -> None:
    """Draw the seconds of each phase as bars: the median over steps, which excludes compilation."""
    phases = [phase for phase in STEP_PHASES if _recorded(runs, (f"time/{phase}",))]
    for row, series in enumerate(runs.values()):
        left = 0.0
        for phase in phases:
            values = finite_values(series, f"time/{phase}")
            seconds = float(np.median(values)) if len(values) else 0.0
            name = phase if row == 0 else None
            axes.barh(
                row,
                seconds,
                left=left,
                height=0.6,
                color=_color(STEP_PHASES.index(phase)),
                label=name,
            )
            left += seconds
        axes.text(left, row, f"  {left:.3g} s", va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(runs)), list(runs))
    spare = max(0.0, (2 - len(runs)) / 2)
    axes.set_ylim(len(runs) - 0.4 + spare, -0.6 - spare)
    axes.margins(x=0.12)
    style_axes(axes, "seconds of a median step")
    axes.legend(**LEGEND, ncols=len(phases), loc="lower center", bbox_to_anchor=(0.5, -0.22))


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _recorded(runs: Runs, names: Iterable[str]) -> bool:
    return any(name in series for series in runs.values() for name in names)


def _source_panels(runs: Runs) -> Iterable[Panel]:
    """Make the panels of the data sources: their reward, discrepancy and length."""
    names = sorted({name for series in runs.values() for name in series})
    for heading, prefix, suffix, unit in (
        ("reward", "reward/source/", "/mean", "mean reward"),
        ("discrepancy", "discrepancy/source/", "/mean", "mean discrepancy"),
        ("length", "completion/source/", "/length_mean", "tokens"),
    ):
        ends = (name for name in names if name.startswith(prefix) and name.endswith(suffix))
        own = {name: name[len(prefix) : -len(suffix)] for name in ends}
        yield Panel(heading, unit, tuple(own), short=own.get, from_zero=True)


def _evaluation_panels(runs: Runs) -> Iterable[Panel]:
    """Make a panel of each held-out score; shares are in percent."""
    for name in sorted(
        {name for series in runs.values() for name in series if name.startswith("eval/")}
    ):
        share = all(
            form_of_score(name, each[name][1], each) is percent
            for each in runs.values()
            if name in each
        )
        heading = name.removeprefix("eval/").replace("/", " ")
        unit = "" if share else "mean reward"
        yield Panel(heading, unit, (name,), percent=share, smoothed=False, marker="o")


def _fixed(title: str, *panels: Panel) -> Callable[[Runs], Figure | None]:
    return functools.partial(_draw, title, lambda runs: panels)


_REWARD = Panel("", "mean reward", ("reward/mean",), from_zero=True)
_SHARE = "share of completions"
_DISCREPANCY = (
    Panel(
        "mean over sampled tokens",
        "discrepancy",
        ("discrepancy/mean",),
        label="mean discrepancy",
        from_zero=True,
        overlay=_draw_budget,
    ),
    Panel(
        "completions whose own mean is over c",
        _SHARE,
        ("discrepancy/completions_over_tolerance",),
        from_zero=True,
        percent=True,
    ),
)
_MULTIPLIER = (
    Panel("lambda", "lambda", ("dual/multiplier",), smoothed=False),
    Panel(
        "violation: lambda rises where it is above 0",
        "violation",
        ("dual/violation",),
        from_zero=True,
    ),
)
_LENGTHS = (
    Panel(
        "sampled tokens of a completion",
        "tokens",
        ("completion/length_mean", "completion/length_min", "completion/length_max"),
        from_zero=True,
    ),
    Panel(
        "cut by the length limit",
        _SHARE,
        ("completion/truncated_fraction",),
        from_zero=True,
        percent=True,
    ),
)
_MISMATCH = (
    Panel("99th percentile of the discrepancy", "discrepancy", ("discrepancy/p99",)),
    Panel(
        "|logit p - logit q|, mean and 95th percentile",
        "nats",
        ("displacement/abs_mean", "displacement/abs_p95"),
    ),
    Panel("KL(rollout || train), k3", "nats", ("mismatch/k3",)),
    Panel("Pearson correlation of probabilities", "correlation", ("mismatch/pearson",)),
    Panel(
        "effective sample size",
        "share of tokens",
        ("mismatch/effective_sample_size",),
        percent=True,
    ),
)
_GAP = tuple(
    Panel(
        heading,
        "nats",
        tuple(f"{part}/{name}" for part in ("staleness", "mismatch", "gap")),
        short=lambda name: name.partition("/")[0],
    )
    for heading, name in (
        ("mean absolute log-ratio of a token", "log_ratio_abs_mean"),
        ("largest absolute log-ratio", "log_ratio_max"),
    )
)
_OPTIMIZATION = (
    Panel("policy entropy", "nats", ("policy/entropy",)),
    Panel("gradient norm before clipping", "norm", ("optimizer/grad_norm",)),
    Panel(
        "clipped tokens",
        "share of tokens",
        ("policy/clip_low_fraction", "policy/clip_high_fraction"),
        percent=True,
    ),
    Panel(
        "importance ratio", "ratio", ("policy/ratio_min", "policy/ratio_mean", "policy/ratio_max")
    ),
    Panel("charge in the update", "share of the update", ("dual/charge_share",), percent=True),
    Panel(
        "prompts with all-equal rewards",
        "share of prompts",
        ("reward/all_equal_groups",),
        percent=True,
    ),
)
_TIME = (
    Panel("", "", tuple(f"time/{phase}" for phase in STEP_PHASES), draw=_draw_phases),
    Panel("throughput", "tokens / s", ("throughput/tokens_per_second",), from_zero=True),
)

FIGURES: dict[str, tuple[str, Callable[[Runs], Figure | None]]] = {
    "reward": ("Mean reward of the training completions.", _fixed("Reward", _REWARD)),
    "sources": (
        "Training completions by data source.",
        functools.partial(_draw, "By data source", _source_panels),
    ),
    "discrepancy": (
        "Mean discrepancy between the engines against the budget c.",
        _fixed("Discrepancy between training and inference engine", *_DISCREPANCY),
    ),
    "multiplier": (
        "The price of discrepancy: it rises while the budget is exceeded and falls after.",
        _fixed("Lagrange multiplier", *_MULTIPLIER),
    ),
    "lengths": (
        "Completion lengths and the share cut by the limit.",
        _fixed("Completion lengths", *_LENGTHS),
    ),
    "evaluation": (
        "Scores on held-out problems.",
        functools.partial(_draw, "Held-out evaluation", _evaluation_panels),
    ),
    "mismatch": (
        "Mismatch of the engines' probabilities on the same tokens.",
        _fixed("Engine mismatch", *_MISMATCH),
    ),
    "gap": (
        "What the policy moved since its tokens were sampled, and what the engine computes "
        "otherwise.",
        _fixed("Staleness and mismatch", *_GAP),
    ),
    "optimization": ("The policy update.", _fixed("Optimization", *_OPTIMIZATION)),
    "time": ("Time per phase and throughput.", _fixed("Time", *_TIME)),
}
"""File stem to (caption, function), in display order."""
