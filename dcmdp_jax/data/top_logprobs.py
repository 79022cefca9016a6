"""Checks of an engine's top-k tokens, with NumPy alone: recordings are read without JAX."""

from collections.abc import Iterator

import numpy as np


def list_problems(
    ids: np.ndarray,
    logprobs: np.ndarray,
    tokens: np.ndarray,
    sampled: np.ndarray,
    vocab_size: int,
    tolerance: float,
) -> Iterator[tuple[str, np.ndarray]]:
    """Problems of an engine's or a recording's top-k tokens, with the tokens [T] of each.

    Args:
        ids, logprobs: [T, k], -1 where there is no token.
        tokens, sampled: [T], the sampled tokens and their log-probs.
        vocab_size: ids are below it.
        tolerance: nats, and probability, that rounding takes at most.
    """
    is_listed = ids >= 0
    ordered = np.sort(np.where(is_listed, ids, -1 - np.arange(ids.shape[1])), axis=1)
    yield f"a listed id is outside 0 .. {vocab_size - 1}", (ids >= vocab_size).any(axis=1)
    yield "an id is listed twice", (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    yield "a listed log-prob is not finite", (is_listed & ~np.isfinite(logprobs)).any(axis=1)
    values = np.where(is_listed, logprobs, -np.inf)
    yield (
        "the listed tokens have a probability above 1 together",
        np.exp(values).sum(axis=1) > 1 + tolerance,
    )
    is_sampled = is_listed & (ids == tokens[:, None])
    listed_logprobs = np.where(is_sampled, logprobs, 0).sum(axis=1)
    apart = is_sampled.any(axis=1) & (np.abs(listed_logprobs - sampled) > tolerance)
    yield (
        "the sampled token has another log-prob in the list, as raw ones beside processed ones do",
        apart,
    )
    least = values.min(axis=1, initial=np.inf)
    lacks = "the list lacks the sampled token, which is likelier than its last"
    yield lacks, ~is_sampled.any(axis=1) & (sampled > least + tolerance)
