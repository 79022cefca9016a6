"""Budgets on random states, rare actions and ties among them, against references that share no code
with the package.

diff and ratio: every set of actions that may share the probability is tried in turn with 60 digits.
log: a search over the whole simplex in log-odds finds nothing better at the multiplier found.
"""

import itertools

import mpmath as mp
import numpy as np
import pytest
from scipy.optimize import minimize

from dcmdp_jax.errors import UserError
from research.theory.budget import policy_for_budget
from research.theory.policy import largest_mismatch
from research.theory.toy import ADVANTAGES, INFERENCE_POLICY

_PRECISION = mp.workdps(60)


def _state(rng, sizes):
    """Some actions with q down to 1e-16, advantages of any scale, in a third of the states two of
    them equal.
    """
    size = int(rng.integers(*sizes))
    q = rng.dirichlet(np.ones(size))
    q[rng.choice(size, rng.integers(0, size), replace=False)] *= 10.0 ** -rng.uniform(0, 16)
    a = rng.normal(size=size) * 10 ** rng.uniform(-2, 2)
    if rng.random() < 1 / 3:
        a[rng.integers(size)] = a[rng.integers(size)]
    return a, q / q.sum()


def _exact(values):
    return [mp.mpf(float(value)) for value in values]


def _deviation(a, q, weight, budget, sided):
    """pi - q that maximizes <pi, A> with sum w (pi - q)^2 = C; one-sided 0 where it is not
    penalized. None: slack.
    """
    everyone = set(range(len(a)))
    for level in sorted(set(a)) if sided == "one" else ():
        above = [i for i in everyone if a[i] > level]
        if above:
            # At nu = A_level: w d = scale (A - nu), and the actions at the level take what is left
            # of their q.
            scale = mp.sqrt(budget / sum((a[i] - level) ** 2 / weight[i] for i in above))
            d = [scale * (a[i] - level) / weight[i] if i in above else mp.mpf(0) for i in everyone]
            taken = sum(q[i] + d[i] for i in above)
            if taken <= 1 <= taken + sum(q[i] for i in everyone if a[i] == level):
                return d
    for size in range(len(a), 0, -1):
        for chosen in itertools.combinations(sorted(everyone), size):
            rest = everyone - set(chosen)
            total = sum(1 / weight[i] for i in chosen)
            left = 1 - sum(q[i] for i in chosen)
            mean = sum(a[i] / weight[i] for i in chosen) / total
            spread = sum((a[i] - mean) ** 2 / weight[i] for i in chosen)
            fixed = left**2 / total + (
                sum(weight[i] * q[i] ** 2 for i in rest) if sided == "two" else 0
            )
            if len({a[i] for i in chosen}) == 1 or budget < fixed:
                continue
            scale = mp.sqrt((budget - fixed) / spread)
            shift = left / total - scale * mean  # w d = scale A + shift; scale nu = -shift
            d = [(scale * a[i] + shift) / weight[i] if i in chosen else -q[i] for i in everyone]
            inside = (
                all(q[i] + d[i] > 0 for i in chosen)
                if sided == "two"
                else all(d[i] > 0 for i in chosen)
            )
            border = [-weight[i] * q[i] if sided == "two" else 0 for i in rest]
            if inside and all(scale * a[i] + shift <= b for i, b in zip(rest, border, strict=True)):
                return d if sided == "two" else [max(x, mp.mpf(0)) for x in d]
    return None


@pytest.mark.parametrize("measure", ["diff", "ratio"])
@pytest.mark.parametrize("sided", ["two", "one"])
def test_budgets_of_continuous_measures_are_met_at_any_probability(measure, sided):
    rng = np.random.default_rng(22)
    statuses = {"met": 0, "slack": 0}
    with _PRECISION:
        for _ in range(250):
            a, q = _state(rng, (2, 6))
            budget = largest_mismatch(q, measure=measure, sided=sided) * 10 ** -rng.uniform(0, 12)
            found = policy_for_budget(a, q, budget=budget, measure=measure, sided=sided)
            statuses[found.status] += 1  # a "jump", which these measures never have, is a KeyError
            exact_q = _exact(q)
            weight = exact_q if measure == "diff" else [1 / x for x in exact_q]
            deviation = _deviation(_exact(a), exact_q, weight, mp.mpf(budget), sided)
            assert (found.status == "slack") == (deviation is None)
            ours = [x - y for x, y in zip(_exact(found.optimum.policy), exact_q, strict=True)]
            penalized = ours if sided == "two" else [max(x, mp.mpf(0)) for x in ours]
            spent = sum(w * x**2 for w, x in zip(weight, penalized, strict=True))
            # Above C by what a sum of five products rounds, and never as reported.
            assert found.optimum.mismatch <= budget and spent <= budget * (1 + mp.mpf(2e-15))
            if deviation is not None:
                # float64 rounds pi by 1.1e-16, which changes Omega by that times 2 sqrt(Omega (1 +
                # Omega)).
                rounding = 64 * 2.2e-16 * mp.sqrt(budget * (1 + budget))
                assert budget - spent <= 1e-9 * budget + rounding
                assert all(abs(x - y) < 1e-12 for x, y in zip(penalized, deviation, strict=True))
    assert min(statuses.values()) >= 5


def _log_value(logits, a, q, multiplier, sided):
    """<pi, A - max A> - lambda Omega at pi = softmax(logits, 0)."""
    logits = np.concatenate([logits, np.zeros((*logits.shape[:-1], 1))], axis=-1)
    log_pi = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    away = log_pi - np.log(q)
    if sided == "one":
        away = np.maximum(away, 0)
    return np.exp(log_pi) @ (a - a.max()) - multiplier * (away**2 @ q)


def _best_value(a, q, multiplier, sided):
    """The largest value on a grid of log-odds, finer near those of q and reaching e^-80 times them,
    and climbed on.
    """
    near = np.sinh(np.linspace(-6, 6, 121)) * 80 / np.sinh(6)
    grid = np.stack(np.meshgrid(*[near] * (len(a) - 1), indexing="ij"), axis=-1) + np.log(
        q[:-1] / q[-1]
    )
    values = _log_value(grid, a, q, multiplier, sided)
    start = grid.reshape(-1, len(a) - 1)[values.argmax()]
    options = {"xatol": 1e-10, "fatol": 1e-16, "maxiter": 2000}
    climbed = minimize(
        lambda x: -_log_value(x, a, q, multiplier, sided),
        start,
        method="Nelder-Mead",
        options=options,
    )
    return -climbed.fun


@pytest.mark.parametrize("sided", ["two", "one"])
def test_optima_of_the_log_measure_are_global_and_its_jumps_real(sided):
    rng = np.random.default_rng(23)
    statuses = {"met": 0, "slack": 0, "jump": 0}
    for _ in range(120):
        a, q = _state(rng, (2, 4))
        if np.ptp(a) == 0:
            continue
        # float64's smallest probability is about e^-708.
        most = min(30, 600**2 * q[a < a.max()].sum()) if sided == "two" else 4 / np.e**2
        budget = most * 10 ** -rng.uniform(0, 8)
        found = policy_for_budget(a, q, budget=budget, measure="log", sided=sided)
        statuses[found.status] += 1
        if found.status == "slack":
            continue
        sides = [found.optimum] if found.status == "met" else [found.optimum, found.above]
        for side in sides:
            value = side.policy @ (a - a.max()) - side.multiplier * side.mismatch
            assert value >= _best_value(a, q, side.multiplier, sided) - 1e-12 * np.ptp(a)
        assert found.optimum.mismatch <= budget
        if found.status == "met":
            rounding = 64 * 2.2e-16 * np.sqrt(budget * (1 + budget))
            assert budget - found.optimum.mismatch <= 1e-9 * budget + rounding
        else:
            assert found.optimum.mismatch < budget < found.above.mismatch
            # Both are global at multipliers that hardly differ, and far apart: Omega leaves the
            # budget out.
            assert found.above.multiplier == pytest.approx(found.optimum.multiplier, rel=1e-9)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = np.abs(np.log(found.optimum.policy / found.above.policy))
            assert np.nanmax(ratios) > 1e-3
    assert statuses["met"] >= 20 and statuses["jump"] >= 1


_LARGE = [(ADVANTAGES, INFERENCE_POLICY, c) for c in (10.0, 3000.0, 1e5, 4e5)]
_TIED = np.array([5.732, 5.732, -2.761]), np.array([0.2204, 0.7795, 4.7e-5])


@pytest.mark.parametrize(
    ("a", "q", "budget"),
    [*_LARGE, *((_TIED[0], _TIED[1] / _TIED[1].sum(), c) for c in (1e-6, 0.28, 20.0))],
)
def test_two_sided_log_budgets_are_met_however_large(a, q, budget):
    found = policy_for_budget(a, q, budget=budget, measure="log")
    assert found.status == "met"
    with _PRECISION:
        pi = _exact(found.optimum.policy)
        exact_q = _exact(q)
        log_ratio = [mp.log(x / y) for x, y in zip(pi, exact_q, strict=True)]
        spent = sum(y * x**2 for x, y in zip(log_ratio, exact_q, strict=True))
        assert abs(spent / budget - 1) < 1e-9 and abs(sum(pi) - 1) < 1e-15
        # A - nu = 2 lambda log(y) / y, in units of 2 lambda, with nu from the action that has most.
        # The best action's own slope is between the two rounded probabilities, so it cancels to the
        # spread of advantages alone.
        slope = [x * mp.exp(-x) for x in log_ratio]
        for i in np.flatnonzero(a < a.max()):
            gap = mp.mpf(float(a[i])) - mp.mpf(float(a.max()))
            expected = (slope[i] - slope[int(a.argmax())]) * 2 * mp.mpf(found.optimum.multiplier)
            assert abs(expected / gap - 1) < 1e-9


def test_a_budget_beyond_float64s_probabilities_is_one_line():
    # sum q log(pi / q)^2 with log pi above -708 is at most about 0.95 * 700^2 = 465,500.
    with pytest.raises(
        UserError, match=r"budget = 1e\+06: .* too small for float64; must be at most 4\d+ here"
    ):
        policy_for_budget(ADVANTAGES, INFERENCE_POLICY, budget=1e6, measure="log")
