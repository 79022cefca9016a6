"""The first tables of docs/evidence.md: what each dual ascent did, and what fixed lambdas did on
long completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import fisher_exact

from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe.metrics_io import Series
from research.kept_studies import KEPT, STUDIES, arms_of
from research.long_tables import (
    BASELINE,
    CONTROLS,
    RESPONSES,
    countdown,
    ended,
    of_seeds,
    parted,
    read,
)
from research.paper_regime import smoothed
from research.studies.results import Table
from research.studies.sweep import arm_values

_EXACTLY = RESPONSES["held-out, exact engine, %"]


class Ascent(NamedTuple):
    """One row.

    Attributes:
        where: task and engine.
        kept, arm: name of the kept metrics, and of the arm in them.
        own: the arm's name among `of`.
        of: the kept runs as one study, with GRPO's.
    """

    where: str
    kept: str
    arm: str
    own: str
    of: Callable[[Table], Table]


def _countdown(name: str) -> Callable[[Table], Table]:
    return lambda kept: countdown(kept)[name]


ASCENTS: Sequence[Ascent] = (
    Ascent("SmolLM2-135M, int4", "smollm2", "dc_grpo", "dc_grpo", lambda kept: kept),
    Ascent(
        "Countdown, stale engine", "countdown", "stale64_dc_grpo", "dc_grpo", _countdown("stale64")
    ),
    Ascent(
        "Countdown, noise of 5%", "countdown", "noise5_dc_grpo", "dc_grpo", _countdown("noise5")
    ),
    Ascent("Countdown, int4", "countdown", "int4_dc_grpo", "dc_grpo", _countdown("int4")),
    Ascent("Countdown, int8", "countdown", "int8_dc_grpo", "dc_grpo", _countdown("int8")),
    Ascent(
        "200 tokens, int4, late collapse", "paper_regime", "dc_grpo", "dc_grpo", lambda kept: kept
    ),
    Ascent(
        "200 tokens, int4, late collapse",
        "paper_regime",
        "dc_grpo_1.25",
        "dc_grpo_1.25",
        lambda kept: kept,
    ),
    Ascent(
        "200 tokens, int3",
        "regimes",
        "int3_dc_grpo",
        "dc_grpo",
        lambda kept: parted(kept, "int3", {}),
    ),
    Ascent("200 tokens, int4", "long_completions", "dc_grpo", "dc_grpo", lambda kept: kept),
)
"""Arms with lambda_0 = 0.1, eta = 1 and a cap of 1, on what is scored by an exact engine too."""
_FALL = 0.25
"""A fall of the reward, mean of four steps, from its peak so far."""


def before_a_fall(series: Series) -> np.ndarray:
    """Discrepancies of the steps before the reward has fallen by `_FALL`; of all if it never
    does.
    """
    means = smoothed(series)
    fallen = np.maximum.accumulate(means) - means > _FALL
    discrepancies = series["discrepancy/mean"][1]
    if not fallen.any():
        return discrepancies
    window = len(discrepancies) - len(means)
    return discrepancies[: int(np.argmax(fallen)) + window]


def ascents() -> str:
    """Markdown: c, delta over c of GRPO, lambda reached and score of each, by the resolved settings
    and kept runs.
    """
    rows = []
    for one in ASCENTS:
        kept = read(KEPT / f"{one.kept}.jsonl.gz") if one.kept in STUDIES else {}
        if one.arm not in kept:
            continue
        runs = one.of(kept)
        values = arm_values(arms_of(one.kept)[one.arm])
        mine = runs[one.own]
        plain = list(runs[BASELINE].values())
        c = values["algorithm.tolerance"]
        mean_delta = np.mean([run["discrepancy/mean"][1].mean() for run in plain])
        healthy_delta = np.median(np.concatenate([before_a_fall(run) for run in plain]))
        # A score stands beside those of the same seeds.
        plain_scores = [_EXACTLY(run) for run in of_seeds(runs[BASELINE], mine).values()]
        peaks = [float(run["dual/multiplier"][1].max()) for run in mine.values()]
        rows.append(
            [
                one.where,
                f"{1e3 * c:.2g}",
                f"{mean_delta / c:.2g}",
                f"{healthy_delta / c:.2g}",
                _range(peaks, ".2g"),
                f"{len(ended(runs)[one.own])} of {len(mine)}",
                _range([_EXACTLY(run) for run in mine.values()], ".0f"),
                _range(plain_scores, ".0f"),
            ]
        )
    heads = ["task, engine", "c, 1e-3", "delta / c", "delta / c before a fall"]
    heads += ["largest lambda", "collapsed", "score, %", "GRPO's"]
    return "\n".join(markdown_table(heads, rows)) + "\n"


def _range(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def fixed() -> str:
    """Markdown: runs with a fixed lambda on 200 tokens that ended, and Fisher's p against none."""
    long = read(KEPT / "long_completions.jsonl.gz")
    over = ended(long)
    without = sum(len(long[arm]) for arm in (BASELINE, CONTROLS[-1]))
    none = without - sum(len(over[arm]) for arm in (BASELINE, CONTROLS[-1]))
    rows = [["0", f"{without - none} of {without}", "-"]]
    for strength in ("0.03", "0.1", "0.3", "1"):
        arm = f"token_{strength}"
        lost = len(over[arm])
        count = len(long[arm])
        p = fisher_exact([[lost, count - lost], [without - none, none]]).pvalue
        rows.append([strength, f"{lost} of {count}", f"{p:.2g}"])
    return "\n".join(markdown_table(["lambda", "collapsed", "p against 0"], rows)) + "\n"


def text() -> str:
    """Both tables."""
    return f"{ascents()}\n{fixed()}"
