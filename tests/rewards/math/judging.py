"""A completion judged without the verifier's processes and limits."""

import signal

from dcmdp_jax.rewards.math.answers import extract_answer
from dcmdp_jax.rewards.math.equivalence import equivalent


def judge(completion: str, answer: str) -> bool:
    """Whether the answer that a completion ends with equals the reference answer.

    False without one.
    """
    prediction = extract_answer(completion)
    return prediction is not None and equivalent(prediction, answer)


class _TimeLimitError(Exception):
    pass


def rewarded(pair):
    """Reward of (answer, reference), the whole way from a completion.

    0 for an error or after two minutes.
    """

    def stop(number, frame):
        raise _TimeLimitError

    prediction, gold = pair
    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    try:
        return judge(rf"so \boxed{{{prediction}}}", gold)
    except Exception:
        return False
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
