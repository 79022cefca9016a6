"""The studies of doses: `python -m research.doses` runs what is not kept; doses.md has the rules.

All arms of a seed run one after another on one machine, then those of the next seed. A seed that
was cut is run again from its first arm. `python -m research doses` makes the table and the figure,
once every seed is there; `--late` and `doses_late` are setting B.

    python -m research.doses --late --seeds=20,21  # these seeds of setting B only
    python -m research.doses --keep=FILE  # copy the whole seeds of another checkout's FILE into the
                                          # kept metrics
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dcmdp_jax.commands.arguments import whole
from dcmdp_jax.commands.failures import run_main
from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe.page_kit import LEGEND, make_figure, style_axes
from dcmdp_jax.training.exit import Interrupted
from research.arguments import each_once
from research.ascents import before_a_fall
from research.dose_tables import holm, t_p_value
from research.kept_studies import KEPT
from research.long_tables import BASELINE, CONTROLS, RESPONSES, ended, yardstick
from research.paper_regime import PRIMARY, smoothed
from research.studies.results import (
    Estimate,
    Table,
    estimate,
    read_kept_metrics,
    write_kept_metrics,
)
from research.studies.study import Study
from research.studies.sweep import check_evaluation, load_study, resolve
from research.sweep import check_kept, evaluated, run_in_one_process

_BASELINES = (BASELINE, CONTROLS[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One of the two studies.

    Attributes:
        study: its file and argument.
        metrics: its kept runs.
        seeds: whole seeds of its one analysis; fewer than the study's where the clock ended it.
        margin: points inside which a whole interval is called neither help nor harm.
    """

    study: str
    metrics: Path
    seeds: int
    margin: float


COARSE = Setting(
    study="configs/studies/doses.py", metrics=KEPT / "doses.jsonl.gz", seeds=40, margin=12.0
)
LATE = Setting(
    study="configs/studies/doses.py:late",
    metrics=KEPT / "doses_late.jsonl.gz",
    seeds=16,
    margin=17.0,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoseDifference:
    """An arm less the mean of both baselines of the same seed, in points by one engine.

    Attributes:
        points: mean over seeds with half of its 95% t interval.
        p: two-sided.
        holds: at 5% by Holm over the arms and both engines.
        margin: of its setting.
    """

    points: Estimate
    p: float
    holds: bool
    margin: float

    @property
    def verdict(self) -> str:
        """What the rule says."""
        if self.holds:
            return "helps" if self.points.mean > 0 else "harms"
        inside = abs(self.points.mean) + self.points.half_width < self.margin
        return "neither" if inside else "open"


def differences(runs: Table, margin: float) -> dict[tuple[str, str], DoseDifference]:
    """(arm, primary measure) -> its difference."""
    estimates: dict[tuple[str, str], Estimate] = {}
    for heading in PRIMARY:
        value = RESPONSES[heading]
        for arm, seeds in runs.items():
            if arm in _BASELINES:
                continue
            by_seed = {}
            for seed, series in seeds.items():
                baseline_scores = [value(runs[baseline][seed]) for baseline in _BASELINES]
                by_seed[seed] = value(series) - float(np.mean(baseline_scores))
            estimates[arm, heading] = estimate(by_seed)
    p = {
        name: t_p_value(len(one.values), one.mean / one.half_width)
        for name, one in estimates.items()
    }
    held = holm(p)
    return {
        name: DoseDifference(points=one, p=p[name], holds=name in held, margin=margin)
        for name, one in estimates.items()
    }


def conclusion(by_name: dict[tuple[str, str], DoseDifference], arm: str) -> str:
    """What the rule says of an arm by both engines, the exact one first where they differ."""
    exact, own = (by_name[arm, heading].verdict for heading in PRIMARY)
    return exact if exact == own else f"{exact}, {own}"


def text(runs: Table, margin: float) -> str:
    """Markdown: each arm's difference by both engines, what the rule says, and what is secondary."""
    by_name = differences(runs, margin)
    rows = []
    for arm in (arm for arm in runs if arm not in _BASELINES):
        cells = [f"`{arm}`", str(len(runs[arm]))]
        for heading in PRIMARY:
            one = by_name[arm, heading]
            mark = "*" if one.holds else ""
            cells += [f"{one.points.mean:+.1f} ± {one.points.half_width:.1f}{mark}", f"{one.p:.2g}"]
        rows.append([*cells, conclusion(by_name, arm)])
    heads = ["arm", "seeds", "exact engine, points", "p", "own engine, points", "p", "the rule"]
    return "\n".join([*markdown_table(heads, rows), "", *_secondary(runs)]) + "\n"


def _secondary(runs: Table) -> list[str]:
    """A table of the rules' secondary measures; "collapsed" is `long_tables.ended`."""
    bar = yardstick(runs)
    collapsed = ended(runs)
    rows = []
    for arm, seeds in runs.items():
        below = {}
        for seed, series in seeds.items():
            means = smoothed(series)
            window = len(series["reward/mean"][1]) - len(means) + 1
            places = np.flatnonzero(means < bar)
            # A run begins below the bar: a fall comes after the first mean above it.
            above = np.flatnonzero(means >= bar)
            if len(above):
                places = places[places > above[0]]
            if len(places):
                below[seed] = int(places[0]) + window
        returned = len(set(below) - set(collapsed[arm]))
        healthy = [float(np.median(before_a_fall(series))) for series in seeds.values()]
        peaks = [float(series["dual/multiplier"][1].max()) for series in seeds.values()]
        moved = sum(len(np.unique(series["dual/multiplier"][1])) > 1 for series in seeds.values())
        cells = [
            f"`{arm}`",
            *(
                f"{np.mean([RESPONSES[heading](x) for x in seeds.values()]):.1f}"
                for heading in PRIMARY
            ),
            str(len(collapsed[arm])),
            f"{np.median(list(below.values())):.0f}" if below else "-",
            f"{returned} of {len(below)}",
            f"{np.mean([smoothed(series).max() for series in seeds.values()]):.3f}",
            f"{1e3 * np.median(healthy):.2f}",
            f"{min(peaks):.2g} to {max(peaks):.2g}",
            str(moved),
        ]
        rows.append(cells)
    heads = [
        "arm",
        "exact engine, %",
        "own engine, %",
        "collapsed",
        "first below the bar, step",
        "came back",
        "best reward of four steps",
        "delta before a fall, 1e-3",
        "largest lambda",
        "lambda moved in",
    ]
    return [*markdown_table(heads, rows), "", f"The bar: mean reward of four steps {bar:.3f}."]


def draw(runs: Table, margin: float) -> Figure:
    """Differences by arm with 95% intervals; the band is the margin."""
    figure, [axes] = make_figure(
        8, 3.4, "Score less that of GRPO and its replicate, points", rows=1, columns=1
    )
    arms = [arm for arm in runs if arm not in _BASELINES]
    by_name = differences(runs, margin)
    axes.axhspan(-margin, margin, alpha=0.15, linewidth=0)
    axes.axhline(0, linewidth=1)
    for heading, shift in zip(PRIMARY, (-0.12, 0.12), strict=True):
        points = [by_name[arm, heading].points for arm in arms]
        axes.errorbar(
            np.arange(len(arms)) + shift,
            [one.mean for one in points],
            yerr=[one.half_width for one in points],
            marker="o",
            linestyle="none",
            label=heading,
        )
    axes.set_xticks(range(len(arms)), arms, rotation=30)
    axes.legend(**{**LEGEND, "loc": "upper left"})
    style_axes(axes, "points", x="")
    return figure


def read_complete(setting: Setting) -> Table | None:
    """Every run of the study's analysis; None before all of its seeds are there."""
    study = load_study(setting.study)
    runs = read_whole(setting.metrics, study)
    return runs if len(whole_seeds(runs, list(study.arms))) == setting.seeds else None


def whole_seeds(runs: Table, arms: Sequence[str]) -> list[int]:
    """Seeds that every arm has, in order."""
    in_every_arm = [set(runs.get(arm, {})) for arm in arms]
    return sorted(set.intersection(*in_every_arm))


def only_seeds(runs: Table, seeds: Sequence[int]) -> Table:
    """The runs of these seeds."""
    return {arm: {seed: runs[arm][seed] for seed in seeds} for arm in runs}


def read_whole(path: Path, study: Study) -> Table:
    """Kept runs of the seeds that every arm has."""
    if not path.exists():
        return {arm: {} for arm in study.arms}
    runs = read_kept_metrics(path, list(study.arms))
    return only_seeds(runs, whole_seeds(runs, list(study.arms)))


def run_seed(study: Study, seed: int, metrics: Path) -> None:
    """Train, score and keep in `metrics` the arms of a seed that it has not."""
    study = dataclasses.replace(study, seeds=(seed,))
    runs, configs = resolve(study, Path("runs/studies/doses"))
    check_evaluation(study, runs, configs)
    show = functools.partial(print, flush=True)
    run_in_one_process(runs, configs, metrics, show, functools.partial(evaluated, study))


def main(argv: list[str]) -> int:
    """Parse the arguments (program name first); run or copy."""
    parser = argparse.ArgumentParser(prog="python -m research.doses")
    parser.add_argument("--late", action="store_true", help="setting B, late collapse")
    parser.add_argument("--seeds", type=each_once(whole(0), "seed"))
    parser.add_argument("--keep", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv[1:])
    setting = LATE if arguments.late else COARSE
    metrics = setting.metrics
    study = load_study(setting.study)
    runs = read_whole(metrics, study)

    if arguments.keep is not None:
        check_kept(arguments.keep, study)
        more = read_whole(arguments.keep, study)
        # A seed that is kept already stays as it is.
        runs = {arm: dict(sorted({**more[arm], **runs[arm]}.items())) for arm in study.arms}
        write_kept_metrics(metrics, runs)
        print(f"{metrics}: seeds {whole_seeds(runs, list(study.arms))}")
        return 0

    check_kept(metrics, study)
    if metrics.exists():
        write_kept_metrics(metrics, runs)
    try:
        for seed in arguments.seeds or study.seeds:
            run_seed(study, seed, metrics)
    except Interrupted as stopped:
        print("stopped; the same command continues with the seed that was cut")
        return 128 + stopped.signal_number
    return 0


if __name__ == "__main__":
    run_main(main)
