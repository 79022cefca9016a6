"""Optimal policies of one state under a penalty on their mismatch (paper, Appendix B)."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from research.theory.log_measure import Array, Maximum, candidates, fill_levels

_SUM_TOLERANCE = 1e-9
"""What q may sum to besides 1: rounding of the caller's."""
MEASURES = {
    "diff": "probability difference",
    "ratio": "probability ratio",
    "log": "log-probability difference",
}
"""The measure's name, as in `config.algorithm.measure`, and the paper's words for it."""
SIDES = {"two": "two-sided", "one": "one-sided"}
"""two: every deviation is penalized. one: only what lies above the inference policy."""

LARGEST_ONE_SIDED_LOG = 4 / np.e**2
"""Bound of the one-sided log mismatch: log(y)^2 <= (4 / e^2) y for y >= 1, and sum q y = 1."""


def mismatch(policy: Array, inference_policy: Array, *, measure: str, sided: str = "two") -> float:
    """Quadratic mismatch of a policy, the paper's Omega.

        diff    sum_a q_a (pi_a - q_a)^2
        ratio   sum_a (pi_a - q_a)^2 / q_a
        log     sum_a q_a (log(pi_a / q_a))^2

    One-sided, an action with pi_a below q_a adds nothing.

    Args:
        policy: [n] float64, pi >= 0.
        inference_policy: [n] float64, q > 0.
        measure: "diff", "ratio" or "log".
        sided: "two" or "one".

    Returns:
        Omega >= 0; infinite for the two-sided log where an action has probability 0.

    Raises:
        ValueError: for an unknown measure or side.
    """
    check_names(measure, sided)
    pi = np.asarray(policy, np.float64)
    q = np.asarray(inference_policy, np.float64)
    if sided == "one":
        pi = np.maximum(pi, q)
    if measure == "diff":
        return float(np.sum(q * (pi - q) ** 2))
    if measure == "ratio":
        return float(np.sum((pi - q) ** 2 / q))
    with np.errstate(divide="ignore"):
        return float(np.sum(q * np.log(pi / q) ** 2))


def largest_mismatch(inference_policy: Array, *, measure: str, sided: str = "two") -> float:
    """A bound that no policy's mismatch exceeds: exact but for the one-sided log.

    diff and ratio are convex, so their maximum is at a policy with a single action. The two-sided
    log has none.

    Args:
        inference_policy: [n] float64, q > 0.
        measure, sided: see `mismatch`.
    """
    check_names(measure, sided)
    if measure == "log":
        return LARGEST_ONE_SIDED_LOG if sided == "one" else np.inf
    single = np.eye(len(inference_policy))
    return max(
        mismatch(policy, inference_policy, measure=measure, sided=sided) for policy in single
    )


def check_names(measure: str, sided: str) -> None:
    """Raise ValueError for a measure or side that is none."""
    for name, value, allowed in (("measure", measure, MEASURES), ("sided", sided, SIDES)):
        if value not in allowed:
            raise ValueError(f"{name} = {value!r}: allowed are {', '.join(allowed)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimum:
    """A policy that maximizes <pi, A> - lambda Omega(pi, q).

    Attributes:
        policy: [n] float64, on the simplex.
        multiplier: lambda; infinite where no mismatch at all is allowed.
        normalizer: nu, the multiplier of sum pi = 1; NaN where lambda is 0 or infinite.
        mismatch: Omega.
        advantage: <pi, A>.
    """

    policy: Array
    multiplier: float
    normalizer: float
    mismatch: float
    advantage: float


def optimal_policy(
    advantages: Array,
    inference_policy: Array,
    *,
    multiplier: float,
    measure: str,
    sided: str = "two",
) -> Optimum:
    """The global maximum of <pi, A> - lambda Omega(pi, q) over the simplex (Theorem B.1).

    Where every action is penalized and has a probability above 0 the policy is the theorem's closed
    form:

        diff    pi = q + (A - nu) / (2 lambda q)
        ratio   pi = q + (A - nu) q / (2 lambda)
        log     pi = -q (2 lambda / (A - nu)) W(-(A - nu) / (2 lambda))

    with nu such that pi sums to 1. diff and ratio are projected: actions whose form is negative get
    0 and nu is found for the rest. The log measure keeps every probability above 0, and its best
    action can lie on Lambert's W_-1 branch (see `log_measure`). One-sided, actions below nu get 0
    and one whose advantage is nu may have any share up to q.

    Under the two-sided log a probability below float64's smallest normal number is 0 and its
    mismatch infinite.

    Differs from the paper: at multiplier 0, of all policies on the best actions, the one with the
    least mismatch, which is the limit of small multipliers.

    Args:
        advantages: [n] float64, A, finite.
        inference_policy: [n] float64, q, above 0 and summing to 1.
        multiplier: lambda >= 0.
        measure: "diff", "ratio" or "log".
        sided: "two" or "one".

    Raises:
        ValueError: if an argument is outside these ranges, or for the two-sided log at multiplier
            0, whose supremum no policy reaches.
    """
    check_names(measure, sided)
    a, q = check_state(advantages, inference_policy)
    if not multiplier >= 0:
        raise ValueError(f"multiplier = {multiplier}: must be at least 0")

    def optimum(policy: Array, nu: float = np.nan) -> Optimum:
        policy = policy / policy.sum()  # the rounding of nu's root
        return Optimum(
            policy=policy,
            multiplier=multiplier,
            normalizer=nu,
            mismatch=mismatch(policy, q, measure=measure, sided=sided),
            advantage=float(policy @ a),
        )

    if np.isinf(multiplier):
        return optimum(q)
    if multiplier == 0:
        optima = [optimum(policy) for policy in _unpenalized(a, q, measure, sided)]
        return min(optima, key=lambda optimum: optimum.mismatch)
    optima = [optimum(policy, nu) for policy, nu in _stationary(a, q, multiplier, measure, sided)]
    # What a policy loses keeps its digits where lambda is small; its advantage does not.
    return max(
        optima, key=lambda optimum: optimum.policy @ (a - a.max()) - multiplier * optimum.mismatch
    )


def check_state(advantages: Array, inference_policy: Array) -> tuple[Array, Array]:
    """A and q as float64.

    Raises:
        ValueError: if they are not two finite vectors of one length, or q does not give every
            action a probability.
    """
    a = np.asarray(advantages, np.float64)
    q = np.asarray(inference_policy, np.float64)
    if a.ndim != 1 or a.shape != q.shape or not len(a):
        raise ValueError(
            f"advantages {a.shape}, inference_policy {q.shape}: must be two vectors of one length"
        )
    if not np.all(np.isfinite(a)):
        raise ValueError("advantages: must be finite")
    if not (np.all(q > 0) and abs(q.sum() - 1) < _SUM_TOLERANCE):
        raise ValueError(
            f"inference_policy: sums to {q.sum():g}, must be above 0 for every action and sum to 1"
        )
    return a, q


def _stationary(a: Array, q: Array, multiplier: float, measure: str, sided: str) -> list[Maximum]:
    """Local maxima, one of which is global; q may sum to less than 1."""
    if measure == "log":
        return list(candidates(a, q, multiplier, sided=sided))
    # d pi / d A of the closed forms, for 2 lambda = 1.
    gain = 1 / q if measure == "diff" else q
    if sided == "one":
        return [_one_sided(a, q, gain, multiplier)]
    active = np.ones(len(a), bool)
    while True:
        policy, nu = _with_active(a, q, gain, multiplier, active)
        if np.all(policy[active] > 0):
            return [(policy, nu)]
        # Where others leave nu rises, so what is negative now stays so.
        active &= policy > 0


def _with_active(a: Array, q: Array, gain: Array, multiplier: float, active: Array) -> Maximum:
    """The closed form and its nu where the active actions share all probability.

    A - nu is a sum of differences of advantages: subtracting a rounded nu would lose the digits of
    an action whose gain is far above the others', as diff's is at q = 1e-14.
    """
    share = np.where(active, gain / gain[active].sum(), 0.0)
    ahead = (a[:, None] - a) @ np.where(active, gain, 0.0) / (2 * multiplier)
    remainder = 1 - q[active].sum()
    nu = float(share @ a - 2 * multiplier * remainder / gain[active].sum())
    return np.where(active, q + share * (ahead + remainder), 0.0), nu


def _one_sided(a: Array, q: Array, gain: Array, multiplier: float) -> Maximum:
    def policy(nu: float, active: Array) -> Array:
        return np.where(active, q + (a - nu) * gain / (2 * multiplier), 0.0)

    def solve(active: Array, low: float, high: float) -> Maximum:
        return _with_active(a, q, gain, multiplier, active)

    return fill_levels(a, q, policy, solve)


def _unpenalized(a: Array, q: Array, measure: str, sided: str) -> Iterator[Array]:
    """The policies of most advantage, one of which has the least mismatch."""
    best = a == a.max()
    if measure == "log" and sided == "two" and not best.all():
        raise ValueError(
            "multiplier = 0: under the two-sided log measure no policy is optimal; must be above 0"
        )
    # Among policies on the best actions <pi, A> is constant, and the penalty alone decides, at any
    # multiplier.
    for best_policy, _ in _stationary(np.zeros(best.sum()), q[best], 1.0, measure, sided):
        policy = np.zeros(len(a))
        policy[best] = best_policy
        yield policy
