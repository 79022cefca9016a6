"""A recommended budget c, with its reasoning."""

from __future__ import annotations

import dataclasses
import math

from dcmdp_jax.algorithm.dual import BUDGET_ROOM

_FLOORS = 2.0


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A budget for the mean |p_train - p_rollout|.

    Attributes:
        tolerance: c; NaN if none is recommended.
        reasoning: why, in a sentence or two.
    """

    tolerance: float
    reasoning: str


def recommend(mean: float, floor: float | None, defect: str | None) -> Recommendation:
    """Recommend c from what two engines show today.

        c = max(BUDGET_ROOM mean, 2 floor), rounded up to two digits

    Ours. The paper tunes c and gives no rule. Just above today's mean the multiplier rests while the mismatch stays as
    it is, and rises when it grows by a quarter. A mean within the noise floor can't be lowered by any policy.

    Args:
        mean: mean |p - q| of the pair.
        floor: the larger of both engines' noise floors; None if not measured.
        defect: name of a cause that is to be settled first, or None.
    """
    if defect is not None:
        return Recommendation(math.nan, f"None before this is settled: {defect}. Then measure again.")
    if mean == 0 and not floor:
        return Recommendation(math.nan, "None: the two agree to the last bit, there is nothing to bound.")
    wanted, least = BUDGET_ROOM * mean, _FLOORS * (floor or 0.0)
    value = _round_up(max(wanted, least))
    said = "not measured" if floor is None else f"{floor:.3g}"
    why = (
        f"{BUDGET_ROOM:g} times the mean of {mean:.3g}: the multiplier rests while the mismatch stays as it is, and "
        "rises when it grows by a quarter"
        if wanted >= least
        else f"{_FLOORS:g} times the noise floor: no policy can go below the floor itself"
    )
    return Recommendation(value, f"c = {value:.2g} is {why}. Noise floor: {said}.")


def _round_up(value: float) -> float:
    scale = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / scale - 1e-9) * scale
