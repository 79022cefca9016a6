"""Rollouts to batches: ragged completions laid into rows of few lengths, so that few shapes
compile.

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
    total = shapes.mini_batches * shapes.completions
    if len(episodes) != total or rewards.shape != (total,):
        raise ValueError(
            f"rollout: {len(episodes)} completions and rewards {rewards.shape}, the shapes are "
            f"for {total}"
        )
    for i, episode in enumerate(episodes):
        if episode.sampled_mask[0] or not episode.sampled_mask.any():
            which = "its first token is" if episode.sampled_mask[0] else "no token is"
            raise ValueError(f"rollout: completion {i}: {which} marked as sampled")
    dropped = np.zeros(total, bool) if dropped is None else dropped
    lengths = np.array([len(episode.token_ids) for episode in episodes])
    columns = common_columns([episode.columns for episode in episodes], lengths)
    if len(too_long := np.flatnonzero(lengths > shapes.longest)):
        i = too_long[0]
        raise ValueError(
            f"rollout: completion {i} has {lengths[i]} tokens with its prompt, rows "
            f"{shapes.longest}"
        )
    truncated = np.array([episode.finish_reason == "length" for episode in episodes], bool)
    shape = (shapes.mini_batches, shapes.completions)
    valid = ~dropped.reshape(shape)
    loss_mask = valid & ~truncated.reshape(shape) if mask_truncated else valid

    batch = _make_batch(shapes, columns, np.full)
    for m, used in enumerate(valid):
        first = m * shapes.completions
        members = np.flatnonzero(used)
        layout = lay_out(lengths[first + members], shapes)
        batch.micro_batches[m] = layout.micro_batches
        for i, number, row, start, segment in zip(members, *layout[1:], strict=True):
            place = (m, *divmod(row, shapes.rows_per_micro_batch[number]))
            _write(batch.rows[number], place, start, segment, i, episodes[first + i])
    groups = np.array([episode.group for episode in episodes]).reshape(shape)
    sampled = np.array([episode.num_sampled for episode in episodes], np.int32)
    batch = batch._replace(
        rewards=np.where(valid, rewards.reshape(shape), 0.0).astype(np.float32),
        group_ids=np.stack([np.unique(row, return_inverse=True)[1] for row in groups]).astype(
            np.int32
        ),
        completion_lengths=sampled.reshape(shape),
        loss_mask=loss_mask,
        valid=valid,
    )
    return batch, (
        int(lengths[~dropped].sum()),
        sum(computed_tokens(shapes, row) for row in batch.micro_batches),
    )


def abstract_batch(packing: RowShapes, columns: Mapping[str, Shape]) -> Batch:
    """Shapes of the batch that `pack` makes.

    Args:
        packing: its shapes.
        columns: name -> shape of an entry, of the columns that the completions have; see
            `episode.column_shapes`.
    """
    return _make_batch(packing, columns, lambda shape, _, dtype: jax.ShapeDtypeStruct(shape, dtype))


def _make_batch(
    shapes: RowShapes, columns: Mapping[str, Shape], make: Callable[[Shape, float, type], Any]
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
    shape: Shape, columns: Mapping[str, Shape], make: Callable[[Shape, float, type], Any]
) -> Rows:
    """Rows of padding; `shape` is the arrays', to the token axis. For the rest see
    `_make_batch`.
    """
    layout = {name: make(shape, 0, dtype) for name, dtype in ROW_LAYOUT.items()}
    extra = {
        n: make((*shape, *entry), COLUMNS[n].fill, COLUMNS[n].dtype) for n, entry in columns.items()
    }
    return Rows(**layout, columns=extra)


def _write(rows: Rows, row: Shape, start: int, segment: int, index: int, episode: Episode) -> None:
    sampled = episode.sampled_mask
    place = slice(start, start + len(sampled))
    rows.input_ids[row][place] = episode.token_ids
    rows.position_ids[row][place] = np.arange(len(sampled))
    rows.segment_ids[row][place] = segment
    rows.completion_mask[row][place] = sampled
    rows.completion_index[row][place] = np.where(sampled, index, 0)
    for name, target in rows.columns.items():
        entries = slice(None) if COLUMNS[name].covers_given else sampled
        target[row][place][entries] = episode.columns[name][entries]


def one_a_row(
    prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], length: int, count: int = 0
) -> Rows:
    """Rows of one completion each, padded to `length`, and to `count` rows."""
    shape = count or len(prompts), length
    rows = _make_rows(shape, {}, np.full)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = np.concatenate([prompt, completion])
        _write(
            rows,
            (row,),
            0,
            1,
            row,
            Episode(ids, np.arange(len(ids)) >= len(prompt), row, 0, "stop", {}),
        )
    return rows._replace(
        completion_index=np.broadcast_to(np.arange(shape[0], dtype=np.int32)[:, None], shape)
    )


def staleness_metrics(batch: Batch, policy_version: int) -> dict[str, float]:
    """Steps between the policy that is trained and those that sampled the batch's tokens; 0 in a
    synchronous run.

    Args:
        batch: packed, before it goes to the devices.
        policy_version: the training step of the parameters that the batch trains.
    """
    versions = [rows.columns["policy_versions"][rows.completion_mask] for rows in batch.rows]
    lag = policy_version - np.concatenate(versions)
    return {"rollout/staleness_mean": float(lag.mean()), "rollout/staleness_max": float(lag.max())}
