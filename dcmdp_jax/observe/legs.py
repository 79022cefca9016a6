"""The two legs of the gap between an engine and a trainer."""

from typing import NamedTuple

import numpy as np


class Leg(NamedTuple):
    """A leg of the gap, between the engine while decoding and its own scores of the tokens, or
    these and the trainer.

        q - p = (q - s) + (s - p),    s the engine's probability of the tokens, scored in one pass

    Attributes:
        name: both ends.
        mean: mean |difference| of the probabilities.
        log_ratio: mean difference of the log-probs, nats; both legs add up to the mean of log q -
            log p.
        share: sum_t (leg)(q - p) / sum_t (q - p)^2; both legs add up to 1.
    """

    name: str
    mean: float
    log_ratio: float
    share: float


DECODING = "decoding - one pass"
ONE_PASS = "one pass - trainer"


def legs_of(decoded: np.ndarray, scored: np.ndarray, trained: np.ndarray) -> list[Leg]:
    """Both legs of tokens, from log q, log s and log p, [n] nats each; none of no tokens."""
    if not len(decoded):
        return []
    logs = [x.astype(np.float64) for x in (decoded, scored, trained)]
    q, s, p = map(np.exp, logs)
    square = float(np.sum((q - p) ** 2)) or np.inf
    return [
        Leg(
            name,
            float(np.mean(np.abs(a - b))),
            float(np.mean(log_a - log_b)),
            float((a - b) @ (q - p)) / square,
        )
        for name, a, b, log_a, log_b in ((DECODING, q, s, *logs[:2]), (ONE_PASS, s, p, *logs[1:]))
    ]
