"""Figures of one or several runs: pure functions from recorded metrics to matplotlib figures.

`FIGURES` has them all. Each takes {label: metrics of the run, as returned by `read_metrics`} and
returns a `Figure`, or None if no run recorded its metrics. Nothing uses pyplot or its global state;
save a figure with `figure.savefig`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from dcmdp_jax.number_format import percent
from dcmdp_jax.observe.alarms import finite_points, finite_values, last_value
from dcmdp_jax.observe.metric_names import STEP_PHASES, form_of_score
from dcmdp_jax.observe.metrics_io import Series
from dcmdp_jax.observe.page_kit import COLORS, INK, LEGEND, make_figure, style_axes

Runs = Mapping[str, Series]

_LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
_SMOOTH_ABOVE = 40
"""Steps of a curve above which its moving average is drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves of some metrics by training step: one color a run, or one a curve for a single run.

    Attributes:
        heading: above the panel.
        unit: label of the vertical axis; in percent if it begins with "share of".
        names: metrics. One that no run recorded is left out, a panel without any is too.
        label: curve's name in the legend of a single run, where that has a legend; the run's if "".
        short: metric -> its piece of a curve's name, where a panel has several.
        from_zero: the vertical axis has 0.
        smoothed: curves above 40 steps are drawn under their moving average.
        marker: matplotlib's name of a point's marker.
        draw: draws (axes, runs) in place of the curves, without a step axis.
        overlay: draws (axes, runs) on top of the curves.
    """

    heading: str = ""
    unit: str = ""
    names: tuple[str, ...]
    label: str = ""
    short: Callable[[str], str] | None = None
    from_zero: bool = False
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
    total = np.convolve(np.where(finite, values, 0.0), np.ones(window), "same")
    count = np.convolve(finite, np.ones(window), "same")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _draw(title: str, panels: Callable[[Runs], Iterable[Panel]], runs: Runs) -> Figure | None:
    """Draw the panels that a run recorded metrics for."""
    recorded_panels = [panel for panel in panels(runs) if _recorded(runs, panel.names)]
    if not recorded_panels:
        return None
    # Inches. Panels of a figure of many are smaller, a single row is higher.
    columns = min(len(recorded_panels), 2)
    width = 5.4 * columns
    if len(recorded_panels) > 6:
        columns = 4
        width = 14.4
    rows = -(-len(recorded_panels) // columns)
    height = 3.7 if rows == 1 else 2.9 * rows
    figure, all_axes = make_figure(
        width=width,
        height=0.5 + height,
        title=title,
        rows=rows,
        columns=columns,
    )
    for unused_axes in all_axes[len(recorded_panels) :]:
        unused_axes.remove()

    last_step = 0
    for series in runs.values():
        for steps, _ in series.values():
            last_step = max(last_step, steps.max(initial=0))
    for axes, panel in zip(all_axes, recorded_panels, strict=False):
        if panel.draw is not None:
            panel.draw(axes, runs)
            continue
        _draw_curves(axes, panel, runs)
        if panel.overlay is not None:
            panel.overlay(axes, runs)
        _finish(axes, panel, last_step, legend=len(runs) > 1)
    return figure


def _draw_curves(axes: Axes, panel: Panel, runs: Runs) -> None:
    """Plot each run's curves; above 40 steps, draw the values faint under their moving average."""
    short = panel.short or (lambda name: name.rpartition("/")[2].replace("_", " "))
    several = panel.short is not None or len(panel.names) > 1
    names = [name for name in panel.names if _recorded(runs, (name,))]
    for name_index, name in enumerate(names):
        for run_index, (label, series) in enumerate(runs.items()):
            if name not in series:
                continue
            # A color is a run, and a line style a metric; of a single run a color is a metric.
            if len(runs) > 1:
                text = f"{label}: {short(name)}" if several else label
                color = run_index
                style = color // len(COLORS) + name_index
            else:
                text = short(name) if several else panel.label or label
                color = name_index
                style = color // len(COLORS)
            curve = functools.partial(
                axes.plot, color=_color(color), linestyle=_LINE_STYLES[style % len(_LINE_STYLES)]
            )
            steps, values = series[name]
            values = np.where(np.isfinite(values), values, np.nan)
            if panel.smoothed and len(steps) > _SMOOTH_ABOVE:
                curve(steps, values, linewidth=0.8, alpha=0.3)
                values = smooth(values, len(steps) // 20 | 1)
            marker = panel.marker
            if marker is None and len(steps) == 1:
                marker = "o"
            curve(steps, values, linewidth=1.8, label=text, marker=marker, markersize=5, zorder=3)


def _finish(axes: Axes, panel: Panel, last_step: int, *, legend: bool) -> None:
    curves = len(axes.get_legend_handles_labels()[0])
    legend = legend or curves > 1 or bool(panel.label) or panel.short is not None
    style_axes(axes, panel.heading, x="training step", y=panel.unit, legend=legend)
    # All panels of a page have the same steps.
    axes.set_xlim(-0.02 * max(last_step, 2), 1.02 * max(last_step, 2))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))

    low, high = axes.dataLim.intervaly
    if not np.isfinite((low, high)).all():
        low = high = 0.0
    if panel.from_zero:
        low = min(low, 0.0)
        high = max(high, 0.0)
    room = 0.05 * (high - low)
    # A constant curve gets a fixed scale, so that rounding is not magnified.
    if not high - low > 1e-12 * max(abs(low), abs(high)):
        room = max(0.5 * abs(high), 1e-3)
    bottom = low - room
    if panel.from_zero and low == 0:
        bottom = 0.0
    axes.set_ylim(bottom, high + room)
    is_share = panel.unit.startswith("share of")
    formatter = PercentFormatter(1) if is_share else StrMethodFormatter("{x:.6g}")
    axes.yaxis.set_major_formatter(formatter)


def _draw_tolerance(axes: Axes, runs: Runs) -> None:
    """Draw each run's c dashed, from the step that knew it, and its noise floor dotted."""
    for index, (label, series) in enumerate(runs.items()):
        color = INK
        suffix = ""
        if len(runs) > 1:
            color = _color(index)
            suffix = f", {label}"

        steps, tolerances = finite_points(series, "dual/tolerance")
        if len(steps):
            axes.plot(
                steps,
                tolerances,
                linestyle="--",
                label=f"tolerance c = {tolerances[-1]:g}{suffix}",
                color=color,
                linewidth=1.3,
                zorder=2,
            )

        floor = last_value(series, "mismatch/noise_floor")
        if np.isfinite(floor):
            axes.axhline(
                floor,
                linestyle=":",
                label=f"noise floor = {floor:.2g}{suffix}",
                color=color,
                linewidth=1.3,
                zorder=2,
            )


def _draw_interval(axes: Axes, runs: Runs, *, name: str) -> None:
    """Shade each run's 95% interval of `eval/TASK/avg@K` in the color of its curve."""
    task = name.removeprefix("eval/").partition("/avg@")[0]
    for index, series in enumerate(runs.values()):
        bounds = [series.get(f"eval_interval/{task}/{bound}") for bound in ("low", "high")]
        if None not in bounds:
            (steps, low), (_, high) = bounds
            axes.fill_between(steps, low, high, color=_color(index), alpha=0.15, linewidth=0)


def _draw_phases(axes: Axes, runs: Runs) -> None:
    """Draw the seconds of each phase as bars: the median over steps, which excludes compilation."""
    phases = [phase for phase in STEP_PHASES if _recorded(runs, (f"time/{phase}",))]
    for row, series in enumerate(runs.values()):
        start = 0.0
        for phase in phases:
            values = finite_values(series, f"time/{phase}")
            seconds = np.median(values) if len(values) else 0.0
            axes.barh(
                row,
                seconds,
                left=start,
                height=0.6,
                color=_color(STEP_PHASES.index(phase)),
                label=phase if row == 0 else None,  # once in the legend
            )
            start += seconds
        axes.text(start, row, f"  {start:.3g} s", va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(runs)), list(runs))
    spare = max(0.0, (2 - len(runs)) / 2)
    axes.set_ylim(len(runs) - 0.4 + spare, -0.6 - spare)
    axes.margins(x=0.12)
    style_axes(axes, "seconds of a median step")
    axes.legend(**LEGEND, ncols=len(phases), loc="lower center", bbox_to_anchor=(0.5, -0.22))


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _recorded(runs: Runs, names: Iterable[str]) -> bool:
    return any(not series.keys().isdisjoint(names) for series in runs.values())


def _source_panels(runs: Runs) -> Iterable[Panel]:
    """Make the panels of the data sources: their reward, discrepancy and length."""
    names = sorted(set().union(*runs.values()))
    for heading, prefix, suffix, unit in (
        ("reward", "reward/source/", "/mean", "mean reward"),
        ("discrepancy", "discrepancy/source/", "/mean", "mean discrepancy"),
        ("length", "completion/source/", "/length_mean", "tokens"),
    ):
        sources = {}
        for name in names:
            if name.startswith(prefix) and name.endswith(suffix):
                sources[name] = name[len(prefix) : -len(suffix)]
        yield Panel(
            heading=heading,
            unit=unit,
            names=tuple(sources),
            short=sources.get,
            from_zero=True,
        )


def _evaluation_panels(runs: Runs) -> Iterable[Panel]:
    """Make a panel of each held-out score; shares are in percent."""
    for name in sorted(set().union(*runs.values())):
        if not name.startswith("eval/"):
            continue
        is_share = all(
            form_of_score(name, series[name][1], series) is percent
            for series in runs.values()
            if name in series
        )
        unit = "share of the full reward" if is_share else "mean reward"
        yield Panel(
            heading=name.removeprefix("eval/").replace("/", " "),
            unit=unit,
            names=(name,),
            smoothed=False,
            marker="o",
            overlay=functools.partial(_draw_interval, name=name),
        )


def _fixed(title: str, *panels: Panel) -> Callable[[Runs], Figure | None]:
    return functools.partial(_draw, title, lambda runs: panels)


_GAP = tuple(
    Panel(
        heading=heading,
        unit="nats",
        names=(f"staleness/{name}", f"mismatch/{name}", f"gap/{name}"),
        short=lambda name: name.partition("/")[0],
    )
    for heading, name in (
        ("mean absolute log-ratio of a token", "log_ratio_abs_mean"),
        ("largest absolute log-ratio", "log_ratio_max"),
    )
)

FIGURES: dict[str, tuple[str, Callable[[Runs], Figure | None]]] = {
    "reward": (
        "Mean reward of the training completions.",
        _fixed("Reward", Panel(unit="mean reward", names=("reward/mean",), from_zero=True)),
    ),
    "sources": (
        "Training completions by data source.",
        functools.partial(_draw, "By data source", _source_panels),
    ),
    "discrepancy": (
        "Mean token discrepancy |p - q| of the step, and the tolerance c.",
        _fixed(
            "Discrepancy between training and inference engine",
            Panel(
                heading="mean over sampled tokens",
                unit="discrepancy",
                names=("discrepancy/mean",),
                label="mean discrepancy",
                from_zero=True,
                overlay=_draw_tolerance,
            ),
            Panel(
                heading="completions whose own mean is over c",
                unit="share of completions",
                names=("discrepancy/completions_over_tolerance",),
                from_zero=True,
            ),
        ),
    ),
    "multiplier": (
        "Lambda, the weight of the penalty: it rises while the discrepancy is above c, and falls "
        "below.",
        _fixed(
            "Lagrange multiplier",
            Panel(heading="lambda", unit="lambda", names=("dual/multiplier",), smoothed=False),
            Panel(
                heading="violation: lambda rises where it is above 0",
                unit="violation",
                names=("dual/violation",),
                from_zero=True,
            ),
        ),
    ),
    "lengths": (
        "Completion lengths and the share cut by the limit.",
        _fixed(
            "Completion lengths",
            Panel(
                heading="sampled tokens of a completion",
                unit="tokens",
                names=("completion/length_mean", "completion/length_min", "completion/length_max"),
                from_zero=True,
            ),
            Panel(
                heading="cut by the length limit",
                unit="share of completions",
                names=("completion/truncated_fraction",),
                from_zero=True,
            ),
        ),
    ),
    "evaluation": (
        "Scores on validation prompts.",
        functools.partial(_draw, "Validation", _evaluation_panels),
    ),
    "mismatch": (
        "Mismatch of the engines' probabilities on the same tokens.",
        _fixed(
            "Engine mismatch",
            Panel(
                heading="99th percentile of the discrepancy",
                unit="discrepancy",
                names=("discrepancy/p99",),
            ),
            Panel(
                heading="|logit p - logit q|, mean and 95th percentile",
                unit="nats",
                names=("displacement/abs_mean", "displacement/abs_p95"),
            ),
            Panel(heading="KL(rollout || train), k3", unit="nats", names=("mismatch/k3",)),
            Panel(
                heading="Pearson correlation of probabilities",
                unit="correlation",
                names=("mismatch/pearson",),
            ),
            Panel(
                heading="effective sample size",
                unit="share of tokens",
                names=("mismatch/effective_sample_size",),
            ),
        ),
    ),
    "gap": (
        "What the policy moved since its tokens were sampled, and what the engine computes "
        "otherwise.",
        _fixed("Staleness and mismatch", *_GAP),
    ),
    "optimization": (
        "The policy update.",
        _fixed(
            "Optimization",
            Panel(heading="policy entropy", unit="nats", names=("policy/entropy",)),
            Panel(
                heading="gradient norm before clipping",
                unit="norm",
                names=("optimizer/grad_norm",),
            ),
            Panel(
                heading="clipped tokens",
                unit="share of tokens",
                names=("policy/clip_low_fraction", "policy/clip_high_fraction"),
            ),
            Panel(
                heading="importance ratio",
                unit="ratio",
                names=("policy/ratio_min", "policy/ratio_mean", "policy/ratio_max"),
            ),
            Panel(
                heading="penalty in the update",
                unit="share of the update",
                names=("dual/penalty_share",),
            ),
            Panel(
                heading="prompts with all-equal rewards",
                unit="share of prompts",
                names=("reward/all_equal_groups",),
            ),
        ),
    ),
    "time": (
        "Time per phase and throughput.",
        _fixed(
            "Time",
            Panel(names=tuple(f"time/{phase}" for phase in STEP_PHASES), draw=_draw_phases),
            Panel(
                heading="throughput",
                unit="tokens / s",
                names=("throughput/tokens_per_second",),
                from_zero=True,
            ),
        ),
    ),
}
"""File stem to (caption, function), in display order."""
