"""The two legs of a mismatch: decode vs. prefill of the engine, and prefill vs. trainer."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leg:
    """A leg of the gap: from the decoding engine to its own scores, or from these to the trainer.

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


DECODING = "decode vs. prefill"
ONE_PASS = "prefill vs. trainer"


def legs_of(decoded: np.ndarray, scored: np.ndarray, trained: np.ndarray) -> list[Leg]:
    """Split the gap of tokens into its two legs; no tokens give an empty list.

    Args:
        decoded, scored, trained: [n] log q, log s and log p, nats.
    """
    if not len(decoded):
        return []
    log_q, log_s, log_p = (logprobs.astype(np.float64) for logprobs in (decoded, scored, trained))
    gap = np.exp(log_q) - np.exp(log_p)
    square = float(np.sum(gap**2)) or np.inf

    def leg(name: str, log_start: np.ndarray, log_end: np.ndarray) -> Leg:
        difference = np.exp(log_start) - np.exp(log_end)
        return Leg(
            name=name,
            mean=float(np.mean(np.abs(difference))),
            log_ratio=float(np.mean(log_start - log_end)),
            share=float(difference @ gap) / square,
        )

    return [leg(DECODING, log_q, log_s), leg(ONE_PASS, log_s, log_p)]
