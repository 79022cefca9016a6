"""Sampled tokens with two log-probs each: the training stack's and the inference engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class TokenPairs:
    """The tokens of N completions, one after another; n tokens in all.

    Attributes:
        token_ids: [n] int32.
        train_logprobs: [n] float32 nats, training stack.
        rollout_logprobs: [n] float32 nats, the engine that sampled.
        lengths: [N] int64, tokens of each completion; none is 0.
        entropies: [n] float32 nats, of the training stack's distribution at each token; None if not known.
        lags: [n] int32, how many training steps old the weights were that sampled the token; None if not known.
        advantages: [N] float32, of each completion; None if not known. Its sign alone is used.
    """

    token_ids: np.ndarray
    train_logprobs: np.ndarray
    rollout_logprobs: np.ndarray
    lengths: np.ndarray
    entropies: np.ndarray | None = None
    lags: np.ndarray | None = None
    advantages: np.ndarray | None = None

    @property
    def completion(self) -> np.ndarray:
        """[n] int64, the completion that each token belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def position(self) -> np.ndarray:
        """[n] int64, place of each token in its completion, from 0."""
        return np.arange(len(self.token_ids)) - np.repeat(self.starts, self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """[N] int64, index of the first token of each completion."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def log_ratio(self) -> np.ndarray:
        """[n] float64, log p_train - log p_rollout, clamped to [-20, 20] as `algorithm/numerics.py` clamps it."""
        return np.clip(self.train_logprobs.astype(np.float64) - self.rollout_logprobs, -20.0, 20.0)

    @property
    def discrepancy(self) -> np.ndarray:
        """[n] float64, |p_train - p_rollout|."""
        return np.abs(np.exp(self.train_logprobs.astype(np.float64)) - np.exp(self.rollout_logprobs.astype(np.float64)))


def make_pairs(
    token_ids: Sequence[np.ndarray],
    train_logprobs: Sequence[np.ndarray],
    rollout_logprobs: Sequence[np.ndarray],
    *,
    entropies: Sequence[np.ndarray] | None = None,
    lags: Sequence[np.ndarray] | None = None,
    advantages: Sequence[float] | None = None,
) -> TokenPairs:
    """Lay ragged completions, one array each, behind one another. `advantages` has one number for each.

    Raises:
        ValueError: if there is no completion, one is empty, or the lengths of its arrays differ.
    """
    lengths = np.array([len(ids) for ids in token_ids], np.int64)
    if not len(lengths) or not lengths.all():
        raise ValueError("token_ids: no completion, or an empty one")
    given = {"train_logprobs": train_logprobs, "rollout_logprobs": rollout_logprobs}
    given |= {name: value for name, value in (("entropies", entropies), ("lags", lags)) if value is not None}
    for name, arrays in given.items():
        if [len(array) for array in arrays] != lengths.tolist():
            raise ValueError(f"{name}: lengths differ from those of token_ids")
    dtypes = {"lags": np.int32}
    flat = {name: np.concatenate(arrays).astype(dtypes.get(name, np.float32)) for name, arrays in given.items()}
    if advantages is not None:
        flat["advantages"] = np.asarray(advantages, np.float32)
    return TokenPairs(np.concatenate(token_ids).astype(np.int32), lengths=lengths, **flat)
