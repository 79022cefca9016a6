"""Budgets of a study's arms against what runs before it measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcmdp_jax.algorithm.penalties import FIXED_MULTIPLIERS
from dcmdp_jax.config.settings import Config
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.studies.results import Table
from dcmdp_jax.lab.studies.study import StudyRun


def check_budgets(runs: Sequence[StudyRun], configs: Sequence[Config], measured: Table, arm: str) -> None:
    """Refuse a budget that no policy can meet, or that none exceeds, before the first run.

    Arms whose lambda does not move, or that measure c themselves, have none.

    Args:
        runs: of a study.
        configs: theirs.
        measured: kept metrics of runs with the same engine.
        arm: the arm of these to go by, one without a charge.

    Raises:
        UserError: naming arm and c, and the noise floor that it is below or the discrepancy that it is above.
    """
    series = list(measured.get(arm, {}).values())
    if not series:
        raise UserError(f"--measured: the file has no run of {arm}, the study's baseline")
    peak = max(float(np.nanmax(each["discrepancy/mean"][1])) for each in series)
    floors = [float(np.nanmax(each["mismatch/noise_floor"][1])) for each in series if "mismatch/noise_floor" in each]
    for run, config in zip(runs, configs, strict=True):
        settings = config.algorithm
        if settings.method in FIXED_MULTIPLIERS or settings.tolerance_steps or not settings.dual_learning_rate:
            continue
        c = settings.tolerance
        if floors and c < max(floors):
            raise UserError(
                f"study: {run.arm}: algorithm.tolerance={c:g} is below the noise floor {max(floors):.3g} that the "
                f"engine was measured to have; no policy meets it, choose {2 * max(floors):.2g} or more"
            )
        if c > peak:
            raise UserError(
                f"study: {run.arm}: algorithm.tolerance={c:g} is above {peak:.3g}, the largest mean discrepancy of any "
                f"step of {arm}; lambda would only fall, choose less"
            )
