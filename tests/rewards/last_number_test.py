"""The reward of the demo on a published model."""

from dcmdp_jax.rewards.math.answers import last_number
from dcmdp_jax.rewards.protocol import load_reward


def test_the_last_number_counts_digit_by_digit():
    cases = dict.fromkeys((" 17", "17.", " 5 + 12 = 17", "17\n"), 1.0)
    cases |= dict.fromkeys(("17, 18", "170", "7", "", "x", "-17", "17.0", "１７"), 0.0)
    assert (
        dict(
            zip(cases, last_number(list(cases), reference_answer=["17"] * len(cases)), strict=True)
        )
        == cases
    )
    assert last_number([[{"role": "assistant", "content": " 17"}]], reference_answer=["17"]) == [
        1.0
    ]
    # A loop of digits is read in a moment.
    assert last_number(["1" * 1_000_000 + " 17"], reference_answer=["17"]) == [1.0]
    assert load_reward("last_number", ["reference_answer"]) is not None
