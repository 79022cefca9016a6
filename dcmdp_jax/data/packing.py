"""Rollouts to batches: ragged completions laid into rows of few lengths, so that few shapes compile.

A mini-batch's rows come in buckets of one length each. A bucket holds as many micro-batches as the worst case needs,
and the step runs only those that hold a row: shapes stay, and padding costs memory on the host but no computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dcmdp_jax.data.episode import Episode
from dcmdp_jax.types import Batch, Rows, SharedPrompts

_SHARE = 8
"""Each of several buckets leaves half a micro-batch empty on average, so none holds more than an eighth of the rows."""
_SMALLEST = 512
"""Tokens on a device below which smaller micro-batches save no time: reading the parameters takes longer."""


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """Static shapes of a batch.

    Attributes:
        row_lengths: length of the rows of each bucket, rising, in tokens; the last holds the longest sequence.
        rows_per_micro_batch: R of each bucket.
        micro_batches: A of each bucket, enough for the worst case.
        mini_batches: M.
        completions: N of one mini-batch.
        segments_per_row: sequences in one row at most.
        group_size: G where the rows of a group share their prompt, which is then computed once; 0 where each row has
            its own.
        prompt_length: S, the shared tokens of the longest prompt: all but its last.
    """

    row_lengths: tuple[int, ...]
    rows_per_micro_batch: tuple[int, ...]
    micro_batches: tuple[int, ...]
    mini_batches: int
    completions: int
    segments_per_row: int
    group_size: int = 0
    prompt_length: int = 0


@dataclasses.dataclass(frozen=True)
class PackingReport:
    """Cost of packing.

    Attributes:
        tokens: prompt and completion tokens placed.
        computed_tokens: tokens, padding included, of the micro-batches that will run.
    """

    tokens: int
    computed_tokens: int


def default_row_lengths(max_total_tokens: int, *, skips_segments: bool) -> tuple[int, ...]:
    """Row lengths for a longest sequence.

    Where the kernel skips other segments one long row length serves all. Where it does not, attention is quadratic in
    the row, and buckets a factor of two apart fill most rows by a half; three of them keep compilation short.
    """
    if skips_segments:
        return (-(-max_total_tokens // 512) * 512,)
    multiple = 8 if max_total_tokens < 512 else 128
    lengths = {-(-max_total_tokens // (divisor * multiple)) * multiple for divisor in (1, 2, 4)}
    return tuple(sorted(lengths))


def make_plan(
    *,
    row_lengths: tuple[int, ...],
    micro_batch_tokens: int,
    mini_batches: int,
    completions: int,
    segments_per_row: int,
    row_shards: int,
) -> PackingPlan:
    """The shapes for batches of `mini_batches` x `completions` sequences.

    Args:
        row_lengths: rising row lengths in tokens.
        micro_batch_tokens: most tokens, padding included, of one micro-batch on one device; at least one row. Fewer
            where the mini-batch fills fewer: how many rows each bucket gets, and how many packed sequences take, is
            known only of one bucket with one sequence a row.
        mini_batches: M.
        completions: N of a mini-batch.
        segments_per_row: sequences in one row at most.
        row_shards: devices that rows are split over; R is a multiple of it.
    """
    full = len(row_lengths) == 1 and segments_per_row == 1
    rows, counts = [], []
    for length in row_lengths:
        wanted = micro_batch_tokens // length
        if not full:
            wanted = min(wanted, max(-(-completions // (_SHARE * row_shards)), _SMALLEST // length))
        rows.append(_fill(wanted, completions, row_shards))
        counts.append(-(-completions // rows[-1]))
    return PackingPlan(row_lengths, tuple(rows), tuple(counts), mini_batches, completions, segments_per_row)


def _fill(wanted: int, available: int, shards: int) -> int:
    """Size of equal micro-batches that hold all that is available: `wanted` on each device at most, at least one."""
    largest = shards * max(1, min(wanted, available // shards))
    return shards * -(-available // (shards * -(-available // largest)))


def shared_group_shape(max_prompt_tokens: int, max_completion_tokens: int, group_size: int) -> tuple[int, int]:
    """Positions of a group that shares its prompt: those of the prompt, and all that are computed, padding included."""
    # Up to a multiple of 16 with the row's own tokens: the width that attention's products run best at.
    prompt_length = max_prompt_tokens - 1 + -(max_prompt_tokens - 1 + max_completion_tokens) % 16
    return prompt_length, prompt_length + group_size * max_completion_tokens


def make_shared_plan(
    *,
    max_prompt_tokens: int,
    max_completion_tokens: int,
    group_size: int,
    micro_batch_tokens: int,
    mini_batches: int,
    completions: int,
    row_shards: int,
) -> PackingPlan:
    """The shapes for completions that share the prompt of their group, one completion in each row.

    A row begins with the last token of its prompt, whose hidden state is the first completion token's, and ends with a
    token that is predicted and never read: `max_completion_tokens` positions are computed for it.

    Args:
        max_prompt_tokens: of the longest prompt, at least 2.
        max_completion_tokens: of the longest completion.
        group_size: G; divides `completions`.
        micro_batch_tokens: most tokens, padding included, of one micro-batch on one device; at least one group.
        mini_batches: M.
        completions: N of a mini-batch.
        row_shards: devices that groups are split over.
    """
    prompt_length, group_tokens = shared_group_shape(max_prompt_tokens, max_completion_tokens, group_size)
    groups = _fill(micro_batch_tokens // group_tokens, completions // group_size, row_shards)
    return PackingPlan(
        row_lengths=(max_completion_tokens + 1,),
        rows_per_micro_batch=(groups * group_size,),
        micro_batches=(-(-completions // (groups * group_size)),),
        mini_batches=mini_batches,
        completions=completions,
        segments_per_row=1,
        group_size=group_size,
        prompt_length=prompt_length,
    )


def pack(
    episodes: Sequence[Episode],
    rewards: np.ndarray,
    plan: PackingPlan,
    *,
    mask_truncated: bool,
    dropped: np.ndarray | None = None,
) -> tuple[Batch, PackingReport]:
    """Pack M * N episodes into a batch; episode i goes to mini-batch i // N.

    Each sequence goes to the shortest bucket that holds it. With more than one segment a row, sequences are placed
    longest first into the first row with room. Completions that share prompts each have a row of their own, row i of
    the mini-batch.

    Args:
        episodes: M * N, grouped by prompt.
        rewards: [M * N] float32.
        plan: shapes.
        mask_truncated: leave completions that hit the length limit out of the loss.
        dropped: [M * N] bool, completions that must not be used at all (their log-probs may be anything).

    Returns:
        The batch as numpy arrays, and what it cost.

    Raises:
        ValueError: if counts disagree, a sequence is longer than the longest row, or completions that should share a
            prompt don't, or an episode's first token, or none, is sampled, or some name their experts and some don't,
            naming them.
    """
    total = plan.mini_batches * plan.completions
    if len(episodes) != total or rewards.shape != (total,):
        raise ValueError(f"rollout: {len(episodes)} completions and rewards {rewards.shape}, the plan is for {total}")
    for i, episode in enumerate(episodes):
        if episode.sampled_mask[0] or not episode.sampled_mask.any():
            which = "its first token is" if episode.sampled_mask[0] else "no token is"
            raise ValueError(f"rollout: completion {i}: {which} marked as sampled")
    dropped = np.zeros(total, bool) if dropped is None else dropped
    routed_shape = _routed_shape(episodes)
    # What a row holds of its prompt is all of it, or the last token alone.
    apart = np.array([episode.prompt_length - 1 if plan.group_size else 0 for episode in episodes])
    lengths = np.array([len(episode.token_ids) for episode in episodes]) - apart
    if len(too_long := np.flatnonzero(lengths > plan.row_lengths[-1])):
        i = too_long[0]
        raise ValueError(
            f"rollout: completion {i} has {lengths[i]} tokens with {'the end of ' * bool(plan.group_size)}its prompt, "
            f"rows {plan.row_lengths[-1]}"
        )
    truncated = np.array([episode.finish_reason == "length" for episode in episodes], bool)
    shape = (plan.mini_batches, plan.completions)
    valid = ~dropped.reshape(shape)
    loss_mask = valid & ~truncated.reshape(shape) if mask_truncated else valid

    buckets = np.searchsorted(plan.row_lengths, lengths)
    counts = np.zeros((plan.mini_batches, len(plan.row_lengths)), np.int32)
    blocks, tokens, computed = [], int(lengths[~dropped].sum()), 0
    for b, (length, rows, micro) in enumerate(
        zip(plan.row_lengths, plan.rows_per_micro_batch, plan.micro_batches, strict=True)
    ):
        block = _empty_rows(plan.mini_batches, micro * rows, length, routed_shape)
        for m in range(plan.mini_batches):
            first = m * plan.completions
            members = first + np.flatnonzero(buckets[first : first + plan.completions] == b)
            members = members[~dropped[members]]
            if plan.group_size:
                placed = [(i - first, 0, 1) for i in members]
            else:
                placed = _place(lengths[members], length, plan.segments_per_row)
            for i, (row, start, segment) in zip(members, placed, strict=True):
                _write(block, (m, row), start, segment, i - first, episodes[i], int(apart[i]))
            used = 1 + max((row for row, _, _ in placed), default=-1)
            counts[m, b] = -(-used // rows)
        computed += int(counts[:, b].sum()) * rows * length
        whole = (plan.mini_batches, micro, rows, length)
        blocks.append(Rows(*(None if field is None else field.reshape(whole + field.shape[3:]) for field in block)))
    if plan.group_size:
        prompts = _shared_prompts(episodes, plan, ~dropped)
        blocks = [blocks[0]._replace(prompts=prompts)]
        # The last token of a row is not read, and the shared ones are read once.
        tokens += int(prompts.lengths.sum() - (~dropped).sum())
        rows = plan.rows_per_micro_batch[0]
        computed += int(counts.sum()) * (rows // plan.group_size * plan.prompt_length - rows)
    groups = np.array([episode.group for episode in episodes]).reshape(shape)
    sampled = np.array([episode.num_sampled for episode in episodes], np.int32)
    batch = Batch(
        rows=tuple(blocks),
        micro_batches=counts,
        rewards=np.where(valid, rewards.reshape(shape), 0.0).astype(np.float32),
        group_ids=np.stack([np.unique(row, return_inverse=True)[1] for row in groups]).astype(np.int32),
        completion_lengths=sampled.reshape(shape),
        loss_mask=loss_mask,
        valid=valid,
    )
    return batch, PackingReport(tokens=tokens, computed_tokens=computed)


def _routed_shape(episodes: Sequence[Episode]) -> tuple[int, int] | None:
    """(layers, k) of the experts that episodes name; None if they name none."""
    shapes = [None if e.routed_experts is None else e.routed_experts.shape for e in episodes]
    for i, (shape, episode) in enumerate(zip(shapes, episodes, strict=True)):
        expected = shapes[0] and (len(episode.token_ids), *shapes[0][1:])
        if shape != expected:
            raise ValueError(f"rollout: completion {i}: routed experts of shape {shape}, expected {expected}")
    return shapes[0] and shapes[0][1:]


def _empty_rows(mini_batches: int, rows: int, length: int, routed_shape: tuple[int, int] | None) -> Rows:
    shape = (mini_batches, rows, length)
    integer, logical, real = (np.zeros(shape, dtype) for dtype in (np.int32, bool, np.float32))
    versions = np.full(shape, -1, np.int32)
    routed = None if routed_shape is None else np.full(shape + routed_shape, -1, np.int16)
    return Rows(
        integer, integer.copy(), integer.copy(), logical, integer.copy(), real, policy_versions=versions,
        routed_experts=routed,
    )  # fmt: skip


def _place(lengths: np.ndarray, row_length: int, segments_per_row: int) -> list[tuple[int, int, int]]:
    """(row, start, segment id) of each sequence: first fit, longest first."""
    if segments_per_row == 1:
        return [(row, 0, 1) for row in range(len(lengths))]
    used: list[list[int]] = []  # [tokens, segments] of each row
    placed: list[tuple[int, int, int]] = [(0, 0, 0)] * len(lengths)
    for i in np.argsort(-lengths, kind="stable"):
        fits = (r for r, (n, s) in enumerate(used) if n + lengths[i] <= row_length and s < segments_per_row)
        row = next(fits, None)
        if row is None:
            used.append([0, 0])
            row = len(used) - 1
        placed[i] = (row, used[row][0], used[row][1] + 1)
        used[row][0] += int(lengths[i])
        used[row][1] += 1
    return placed


def _shared_prompts(episodes: Sequence[Episode], plan: PackingPlan, used: np.ndarray) -> SharedPrompts:
    """Every group's prompt without its last token; nothing for a group of which no completion is used."""
    shape = (plan.mini_batches, plan.micro_batches[0], plan.rows_per_micro_batch[0] // plan.group_size)
    ids, lengths = np.zeros((*shape, plan.prompt_length), np.int32), np.zeros(shape, np.int32)
    routed_shape = _routed_shape(episodes)
    routed = None if routed_shape is None else np.full(ids.shape + routed_shape, -1, np.int16)
    groups = plan.completions // plan.group_size
    for group, first in enumerate(range(0, len(episodes), plan.group_size)):
        prompt, last = episodes[first].prompt_ids, first + plan.group_size
        if len(prompt) > plan.prompt_length + 1:
            raise ValueError(
                f"rollout: the prompt of completion {first} has {len(prompt)} tokens, the plan is for "
                f"{plan.prompt_length + 1}"
            )
        for i in range(first + 1, last):
            if not np.array_equal(episodes[i].prompt_ids, prompt):
                raise ValueError(f"rollout: completions {first} and {i} are of one group and have different prompts")
        if used[first:last].any():
            place = np.unravel_index(group % groups, shape[1:])
            ids[group // groups][place][: len(prompt) - 1] = prompt[:-1]
            lengths[group // groups][place] = len(prompt) - 1
            if routed is not None:
                # Members of a group differ by rounding: the prompt has one hidden state, so the experts of one.
                read = episodes[first].routed_experts[: len(prompt) - 1]
                routed[group // groups][place][: len(prompt) - 1] = read
    return SharedPrompts(ids, lengths, routed)


def _write(
    rows: Rows, row: tuple[int, int], start: int, segment: int, index: int, episode: Episode, apart: int
) -> None:
    """Write an episode without its first `apart` tokens."""
    sampled = episode.sampled_mask[apart:]
    place = slice(start, start + len(sampled))
    rows.input_ids[row][place] = episode.token_ids[apart:]
    rows.position_ids[row][place] = apart + np.arange(len(sampled))
    rows.segment_ids[row][place] = segment
    rows.completion_mask[row][place] = sampled
    rows.completion_index[row][place] = np.where(sampled, index, 0)
    rows.rollout_logprobs[row][place] = np.where(sampled, episode.rollout_logprobs[apart:], 0.0)
    rows.policy_versions[row][place] = np.where(sampled, episode.policy_versions[apart:], -1)
    if rows.routed_experts is not None:
        rows.routed_experts[row][place] = episode.routed_experts[apart:]
