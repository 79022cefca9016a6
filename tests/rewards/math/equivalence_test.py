"""Equality of answers that needs structure or algebra, and other projects' judged sets.

The sets are of other verifiers.
"""

import json
from pathlib import Path

import pytest

from dcmdp_jax.rewards.math import algebra
from dcmdp_jax.rewards.math.answers import math_verify
from dcmdp_jax.rewards.math.equivalence import equivalent
from tests.rewards.math.judging import judge

_JUDGED = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "verifier"


def test_an_infinity_is_not_left_to_the_library(monkeypatch):
    monkeypatch.setattr(algebra.math_verify, "verify", lambda *values, **options: True)
    pairs = [
        ("-3∞", "-3"),
        (r"-\infty", r"\infty"),
        (r"-2\infty", r"-\infty"),
        (r"\infty+1", r"\infty"),
    ]
    assert [equivalent(*pair) for pair in pairs] == [False, False, True, True]


@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        # sympy finds no solution of either; math-verify says True of two empty lists
        ("|x|+|y|=2", "|x|+|y|=1", False),
        ("|x-y|=1", "|x+y|=1", False),
        ("x^2=-2", "x^2=-1", False),
        ("x^2+y^2=-2", "x^2+y^2=-1", False),
        ("|x||y|=1", "1=|xy|", True),
        # it has solutions, and both have the same
        ("(x+y)^3=1", "x+y=1", True),
        # not decided at points, because the absolute values differ
        (r"|x||y| \neq 1", r"1 \neq |xy|", True),
        (r"|x|+|y| \neq 2", r"|x|+|y| \neq 1", False),
        (r"2x+2y \neq 2", r"x+y \neq 1", True),
        (r"x+y \neq 2", r"x+y \neq 1", False),
        # math-verify raises KeyError for the second pair
        (r"g(x)y - 1 \neq 0", r"g(x)y \neq 1", True),
        (r"g(x)y \neq 2", r"g(x)y \neq 1", False),
    ],
)
def test_relations_that_points_do_not_decide(prediction, gold, equal):
    assert equivalent(prediction, gold) == equal
    assert equivalent(gold, prediction) == equal


@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        # Both are true, of other numbers.
        ("2<3", "4<6", False),
        ("2=2", "3=3", False),
        (r"2 \neq 3", r"3 \neq 4", False),
        ("x<x+1", "2<3", False),
        # The same in another order, or with the numbers written otherwise.
        ("3>2", "2<3", True),
        ("3<2", "2<3", False),
        ("2=3", "3=2", True),
        (r"\frac{1}{2} < \frac{3}{4}", "0.5 < 0.75", True),
    ],
)
def test_relations_without_variables_are_equal_by_their_sides(prediction, gold, equal):
    assert equivalent(prediction, gold) == equal
    assert equivalent(gold, prediction) == equal


def test_plain_math_verify_drops_no_factor_either():
    pairs = [
        (r"7-4\mathrm{i}", "3"),
        (r"6\mathrm{e}", "6"),
        (r"7\text{k}", "7"),
        ("6", r"6\mathrm{e}"),
        (r"8\text{M}", "8"),
    ]
    pairs += [(r"6\mathrm{e}", "6e"), (r"7-4\mathrm{i}", "7-4i"), (r"9\text{ cm}", "9")]
    rewards = math_verify(
        [rf"\boxed{{{right}}}" for _, right in pairs], [gold for gold, _ in pairs]
    )
    assert rewards == [0, 0, 0, 0, 0, 1, 1, 1]


def test_judge_takes_the_answer_from_the_completion():
    assert judge(r"first \boxed{3}, no: \boxed{x+1}", "1+x")
    assert not judge("it is x+1", "x+1")


@pytest.mark.parametrize(("name", "rows"), [("cases", 347), ("model_outputs", 349)])
def test_judged_sets_of_other_projects(name, rows):
    path = _JUDGED / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"the judged answers {path} are not here")
    judged = [row for row in map(json.loads, path.read_text().splitlines()) if not row["contested"]]
    wrong = []
    for row in judged:
        completion = row["pred"] if row["kind"] == "response" else rf"\boxed{{{row['pred']}}}"
        if judge(completion, row["gold"]) != row["expected"]:
            wrong.append((row["id"], row["gold"], row["pred"][-80:], row["expected"]))
    assert len(judged) == rows
    assert wrong == []
