"""Tables and figures of long.md, regimes.md, real.md and countdown.md: `python -m research
long_completions`, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import ttest_ind

from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe.alarms import alarms
from dcmdp_jax.observe.metrics_io import Series
from dcmdp_jax.observe.page_kit import COLORS, make_figure, style_axes
from research.dose_tables import holm, t_p_value
from research.studies.results import (
    BASELINE_COLOR,
    Estimate,
    Table,
    color_of,
    estimate,
    read_kept_metrics,
)

BASELINE = "grpo"
CONTROLS = ("grpo_perturbed", "grpo_shaken")
OF_ANOTHER_MEASURE = (
    "trainer_above_1",
    "log",
    "ratio",
    "logit",
    "ascent_logit_p95",
    "ascent_logit",
    "dc_logit",
)
"""Arms whose recorded discrepancy is not |p - q|."""
LONG_SHOWN = (
    "exact",
    "token_0.1",
    "dc_grpo_eta50",
    "token_1",
    "trainer_above_1",
    "engine_above_1",
    "rare_1",
    "not_rare_1",
)
REAL_SHOWN = ("exact", "tis", "tis_centered", "dc_grpo", "ascent_logit")
INT3_SHOWN = (
    "exact",
    "tis",
    "icepop",
    "centered",
    "tis_centered",
    "dc_grpo_eta50",
    "token_0.03",
    "matched",
)
"""Arms of the figures."""
_CURVE = {
    BASELINE: (BASELINE_COLOR, "-"),
    "centered": (COLORS[5], "-"),
    "dc_logit": (color_of("dc_grpo"), "--"),
    "grpo_shaken": (BASELINE_COLOR, "--"),
}
"""Colors and dashes of Countdown's curves, where arms of one color are in one panel."""
_LAST = 4
_WINDOW = 8


def _late(name: str, scale: float = 1.0) -> Callable[[Series], float]:
    """Mean over the second half of the steps."""

    def mean(series: Series) -> float:
        values = series[name][1] if name in series else [math.nan]
        return scale * float(np.mean(values[len(values) // 2 :]))

    return mean


def _last(kind: str) -> Callable[[Series], float]:
    """The last held-out score, %: `eval` by the run's own engine, `evaluation` by an exact one."""

    def score(series: Series) -> float:
        name = next(
            (each for each in series if each.startswith(f"{kind}/") and "/avg@" in each), None
        )
        return 100 * float(series[name][1][-1]) if name else math.nan

    return score


_DELTA = "delta, 1e-3"
_OWN = "held-out, own engine, %"
_EXACTLY = "held-out, exact engine, %"
RESPONSES: Mapping[str, Callable[[Series], float]] = {
    "reward": _late("reward/mean"),
    _OWN: _last("eval"),
    _EXACTLY: _last("evaluation"),
    _DELTA: _late("discrepancy/mean", 1e3),
    "mean abs(eps), nats": _late("displacement/abs_mean"),
    "p95 abs(eps), nats": _late("displacement/abs_p95"),
    "entropy, nats": _late("policy/entropy"),
}
"""Heading -> a run's number; means are of the last half of the steps."""
_BY_DEFINITION = tuple(
    (name, "exact") for name in RESPONSES if name == _DELTA or "abs(eps)" in name
)
"""What the exact engine has none of."""
BESIDE: Mapping[str, Callable[[Series], float]] = {
    "delta with q > p, %": _late("discrepancy/engine_share", 100),
    "p99 of delta, 1e-3": _late("discrepancy/p99", 1e3),
    "p99 abs(eps), nats": _late("displacement/abs_p99"),
    "penalty's share, %": _late("dual/penalty_share", 100),
    "gradient norm": _late("optimizer/grad_norm"),
    "lambda, last": lambda series: float(series["dual/multiplier"][1][-1]),
    "length": _late("completion/length_mean"),
    "truncated, %": _late("completion/truncated_fraction", 100),
}
"""What is told besides, without a comparison."""


def yardstick(runs: Table) -> float:
    """Half of GRPO's reward at its best step, the mean over its seeds: below it a run has ended."""
    longest = max(len(series["reward/mean"][1]) for series in runs[BASELINE].values())
    rewards = [series["reward/mean"][1] for series in runs[BASELINE].values()]
    return float(np.mean([each for each in rewards if len(each) == longest], axis=0).max()) / 2


def ended(runs: Table) -> dict[str, list[int]]:
    """Arm -> seeds whose learning ended: mean reward of the last four steps below `yardstick`,
    GRPO's runs too.
    """
    bar = yardstick(runs)
    return {
        arm: [
            seed
            for seed, series in seeds.items()
            if np.mean(series["reward/mean"][1][-_LAST:]) < bar
        ]
        for arm, seeds in runs.items()
    }


def penalty_warnings(runs: Table) -> dict[str, int]:
    """How well the alarm `penalty` tells runs that end, of those with a lambda above 0.

    Returns:
        `ended` runs, those of them warned `in_time`, before the first four steps of which all later
        ones are below `yardstick` have passed; `lived`, and those of them that were `warned`.
    """
    over = ended(runs)
    bar = yardstick(runs)
    found = dict.fromkeys(("ended", "in_time", "lived", "warned"), 0)
    for arm, seeds in runs.items():
        for seed, series in seeds.items():
            if series["dual/multiplier"][1].max() <= 0:
                continue
            count = len(series["reward/mean"][1])
            first = next((n for n in range(1, count + 1) if _warned(_first(series, n))), count + 1)
            if seed in over[arm]:
                means = np.convolve(series["reward/mean"][1], np.ones(_LAST) / _LAST, "valid")
                end = (
                    count - int(np.argmin((means < bar)[::-1]))
                    if (means >= bar).any()
                    else _LAST - 1
                )
                found["ended"] += 1
                found["in_time"] += first <= end + 1
            else:
                found["lived"] += 1
                found["warned"] += first <= count
    return found


def _first(series: Series, count: int) -> Series:
    return {name: (steps[:count], values[:count]) for name, (steps, values) in series.items()}


def _warned(series: Series) -> bool:
    return any(alarm.name == "penalty" for alarm in alarms(series))


def differences(runs: Table) -> dict[tuple[str, str], Estimate]:
    """(heading, arm) -> the difference to GRPO, paired by seed."""
    found = {}
    for heading, value in RESPONSES.items():
        base = {seed: value(series) for seed, series in runs[BASELINE].items()}
        for arm, seeds in runs.items():
            told = {} if heading == _DELTA and arm in OF_ANOTHER_MEASURE else seeds
            found[heading, arm] = estimate(
                {seed: value(run) - base[seed] for seed, run in told.items() if seed in base}
            )
    return found


def claims(runs: Table) -> tuple[dict[tuple[str, str], float], set[tuple[str, str]]]:
    """Two-sided p of each difference of an arm that is no control, and those that hold at 5% by
    Holm.
    """
    p = {}
    for name, found in differences(runs).items():
        told = math.isfinite(found.half_width) and found.half_width > 0
        if name[1] not in (BASELINE, *CONTROLS) and told and name not in _BY_DEFINITION:
            p[name] = t_p_value(len(found.values), found.mean / found.half_width)
    return p, holm(p)


def comparison(runs: Table, held: Collection[tuple[str, str]] | None = None) -> str:
    """Markdown: runs that ended, and differences to GRPO, whose own values are in the first row; *
    holds by Holm.

    Args:
        runs: of the arms.
        held: (heading, arm) that hold, where other tables' differences count too.
    """
    over = ended(runs)
    found = differences(runs)
    held = claims(runs)[1] if held is None else held
    own = {
        heading: estimate({s: value(run) for s, run in runs[BASELINE].items()})
        for heading, value in RESPONSES.items()
    }
    first = str(len(runs[BASELINE])), str(len(over[BASELINE]))
    rows = [[f"`{BASELINE}`", *first, *(_text(own[heading], "") for heading in RESPONSES)]]
    for arm, seeds in runs.items():
        if arm != BASELINE:
            cells = [
                _text(found[name, arm], "+") + "*" * ((name, arm) in held) for name in RESPONSES
            ]
            rows.append([f"`{arm}`", str(len(seeds)), str(len(over[arm])), *cells])
    return "\n".join(markdown_table(["arm", "runs", "ended", *RESPONSES], rows)) + "\n"


def claims_of_all(tables: Mapping[str, Table]) -> dict[str, set[tuple[str, str]]]:
    """Differences that hold at 5% by Holm over all tables of a study, of each table."""
    p = {
        (name, *each): value
        for name, runs in tables.items()
        for each, value in claims(runs)[0].items()
    }
    held = holm(p)
    return {name: {each[1:] for each in held if each[0] == name} for name in tables}


def parted(kept: Table, engine: str, exact: Mapping[int, Series]) -> Table:
    """Arms against one engine, `ENGINE_ARM`, as a study of their own, and the runs of an exact
    engine.

    Args:
        kept: a study's runs. `ENGINE` alone is GRPO, `ENGINE_shaken` its control.
        engine: how the arms' names begin.
        exact: seed -> run with an exact engine; those without a run of GRPO are left out.
    """
    named = {"": BASELINE, "shaken": CONTROLS[-1]}
    own = {
        arm.removeprefix(engine).removeprefix("_"): runs
        for arm, runs in kept.items()
        if arm.startswith(engine)
    }
    own = {named.get(arm, arm): runs for arm, runs in own.items()}
    return own | {"exact": {seed: run for seed, run in exact.items() if seed in own[BASELINE]}}


def regimes(long: Table, kept: Table) -> dict[str, Table]:
    """Name -> GRPO and an exact engine, of the study of long completions and of its other
    regimes.
    """
    found = {"int4": {BASELINE: long[BASELINE], "exact": long["exact"]}}
    for name in ("int3", "fp8_cache", "four_updates", "128steps"):
        exact = kept.get(f"{name}_exact", long["exact"])
        if name in kept:
            found[name] = parted({name: kept[name]}, name, exact)
    return found


def lost(found: Mapping[str, Table]) -> str:
    """Markdown: what an exact engine wins over GRPO in each regime, in points; * holds by Holm over
    the regimes.
    """
    each = {name: differences(runs) for name, runs in found.items()}
    gains = {name: values[_EXACTLY, "exact"] for name, values in each.items()}
    p = {
        n: t_p_value(len(x.values), x.mean / x.half_width)
        for n, x in gains.items()
        if math.isfinite(x.half_width)
    }
    held = holm(p)
    rows = []
    for name, gain in gains.items():
        plain = estimate(
            {seed: RESPONSES[_EXACTLY](run) for seed, run in found[name][BASELINE].items()}
        )
        told = _text(gain, "+") + "*" * (name in held), f"{p[name]:.2g}" if name in p else "-"
        rows.append(
            [
                f"`{name}`",
                str(len(gain.values)),
                _text(plain, ""),
                *told,
                _text(each[name][_OWN, "exact"], "+"),
            ]
        )
    heads = [
        "regime",
        "runs",
        "GRPO, exact engine, %",
        "exact less GRPO, exact engine",
        "p",
        "each by its own engine",
    ]
    return "\n".join(markdown_table(heads, rows)) + "\n"


def of_seeds(runs: Mapping[int, Series], seeds: Collection[int]) -> dict[int, Series]:
    """An arm's runs of these seeds: a difference is taken to runs of the seeds that both sides
    have.
    """
    return {seed: series for seed, series in runs.items() if seed in seeds}


def pooled(runs: Table, heading: str, arm: str) -> tuple[float, float, float]:
    """An arm less GRPO and `grpo_shaken` together, unpaired, of the arm's own seeds alone.

    Returns:
        The difference, half of Welch's 95% interval, and the two-sided p.
    """
    value = RESPONSES[heading]
    ours = [value(run) for run in runs[arm].values()]
    theirs = []
    for baseline in (BASELINE, CONTROLS[-1]):
        theirs += [value(run) for run in of_seeds(runs.get(baseline, {}), runs[arm]).values()]
    found = ttest_ind(ours, theirs, equal_var=False)
    interval = found.confidence_interval()
    half_width = float(interval.high - interval.low) / 2
    return float(np.mean(ours) - np.mean(theirs)), half_width, float(found.pvalue)


def pooled_table(runs: Table) -> str:
    """Markdown: `pooled` of every arm, by the exact engine and by its own."""
    rows = []
    for arm in (arm for arm in runs if arm not in (BASELINE, *CONTROLS)):
        each = [pooled(runs, heading, arm) for heading in (_EXACTLY, _OWN)]
        texts = [
            (f"{mean:+.1f} ({mean - half:.1f} to {mean + half:.1f})", f"{p:.2g}")
            for mean, half, p in each
        ]
        rows.append([f"`{arm}`", str(len(runs[arm])), *texts[0], *texts[1]])
    return "\n".join(markdown_table(["arm", "runs", _EXACTLY, "p", _OWN, "p"], rows)) + "\n"


def besides(runs: Table) -> str:
    """Markdown: `BESIDE` of every arm, means over runs."""
    rows = [
        [
            f"`{arm}`",
            *(
                f"{np.mean([value(series) for series in seeds.values()]):.3g}"
                for value in BESIDE.values()
            ),
        ]
        for arm, seeds in runs.items()
    ]
    return "\n".join(markdown_table(["arm", *BESIDE], rows)) + "\n"


def _text(found: Estimate, sign: str) -> str:
    if not found.values or not np.isfinite(found.mean):
        return "-"
    return f"{found.mean:{sign}.3g}" + (
        f" ± {found.half_width:.2g}" if math.isfinite(found.half_width) else ""
    )


def draw(runs: Table, panels: Sequence[tuple[str, str]], title: str, rows: int) -> Figure:
    """A panel for each (arm, metric) with a line for each of the arm's runs, GRPO's in gray."""
    columns = -(-len(panels) // rows)
    figure, places = make_figure(2.4 * columns, 2.3 * rows, title, rows=rows, columns=columns)
    for axes, (arm, metric) in zip(places, panels, strict=True):
        for name, color in ((BASELINE, BASELINE_COLOR), (arm, color_of(arm))):
            for series in runs[name].values():
                axes.plot(*series[metric], color=color, linewidth=1.2)
        axes.set_ylim(0, 1 if metric == "reward/mean" else None)
        style_axes(
            axes, arm if metric == "reward/mean" else f"{arm}, mean |eps|", x="training step"
        )
    return figure


def curves(found: Mapping[str, Table]) -> Figure:
    """Countdown: held-out score by the run's own engine, and delta in windows of eight steps, means
    over runs.
    """
    figure, places = make_figure(
        2.9 * len(found), 5.4, "Countdown in small: means over runs", rows=2, columns=len(found)
    )
    for column, (name, runs) in enumerate(found.items()):
        for arm, seeds in ((arm, list(seeds.values())) for arm, seeds in runs.items()):
            color, style = _CURVE.get(arm, (color_of(arm), "-"))
            scores = next(each for each in seeds[0] if each.startswith("eval/") and "/avg@" in each)
            means = np.mean([series[scores][1] for series in seeds], axis=0)
            places[column].plot(
                seeds[0][scores][0],
                100 * means,
                color=color,
                linestyle=style,
                linewidth=1.2,
                label=arm,
            )
            if arm not in ("exact", *OF_ANOTHER_MEASURE):
                steps = seeds[0]["discrepancy/mean"][0]
                delta = [series["discrepancy/mean"][1] for series in seeds]
                windows = np.mean(delta, axis=0).reshape(-1, _WINDOW).mean(axis=1)
                at = steps[_WINDOW - 1 :: _WINDOW]
                places[len(found) + column].plot(
                    at, windows, color=color, linestyle=style, linewidth=1.2
                )
        style_axes(places[column], f"{name}: held-out, %", x="training step")
        style_axes(places[len(found) + column], f"{name}: delta", x="training step")
    figure.legend(
        *places[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=9,
        frameon=False,
        fontsize=8,
    )
    return figure


def countdown(kept: Table) -> dict[str, Table]:
    """Mismatch -> its arms; the exact engine's runs are those of any mismatch."""
    names = dict.fromkeys(arm.partition("_")[0] for arm in kept if arm != "exact")
    return {name: parted(kept, name, kept["exact"]) for name in names}


def read(path: Path) -> Table:
    """The kept runs of a study, of arms that have one."""
    return {arm: seeds for arm, seeds in read_kept_metrics(path, None).items() if seeds}


def _of_study(kept: Table) -> str:
    p, held = claims(kept)
    told = (
        f"{heading}, {arm}: p {p[heading, arm]:.1g}"
        for heading, arm in sorted(held, key=p.__getitem__)
    )
    return "\n".join((comparison(kept), besides(kept), *told))


def _of_long(path: Path) -> tuple[str, Figure]:
    kept = read(path)
    panels = [(arm, "reward/mean") for arm in LONG_SHOWN]
    return _of_study(kept), draw(
        kept, panels, "Reward by run: completions of 200 tokens, int4 engine", 2
    )


def _of_regimes(path: Path) -> tuple[str, Figure]:
    kept = read(path)
    long = read(path.parent / "long_completions.jsonl.gz")
    int3 = parted(kept, "int3", long["exact"])
    updates = parted(kept, "four_updates", kept["four_updates_exact"])
    panels = [(arm, "reward/mean") for arm in INT3_SHOWN]
    figure = draw(int3, panels, "Reward by run: completions of 200 tokens, int3 engine", 2)
    parts = ["Regimes", lost(regimes(long, kept))]
    for name, runs in (("Against int3", int3), ("Four updates a step", updates)):
        parts += [
            name,
            comparison(runs),
            f"{name}, less GRPO and its replicate pooled, unpaired, post hoc",
        ]
        parts += [pooled_table(runs)]
    return "\n".join(f"{part}\n" if "|" not in part else part for part in parts), figure


def _of_real(path: Path) -> tuple[str, Figure]:
    kept = read(path)
    panels = [
        (arm, metric) for metric in ("reward/mean", "displacement/abs_mean") for arm in REAL_SHOWN
    ]
    return _of_study(kept), draw(kept, panels, "SmolLM2-135M against an int4 engine, by run", 2)


def _of_countdown(path: Path) -> tuple[str, Figure]:
    found = countdown(read(path))
    held = claims_of_all(found)
    tables = (
        f"`{name}`\n\n<!-- {name} -->\n\n{comparison(runs, held[name])}"
        for name, runs in found.items()
    )
    return "\n".join(tables), curves(found)


STUDIES: Mapping[str, Callable[[Path], tuple[str, Figure]]] = {
    "long_completions": _of_long,
    "regimes": _of_regimes,
    "smollm2": _of_real,
    "countdown": _of_countdown,
}
"""Name of the kept metrics -> their tables, a blank line between them, and their figure."""
