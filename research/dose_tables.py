"""The tables and figures of appendix.md: what a fixed lambda does, penalty by penalty, at equal
entropy.

`python -m research dose_response`, and the other studies of fixed lambdas. Two estimators stand
beside each other, since delta follows the policy's entropy H and nobody knows how exactly:

    delta at equal entropy  log delta over what the baseline's runs have at that H, by a regression
                            of log delta on log H over all their steps; in training H falls while
                            the weights sharpen, so its slope is the one along a run
    delta per nat           log (delta / H), the regression with slope 1, as delta goes with H over
                            tokens and over policies of one age
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import stdtr

from configs.studies.dose_response import doses
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.estimators import t_quantile
from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe.metrics_io import Series
from dcmdp_jax.observe.page_kit import INK, LEGEND, make_figure, style_axes
from research.oracle.oracle import NOTHING
from research.oracle.page import draw_oracle
from research.studies.results import (
    BASELINE_COLOR,
    Estimate,
    Table,
    color_of,
    curves,
    estimate,
    held_out,
    plot_curve,
    recorded,
)

BASELINE = "grpo"
CONTROL = "grpo_perturbed"
"""Arm without a penalty, and the one that differs from it by a perturbation alone."""
_FEWEST_RUNS = 5
_LOGARITHMS = ("excess", "per_nat")
Doses = Mapping[str, tuple[str, float]]
"""Arm -> its penalty and its lambda."""


@dataclasses.dataclass(frozen=True)
class Relation:
    """Discrepancy by entropy of runs without a penalty: log delta = intercept + slope log H.

    Attributes:
        intercept, slope: least squares over all steps of all runs.
        lowest, highest: entropies that it was fitted on, nats; beyond them it is extrapolated.
    """

    intercept: float
    slope: float
    lowest: float
    highest: float


def fit_relation(runs: Mapping[int, Series]) -> Relation:
    """Fit delta against entropy over every step of these runs."""
    delta, entropy = (
        np.concatenate([series[name][1] for series in runs.values()])
        for name in ("discrepancy/mean", "policy/entropy")
    )
    used = (delta > 0) & (entropy > 0)
    slope, intercept = np.polyfit(np.log(entropy[used]), np.log(delta[used]), 1)
    return Relation(
        float(intercept), float(slope), float(entropy[used].min()), float(entropy[used].max())
    )


def responses(relation: Relation) -> dict[str, tuple[str, object]]:
    """Name -> heading, and the function from a run's metrics to its number. All but one look at the
    last half.
    """

    def late(series: Series, name: str) -> np.ndarray:
        values = series[name][1]
        return values[len(values) // 2 :]

    def excess(series: Series) -> float:
        delta = late(series, "discrepancy/mean")
        entropy = late(series, "policy/entropy")
        used = (delta > 0) & (entropy > 0)
        if not used.any():
            return math.nan
        return float(
            np.mean(
                np.log(delta[used]) - relation.intercept - relation.slope * np.log(entropy[used])
            )
        )

    def per_nat(series: Series) -> float:
        delta = late(series, "discrepancy/mean")
        entropy = late(series, "policy/entropy")
        return (
            math.log(delta.mean() / entropy.mean())
            if min(delta.mean(), entropy.mean()) > 0
            else math.nan
        )

    def score(series: Series) -> float:
        values = held_out(series)[1]
        return 100 * float(values[-1]) if len(values) else math.nan

    return {
        "discrepancy": (
            "delta, 1e-3",
            lambda series: 1e3 * float(late(series, "discrepancy/mean").mean()),
        ),
        "excess": ("delta at equal entropy, %", excess),
        "per_nat": ("delta per nat, %", per_nat),
        "entropy": ("entropy, nats", lambda series: float(late(series, "policy/entropy").mean())),
        "reward": ("reward", lambda series: float(late(series, "reward/mean").mean())),
        "held_out": ("held-out, %", score),
    }


def measure_doses(runs: Table, baseline: str) -> dict[str, dict[str, tuple[Estimate, Estimate]]]:
    """Of each response and arm: the value, and the difference to the baseline, seed by seed.

    `excess` and `per_nat` are 100 (e^x - 1), x the mean over seeds of the difference of logarithms.
    """
    relation = fit_relation(runs[baseline])
    found = {}
    for name, (_, value) in responses(relation).items():
        values = {
            arm: {seed: value(series) for seed, series in seeds.items()}
            for arm, seeds in runs.items()
        }
        found[name] = {}
        for arm, of_arm in values.items():
            paired = {
                seed: each - values[baseline][seed]
                for seed, each in of_arm.items()
                if seed in values[baseline]
            }
            found[name][arm] = estimate(of_arm), estimate(paired)
    for name in _LOGARITHMS:
        found[name] = {
            arm: (_percent(own), _percent(paired)) for arm, (own, paired) in found[name].items()
        }
    return found


def dose_table(runs: Table, baseline: str) -> str:
    """Markdown: every arm's responses as differences to the baseline, whose own values are in the
    first row.
    """
    present = {arm: seeds for arm, seeds in runs.items() if seeds}
    found = measure_doses(present, baseline)
    relation = fit_relation(present[baseline])
    names = responses(relation)
    entropies = found["entropy"]
    rows = [
        [
            baseline,
            str(len(present[baseline])),
            *(_own(found[name][baseline][0], name) for name in names),
        ]
    ]
    for arm in present:
        if arm != baseline:
            cells = [_difference(found[name][arm][1]) for name in names]
            if not relation.lowest <= entropies[arm][0].mean <= relation.highest:
                cells[list(names).index("excess")] += " (extrapolated)"
            rows.append([arm, str(len(present[arm])), *cells])
    return (
        "\n".join(
            markdown_table(["arm", "runs", *(heading for heading, _ in names.values())], rows)
        )
        + "\n"
    )


def p_values(
    found: Mapping[str, Mapping[str, tuple[Estimate, Estimate]]], others: Sequence[str]
) -> dict:
    """(response, arm) -> two-sided p of the difference to the baseline, of `measure_doses`; only
    where there is one.

    Args:
        found: of `measure_doses`.
        others: arms without a claim, which are no tests: the baseline and its control.
    """
    result = {}
    for name, arms in found.items():
        for arm, (_, difference) in arms.items():
            mean = difference.mean
            half = difference.half_width
            if name in _LOGARITHMS and mean > -100:
                mean, half = math.log1p(mean / 100), half / (100 + mean)  # back from `_percent`
            if arm not in others and math.isfinite(half) and (half > 0 or mean):
                result[name, arm] = t_p_value(
                    len(difference.values), mean / half if half > 0 else math.inf
                )
    return result


def t_p_value(count: int, half_widths: float) -> float:
    """Two-sided p of a mean of `count` independent values that is this many half widths of its 95%
    interval from 0.
    """
    return float(2 * stdtr(count - 1, -abs(half_widths) * t_quantile(count)))


def holm(p: Mapping[Any, float], level: float = 0.05) -> set:
    """Those of several tests that hold together: with probability 1 - `level` none of them is
    chance (Holm 1979).
    """
    held = set()
    for place, name in enumerate(sorted(p, key=p.__getitem__)):
        if p[name] * (len(p) - place) > level:
            break
        held.add(name)
    return held


def dose_claims(runs: Table, baseline: str, control: str) -> list[str]:
    """Lines of Markdown: the differences to the baseline that the runs carry.

    A difference is claimed if it is more than twice its 95% half width, more than three times what
    the perturbation alone does, its half width included, and of at least five runs. Twice the half
    width is p = 0.0051 with five runs, 0.0014 with ten, 0.0005 with twenty, and sees an effect of
    2.5 half widths in 80% of studies. Each has its p, and "not by Holm" where it does not hold at
    5% over all differences of all arms.

    Args:
        runs: of the study.
        baseline: arm without a penalty.
        control: the same arm with a perturbation.
    """
    present = {arm: seeds for arm, seeds in runs.items() if seeds}
    found = measure_doses(present, baseline)
    p = p_values(found, (baseline, control))
    held = holm(p)
    lines = []
    for arm in (arm for arm in present if arm not in (baseline, control)):
        parts = []
        for name, (heading, _) in responses(fit_relation(present[baseline])).items():
            difference = found[name][arm][1]
            chance = found[name][control][1]
            enough = (
                len(difference.values) >= _FEWEST_RUNS
                and abs(difference.mean) > 2 * difference.half_width
            )
            if enough and abs(difference.mean) > 3 * (abs(chance.mean) + chance.half_width):
                note = "" if (name, arm) in held else ", not by Holm"
                parts.append(f"{heading} {_difference(difference)} (p {p[name, arm]:.1g}{note})")
        lines.append(
            f"- `{arm}` ({len(present[arm])} runs): "
            f"{'; '.join(parts) or 'no difference that they carry'}."
        )
    return lines


def ascending(runs: Table) -> list[str]:
    """Arms whose lambda moves."""
    name = "dual/multiplier"
    return [
        arm
        for arm, seeds in runs.items()
        if any(name in run and np.ptp(run[name][1]) > 0 for run in seeds.values())
    ]


def ascent_table(runs: Table, baseline: str) -> str:
    """Markdown: where lambda goes under dual ascent, and whether the discrepancy follows its budget
    c.

    Against each arm stands the baseline with the same c: what the share of steps above it is
    without a penalty.
    """
    rows = []
    for arm in ascending(runs):
        c = float(next(iter(runs[arm].values()))["dual/tolerance"][1][-1])

        def over(series: Series, c: float = c) -> float:
            return 100 * float(np.mean(series["discrepancy/mean"][1] > c))

        multipliers = {seed: run["dual/multiplier"][1] for seed, run in runs[arm].items()}
        late = {
            name: {seed: _late_mean(run) for seed, run in runs[name].items()}
            for name in (arm, baseline)
        }
        changed = estimate(
            {seed: value - late[baseline][seed] for seed, value in late[arm].items()}
        )
        columns = (
            estimate({seed: values[-1] for seed, values in multipliers.items()}),
            estimate({seed: values.max() for seed, values in multipliers.items()}),
            estimate({seed: over(run) for seed, run in runs[arm].items()}),
            estimate({seed: over(run) for seed, run in runs[baseline].items()}),
        )
        cells = [*(_number(each, "") for each in columns), _difference(changed)]
        rows.append([arm, str(len(multipliers)), f"{1e3 * c:.3g}", *cells])
    heading = ["arm", "runs", "c, 1e-3", "lambda, last", "lambda, peak", "steps above c, %"]
    heading += [f"the same, {baseline}, %", f"delta less {baseline}'s, 1e-3"]
    return "\n".join(markdown_table(heading, rows)) + "\n"


def _late_mean(series: Series) -> float:
    values = series["discrepancy/mean"][1]
    return 1e3 * float(values[len(values) // 2 :].mean())


def dose_panels(
    runs: Table, baseline: str, doses: Doses
) -> dict[str, tuple[float, float, dict[str, np.ndarray]]]:
    """What `draw_doses` draws: values of each penalty by lambda; logarithms as a difference to
    0.
    """
    present = {arm: seeds for arm, seeds in runs.items() if seeds}
    found = measure_doses(present, baseline)
    panels = {}
    for name, (heading, _) in responses(fit_relation(present[baseline])).items():
        penalties: dict[str, list[tuple[float, float, float]]] = {}
        for arm, (penalty, strength) in doses.items():
            if arm in present:
                own, paired = found[name][arm]
                shown = paired if name in _LOGARITHMS else own
                penalties.setdefault(penalty, []).append((strength, shown.mean, shown.half_width))
        level = found[name][baseline][1 if name in _LOGARITHMS else 0]
        panels[heading] = (
            level.mean,
            level.half_width,
            {penalty: np.array(each) for penalty, each in penalties.items()},
        )
    return panels


def _percent(found: Estimate) -> Estimate:
    """Of logarithms, in percent; the half width to first order."""
    values = {seed: 100 * math.expm1(value) for seed, value in found.values.items()}
    mean = 100 * math.expm1(found.mean)
    return Estimate(mean=mean, half_width=(100 + mean) * found.half_width, values=values)


def _own(found: Estimate, name: str) -> str:
    return "0" if name in _LOGARITHMS else _number(found, "")


def _difference(found: Estimate) -> str:
    return _number(found, "+")


def _number(found: Estimate, sign: str) -> str:
    if not found.values:
        return "-"
    text = f"{found.mean:{sign}.3g}"
    return f"{text} ± {found.half_width:.2g}" if math.isfinite(found.half_width) else text


_ENDS = {"reward": "reward", "held_out": "held-out score", "discrepancy": "delta"}


def rank_correlation(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Spearman's: the correlation of the ranks of two numbers over the names that both have; equal
    ones share a rank.

    Raises:
        ValueError: with fewer than three names, or where one of the two is constant.
    """
    names = [name for name in first if name in second]
    ranks = [_ranks(np.array([values[name] for name in names])) for values in (first, second)]
    if len(names) < 3 or any(np.ptp(each) == 0 for each in ranks):
        raise ValueError(f"rank correlation of {len(names)} names: needs three that differ")
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.array(
        [np.sum(values < value) + (np.sum(values == value) - 1) / 2 for value in values]
    )


def oracle_order(path: Path, runs: Table, baseline: str) -> list[str]:
    """Lines of Markdown: an oracle's table, and the rank correlation of its errors with training
    results.

    Args:
        path: remedies.json of `python -m research.oracle --study`.
        runs: of the study.
        baseline: the arm without a penalty, which the oracle calls no remedy.

    Raises:
        UserError: if the file can't be read, or has fewer than three of the study's arms.
    """
    try:
        oracles = json.loads(path.read_text(encoding="utf-8"))
        errors = [
            {
                one["name"]: one["quality"]["error"]
                for one in oracle["remedies"]
                if one["quality"]["error"] is not None
            }
            for oracle in oracles
        ]
        lines = [*_table(oracles), ""]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--oracle: {path}: can't be read as remedies.json of the oracle ({error})"
        ) from error
    found = measure_doses({arm: seeds for arm, seeds in runs.items() if seeds}, baseline)
    for oracle, squared in zip(oracles, errors, strict=True):
        squared = {baseline if name == NOTHING else name: value for name, value in squared.items()}
        ends = {
            label: {arm: own.mean for arm, (own, _) in found[name].items() if arm in squared}
            for name, label in _ENDS.items()
        }
        count = len(ends["reward"])
        if count < 3:
            raise UserError(
                f"--oracle: {path} has {count} of the study's arms, needs three; give the oracle "
                "--study"
            )
        words = ", ".join(
            f"{label} {rank_correlation(squared, values):+.2f}" for label, values in ends.items()
        )
        lines.append(
            f"- `{oracle['engine']}` on {oracle['model']}, {count} arms: rank correlation with "
            f"{words}."
        )
    return lines


def oracle_panels(path: Path) -> dict[str, dict[str, tuple[float | None, ...]]]:
    """What `draw_oracle` draws of a file that `oracle_order` read."""
    return {
        oracle["engine"]: {one["name"]: _judged(one) for one in oracle["remedies"]}
        for oracle in json.loads(path.read_text(encoding="utf-8"))
    }


def _judged(one: Mapping[str, Any]) -> tuple[float | None, ...]:
    """error, half of its interval, bias^2, half of its interval, variance of a remedy in
    remedies.json.
    """
    found = one["quality"]
    width = one["half_width"]
    return (
        found["error"],
        width["error"],
        found["squared_bias"],
        width["squared_bias"],
        found["variance"],
    )


def _table(oracles: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each remedy in the order of the first engine: error and bias^2 with their 95%
    intervals, of each.
    """
    rows = []
    for first in oracles[0]["remedies"]:
        cells = []
        for oracle in oracles:
            (one,) = (one for one in oracle["remedies"] if one["name"] == first["name"])
            error, width, squared, spread = (
                "-" if value is None else f"{value:.2f}" for value in _judged(one)[:4]
            )
            cells += [f"{error} ± {width}", f"{squared} ± {spread}"]
        rows.append([f"`{first['name']}`", *cells])
    engines = [
        heading for oracle in oracles for heading in (f"{oracle['engine']}: error", "bias^2")
    ]
    return markdown_table(["penalty", *engines], rows)


def draw_doses(
    title: str, baseline: str, panels: Mapping[str, tuple[float, float, Mapping[str, np.ndarray]]]
) -> Figure:
    """Plot what a fixed lambda does: a panel for each response, a line for each penalty, the
    baseline in gray.

    Args:
        title: heading.
        baseline: label of the runs without a penalty.
        panels: heading -> the baseline's mean and half width, and penalty -> [n, 3]: lambda, mean,
            half width.
    """
    columns = math.ceil(len(panels) / 2)
    figure, places = make_figure(3.2 * columns + 0.4, 5.8, title, rows=2, columns=columns)
    for axes, (heading, panel) in zip(places, panels.items(), strict=False):
        _doses(axes, heading, baseline, panel)
    axes.legend(**LEGEND)
    return figure


def _doses(
    axes: Axes, heading: str, baseline: str, panel: tuple[float, float, Mapping[str, np.ndarray]]
) -> None:
    """One response by fixed lambda."""
    mean, half, penalties = panel
    axes.axhline(mean, color=BASELINE_COLOR, linewidth=1.5, label=baseline)
    if math.isfinite(half):
        axes.axhspan(mean - half, mean + half, color=BASELINE_COLOR, alpha=0.25, linewidth=0)
    for penalty, points in penalties.items():
        strength, values, widths = points.T
        widths = np.where(np.isfinite(widths), widths, 0)
        line = {
            "color": color_of(penalty),
            "linestyle": "--" if penalty.endswith("_one") else "-",
            "linewidth": 1.5,
        }
        axes.errorbar(
            strength,
            values,
            yerr=widths,
            marker="o",
            markersize=4,
            capsize=3,
            label=penalty,
            **line,
        )
    axes.set_xscale("log")
    style_axes(axes, heading, x="lambda, fixed")


def draw_answer(
    title: str,
    baseline: str,
    panels: Mapping[str, tuple[float, float, Mapping[str, np.ndarray]]],
    multipliers: Mapping[str, np.ndarray],
    discrepancies: Mapping[str, np.ndarray],
    budget: float,
) -> Figure:
    """Plot whether the penalty lowers the discrepancy: by fixed lambda above, by dual ascent below.

    Args:
        title: heading.
        baseline: label of the runs without a penalty.
        panels: two of `draw_doses`.
        multipliers, discrepancies: label -> [n, 3]: step, mean, half width, of arms with dual
            ascent; the second has the baseline too.
        budget: c of these arms.
    """
    figure, places = make_figure(8.6, 6.2, title, rows=2, columns=2)
    for axes, (heading, panel) in zip(places[:2], panels.items(), strict=True):
        _doses(axes, heading, baseline, panel)
    places[0].legend(**LEGEND)
    headings = {
        "lambda by dual ascent": multipliers,
        "delta under dual ascent; dashed: c": discrepancies,
    }
    for axes, (heading, found) in zip(places[2:], headings.items(), strict=True):
        for label, curve in found.items():
            plot_curve(axes, curve, BASELINE_COLOR if label == baseline else color_of(label))
            axes.lines[-1].set_label(label)
        style_axes(axes, heading, x="training step", legend=True)
    places[3].axhline(budget, color=INK, linestyle=(0, (5, 2)), linewidth=1)
    return figure


def text(runs: Table, oracle: Path | None = None) -> str:
    """Tables of a study, what its runs carry and, with its remedies.json, the oracle's order
    against theirs.
    """
    parts = [
        f"Differences to {BASELINE}, seed by seed, over the last half of the steps.",
        dose_table(runs, BASELINE),
    ]
    if _moving(runs):
        parts += ["Dual ascent.", ascent_table(runs, BASELINE)]
    if CONTROL in runs:
        parts += [f"Carried by the runs, and larger than what the perturbation of {CONTROL} does:"]
        parts += ["\n".join(dose_claims(runs, BASELINE, CONTROL))]
    if oracle is not None:
        parts += ["\n".join(oracle_order(oracle, runs, BASELINE))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _moving(runs: Table) -> list[str]:
    """Arms with dual ascent."""
    chosen = doses("one" if any("_one_" in arm for arm in runs) else "two")
    return ascending({arm: seeds for arm, seeds in runs.items() if arm not in chosen})


def figures(runs: Table, oracle: Path | None = None) -> dict[str, Figure]:
    """Fixed lambdas; with the oracle's remedies.json, dual ascent beside them, and the oracle."""
    panels = dose_panels(runs, BASELINE, doses("two"))
    title = "Dose and response"
    if oracle is None:
        return {"vllm": draw_doses(f"{title}, vLLM with an FP8 cache", BASELINE, panels)}
    moving = _moving(runs)
    multipliers, discrepancies = (
        curves({arm: runs[arm] for arm in arms}, functools.partial(recorded, name=name))
        for name, arms in (("dual/multiplier", moving), ("discrepancy/mean", [BASELINE, *moving]))
    )
    budget = float(next(iter(runs[moving[0]].values()))["dual/tolerance"][1][-1])
    first = dict(list(panels.items())[:2])
    return {
        "doses": draw_doses(title, BASELINE, panels),
        "answer": draw_answer(title, BASELINE, first, multipliers, discrepancies, budget),
        "oracle": draw_oracle(
            "Each penalty's gradient against the exact one", oracle_panels(oracle)
        ),
    }
