"""The penalized optimum under the log measure, whose mismatch is convex only up to pi = e q.

Stationarity is A_a - nu = 2 lambda log(y_a) / y_a with y = pi / q. It has two solutions where 0 <
(A_a - nu) / (2 lambda) < 1/e: the W_0 branch of Lambert's function gives y < e, where the objective
is concave, and the W_-1 branch y > e, where it is convex. Two actions in the convex range can
always trade probability to their gain, so at a maximum at most one action is on the W_-1 branch.
All maxima are therefore found by trying: no action, then each in turn.
"""

from collections.abc import Callable, Iterator

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, lambertw, log_expit, logit

_GRID = 240
"""Log-odds at which the sum of probabilities is looked at, to find where it grows through 1."""
_BRANCH_POINT = (1 - 1e-15) / np.e
_ROUNDING = 1e-8
"""Above what q may sum to beyond 1."""
_ALONE = 40.0
"""Log-odds above which what remains for the others changes no slope."""
Array = np.ndarray
Maximum = tuple[Array, float]
"""A policy [n] and its nu."""
_RTOL = 4 * np.finfo(float).eps
"""The least relative tolerance that `brentq` takes."""


def ratio(slope: Array | float, branch: int) -> Array:
    """Solve log(y) / y = slope for y on a branch of Lambert's W: y = -W(-slope) / slope.

    Args:
        slope: any shape, at most 1/e; above 0 on branch -1.
        branch: 0 for y <= e, -1 for y >= e.
    """
    slope = np.asarray(slope, np.float64)
    # Rounding may put a slope of 1/e beyond the branch point, where scipy's W is complex or NaN.
    at_branch_point = slope >= _BRANCH_POINT
    # exp(-W) is -W / slope without the division by 0 at slope 0.
    return np.where(
        at_branch_point,
        np.e,
        np.exp(-lambertw(np.where(at_branch_point, 0.1, -slope), branch).real),
    )


def candidates(
    advantages: Array, inference_policy: Array, multiplier: float, *, sided: str
) -> Iterator[Maximum]:
    """Yield every local maximum of <pi, A> - lambda Omega_log(pi, q), as (policy, nu).

    Args:
        advantages, inference_policy: [n] float64; q > 0 and may sum to less than 1.
        multiplier: lambda > 0.
        sided: "two" or "one".
    """
    # Relative to the best advantage, nu keeps its digits where lambda is small.
    top = advantages.max()
    behind = advantages - top
    all_concave = _one_sided if sided == "one" else _two_sided
    maxima = list(all_concave(behind, inference_policy, multiplier))
    for action in np.flatnonzero(inference_policy < 1 / np.e):
        maxima += _with_one_convex(behind, inference_policy, multiplier, int(action), sided)
    for policy, nu in maxima:
        yield np.where(policy < np.finfo(float).tiny, 0.0, policy), float(top + nu)


def _two_sided(a: Array, q: Array, multiplier: float) -> Iterator[Maximum]:
    def policy(nu: float) -> Array:
        return q * ratio((a - nu) / (2 * multiplier), 0)

    # Below the first the best action has no W_0 solution; q sums to at most 1 but for rounding, so
    # nu is at most 0.
    lowest = -2 * multiplier / np.e
    highest = 2 * multiplier * _ROUNDING
    if policy(lowest).sum() >= 1:
        nu = brentq(lambda nu: policy(nu).sum() - 1, lowest, highest, xtol=1e-300, rtol=_RTOL)
        yield policy(nu), nu


def _one_sided(a: Array, q: Array, multiplier: float) -> Iterator[Maximum]:
    def policy(nu: float, active: Array) -> Array:
        return np.where(active, q * ratio(np.where(active, (a - nu) / (2 * multiplier), 0), 0), 0.0)

    def solve(active: Array, low: float, high: float) -> Maximum:
        nu = brentq(lambda nu: policy(nu, active).sum() - 1, low, high, xtol=1e-300, rtol=_RTOL)
        return policy(nu, active), nu

    maximum = fill_levels(a, q, policy, solve, lowest=-2 * multiplier / np.e)
    if maximum is not None:
        yield maximum


def _with_one_convex(
    a: Array, q: Array, multiplier: float, action: int, sided: str
) -> Iterator[Maximum]:
    """Local maxima with `action` on the W_-1 branch and every other action on W_0.

    The unknown is log(pi / (1 - pi)) of the action, which keeps the digits of both. It gives pi /
    q, which gives nu, which gives the others. A maximum is where the sum of probabilities grows
    through 1 with it: there the second-order condition holds, where it falls through 1 it does not.
    """
    others = np.arange(len(a)) != action
    action_q = q[action]
    behind = (a - a[action]) / (2 * multiplier)

    def action_slope(log_odds: Array) -> Array:
        log_ratio = log_expit(log_odds) - np.log(action_q)
        return log_ratio * np.exp(-log_ratio)

    def policy(log_odds: Array) -> Array:
        slope = action_slope(log_odds)[..., None] + behind
        pi = q * ratio(slope, 0)
        if sided == "one":
            pi = np.where(slope > 0, pi, 0.0)
        pi[..., action] = expit(log_odds)
        return pi

    def excess(log_odds: Array) -> Array:
        return policy(np.asarray(log_odds))[..., others].sum(axis=-1) - expit(-np.asarray(log_odds))

    # Where another action would leave W_0, and, one-sided, where one drops to 0: the sum jumps down
    # there.
    borders = []
    kinks = [1 / np.e, 0.0] if sided == "one" else [1 / np.e]
    for slope in np.subtract.outer(kinks, behind[others]).flat:
        if not 0 < slope < 1 / np.e:
            continue
        y = ratio(slope, -1)
        if np.e < y < 1 / action_q:
            borders += [logit(action_q * y * (1 - 1e-12)), logit(action_q * y * (1 + 1e-12))]
    grid = np.unique([*np.linspace(logit(action_q * np.e), _ALONE, _GRID), *borders, np.inf])
    reachable = action_slope(grid) + behind[others].max(initial=-np.inf) <= 1 / np.e
    values = np.where(reachable, excess(grid), np.nan)
    for index in np.flatnonzero((values[:-1] < 0) & (values[1:] >= 0)):
        root = grid[index + 1]
        if np.isfinite(root):
            root = brentq(excess, grid[index], root, xtol=1e-15, rtol=_RTOL)
        log_odds = np.asarray(root)
        yield policy(log_odds), float(a[action] - 2 * multiplier * action_slope(log_odds))


def fill_levels(
    a: Array,
    q: Array,
    policy: Callable[[float, Array], Array],
    solve: Callable[[Array, float, float], Maximum],
    *,
    lowest: float = -np.inf,
) -> Maximum | None:
    """The one-sided stationary policy and its nu, found by lowering nu over the advantages.

    An action above nu has the probability that `policy` says, at least q; one below nu has 0. An
    action whose advantage is nu costs nothing up to q and takes what is left: a fraction that no
    closed form has. Actions of equal advantage share it in proportion to q.

    Args:
        a, q: [n] float64; q > 0.
        policy: (nu, [n] bool actions above nu) -> [n] probabilities, 0 elsewhere, falling in nu.
        solve: (actions above nu, low, high) -> the policy and its nu in [low, high] at which they
            sum to 1.
        lowest: `policy` has no value below it; None is returned if the probabilities don't sum to 1
            there.
    """
    active = np.zeros(len(a), bool)
    upper = np.inf
    filled = np.zeros(len(a))
    for level in [*np.unique(a)[::-1], -np.inf]:
        lower = max(level, lowest)
        if active.any() and np.isfinite(lower):
            filled = policy(lower, active)
        if np.isinf(lower) or filled.sum() >= 1:  # all actions lie above nu where no level is left
            return solve(active, lower, upper)
        if lower > level:
            return None
        here = a == level
        room = q[here].sum()
        if filled.sum() + room >= 1:
            return np.where(here, q * (1 - filled.sum()) / room, filled), float(level)
        active = active | here
        upper = level
    return None
