"""Validation of the sidecar's replies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dcmdp_jax.rollout.engine import SamplingParams
from dcmdp_jax.rollout.sidecar.process import SidecarBroken


def checked_progress(
    arrays: Mapping[str, np.ndarray], count: int, vocab_size: int
) -> tuple[list[int], list[np.ndarray]]:
    """Rows and token ids that can be those of completions; the answer alone says what they are."""
    try:
        rows, tokens, lengths = (arrays[name] for name in ("rows", "token_ids", "lengths"))
    except KeyError as error:
        raise SidecarBroken(f"generate: no {error} in a sign of progress") from None
    fits = rows.shape == lengths.shape == (rows.size,) and tokens.shape == (lengths.sum(),)
    inside = fits and not np.any((rows < 0) | (rows >= count) | (lengths < 1))
    if not inside or np.any((tokens < 0) | (tokens >= vocab_size)):
        raise SidecarBroken(f"generate: a sign of progress with {rows.size} rows that can't be right")
    return rows.tolist(), np.split(tokens, np.cumsum(lengths)[:-1])


def checked_reply(
    arrays: Mapping[str, np.ndarray], count: int, sampling: SamplingParams, vocab_size: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Token ids and log-probs by completion, after everything about them that can be known was checked."""
    try:
        tokens, logprobs, lengths, stopped = (arrays[name] for name in ("token_ids", "logprobs", "lengths", "stopped"))
    except KeyError as error:
        raise SidecarBroken(f"generate: no {error} in the answer") from None
    if lengths.shape != (count,) or stopped.shape != (count,):
        raise SidecarBroken(f"generate: {lengths.size} completions for {count} requests")
    if lengths.min() < 1 or lengths.max() > sampling.max_completion_tokens:
        raise SidecarBroken(
            f"generate: completions of {lengths.min()} to {lengths.max()} tokens, the limit is "
            f"{sampling.max_completion_tokens}"
        )
    if not tokens.shape == logprobs.shape == (lengths.sum(),):
        raise SidecarBroken(f"generate: {tokens.size} tokens and {logprobs.size} log-probs, not {lengths.sum()}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise SidecarBroken(f"generate: token ids {tokens.min()} to {tokens.max()}, the model has fewer")
    ends = np.cumsum(lengths)
    last_is_stop = np.isin(tokens[ends - 1], sampling.stop_token_ids)
    if not np.array_equal(last_is_stop, stopped.astype(bool)):
        raise SidecarBroken("generate: a completion's finish reason does not fit its last token")
    return np.split(tokens, ends[:-1]), np.split(logprobs, ends[:-1])
