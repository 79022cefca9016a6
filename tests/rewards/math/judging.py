"""A completion judged without the verifier's processes and limits."""

from dcmdp_jax.rewards.math.answers import extract_answer
from dcmdp_jax.rewards.math.equivalence import equivalent


def judge(completion: str, answer: str) -> bool:
    """Whether the answer that a completion ends with equals the reference answer; False without one."""
    prediction = extract_answer(completion)
    return prediction is not None and equivalent(prediction, answer)
