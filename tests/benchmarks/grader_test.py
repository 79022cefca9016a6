"""The benchmark of graders counts false rewards and misses; its pairs are well formed."""

from collections import Counter

import pytest

from benchmarks.grader import PAIRS, judge, read_pairs, table
from dcmdp_jax.rewards.math.verifier import Verifier


def test_false_rewards_and_misses_are_told_apart(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("# a remark\n[sums]\n2  1+1  3\n4  2+2  5\n\n[words]\nx y  y  z\n")
    pairs = read_pairs(path)
    assert [(pair.kind, pair.reference) for pair in pairs] == [
        ("sums", "2"),
        ("sums", "4"),
        ("words", "x y"),
    ]
    # Rewards 1+1 and 5, gives 2+2 no value: one false reward, of 5, and one miss.
    verdict = judge(
        lambda completions, references: [
            {"1+1": 1.0, "5": 1.0, "3": 0.0}.get(text.split("{")[1].split("}")[0])
            for text in completions
        ],
        pairs[:2],
    )
    assert verdict.false_rewards == verdict.misses == [pairs[1]]
    lines = table({"sums": {"a": verdict}, "words": {"a": verdict}}, {"sums": 2, "words": 1})
    assert [line.split()[:4] for line in lines.splitlines()[1:]] == [
        ["sums", "2", "1", "1"],
        ["words", "1", "1", "1"],
        ["all", "3", "2", "2"],
    ]


@pytest.mark.parametrize("line", ["2  1+1", "2  1+1  3  4"])
def test_a_line_without_three_columns_is_refused(line, tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text(f"[sums]\n{line}\n")
    with pytest.raises(ValueError, match="line 2: got '2  1"):
        read_pairs(path)


def test_the_pairs_are_several_hundred_of_many_kinds_and_none_stands_twice():
    pairs = read_pairs(PAIRS)
    counts = Counter(pair.kind for pair in pairs)
    assert len(pairs) >= 300 and len(counts) == 17 and min(counts.values()) >= 15
    assert len(set(pairs)) == len(pairs)
    assert [pair for pair in pairs if len({pair.reference, pair.right, pair.wrong}) < 3] == []


def test_math_rewards_one_wrong_answer_of_the_pairs_and_misses_three():
    pairs = read_pairs(PAIRS)
    with Verifier(budget_s=0) as verifier:
        verdict = judge(
            lambda completions, references: verifier.grade(completions, references).rewards, pairs
        )
    # `100,100` may be a list; an angle and a number, a sum of grouped digits, x > e are not read.
    assert [pair.wrong for pair in verdict.false_rewards] == ["100, 100"]
    assert [pair.right for pair in verdict.misses] == ["1,000,000 - 1", "x > e", r"180^\circ"]
