"""The abstract batch against the one that is packed."""

import jax
import numpy as np
import pytest

from dcmdp_jax.data.packing import abstract_batch, pack
from dcmdp_jax.data.row_layout import make_row_shapes
from tests.support.sampling import counted_rollout


@pytest.mark.parametrize(
    "further", [{}, {"routed_experts": (3, 2)}, {"old_logprobs": (), "teacher_logprobs": ()}]
)
def test_the_abstract_batch_is_the_one_that_is_packed(further):
    packing = make_row_shapes(
        row_lengths=(4, 8),
        segments_per_row=1,
        micro_batch_tokens=70,
        mini_batches=2,
        completions=4,
        row_shards=2,
    )
    episodes = [
        episode.with_columns(
            **{
                name: np.zeros((len(episode.token_ids), *entry), np.int16 if entry else np.float32)
                for name, entry in further.items()
            }
        )
        for episode in counted_rollout([(3, 1), (3, 4)] * 4, 2).episodes
    ]
    batch, _ = pack(episodes, np.zeros(8, np.float32), packing, mask_truncated=False)

    def shape(leaf):
        return leaf.shape, leaf.dtype

    columns = {"rollout_logprobs": (), "policy_versions": (), **further}
    assert jax.tree.map(shape, abstract_batch(packing, columns)) == jax.tree.map(shape, batch)
