"""Figures of one pair of engines: pure functions from tokens and an analysis to matplotlib figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dcmdp_jax.lab.mismatch.analysis import Analysis
from dcmdp_jax.lab.mismatch.breakdown import Group
from dcmdp_jax.lab.mismatch.pairs import TokenPairs

_BLUE, _ORANGE, _GREEN, _INK, _GRID = "#0072B2", "#D55E00", "#009E73", "#222222", "#e3e3e3"
_POINTS = 20_000


def draw_scatter(pairs: TokenPairs, analysis: Analysis) -> Figure:
    """p against q of every token, at most 20,000 of them, evenly chosen."""
    del analysis
    every = -(-len(pairs.token_ids) // _POINTS)
    p, q = (np.exp(x[::every].astype(np.float64)) for x in (pairs.train_logprobs, pairs.rollout_logprobs))
    figure, axes = _figure(5.2)
    axes.plot([0, 1], [0, 1], color=_INK, linewidth=0.8)
    axes.scatter(q, p, s=5, alpha=0.35, color=_BLUE, linewidths=0, rasterized=True)
    _finish(axes, "probability under the engine, q", "under the training stack, p")
    return figure


def draw_distribution(pairs: TokenPairs, analysis: Analysis) -> Figure:
    """Share of tokens above each |p - q|, with the mean, the noise floors and the recommended c."""
    delta = np.sort(pairs.discrepancy)
    positive = delta[delta > 0]
    figure, axes = _figure(7.2)
    if len(positive):
        above = np.arange(len(positive), 0, -1) / len(delta)
        keep = np.unique(np.linspace(0, len(positive) - 1, 2000).astype(int))
        axes.plot(positive[keep], above[keep], color=_BLUE, linewidth=1.8)
        axes.set_xscale("log")
        axes.set_yscale("log")
    lines = {"mean": (analysis.statistics.mean, _ORANGE, "-"), "c": (analysis.statistics.tolerance, _INK, "--")}
    lines |= {f"noise floor, {name}": (value, _GREEN, ":") for name, value in analysis.floors.items()}
    for label, (value, color, style) in lines.items():
        if value > 0:
            axes.axvline(value, color=color, linestyle=style, linewidth=1.4, label=f"{label} {value:.2g}")
    axes.legend(frameon=False, fontsize=9)
    _finish(axes, "|p - q|", "share of tokens above")
    return figure


def draw_groups(pairs: TokenPairs, analysis: Analysis) -> Figure:
    """Mean |p - q| by probability, position and entropy."""
    del pairs
    shown = {heading: groups for heading, groups in analysis.groups.items() if not heading.startswith(("token", "age"))}
    figure = Figure(figsize=(4.4 * len(shown), 3.6), layout="constrained")
    for axes, (heading, groups) in zip(np.atleast_1d(figure.subplots(1, len(shown))), shown.items(), strict=True):
        _bars(axes, groups)
        axes.set_title(heading, fontsize=10, loc="left")
    return figure


def draw_steps(pairs: TokenPairs, analysis: Analysis) -> Figure:
    """Mean and 99% quantile of |p - q| of each step, and c."""
    del pairs
    over = analysis.over_training
    steps = [step.step for step in over.steps]
    figure, axes = _figure(7.2)
    for name, color in (("mean", _BLUE), ("p99", _ORANGE)):
        values = [getattr(step.statistics, name) for step in over.steps]
        axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=3, label=name)
    if over.tolerance > 0:
        axes.axhline(over.tolerance, color=_INK, linestyle="--", linewidth=1.2, label=f"c {over.tolerance:.2g}")
    axes.legend(frameon=False, fontsize=9)
    _finish(axes, "step", "|p - q|")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


FIGURES: Mapping[str, tuple[str, Callable[[TokenPairs, Analysis], Figure]]] = MappingProxyType({
    "scatter": ("Each token's probability under both.", draw_scatter),
    "distribution": ("Share of tokens above each |p - q|; mean, noise floors and c.", draw_distribution),
    "groups": ("Mean |p - q| where it arises.", draw_groups),
})  # fmt: skip
"""File stem to (caption, function)."""


def figures_of(analysis: Analysis) -> dict[str, tuple[str, Callable[[TokenPairs, Analysis], Figure]]]:
    """The figures of a pair: `FIGURES`, and the curve over training where there are several steps."""
    several = analysis.over_training is not None and len(analysis.over_training.steps) > 1
    return {**({"steps": ("|p - q| over training.", draw_steps)} if several else {}), **FIGURES}


def _figure(width: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    return figure, figure.subplots()


def _bars(axes: Axes, groups: tuple[Group, ...]) -> None:
    axes.bar(range(len(groups)), [group.mean for group in groups], color=_BLUE)
    axes.set_xticks(range(len(groups)), [group.label for group in groups], rotation=60, fontsize=8)
    _finish(axes, "", "mean |p - q|")


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.set_axisbelow(True)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.tick_params(labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
