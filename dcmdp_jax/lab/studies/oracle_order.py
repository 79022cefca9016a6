"""Does the oracle's order of remedies predict how training with them ends?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.oracle.entries import NOTHING
from dcmdp_jax.lab.studies.dose import measure_doses
from dcmdp_jax.lab.studies.results import Table
from dcmdp_jax.number_format import markdown_table

_ENDS = {"reward": "reward", "held_out": "held-out score", "discrepancy": "delta"}


def rank_correlation(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Spearman's: the correlation of the ranks of two numbers over the names that both have; equal ones share a rank.

    Raises:
        ValueError: with fewer than three names, or where one of the two is constant.
    """
    names = [name for name in first if name in second]
    ranks = [_ranks(np.array([values[name] for name in names])) for values in (first, second)]
    if len(names) < 3 or any(np.ptp(each) == 0 for each in ranks):
        raise ValueError(f"rank correlation of {len(names)} names: needs three that differ")
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.array([np.sum(values < value) + (np.sum(values == value) - 1) / 2 for value in values])


def oracle_order(path: Path, runs: Table, baseline: str) -> list[str]:
    """Lines of Markdown: an oracle's table, and the rank correlation of its errors with training results.

    Args:
        path: remedies.json of `dcmdp probe --remedies --study`.
        runs: of the study.
        baseline: the arm without a charge, which the oracle calls no remedy.

    Raises:
        UserError: if the file can't be read, or has fewer than three of the study's arms.
    """
    try:
        oracles = json.loads(path.read_text(encoding="utf-8"))
        errors = [
            {one["name"]: one["quality"]["error"] for one in oracle["remedies"] if one["quality"]["error"] is not None}
            for oracle in oracles
        ]
        lines = [*_table(oracles), ""]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--oracle: {path}: can't be read as remedies.json of dcmdp probe ({error})") from error
    found = measure_doses({arm: seeds for arm, seeds in runs.items() if seeds}, baseline)
    for oracle, squared in zip(oracles, errors, strict=True):
        squared = {baseline if name == NOTHING else name: value for name, value in squared.items()}
        ends = {
            label: {arm: own.mean for arm, (own, _) in found[name].items() if arm in squared}
            for name, label in _ENDS.items()
        }
        count = len(ends["reward"])
        if count < 3:
            raise UserError(f"--oracle: {path} has {count} of the study's arms, needs three; give dcmdp probe --study")
        words = ", ".join(f"{label} {rank_correlation(squared, values):+.2f}" for label, values in ends.items())
        lines.append(f"- `{oracle['engine']}` on {oracle['model']}, {count} arms: rank correlation with {words}.")
    return lines


def oracle_panels(path: Path) -> dict[str, dict[str, tuple[float | None, ...]]]:
    """What `study_figures.draw_oracle` draws of a file that `oracle_order` read."""
    return {
        oracle["engine"]: {one["name"]: _judged(one) for one in oracle["remedies"]}
        for oracle in json.loads(path.read_text(encoding="utf-8"))
    }


def _judged(one: Mapping[str, Any]) -> tuple[float | None, ...]:
    """error, half of its interval, bias^2, half of its interval, variance of a remedy in remedies.json."""
    found, width = one["quality"], one["half_width"]
    return found["error"], width["error"], found["squared_bias"], width["squared_bias"], found["variance"]


def _table(oracles: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each remedy in the order of the first engine: error and bias^2 with their 95% intervals, of each."""
    rows = []
    for first in oracles[0]["remedies"]:
        cells = []
        for oracle in oracles:
            (one,) = (one for one in oracle["remedies"] if one["name"] == first["name"])
            error, width, squared, spread = ("-" if value is None else f"{value:.2f}" for value in _judged(one)[:4])
            cells += [f"{error} ± {width}", f"{squared} ± {spread}"]
        rows.append([f"`{first['name']}`", *cells])
    engines = [heading for oracle in oracles for heading in (f"{oracle['engine']}: error", "bias^2")]
    return markdown_table(["charge", *engines], rows)
