"""The tables and the figure of frozen.md, from the numbers that `research.frozen_model` keeps of
each engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcmdp_jax.evaluation.estimators import t_quantile
from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe.page_kit import COLORS, LEGEND, make_figure, style_axes
from research.frozen_model import CONTROL, DECADES, ENGINES, FEWEST, LOWEST

_KEPT = Path(__file__).resolve().parent / "kept"
KEPT, OF_DEMO, WHOLE = (
    _KEPT / f"{name}.json" for name in ("frozen", "frozen_demo", "frozen_whole")
)
"""Engines whose column holds the whole vocabulary."""
BAR = 0.015
"""prime-rl's bar for KL(q || p), nats."""
_DEMO = "the demo's policy, "
_FIRST = "local:int4"
_FEWEST_LARGE = 5
_WHOLE = ("total_variation", "expected_discrepancy")
Kept = Mapping[str, Mapping[str, Any]]


def read_kept() -> dict[str, Any]:
    """What is kept of each engine, the demo's policy under a name of its own."""
    kept, demo = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for path in (KEPT, OF_DEMO)
    )
    return kept | {_DEMO + name: one for name, one in demo.items()}


def mean(one: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Mean over tokens and half of its 95% interval, by the jackknife over prompts, from the sums
    of each prompt.
    """
    total, count = (np.array(one["by_prompt"][key], float) for key in (name, "tokens"))
    left = (total.sum() - total) / (count.sum() - count)
    n = len(left)
    error = np.sqrt((n - 1) * np.mean((left - left.mean()) ** 2))
    return float(total.sum() / count.sum()), float(t_quantile(n) * error)


def verdict(one: Mapping[str, Any]) -> str:
    """The class that the page defined before the runs."""
    divergence = mean(one, "k3")[0]
    large = mean(one, "large")[0]
    if divergence > 10 * BAR or large > 1e-3:
        return "afraid"
    return "watch" if divergence > BAR or large > 1e-4 else "calm"


def tail_like(real: Mapping[str, Any], demo: Mapping[str, Any]) -> tuple[str, str]:
    """Whether a real model has the demo's tail, by the page's rule, and the numbers that say so.

    Shares of large deltas are compared, or where the demo has fewer than five, the 99.9th
    percentile over the mean.
    """
    if sum(demo["by_prompt"]["large"]) >= _FEWEST_LARGE:
        (value, half), known, what = (
            mean(real, "large"),
            mean(demo, "large")[0],
            "share of large deltas",
        )
        upper = value + half
    else:
        (value, upper), (known, _) = (_tail_over_mean(one) for one in (real, demo))
        what = "p99.9 of delta over its mean"
    said = "yes" if value >= known / 2 else "no" if upper < known / 10 else "open"
    return said, f"{what} is {value:.3g} (at most {upper:.3g}), the demo's {known:.3g}"


def _tail_over_mean(one: Mapping[str, Any]) -> tuple[float, float]:
    """99.9th percentile of delta over its mean, and with the upper end of the percentile's
    interval.
    """
    found = one["quantiles"]["delta"]
    average = mean(one, "delta")[0]
    return found["p99.9"] / average, found["p99.9_interval"][1] / average


def answer(kept: Kept) -> str:
    """The engines by verdict, those that have not run, and the demo's tail."""
    real = {name: one for name, one in kept.items() if not name.startswith(_DEMO)}
    verdicts = {name: verdict(one) for name, one in real.items() if name != CONTROL}
    lines = []
    for said in ("afraid", "watch", "calm"):
        each = [
            f"`{name}` ({mean(real[name], 'k3')[0]:.2g}, {1e4 * mean(real[name], 'large')[0]:.3g})"
            for name, found in verdicts.items()
            if found == said
        ]
        unit = " (k3, large deltas of 10,000)" * (said == "afraid")
        lines.append(f"- **{said.capitalize()}**{unit}: {', '.join(each) or 'none'}.")
    if missing := [f"`{name}`" for name in ENGINES if name not in real]:
        lines.append(f"- Not run to the end yet: {', '.join(missing)}.")
    if _FIRST in real:
        said, numbers = tail_like(real[_FIRST], kept[_DEMO + _FIRST])
        lines.append(f"- **A tail like the demo's, `{_FIRST}`: {said}**: {numbers}.")
    return "\n".join(lines)


def _plus_minus(value: float, half: float, scale: float = 1.0) -> str:
    return f"{scale * value:.3g} ± {scale * half:.2g}"


def _rows(kept: Kept, heading: list[str], row: Callable[[Mapping[str, Any]], list[str]]) -> str:
    rows = [
        [f"`{name}`" if not name.startswith(_DEMO) else name, *row(one)]
        for name, one in kept.items()
    ]
    return "\n".join(markdown_table(["engine", *heading], rows))


def size_table(kept: Kept) -> str:
    """delta and |eps|: mean, quantiles and the largest; the share of q > p."""

    def row(one: Mapping[str, Any]) -> list[str]:
        cells = []
        for name in ("delta", "abs_displacement"):
            found = one["quantiles"][name]
            low, high = found["p99.9_interval"]
            rest = [
                f"{found['p50']:.2g}",
                f"{found['p99.9']:.3g} ({low:.2g} to {high:.2g})",
                f"{found['max']:.3g}",
            ]
            cells += [_plus_minus(*mean(one, name)), *rest]
        return [f"{one['tokens']:,}", *cells, _plus_minus(*mean(one, "q_above_p"), 100)]

    heading = [
        f"{name} {what}"
        for name in ("delta", "\\|eps\\|")
        for what in ("mean", "p50", "p99.9", "largest")
    ]
    return _rows(kept, ["tokens", *heading, "q > p, %"], row)


def verdict_table(kept: Kept) -> str:
    """The distance of the distributions, the tail, and what follows."""

    def row(one: Mapping[str, Any]) -> list[str]:
        bound = mean(one, "total_variation_bound")[0]
        head = mean(one, "head_mass")[0]
        return [
            _plus_minus(*mean(one, "k3")),
            f"{_plus_minus(*mean(one, 'total_variation'))} (+ {bound:.2g})",
            f"{head:.3f}",
            *(_plus_minus(*mean(one, name), 1e4) for name in ("large", "rare")),
            *(_plus_minus(*mean(one, name), 100) for name in ("over_1_nat", "over_4_nats")),
            verdict(one),
        ]

    heading = [
        "k3",
        "total variation (+ bound)",
        "head's mass",
        "large of 10,000",
        "rare of 10,000",
    ]
    return _rows(kept, [*heading, "\\|eps\\| > 1, %", "\\|eps\\| > 4, %", "verdict"], row)


def whole_table(kept: Kept) -> str:
    """The exact total variation of fewer tokens, beside what a head of 32 has of more."""
    whole = json.loads(WHOLE.read_text(encoding="utf-8"))

    def row(one: Mapping[str, Any]) -> list[str]:
        return [
            f"{one['tokens']:,}",
            *(_plus_minus(*mean(one, name)) for name in _WHOLE),
            f"{one['head']:.3g}",
        ]

    heads = {name: mean(kept[name], "total_variation")[0] for name in whole if name in kept}
    found = {name: one | {"head": heads[name]} for name, one in whole.items() if name in heads}
    return _rows(
        found,
        ["tokens", "total variation", "mean of delta under q", "head of 32, the table above"],
        row,
    )


def penalty_table(kept: Kept) -> str:
    """The penalty's share and its tail."""

    def row(one: Mapping[str, Any]) -> list[str]:
        cells = []
        for found in one["penalty"].values():
            cells += [
                f"{100 * found['share']:.2g}",
                f"{found['largest']:.2g}",
                f"{1e4 * found['over_half']:.2g}",
            ]
        return cells

    names = [
        f"{what}, lambda {each}"
        for each in ("0.1", "1")
        for what in ("share, %", "largest", "over half of 10,000")
    ]
    return _rows(kept, names, row)


def floor_table(kept: Kept) -> str:
    """Each engine and the trainer against itself, and the engine's two ways to score."""

    def row(one: Mapping[str, Any]) -> list[str]:
        cells = []
        for name in ("engine", "trainer", "decoding"):
            found = one["floors"][name]
            cells += [
                f"{found['delta']:.2g}",
                f"{found['largest']:.2g}",
                f"{found['abs_displacement']:.2g}",
            ]
        return cells

    names = (
        "engine, alone or together",
        "trainer, alone or together",
        "engine, decoding or one pass",
    )
    return _rows(
        kept,
        [f"{name}: {what}" for name in names for what in ("delta", "largest", "\\|eps\\|")],
        row,
    )


def bin_table(kept: Kept, by: str, name: str) -> str:
    """Mean and 99.9th percentile of a measure in each bin, a column an engine; or the share of q >
    p.
    """
    bins = next(iter(kept.values()))[by]
    rows = []
    for place, first in enumerate(bins):
        cells = []
        for one in kept.values():
            found = one[by][place]
            if name == "q_above_p":
                cells.append("-" if found[name] is None else f"{100 * found[name]:.0f}")
            else:
                tail = found[name].get("p99.9")
                cells.append(f"{found[name]['mean']:.2g}" if found["tokens"] else "-")
                cells[-1] += "" if tail is None else f" / {tail:.2g}"
        rows.append([f"{first['low']:g} to {first['high']:g}", *cells])
    heading = [each if each.startswith(_DEMO) else f"`{each}`" for each in kept]
    return "\n".join(markdown_table(["p" if by == "by_p" else "entropy, nats", *heading], rows))


def count_table(kept: Kept) -> str:
    """Tokens of each bin of p."""
    bins = next(iter(kept.values()))["by_p"]
    heading = [f"{each['low']:g} to {each['high']:g}" for each in bins]
    return _rows(kept, heading, lambda one: [f"{each['tokens']:,}" for each in one["by_p"]])


def text_table(kept: Kept) -> str:
    """The beginning of two completions of each engine."""

    def row(one: Mapping[str, Any]) -> list[str]:
        return [" ".join(text.split()).replace("|", "\\|")[:110] for text in one["text"]]

    return _rows(
        {name: one for name, one in kept.items() if not name.startswith(_DEMO)},
        ["first", "second"],
        row,
    )


def tables(kept: Kept) -> dict[str, str]:
    """Every table of the page by name."""
    return {
        "answer": answer(kept),
        "size": size_table(kept),
        "verdict": verdict_table(kept),
        "whole": whole_table(kept),
        "penalty": penalty_table(kept),
        "floor": floor_table(kept),
        "count": count_table(kept),
        "text": text_table(kept),
        **{
            f"{by} {name}": bin_table(kept, by, name)
            for by in ("by_p", "by_entropy")
            for name in ("delta", "abs_displacement", "q_above_p")
        },
    }


def draw(kept: Kept) -> Figure:
    """Plot the tails of delta and |eps|, and the mean and 99.9th percentile of |eps| and delta by
    p.
    """
    kept = {name: one for name, one in kept.items() if name != _DEMO + CONTROL}
    figure, places = make_figure(
        11.5, 8.2, "Engines on a frozen SmolLM2-135M-Instruct", rows=2, columns=2
    )
    lines = {
        name: {
            "color": "#999999" if number == 0 else COLORS[(number - 1) % len(COLORS)],
            "linewidth": 1.6,
        }
        | ({"linestyle": ":"} if number > len(COLORS) else {})
        | ({"linestyle": "--", "color": "#222222"} if name.startswith(_DEMO) else {})
        for number, name in enumerate(kept)
    }
    for axes, name in zip(places[:2], ("delta", "abs_displacement"), strict=True):
        for engine, one in kept.items():
            counts = np.array(one["histograms"][name])
            above = counts[::-1].cumsum()[::-1] / counts.sum()
            lower = 10.0 ** (LOWEST + np.arange(len(counts)) / DECADES)
            axes.plot(lower[above > 0], above[above > 0], label=engine, **lines[engine])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim((1e-5, 1.2) if name == "delta" else (1e-4, 60))
        label = {"delta": "delta", "abs_displacement": "|eps|, nats"}[name]
        style_axes(
            axes, f"Tokens with more than this {label.split(',')[0]}", x=label, y="share of tokens"
        )
    places[0].legend(**LEGEND | {"fontsize": 8}, loc="lower left")
    for axes, name in zip(places[2:], ("delta", "abs_displacement"), strict=True):
        _by_probability(axes, kept, name, lines)
    return figure


def _by_probability(
    axes: Axes, kept: Kept, name: str, lines: Mapping[str, Mapping[str, Any]]
) -> None:
    """Means as lines, 99.9th percentiles as dots, by bin of p."""
    for engine, one in kept.items():
        bins = one["by_p"]
        style = lines[engine]
        means = [each[name]["mean"] if each["tokens"] >= FEWEST // 10 else np.nan for each in bins]
        axes.plot(range(len(bins)), means, **style)
        tails = [
            (place, each[name]["p99.9"]) for place, each in enumerate(bins) if "p99.9" in each[name]
        ]
        axes.plot(*zip(*tails, strict=True), "o", markersize=4, color=style["color"])
    axes.set_yscale("log")
    labels = [f"{each['low']:g}-{each['high']:g}" for each in bins]
    axes.set_xticks(range(len(labels)), labels, rotation=30)
    title = {"delta": "delta", "abs_displacement": "|eps|, nats"}[name]
    style_axes(
        axes,
        f"{title.split(',')[0]} by p: mean (line) and p99.9 (dots)",
        x="p of the trainer",
        y=title,
    )
