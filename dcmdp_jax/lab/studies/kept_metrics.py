"""A study's metrics in one small file, from which its tables and figures are drawn again without its runs.

Gzipped JSON lines, one of each run and step: {"arm": "grpo", "seed": 0, "step": 3, "reward/mean": 0.41, ...}, with the
metrics that a study compares and nine significant digits, which hold a float32 exactly.
"""

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.studies.results import Table
from dcmdp_jax.observe import jsonl
from dcmdp_jax.observe.metrics_io import Series

_KEPT = set(
    """
    reward/mean discrepancy/mean discrepancy/max discrepancy/p50 discrepancy/p99 discrepancy/spent
    discrepancy/engine_share displacement/abs_mean displacement/abs_p50 displacement/abs_p95
    displacement/abs_p99 distribution/total_variation completion/length_mean completion/truncated_fraction
    optimizer/grad_norm dual/charge_share dual/multiplier dual/tolerance policy/entropy
    policy/clip_low_fraction policy/clip_high_fraction mismatch/noise_floor mismatch/log_ratio_abs_mean
    staleness/log_ratio_abs_mean
    """.split()
)
_DIGITS = 9


def write_kept_metrics(path: Path, runs: Table) -> None:
    """Write the metrics of all runs, atomically. Equal metrics give equal bytes."""
    lines = [
        line for arm, seeds in runs.items() for seed, series in seeds.items() for line in _lines(arm, seed, series)
    ]
    atomic_write(path, gzip.compress("".join(lines).encode(), mtime=0))


def _lines(arm: str, seed: int, series: Series) -> list[str]:
    by_step: dict[int, dict[str, float]] = defaultdict(dict)
    for name, (steps, values) in series.items():
        if name in _KEPT or (name.startswith(("eval/", "evaluation/")) and "/avg@" in name):
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                by_step[step][name] = float(f"{value:.{_DIGITS}g}")
    return [jsonl.encode({"arm": arm, "seed": seed, "step": step, **by_step[step]}) for step in sorted(by_step)]


def read_kept_metrics(path: Path, arms: Sequence[str] | None) -> Table:
    """Read what `write_kept_metrics` wrote.

    Args:
        path: the file.
        arms: labels of the study, in its order; None for the file's own.

    Returns:
        Arm -> seed -> series; an arm that the file lacks has no seeds.

    Raises:
        UserError: in one line, if the file can't be read, or holds an arm that the study has not.
    """
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read as gzipped JSON lines ({error})") from error
    points: dict[str, dict[int, dict[str, list[tuple[int, float]]]]] = {arm: {} for arm in arms or ()}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            arm, seed, step = row.pop("arm"), row.pop("seed"), row.pop("step")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}, line {number}: must be an object with arm, seed, step and metrics") from error
        if arms is None:
            points.setdefault(arm, {})
        if arm not in points:
            raise UserError(f"{path}, line {number}: arm {arm!r} is none of the study's: {', '.join(arms)}")
        of_run = points[arm].setdefault(seed, {})
        for name, value in row.items():
            of_run.setdefault(name, []).append((step, float(value)))
    return {
        arm: {seed: {name: _arrays(found) for name, found in series.items()} for seed, series in seeds.items()}
        for arm, seeds in points.items()
    }


def _arrays(points: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    steps, values = zip(*points, strict=True)
    return np.array(steps, np.int64), np.array(values, np.float64)
