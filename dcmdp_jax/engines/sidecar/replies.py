"""Checks of what the sidecar says it sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dcmdp_jax.data.columns import COLUMNS, Shape
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.engines.sidecar.process import SidecarBroken


class Completion(NamedTuple):
    """A completion that has ended.

    Attributes:
        row: `prompt * group_size + member`.
        token_ids: [T] int32.
        logprobs: [T] float32 nats.
        finish_reason: "stop" or "length".
    """

    row: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str


def split_columns(
    arrays: Mapping[str, np.ndarray], prompts: Sequence[int], completions: Sequence[int], expected: Mapping[str, Shape]
) -> list[dict[str, np.ndarray]]:
    """The columns of `data.columns.COLUMNS` that a frame has beside tokens and log-probs, for each completion.

    A column that given tokens have comes for a prompt's tokens and the completion's own but the last, which is not
    read; another for the completion's tokens. Completions follow each other on the first axis.

    Args:
        arrays: of the frame.
        prompts, completions: tokens of each completion's prompt, and its own.
        expected: shape of an entry of the columns that must be there. Others may be.

    Raises:
        SidecarBroken: if a column is not there, or of another shape. `validation` looks at the values.
    """
    found: list[dict[str, np.ndarray]] = [{} for _ in completions]
    for name, column in COLUMNS.items():
        if name not in arrays and name not in expected:
            continue
        counts = np.array(completions, np.int64)
        counts = counts + np.array(prompts, np.int64) - 1 if column.of_given else counts
        values = arrays.get(name, np.empty(0))
        shape = (int(counts.sum()), *expected.get(name, values.shape[1:]))
        if values.shape != shape:
            label = name.replace("_", " ")
            raise SidecarBroken(f"generate: {label} of shape {values.shape}, expected {shape}")
        for columns, part in zip(found, np.split(values, np.cumsum(counts)[:-1]), strict=True):
            columns[name] = part
    return found


def checked_completions(
    arrays: Mapping[str, np.ndarray], count: int, sampling: SamplingParams, vocab_size: int
) -> list[Completion]:
    """The completions of one frame, after everything about them that can be known was checked; none without arrays.

    Raises:
        SidecarBroken: saying what can't be right.
    """
    if not arrays:
        return []
    try:
        rows, tokens, logprobs, lengths, stopped = (
            arrays[name] for name in ("rows", "token_ids", "logprobs", "lengths", "stopped")
        )
    except KeyError as error:
        raise SidecarBroken(f"generate: no {error} in the answer") from None
    if not rows.shape == lengths.shape == stopped.shape == (rows.size,) or not rows.size:
        raise SidecarBroken(f"generate: {lengths.size} lengths and {stopped.size} finish reasons of {rows.size} rows")
    if rows.min() < 0 or rows.max() >= count or np.unique(rows).size < rows.size:
        raise SidecarBroken(f"generate: {rows.size} rows from {rows.min()} to {rows.max()}, not of {count} requests")
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
    reasons = ["stop" if end else "length" for end in stopped]
    cut = np.split(tokens, ends[:-1]), np.split(logprobs, ends[:-1])
    return [Completion(*parts) for parts in zip(rows.tolist(), *cut, reasons, strict=True)]
