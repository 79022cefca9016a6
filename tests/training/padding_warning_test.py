"""A step that computes much padding says so once, with the setting to change."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from dcmdp_jax.data.episode import single_turn
from dcmdp_jax.data.row_layout import RowShapes
from dcmdp_jax.parallel.hosts import ONE_PROCESS
from dcmdp_jax.training.batches import Batches
from dcmdp_jax.training.exit import CollectiveExit, StopSignal
from tests.support.our_log import our_log
from tests.support.small_task import EchoEngine, small_placement, small_services, small_task


def _batches(packing, **training):
    placement = dataclasses.replace(small_placement(), packing=packing)
    programs = SimpleNamespace(shardings=SimpleNamespace(params=None))
    leave = CollectiveExit(ONE_PROCESS, StopSignal(), lambda: 0)
    return Batches(
        small_services(EchoEngine()),
        placement,
        small_task(training=training),
        programs,
        leave,
    )


def _rollout(count, tokens):
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
    return SimpleNamespace(
        episodes=episodes,
        rows=np.arange(count),
        scores=SimpleNamespace(totals=np.zeros(count, np.float32)),
        dropped=np.zeros(count, bool),
    )


def test_much_padding_is_told_once_with_the_setting(caplog):
    # Sixteen rows of 64 for 30 tokens each: 34 of 64 are padding, 53%.
    batches = _batches(
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
        _, _, metrics = batches._pack(_rollout(16, 30), step)
        assert metrics["rollout/padding_fraction"] == pytest.approx(34 / 64)
    assert our_log(caplog) == [
        "step 7: 53% of what is computed is padding; training.row_lengths=() chooses the lengths "
        "of rows"
    ]


@pytest.mark.parametrize(
    ("loss", "setting"),
    [
        ("surrogate", "training.prompts_per_mini_batch or rollout.group_size"),
        # Conversations have no groups.
        ("likelihood", "training.prompts_per_mini_batch"),
    ],
)
def test_the_advice_names_a_setting_that_the_run_has(caplog, loss, setting):
    # 16 sequences for 4 devices are fewer than 8 for each.
    batches = _batches(
        RowShapes(
            row_lengths=(64,),
            rows_per_micro_batch=(4,),
            micro_batches=(4,),
            mini_batches=1,
            completions=16,
            segments_per_row=1,
            row_shards=4,
            longest=64,
        )
    )
    config = dataclasses.replace(batches._config.algorithm, loss=loss)
    batches._config = dataclasses.replace(batches._config, algorithm=config)
    batches._pack(_rollout(16, 30), 0)
    [said] = our_log(caplog)
    assert said.endswith(f"a mini-batch has 16 completions for 4 devices: raise {setting}")


def test_little_padding_is_not_told(caplog):
    batches = _batches(
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
    _, _, metrics = batches._pack(_rollout(16, 45), 0)
    assert metrics["rollout/padding_fraction"] == pytest.approx(19 / 64) and our_log(caplog) == []
