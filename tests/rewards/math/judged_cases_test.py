"""Judgments written by hand in the answer formats of the benchmarks.

Intervals, units, bases, matrices, ...
"""

import json
from pathlib import Path

import pytest

from tests.rewards.math.judging import judge

_CASES = [
    json.loads(line)
    for line in Path(__file__).with_name("judged_cases.jsonl").read_text().splitlines()
]


def test_there_are_enough_cases_of_either_kind():
    assert sum(len(case["right"]) for case in _CASES) >= 100
    assert sum(len(case["wrong"]) for case in _CASES) >= 100


@pytest.mark.parametrize("case", _CASES, ids=[case["gold"] for case in _CASES])
def test_judgment(case):
    gold = case["gold"]
    assert [answer for answer in case["right"] if not judge(rf"so \boxed{{{answer}}}.", gold)] == []
    assert [answer for answer in case["wrong"] if judge(rf"so \boxed{{{answer}}}.", gold)] == []
