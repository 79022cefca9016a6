"""Dose and response: what a fixed lambda does, charge by charge, and the discrepancy at equal entropy.

Two estimators stand beside each other, since delta follows the policy's entropy H and nobody knows how exactly:

    delta at equal entropy   log delta over what the baseline's runs have at that H, by a regression of log delta on
                             log H over all their steps; in training H falls while the weights sharpen, so its slope
                             is the one along a run
    delta per nat            log (delta / H), the regression with slope 1, as delta goes with H over tokens and over
                             policies of one age
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dcmdp_jax.evaluation.estimators import t_p_value
from dcmdp_jax.lab.studies.results import Estimate, Table, estimate, held_out
from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe.metrics_io import Series

_FEWEST_RUNS = 5
_LOGARITHMS = ("excess", "per_nat")
Doses = Mapping[str, tuple[str, float]]
"""Arm -> its charge and its lambda."""


@dataclasses.dataclass(frozen=True)
class Relation:
    """Discrepancy by entropy of runs without a charge: log delta = intercept + slope log H.

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
        np.concatenate([series[name][1] for series in runs.values()]) for name in ("discrepancy/mean", "policy/entropy")
    )
    used = (delta > 0) & (entropy > 0)
    slope, intercept = np.polyfit(np.log(entropy[used]), np.log(delta[used]), 1)
    return Relation(float(intercept), float(slope), float(entropy[used].min()), float(entropy[used].max()))


def responses(relation: Relation) -> dict[str, tuple[str, object]]:
    """Name -> heading, and the function from a run's metrics to its number. All but one look at the last half."""

    def late(series: Series, name: str) -> np.ndarray:
        values = series[name][1]
        return values[len(values) // 2 :]

    def excess(series: Series) -> float:
        delta, entropy = late(series, "discrepancy/mean"), late(series, "policy/entropy")
        used = (delta > 0) & (entropy > 0)
        if not used.any():
            return math.nan
        return float(np.mean(np.log(delta[used]) - relation.intercept - relation.slope * np.log(entropy[used])))

    def per_nat(series: Series) -> float:
        delta, entropy = late(series, "discrepancy/mean"), late(series, "policy/entropy")
        return math.log(delta.mean() / entropy.mean()) if min(delta.mean(), entropy.mean()) > 0 else math.nan

    def score(series: Series) -> float:
        values = held_out(series)[1]
        return 100 * float(values[-1]) if len(values) else math.nan

    return {
        "discrepancy": ("delta, 1e-3", lambda series: 1e3 * float(late(series, "discrepancy/mean").mean())),
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
    relation, found = fit_relation(runs[baseline]), {}
    for name, (_, value) in responses(relation).items():
        values = {arm: {seed: value(series) for seed, series in seeds.items()} for arm, seeds in runs.items()}
        found[name] = {}
        for arm, of_arm in values.items():
            paired = {seed: each - values[baseline][seed] for seed, each in of_arm.items() if seed in values[baseline]}
            found[name][arm] = estimate(of_arm), estimate(paired)
    for name in _LOGARITHMS:
        found[name] = {arm: (_percent(own), _percent(paired)) for arm, (own, paired) in found[name].items()}
    return found


def dose_table(runs: Table, baseline: str) -> str:
    """Markdown: every arm's responses as differences to the baseline, whose own values are in the first row."""
    present = {arm: seeds for arm, seeds in runs.items() if seeds}
    found, relation = measure_doses(present, baseline), fit_relation(present[baseline])
    names = responses(relation)
    entropies = found["entropy"]
    rows = [[baseline, str(len(present[baseline])), *(_own(found[name][baseline][0], name) for name in names)]]
    for arm in present:
        if arm != baseline:
            cells = [_difference(found[name][arm][1]) for name in names]
            if not relation.lowest <= entropies[arm][0].mean <= relation.highest:
                cells[list(names).index("excess")] += " (extrapolated)"
            rows.append([arm, str(len(present[arm])), *cells])
    return "\n".join(markdown_table(["arm", "runs", *(heading for heading, _ in names.values())], rows)) + "\n"


def p_values(found: Mapping[str, Mapping[str, tuple[Estimate, Estimate]]], others: Sequence[str]) -> dict:
    """(response, arm) -> two-sided p of the difference to the baseline, of `measure_doses`; only where there is one.

    Args:
        found: of `measure_doses`.
        others: arms without a claim, which are no tests: the baseline and its control.
    """
    result = {}
    for name, arms in found.items():
        for arm, (_, difference) in arms.items():
            mean, half = difference.mean, difference.half_width
            if name in _LOGARITHMS and mean > -100:
                mean, half = math.log1p(mean / 100), half / (100 + mean)  # back from `_percent`
            if arm not in others and math.isfinite(half) and (half > 0 or mean):
                result[name, arm] = t_p_value(len(difference.values), mean / half if half > 0 else math.inf)
    return result


def holm(p: Mapping[Any, float], level: float = 0.05) -> set:
    """Those of several tests that hold together: with probability 1 - `level` none of them is chance (Holm 1979)."""
    held = set()
    for place, name in enumerate(sorted(p, key=p.__getitem__)):
        if p[name] * (len(p) - place) > level:
            break
        held.add(name)
    return held


def dose_claims(runs: Table, baseline: str, control: str) -> list[str]:
    """Lines of Markdown: the differences to the baseline that the runs carry.

    A difference is claimed if it is more than twice its 95% half width, more than three times what the perturbation
    alone does, its half width included, and of at least five runs. Twice the half width is p = 0.0051 with five runs,
    0.0014 with ten, 0.0005 with twenty, and sees an effect of 2.5 half widths in 80% of studies. Each has its p, and
    "not by Holm" where it does not hold at 5% over all differences of all arms.

    Args:
        runs: of the study.
        baseline: arm without a charge.
        control: the same arm with a perturbation.
    """
    present = {arm: seeds for arm, seeds in runs.items() if seeds}
    found = measure_doses(present, baseline)
    p = p_values(found, (baseline, control))
    held, lines = holm(p), []
    for arm in (arm for arm in present if arm not in (baseline, control)):
        parts = []
        for name, (heading, _) in responses(fit_relation(present[baseline])).items():
            difference, chance = found[name][arm][1], found[name][control][1]
            enough = len(difference.values) >= _FEWEST_RUNS and abs(difference.mean) > 2 * difference.half_width
            if enough and abs(difference.mean) > 3 * (abs(chance.mean) + chance.half_width):
                note = "" if (name, arm) in held else ", not by Holm"
                parts.append(f"{heading} {_difference(difference)} (p {p[name, arm]:.1g}{note})")
        lines.append(f"- `{arm}` ({len(present[arm])} runs): {'; '.join(parts) or 'no difference that they carry'}.")
    return lines


def ascending(runs: Table) -> list[str]:
    """Arms whose lambda moves."""
    name = "dual/multiplier"
    return [
        arm for arm, seeds in runs.items() if any(name in run and np.ptp(run[name][1]) > 0 for run in seeds.values())
    ]


def ascent_table(runs: Table, baseline: str) -> str:
    """Markdown: where lambda goes under dual ascent, and whether the discrepancy follows its budget c.

    Against each arm stands the baseline with the same c: what the share of steps above it is without a charge.
    """
    rows = []
    for arm in ascending(runs):
        c = float(next(iter(runs[arm].values()))["dual/tolerance"][1][-1])

        def over(series: Series, c: float = c) -> float:
            return 100 * float(np.mean(series["discrepancy/mean"][1] > c))

        multipliers = {seed: run["dual/multiplier"][1] for seed, run in runs[arm].items()}
        late = {name: {seed: _late_mean(run) for seed, run in runs[name].items()} for name in (arm, baseline)}
        changed = estimate({seed: value - late[baseline][seed] for seed, value in late[arm].items()})
        columns = (
            estimate({seed: values[-1] for seed, values in multipliers.items()}),
            estimate({seed: values.max() for seed, values in multipliers.items()}),
            estimate({seed: over(run) for seed, run in runs[arm].items()}),
            estimate({seed: over(run) for seed, run in runs[baseline].items()}),
        )
        cells = [*(_number(each, "") for each in columns), _difference(changed)]
        rows.append([arm, str(len(multipliers)), f"{1e3 * c:.3g}", *cells])
    heading = [
        "arm", "runs", "c, 1e-3", "lambda, last", "lambda, peak", "steps above c, %", f"the same, {baseline}, %",
        f"delta less {baseline}'s, 1e-3",
    ]  # fmt: skip
    return "\n".join(markdown_table(heading, rows)) + "\n"


def _late_mean(series: Series) -> float:
    values = series["discrepancy/mean"][1]
    return 1e3 * float(values[len(values) // 2 :].mean())


def dose_panels(runs: Table, baseline: str, doses: Doses) -> dict[str, tuple[float, float, dict[str, np.ndarray]]]:
    """What `study_figures.draw_doses` draws: values of each charge by lambda; logarithms as a difference to 0."""
    present = {arm: seeds for arm, seeds in runs.items() if seeds}
    found, panels = measure_doses(present, baseline), {}
    for name, (heading, _) in responses(fit_relation(present[baseline])).items():
        charges: dict[str, list[tuple[float, float, float]]] = {}
        for arm, (charge, strength) in doses.items():
            if arm in present:
                own, paired = found[name][arm]
                shown = paired if name in _LOGARITHMS else own
                charges.setdefault(charge, []).append((strength, shown.mean, shown.half_width))
        level = found[name][baseline][1 if name in _LOGARITHMS else 0]
        panels[heading] = level.mean, level.half_width, {charge: np.array(each) for charge, each in charges.items()}
    return panels


def _percent(found: Estimate) -> Estimate:
    """Of logarithms, in percent; the half width to first order."""
    values = {seed: 100 * math.expm1(value) for seed, value in found.values.items()}
    mean = 100 * math.expm1(found.mean)
    return Estimate(mean, (100 + mean) * found.half_width, values)


def _own(found: Estimate, name: str) -> str:
    return "0" if name in _LOGARITHMS else _number(found, "")


def _difference(found: Estimate) -> str:
    return _number(found, "+")


def _number(found: Estimate, sign: str) -> str:
    if not found.values:
        return "-"
    text = f"{found.mean:{sign}.3g}"
    return f"{text} ± {found.half_width:.2g}" if math.isfinite(found.half_width) else text
