"""A run's multiplier computed again from its own metrics: an arm whose settings are others than it
says is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dcmdp_jax.algorithm.penalties import FIXED_MULTIPLIERS
from dcmdp_jax.errors import UserError
from dcmdp_jax.observe.metrics_io import Series
from research.studies.results import Table

_MULTIPLIER = "dual/multiplier"
_TOLERANCE = "dual/tolerance"
_FLOOR = "mismatch/noise_floor"


def broken_rule(series: Series, values: Mapping[str, Any]) -> Iterator[str]:
    """Steps that contradict the dual ascent of these settings, in words; none if it is what ran.

        lambda_1 = lambda_0,    lambda_{k+1} = clip(lambda_k + eta (delta_k - c), 0, cap)

    from each step's own lambda_k and delta_k, in float32 as a run computes it: up to two roundings
    of the largest term, since a compiler may fuse the product with the sum. While c is measured
    lambda rests; then c is `tolerance_factor` times the median of max(delta, latest noise floor). A
    method without ascent has a constant lambda.

    Args:
        series: metrics of a run.
        values: dotted name of a setting -> its value; at least section `algorithm`.

    Raises:
        UserError: in one line, if a step is missing.
    """
    algorithm = {name.removeprefix("algorithm."): value for name, value in values.items()}
    bounded = "discrepancy/mean" if algorithm["budget"] == "mean" else "discrepancy/spent"
    lambdas, delta, c = (_every_step(series, name) for name in (_MULTIPLIER, bounded, _TOLERANCE))
    if (fixed := FIXED_MULTIPLIERS.get(algorithm["method"])) is not None:
        for step in np.flatnonzero(lambdas != fixed):
            yield f"lambda is {lambdas[step]} at step {step + 1}, the settings give {fixed}"
        return
    names = "dual_learning_rate", "multiplier_max", "tolerance_factor", "multiplier"
    eta, cap, factor, first = (np.float32(algorithm[name]) for name in names)
    measured = algorithm["tolerance_steps"]
    budget = np.full(len(c), algorithm["tolerance"], np.float32)
    if 0 < measured < len(c):
        at, floors = series.get(_FLOOR, (np.zeros(1), np.zeros(1)))
        latest = [
            max(delta[step], np.float32(floors[at <= step + 1][-1])) for step in range(measured)
        ]
        budget[measured:] = factor * np.median(np.array(latest, np.float32))
    for step in np.flatnonzero(~np.isclose(c, budget, rtol=1e-6, atol=0))[:1]:
        yield f"c is {c[step]} at step {step + 1}, the settings give {budget[step]}"
    if lambdas[0] != first:
        yield f"lambda begins at {lambdas[0]}, the settings give {first}"
    moved = np.where(np.arange(len(c)) < measured, np.float32(0), eta * (delta - c))
    wanted = np.clip(lambdas + moved, 0, cap)[:-1]
    rounding = 2 * np.spacing(np.maximum(lambdas, abs(moved)))[:-1]
    for step in np.flatnonzero(abs(lambdas[1:] - wanted) > rounding):
        yield f"lambda is {lambdas[step + 1]} at step {step + 2}, the settings give {wanted[step]}"


def check_replay(runs: Table, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse kept runs that are not what their arm's settings are.

    Args:
        runs: arm -> seed -> metrics.
        values: arm -> its resolved settings, by dotted name.

    Raises:
        UserError: in one line, naming arm, seed, what its metrics say and what the settings give.
    """
    for arm, seeds in runs.items():
        for seed, series in seeds.items():
            try:
                found = next(broken_rule(series, values[arm]), None)
            except UserError as error:
                raise UserError(f"arm {arm!r}, seed {seed}: {error}") from None
            if found:
                raise UserError(
                    f"arm {arm!r}, seed {seed}: {found}; another run has this name, rename one"
                )


def _every_step(series: Series, name: str) -> np.ndarray:
    """A metric of every step, float32."""
    steps, values = series.get(name, (np.zeros(0, int), np.zeros(0)))
    last = max((int(at[-1]) for at, _ in series.values()), default=0)
    if missing := sorted(set(range(1, last + 1)) - set(steps.tolist())):
        raise UserError(f"{name} has no step {missing[0]} of {last}; a replay needs every step")
    return values.astype(np.float32)
