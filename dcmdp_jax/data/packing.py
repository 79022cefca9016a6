"""Packing of ragged completions into rows of few lengths, so that few shapes compile.

Where each completion goes, `row_layout` says. A batch holds as many micro-batches of each shape as
the worst case needs, and the step runs only the ones that hold a row: shapes stay, and padding
costs memory on the host but no computation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from dcmdp_jax.data.episode import COLUMNS, ROW_LAYOUT, Episode, Shape, common_columns
from dcmdp_jax.data.row_layout import RowShapes, computed_tokens, lay_out
from dcmdp_jax.types import Batch, Rows


def pack(
    episodes: Sequence[Episode],
    rewards: Float[np.ndarray, " episodes"],
    shapes: RowShapes,
    *,
    mask_truncated: bool,
    dropped: Bool[np.ndarray, " episodes"] | None = None,
) -> tuple[Batch, tuple[int, int]]:
    """Pack M * N episodes into a batch; episode i goes to mini-batch i // N.

    Args:
        episodes: M * N, grouped by prompt.
        rewards: of each episode.
        shapes: shapes of the rows.
        mask_truncated: leave completions that hit the length limit out of the loss.
        dropped: completions that must not be used at all (their log-probs may be anything).

    Returns:
        The batch as numpy arrays, the prompt and completion tokens in it, and the tokens, padding
        included, of the micro-batches that will run.

    Raises:
        ValueError: if counts disagree, a sequence is longer than the longest row, an episode's
            first token, or none, is sampled, or a column is there for some and not for others,
            naming them.
    """
    shape = (shapes.mini_batches, shapes.completions)
    total = shapes.mini_batches * shapes.completions
    if len(episodes) != total or rewards.shape != (total,):
        raise ValueError(
            f"rollout: {len(episodes)} completions and rewards {rewards.shape}, the shapes are "
            f"for {total}"
        )
    for i, episode in enumerate(episodes):
        if episode.sampled_mask[0]:
            raise ValueError(f"rollout: completion {i}: its first token is marked as sampled")
        if not episode.sampled_mask.any():
            raise ValueError(f"rollout: completion {i}: no token is marked as sampled")
        length = len(episode.token_ids)
        if length > shapes.longest:
            raise ValueError(
                f"rollout: completion {i} has {length} tokens with its prompt, rows "
                f"{shapes.longest}"
            )
    if dropped is None:
        dropped = np.zeros(total, bool)
    lengths = np.array([len(episode.token_ids) for episode in episodes])
    columns = common_columns(episodes)
    valid = ~dropped.reshape(shape)
    loss_mask = valid
    if mask_truncated:
        truncated = np.array([episode.finish_reason == "length" for episode in episodes], bool)
        loss_mask = valid & ~truncated.reshape(shape)

    batch = _make_batch(shapes, columns, np.full)
    tokens_to_run = 0
    for m, used in enumerate(valid):
        first = m * shapes.completions
        members = np.flatnonzero(used)
        layout = lay_out(lengths[first + members], shapes)
        batch.micro_batches[m] = layout.micro_batches
        tokens_to_run += computed_tokens(shapes, layout.micro_batches)
        for place, completion in enumerate(members):
            kind = layout.shape[place]
            micro, row = divmod(layout.row[place], shapes.rows_per_micro_batch[kind])
            _write(
                batch.rows[kind],
                row=(m, micro, row),
                start=layout.start[place],
                segment=layout.segment[place],
                index=completion,
                episode=episodes[first + completion],
            )

    groups = np.array([episode.group for episode in episodes]).reshape(shape)
    # Groups are numbered from 0 within a mini-batch.
    group_ids = np.stack([np.unique(row, return_inverse=True)[1] for row in groups])
    sampled = np.array([episode.num_sampled for episode in episodes], np.int32)
    batch = batch._replace(
        rewards=np.where(valid, rewards.reshape(shape), 0.0).astype(np.float32),
        group_ids=group_ids.astype(np.int32),
        completion_lengths=sampled.reshape(shape),
        loss_mask=loss_mask,
        valid=valid,
    )
    return batch, (int(lengths[~dropped].sum()), tokens_to_run)


def abstract_batch(packing: RowShapes, columns: Mapping[str, Shape]) -> Batch:
    """Shapes of the batch that `pack` makes.

    Args:
        packing: its shapes.
        columns: name -> shape of an entry, of the columns that the completions have; see
            `episode.column_shapes`.
    """
    return _make_batch(packing, columns, lambda shape, _, dtype: jax.ShapeDtypeStruct(shape, dtype))


def _make_batch(
    shapes: RowShapes,
    columns: Mapping[str, Shape],
    make: Callable[[Shape, float, type], Any],
) -> Batch:
    """A batch of nothing but padding.

    Args:
        shapes: shapes of the rows.
        columns: name -> shape of an entry.
        make: (shape, entry of padding, dtype) -> array.
    """
    kinds = zip(shapes.micro_batches, shapes.rows_per_micro_batch, shapes.row_lengths, strict=True)
    rows = tuple(_make_rows((shapes.mini_batches, *kind), columns, make) for kind in kinds)
    completions = (shapes.mini_batches, shapes.completions)
    return Batch(
        rows=rows,
        micro_batches=make((shapes.mini_batches, len(rows)), 0, np.int32),
        rewards=make(completions, 0, np.float32),
        group_ids=make(completions, 0, np.int32),
        completion_lengths=make(completions, 0, np.int32),
        loss_mask=make(completions, 0, np.bool_),
        valid=make(completions, 0, np.bool_),
    )


def _make_rows(
    shape: Shape,
    columns: Mapping[str, Shape],
    make: Callable[[Shape, float, type], Any],
) -> Rows:
    """Rows of padding; `shape` is the arrays' to the token axis. See `_make_batch`."""
    extra = {}
    for name, entry in columns.items():
        column = COLUMNS[name]
        extra[name] = make((*shape, *entry), column.fill, column.dtype)
    layout = {name: make(shape, 0, dtype) for name, dtype in ROW_LAYOUT.items()}
    return Rows(columns=extra, **layout)


def _write(
    rows: Rows,
    row: Shape,
    start: int,
    segment: int,
    index: int,
    episode: Episode,
) -> None:
    sampled = episode.sampled_mask
    span = slice(start, start + len(sampled))
    rows.input_ids[row][span] = episode.token_ids
    rows.position_ids[row][span] = np.arange(len(sampled))
    rows.segment_ids[row][span] = segment
    rows.completion_mask[row][span] = sampled
    rows.completion_index[row][span] = np.where(sampled, index, 0)
    for name, column in rows.columns.items():
        entries = sampled
        if COLUMNS[name].covers_given:
            entries = slice(None)
        column[row][span][entries] = episode.columns[name][entries]


def one_a_row(
    prompts: Sequence[np.ndarray],
    completions: Sequence[np.ndarray],
    length: int,
    count: int = 0,
) -> Rows:
    """Rows of one completion each, padded to `length`, and to `count` rows."""
    shape = count or len(prompts), length
    rows = _make_rows(shape, {}, np.full)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = np.concatenate([prompt, completion])
        sampled = np.arange(len(ids)) >= len(prompt)
        episode = Episode(
            token_ids=ids,
            sampled_mask=sampled,
            group=row,
            member=0,
            finish_reason="stop",
            columns={},
        )
        _write(rows, (row,), start=0, segment=1, index=row, episode=episode)
    index = np.arange(shape[0], dtype=np.int32)[:, None]
    return rows._replace(completion_index=np.broadcast_to(index, shape))


def staleness_metrics(batch: Batch, policy_version: int) -> dict[str, float]:
    """Steps between the trained policy and those that sampled the batch's tokens.

    0 in a synchronous run.

    Args:
        batch: packed, before it goes to the devices.
        policy_version: the training step of the parameters that the batch trains.
    """
    versions = [rows.columns["policy_versions"][rows.completion_mask] for rows in batch.rows]
    lag = policy_version - np.concatenate(versions)
    return {"rollout/staleness_mean": float(lag.mean()), "rollout/staleness_max": float(lag.max())}
