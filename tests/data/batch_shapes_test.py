"""The abstract batch against the one that is packed."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from dcmdp_jax.data.batch_shapes import abstract_batch
from dcmdp_jax.data.packing import make_plan, make_shared_plan, pack
from tests.data.packing_test import _rollout


@pytest.mark.parametrize("routed", [None, (3, 2)])
@pytest.mark.parametrize("shared", [False, True])
def test_the_abstract_batch_is_the_one_that_is_packed(shared, routed):
    shapes = {"micro_batch_tokens": 70, "mini_batches": 2, "completions": 4, "row_shards": 2}
    if shared:
        packing = make_shared_plan(max_prompt_tokens=4, max_completion_tokens=4, group_size=2, **shapes)
    else:
        packing = make_plan(row_lengths=(4, 8), segments_per_row=1, **shapes)
    rollout = _rollout([(3, 1), (3, 4)] * 4 if not shared else [(3, 1)] * 8, 2)
    episodes = rollout.episodes
    if routed:
        episodes = [
            dataclasses.replace(episode, routed_experts=np.zeros((len(episode.token_ids), *routed), np.int16))
            for episode in episodes
        ]
    batch, _ = pack(episodes, np.zeros(8, np.float32), packing, mask_truncated=False)

    def shape(leaf):
        return leaf.shape, leaf.dtype

    assert jax.tree.map(shape, abstract_batch(packing, routed)) == jax.tree.map(shape, batch)
