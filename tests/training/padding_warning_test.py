"""A step that computes much padding says so once, with the setting to change."""

import dataclasses

import numpy as np
import pytest

from dcmdp_jax.config.checks import PACKING, SUPERVISED_PACKING
from dcmdp_jax.data.episode import single_turn
from dcmdp_jax.data.row_layout import RowShapes
from dcmdp_jax.training.batches import BatchPacker
from tests.support.our_log import our_log
from tests.support.small_task import small_config, small_placement


def _packer(packing, *, setting_names=PACKING, **training):
    return BatchPacker(
        placement=dataclasses.replace(small_placement(), packing=packing),
        training=small_config(training=training).training,
        setting_names=setting_names,
    )


def _pack(packer, count, tokens, step=0):
    episodes = []
    for member in range(count):
        episode = single_turn(
            np.arange(2),
            np.arange(tokens - 2),
            np.zeros(tokens - 2),
            policy_version=0,
            group=0,
            member=member,
            finish_reason="stop",
        )
        episodes.append(episode)
    rewards = np.zeros(count, np.float32)
    return packer.pack(episodes, rewards, step=step, dropped=np.zeros(count, bool))


def test_much_padding_is_told_once_with_the_setting(caplog):
    # Sixteen rows of 64 for 30 tokens each: 34 of 64 are padding, 53%.
    packer = _packer(
        RowShapes(
            row_lengths=(64,),
            rows_per_micro_batch=(4,),
            micro_batches=(4,),
            mini_batches=1,
            completions=16,
            segments_per_row=1,
            row_shards=1,
            longest=64,
        ),
        row_lengths=(64,),
    )
    for step in (6, 7):
        packed = _pack(packer, 16, 30, step)
        assert packed.padding_fraction == pytest.approx(34 / 64)
    assert our_log(caplog) == [
        "step 7: 53% of what is computed is padding; training.row_lengths=() chooses the lengths "
        "of rows"
    ]


@pytest.mark.parametrize(
    ("setting_names", "setting"),
    [
        (PACKING, "training.prompts_per_mini_batch or rollout.group_size"),
        # Conversations have no groups.
        (SUPERVISED_PACKING, "training.prompts_per_mini_batch"),
    ],
)
def test_the_advice_names_a_setting_that_the_run_has(caplog, setting_names, setting):
    # 16 sequences for 4 devices are fewer than 8 for each.
    packer = _packer(
        RowShapes(
            row_lengths=(64,),
            rows_per_micro_batch=(4,),
            micro_batches=(4,),
            mini_batches=1,
            completions=16,
            segments_per_row=1,
            row_shards=4,
            longest=64,
        ),
        setting_names=setting_names,
    )
    _pack(packer, 16, 30)
    [said] = our_log(caplog)
    assert said.endswith(f"a mini-batch has 16 completions for 4 devices: raise {setting}")


def test_little_padding_is_not_told(caplog):
    packer = _packer(
        RowShapes(
            row_lengths=(64,),
            rows_per_micro_batch=(4,),
            micro_batches=(4,),
            mini_batches=1,
            completions=16,
            segments_per_row=1,
            row_shards=1,
            longest=64,
        )
    )
    assert _pack(packer, 16, 45).padding_fraction == pytest.approx(19 / 64)
    assert our_log(caplog) == []
