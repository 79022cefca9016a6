"""Multipliers for budgets: met, out of reach, jumped over, and met by no policy."""

import numpy as np
import pytest

from dcmdp_jax.errors import UserError
from research.tests.slsqp import disagreement
from research.theory.budget import policy_for_budget
from research.theory.policy import MEASURES, SIDES, mismatch, optimal_policy
from research.theory.toy import ADVANTAGES, INFERENCE_POLICY, concentration, solve_toy


def test_the_multiplier_by_hand():
    # As in policy_test: diff gives pi_1 = 1/2 + 1/lambda and Omega = 1/lambda^2, so C = 0.04 needs
    # lambda = 5.
    result = policy_for_budget(
        np.array([1.0, -1.0]), np.array([0.5, 0.5]), budget=0.04, measure="diff"
    )
    assert result.status == "met" and result.optimum.multiplier == pytest.approx(5.0)
    np.testing.assert_allclose(result.optimum.policy, [0.7, 0.3], atol=1e-12)


def test_a_budget_of_0_leaves_the_inference_policy():
    result = policy_for_budget(ADVANTAGES, INFERENCE_POLICY, budget=0.0, measure="log")
    np.testing.assert_array_equal(result.optimum.policy, INFERENCE_POLICY)
    assert result.optimum.multiplier == np.inf and result.optimum.mismatch == 0


def test_a_budget_out_of_reach_is_called_slack_and_not_met():
    # All on a6 is the best policy there is and costs .05 * .95^2 one-sided: 0.1 can't be spent with
    # profit.
    result = policy_for_budget(
        ADVANTAGES, INFERENCE_POLICY, budget=0.1, measure="diff", sided="one"
    )
    assert result.status == "slack" and result.optimum.multiplier == 0
    np.testing.assert_array_equal(result.optimum.policy, [0, 0, 0, 0, 0, 1])
    assert result.optimum.mismatch == pytest.approx(0.045125)
    assert result.describe() == "not reached: the best policy of all spends 0.04512, so lambda = 0"


def test_a_budget_within_a_jump_is_met_by_no_multiplier():
    result = policy_for_budget(ADVANTAGES, INFERENCE_POLICY, budget=0.1, measure="log", sided="one")
    below = result.optimum
    above = result.above
    assert result.status == "jump" and below.mismatch < 0.1 < above.mismatch
    # Two optima of one objective, far from each other.
    multiplier = below.multiplier
    values = [side.advantage - multiplier * side.mismatch for side in (below, above)]
    assert (
        values[0] == pytest.approx(values[1], abs=1e-7) and above.policy[5] - below.policy[5] > 0.7
    )
    # On a fine grid of multipliers no optimum comes between them.
    for factor in np.geomspace(0.5, 2, 200):
        optimum = optimal_policy(
            ADVANTAGES, INFERENCE_POLICY, multiplier=multiplier * factor, measure="log", sided="one"
        )
        assert not below.mismatch + 1e-6 < optimum.mismatch < above.mismatch - 1e-6
    assert "met by no lambda: at 2.063 the optimum jumps from 0.0564 to 0.3992" in result.describe()


def test_mismatch_never_rises_with_the_multiplier():
    for measure in MEASURES:
        for sided in SIDES:
            spent = [
                optimal_policy(
                    ADVANTAGES, INFERENCE_POLICY, multiplier=m, measure=measure, sided=sided
                ).mismatch
                for m in np.geomspace(0.05, 500, 60)
            ]
            assert np.all(np.diff(spent) <= 1e-12)


@pytest.mark.parametrize(
    ("budget", "measure", "sided", "message"),
    [
        (
            -0.1,
            "diff",
            "two",
            "budget = -0.1: no policy has that mismatch; must be a number of at least 0",
        ),
        (float("nan"), "log", "two", "budget = nan: no policy has that mismatch"),
        (0.19, "diff", "two", "two-sided probability difference the largest is 0.181"),
        (20.0, "ratio", "two", "two-sided probability ratio the largest is 19"),
        (0.6, "log", "one", "one-sided log-probability difference the largest is 0.5413"),
    ],
)
def test_a_budget_that_no_policy_meets_is_one_line(budget, measure, sided, message):
    with pytest.raises(UserError) as caught:
        policy_for_budget(ADVANTAGES, INFERENCE_POLICY, budget=budget, measure=measure, sided=sided)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_papers_takeaway_and_its_other_sentence():
    budgets = (0.005, 0.02, 0.1)
    two = solve_toy("two", budgets)
    one = solve_toy("one", budgets)
    for row in [*two, *one]:
        names = {"measure": row.measure, "sided": row.sided}
        assert disagreement(ADVANTAGES, INFERENCE_POLICY, row.result, **names) < 1e-6
    for rows, comparable in ((two, budgets), (one, budgets[:2])):
        for budget in comparable:
            shares = concentration(rows, budget)
            assert shares["diff"] > shares["log"] > shares["ratio"]
            for row in rows:
                if row.result.budget == budget:
                    spent = mismatch(
                        row.result.optimum.policy,
                        INFERENCE_POLICY,
                        measure=row.measure,
                        sided=row.sided,
                    )
                    assert spent == pytest.approx(budget, rel=1e-9)
    # One-sided at 0.1 there is nothing to compare: diff is slack, log jumps.
    assert concentration(one, 0.1) is None
    # "All three move every action in the direction of its advantage" holds for the two-sided ratio
    # alone.
    always = {
        (measure, sided)
        for sided, rows in (("two", two), ("one", one))
        for measure in MEASURES
        if not any(row.against_advantage for row in rows if row.measure == measure)
    }
    assert always == {("ratio", "two")}
