"""Tables and figures of late collapse, from kept metrics; paper_regime.md has the rules they
follow.

    python -m research paper_regime

Primary: the last policy's score by an exact engine and by its own, Welch's test against GRPO and
its replicate pooled over the arm's own seeds, Holm over the arms. Secondary: the largest fall of
the reward from its peak, and the share of runs that ended by one yardstick for every arm.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.figure import Figure

from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe.metrics_io import Series
from dcmdp_jax.observe.page_kit import make_figure, style_axes
from research.dose_tables import holm
from research.kept_studies import KEPT
from research.long_tables import (
    BASELINE,
    CONTROLS,
    RESPONSES,
    ended,
    of_seeds,
    pooled,
    read,
    yardstick,
)
from research.repeated import fingerprint
from research.studies.results import BASELINE_COLOR, Table, color_of

SMALLEST = 17.0
"""Points of score below which a difference is said not to matter."""
PAPERS = "dc_grpo"
"""The arm that the rules define an outcome of."""
_WINDOW = 4


@dataclasses.dataclass(frozen=True)
class Difference:
    """An arm's mean less that of GRPO and its replicate, points: Welch's interval and two-sided p.

    Attributes:
        mean, low, high: the difference and its 95% interval.
        p: two-sided.
        held: by Holm at 5% over the arms.
    """

    mean: float
    low: float
    high: float
    p: float
    held: bool = False


def read_kept(name: str) -> Table:
    """Runs of `paper_regime`, `paper_regime_readings` (beside the main study's GRPO and replicate)
    or `..._calm`.
    """
    runs = read(KEPT / f"{name}.jsonl.gz")
    if name != "paper_regime_readings":
        return runs
    main = read(KEPT / "paper_regime.jsonl.gz")
    return {arm: main[arm] for arm in (BASELINE, CONTROLS[-1])} | {
        arm: runs[arm] for arm in runs if arm != BASELINE
    }


EXACTLY = "held-out, exact engine, %"
OWN = "held-out, own engine, %"
PRIMARY = (EXACTLY, OWN)
"""The measures that the rules name: a claim about an arm is made of both."""


def known_runs() -> dict[str, list[int]]:
    """Arm -> seeds whose first steps were kept, in `regimes`, before the rules were written."""
    earlier = read(KEPT / "regimes.jsonl.gz")
    bits = {fingerprint(series) for seeds in earlier.values() for series in seeds.values()}
    known = {}
    for arm, seeds in read(KEPT / "paper_regime.jsonl.gz").items():
        same = [seed for seed, series in seeds.items() if fingerprint(series) in bits]
        if same:
            known[arm] = same
    return known


def fresh(runs: Table) -> Table:
    """The runs whose outcome nobody knew when the rules were written."""
    known = known_runs()
    return {
        arm: of_seeds(seeds, set(seeds) - set(known.get(arm, ()))) for arm, seeds in runs.items()
    }


def smoothed(series: Series) -> np.ndarray:
    """Rewards as means of four steps."""
    return np.convolve(series["reward/mean"][1], np.ones(_WINDOW) / _WINDOW, "valid")


def fall(series: Series) -> float:
    """The largest fall of the reward from its peak so far."""
    means = smoothed(series)
    return float(np.max(np.maximum.accumulate(means) - means))


def differences(runs: Table, heading: str) -> dict[str, Difference]:
    """Arm -> its difference to GRPO and its replicate of its own seeds, of one of `RESPONSES`;
    Holm's over all arms.
    """
    arms = [arm for arm in runs if arm not in (BASELINE, CONTROLS[-1]) and len(runs[arm]) > 1]
    found = {arm: pooled(runs, heading, arm) for arm in arms}
    held = holm({arm: p for arm, (_, _, p) in found.items()})
    return {
        arm: Difference(mean, mean - half, mean + half, p, arm in held)
        for arm, (mean, half, p) in found.items()
    }


def outcome(found: Difference) -> str:
    """What the rule says of a difference by the exact engine."""
    if found.low >= 0 and found.mean >= SMALLEST:
        return "the claim is reproduced at this size"
    if found.high <= 0 and found.mean <= -SMALLEST:
        return "a negative result in late collapse"
    if found.low > -SMALLEST and found.high < SMALLEST:
        return "neither help nor harm of a size that matters"
    return "open"


def table(runs: Table) -> str:
    """Markdown: scores and their differences, falls, ends, delta and lambda of every arm."""
    found = {name: differences(runs, name) for name in (EXACTLY, OWN)}
    over = ended(runs)
    rows = []
    for arm, seeds in runs.items():
        each = list(seeds.values())
        cells = [f"`{arm}`", str(len(each))]
        for name in found:
            values = [RESPONSES[name](series) for series in each]
            cells.append(f"{np.mean(values):.1f}")
            one = found[name].get(arm)
            cells.append(
                (
                    f"{one.mean:+.1f} ({one.low:.0f} to {one.high:.0f}){'*' if one.held else ''}, "
                    f"p {one.p:.2g}"
                )
                if one
                else "-"
            )
        late = [
            np.mean(series["discrepancy/mean"][1][len(series["reward/mean"][1]) // 2 :])
            for series in each
        ]
        last = [series["dual/multiplier"][1][-1] for series in each]
        largest = [series["dual/multiplier"][1].max() for series in each]
        cells += [
            f"{np.mean([fall(series) for series in each]):.2f}",
            f"{len(over[arm])}",
            f"{1e3 * np.mean(late):.2f}",
            f"{min(last):.3g} to {max(last):.3g}",
            f"{max(largest):.3g}",
        ]
        rows.append(cells)
    heads = [
        "arm",
        "runs",
        "exact engine, %",
        "less GRPO, points",
        "own engine, %",
        "less GRPO, points",
        "largest fall of reward",
        "ended",
        "delta, 1e-3",
        "lambda at the end",
        "largest",
    ]
    return "\n".join(markdown_table(heads, rows)) + "\n"


FIGURES: Mapping[str, Callable[[Series], tuple[np.ndarray, np.ndarray]]] = {
    "reward": lambda series: series["reward/mean"],
    "delta": lambda series: series["discrepancy/mean"],
    "lambda": lambda series: series["dual/multiplier"],
    "share clipped": lambda series: (
        series["policy/clip_low_fraction"][0],
        series["policy/clip_low_fraction"][1] + series["policy/clip_high_fraction"][1],
    ),
    "penalty's share": lambda series: series["dual/penalty_share"],
}


def draw(runs: Table, name: str) -> Figure:
    """A panel for each arm with a line for each run, GRPO's in gray; `held out` has the scores of
    the last policies.
    """
    arms = [arm for arm in runs if runs[arm]]
    if name == "held out":
        figure, [axes] = make_figure(
            8, 3, "Held out by an exact engine, each run's last policy", rows=1, columns=1
        )
        for place, arm in enumerate(arms):
            values = [RESPONSES[EXACTLY](series) for series in runs[arm].values()]
            axes.plot([place] * len(values), values, "o", color=color_of(arm), alpha=0.6)
        axes.set_xticks(range(len(arms)), arms, rotation=30)
        style_axes(axes, "%", x="")
        return figure
    columns = min(5, len(arms))
    figure, places = make_figure(
        2.6 * columns,
        2.3 * -(-len(arms) // columns),
        f"{name} by run",
        rows=-(-len(arms) // columns),
        columns=columns,
    )
    for axes, arm in zip(places, arms, strict=False):
        for of, color in ((BASELINE, BASELINE_COLOR), (arm, color_of(arm))):
            for series in runs[of].values():
                axes.plot(*FIGURES[name](series), color=color, linewidth=0.9)
        style_axes(axes, arm, x="training step")
    for axes in places[len(arms) :]:
        axes.set_visible(False)
    return figure


def claims(runs: Table) -> str:
    """Markdown: each arm's difference by each primary measure; * holds by Holm over the arms."""
    by_measure = {heading: differences(runs, heading) for heading in PRIMARY}
    rows = []
    for arm in by_measure[EXACTLY]:
        base = sum(len(of_seeds(runs[name], runs[arm])) for name in (BASELINE, CONTROLS[-1]))
        rows.append(
            [
                f"`{arm}`",
                f"{len(runs[arm])}, {base}",
                *(said(found[arm]) for found in by_measure.values()),
            ]
        )
    heads = ["variant", "runs, GRPO's", "zero-mismatch engine, points", "own engine, points"]
    return "\n".join(markdown_table(heads, rows)) + "\n"


def said(found: Difference) -> str:
    """A difference with its interval; * if it holds by Holm."""
    return f"{found.mean:+.0f} ({found.low:.0f} to {found.high:.0f}){'*' if found.held else ''}"


def text(runs: Table) -> str:
    """The table, what the rule says of DC-GRPO, and the fresh runs alone."""
    lines = [table(runs), f"ended: mean reward of the last four steps below {yardstick(runs):.3f}"]
    if PAPERS in runs:
        lines.append(f"{PAPERS}: {outcome(differences(runs, EXACTLY)[PAPERS])}")
        lines += [
            "",
            "Fresh runs alone (their first steps were not kept before the rules):",
            "",
            claims(fresh(runs)),
        ]
    return "\n".join(lines) + "\n"


def figures(runs: Table) -> dict[str, Figure]:
    """The six figures by the stem of their file."""
    stems = {
        name: f"paper_regime_{re.sub('[^a-z]+', '_', name)}" for name in (*FIGURES, "held out")
    }
    return {stem: draw(runs, name) for name, stem in stems.items()}
