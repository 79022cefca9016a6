"""The table of token columns: a column is one declaration."""

import dataclasses

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dcmdp_jax.config.rollout import RolloutSettings
from dcmdp_jax.config.settings import Config, RewardSettings
from dcmdp_jax.data.episode import COLUMNS, Column, column_shapes, over_sequence, single_turn
from dcmdp_jax.data.packing import abstract_batch, pack
from dcmdp_jax.data.row_layout import make_row_shapes


def _episodes(name, entries):
    """Completions of 2, 5 and 3 tokens after prompts of 3; entry t of completion i is 100 i + t."""
    episodes = []
    for i, tokens in enumerate((2, 5, 3)):
        values = np.full((tokens, *entries), 100 * i) + np.arange(tokens).reshape(
            -1, *(1 for _ in entries)
        )
        place = dict(policy_version=0, group=0, member=i, finish_reason="stop")
        episodes.append(
            single_turn(
                np.arange(3), np.arange(tokens), np.zeros(tokens), **place, **{name: values}
            )
        )
    return episodes


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("entries", [(), (2,)])
def test_a_column_is_one_declaration(monkeypatch, tmp_path, segments, entries):
    monkeypatch.setitem(COLUMNS, "marks", Column("a number", np.float32, -7.0))
    plan = make_row_shapes(
        row_lengths=(6, 16),
        micro_batch_tokens=16,
        mini_batches=1,
        completions=3,
        segments_per_row=segments,
        row_shards=1,
    )
    batch, _ = pack(
        _episodes("marks", entries), np.zeros(3, np.float32), plan, mask_truncated=False
    )
    columns = {"rollout_logprobs": (), "policy_versions": (), "marks": entries}
    abstract = abstract_batch(plan, columns)
    # In the compiled step, and through a checkpoint.
    seen = jax.device_get(jax.jit(lambda batch: batch)(batch))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "batch", seen)
        checkpointer.wait_until_finished()
        seen = jax.device_get(checkpointer.restore(tmp_path / "batch", abstract))
    found = {}
    for rows in seen.rows:
        marks = np.asarray(rows.columns["marks"])
        mask = np.asarray(rows.completion_mask)
        assert marks.dtype == np.float32 and marks.shape == (*mask.shape, *entries)
        assert (marks[~mask] == -7.0).all()  # prompts and padding
        for index in np.unique(rows.completion_index[mask]):
            found[int(index)] = marks[mask & (np.asarray(rows.completion_index) == index)].reshape(
                -1, *entries
            )
    assert {
        i: values[..., -1].tolist() if entries else values.tolist() for i, values in found.items()
    } == {
        0: [0, 1],
        1: [100, 101, 102, 103, 104],
        2: [200, 201, 202],
    }


def test_columns_that_an_engine_gives_unasked_are_declared():
    episodes = _episodes("old_logprobs", ())
    assert episodes[1].columns["old_logprobs"].tolist() == [0, 0, 0, 100, 101, 102, 103, 104]


def test_a_column_of_given_tokens_lacks_the_last_ones():
    mask = np.array([False, True, True])
    np.testing.assert_array_equal(
        over_sequence("routed_experts", np.ones((2, 1, 1)), mask)[:, 0, 0], [1, 1, -1]
    )
    np.testing.assert_array_equal(
        over_sequence("policy_versions", np.array([4, 5]), mask), [-1, 4, 5]
    )


def test_a_column_that_is_not_declared_is_refused():
    with pytest.raises(
        ValueError, match="^column 'entropy' is not declared in data/episode.py; declared are roll"
    ):
        _episodes("entropy", ())


def test_the_columns_of_a_run_follow_from_its_config():
    def found(**rollout):
        config = dataclasses.replace(Config(), rollout=RolloutSettings(**rollout))
        return column_shapes(config.columns, k=config.rollout.top_logprobs, routing=(3, 2, 8))

    shapes = {"rollout_logprobs": (), "policy_versions": ()}
    assert found(router_replay=True) == {**shapes, "routed_experts": (3, 2)}
    assert found() == shapes
    assert found(lag=1) == {**shapes, "old_logprobs": ()}  # the trainer's own column
    lists = dict.fromkeys(("top_ids", "top_logprobs"), (5,))
    assert found(top_logprobs=5) == {**shapes, **lists}
    assert found(lag=1, top_logprobs=5) == {
        **shapes,
        "old_logprobs": (),
        **lists,
        "old_top_logprobs": (5,),
    }
    every = RolloutSettings(router_replay=True, lag=1, top_logprobs=5)
    every = dataclasses.replace(Config(), rollout=every, rewards=RewardSettings("math,teacher:m"))
    assert set(every.columns) == COLUMNS.keys()
